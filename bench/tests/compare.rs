//! The driver with the peers that are part of this program: one short round, without any check of speed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use leasehold_bench::compare::results::{Cell, Presence, Results};
use leasehold_testkit::unless_paused_blocking;

/// Commands of a measurement besides those of its acquisitions.
const FEW: f64 = 8.0;

/// Runs the program itself, since the peers are started from it.
fn compare(arguments: &[&str]) -> Results {
    let folder = tempfile::tempdir().unwrap();
    let output: PathBuf = folder.path().join("run.json");
    let done = Command::new(env!("CARGO_BIN_EXE_leasehold-bench"))
        .args(["compare", "--quick", "--output"])
        .arg(&output)
        .args(arguments)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Results::read(&output).unwrap()
}

fn figures<'a>(cell: &'a Cell, row: &str) -> &'a BTreeMap<String, Vec<f64>> {
    let found = cell.rows.iter().find(|found| found.row == row).unwrap();
    assert_eq!((&found.missing, &found.failure), (&None, &None), "{row}");
    &found.figures
}

/// Each part runs for less than half a second, so a pause of the machine may be all of it.
#[test]
fn leasehold_runs_beside_the_lower_bounds_and_is_not_broken() {
    unless_paused_blocking(Duration::from_millis(100), assert_leasehold_is_not_broken);
}

fn assert_leasehold_is_not_broken() {
    // What is sent is counted in the short warm-up, in which a busy machine may acquire nothing.
    let warm = |results: &Results| figures(&results.cells[0], "leasehold").contains_key("sent");
    let runs = (0..3).map(|_| compare(&["a", "h", "g", "--only", "leasehold,bounds"]));
    let results = runs.into_iter().find(warm).expect("something is acquired in one of three warm-ups");
    let is_there = |program| matches!(results.peers[program], Presence::There(_));
    assert!(is_there("leasehold") && is_there("bounds"));
    assert_eq!(results.cells.len(), 7);
    assert!(
        results.cells[2].title.starts_with("on Valkey 9, ") && results.machine.server.contains("Valkey 9")
    );
    for (cell, row) in results.cells.iter().zip([
        "leasehold",
        "leasehold",
        "leasehold",
        "leasehold Semaphore",
        "leasehold Semaphore",
        "leasehold RwLock",
        "leasehold RwLock",
    ]) {
        let found = figures(cell, row);
        assert!(
            found["acquisitions"].iter().all(|acquisitions| *acquisitions > 0.0),
            "{}: {found:?}",
            cell.title
        );
        assert!(found["overlaps"].iter().all(|overlaps| *overlaps == 0.0), "{}: {found:?}", cell.title);
        assert!(found["calls"].iter().all(|calls| *calls > 0.0), "{}: {found:?}", cell.title);
    }
    let alone = figures(&results.cells[0], "leasehold");
    // A command to take it and one to give it back. A few more are those of the client's start. A pair that is cut off by either end of
    // the measurement has one more or one less. On a slow machine they are shared by few acquisitions.
    for (sent, acquisitions) in alone["sent"].iter().zip(&alone["sent_for"]) {
        assert!(((sent - 2.0) * acquisitions).abs() <= FEW, "{alone:?}");
    }
}

#[test]
fn the_next_has_the_lock_when_its_holder_is_killed() {
    let results = compare(&["e", "--only", "leasehold"]);
    let found = figures(&results.cells[0], "leasehold");
    assert_eq!(found["takeover"].len(), 1);
}

#[test]
fn a_peer_that_is_not_built_is_told_and_not_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run.json");
    let done = Command::new(env!("CARGO_BIN_EXE_leasehold-bench"))
        .args(["compare", "a", "--quick", "--only", "redsync", "--output"])
        .arg(&output)
        .env("CARGO_TARGET_DIR", folder.path())
        .output()
        .unwrap();
    assert!(done.status.success());
    let results = Results::read(&output).unwrap();
    assert!(matches!(results.peers["redsync"], Presence::Missing { .. }));
    let why = results.cells[0].rows[0].missing.as_deref();
    assert_eq!(why, Some("it is not built: bench/setup redsync"));
}

#[test]
fn a_program_that_is_not_there_is_refused_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run.json");
    let refused = Command::new(env!("CARGO_BIN_EXE_leasehold-bench"))
        .args(["compare", "a", "--only", "redison", "--output"])
        .arg(&output)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && said.contains("redisson"), "{said}");
    assert!(!output.exists());
}
