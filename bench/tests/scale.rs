//! The scenarios of `leasehold-bench scale` at tiny sizes, its refusals, and the page.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use leasehold_bench::scale::results::ScaleResults;

fn scale(arguments: &[&str], output: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_leasehold-bench"))
        .arg("scale")
        .args(arguments)
        .args(["--ttl", "3", "--output"])
        .arg(output)
        .output()
        .unwrap()
}

/// Runs one scenario of leasehold, and returns the figures of each row of each cell.
fn measure(part: &str, size: &str) -> Vec<Vec<BTreeMap<String, f64>>> {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("scale.json");
    let done = scale(&[part, "--size", size, "--seconds", "2", "--only", "leasehold"], &output);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let cells = ScaleResults::read(&output).unwrap().cells;
    let figures = |row: &leasehold_bench::compare::results::RowResult| {
        assert_eq!((&row.missing, &row.failure), (&None, &None));
        row.figures.keys().map(|name| (name.clone(), row.median(name).unwrap())).collect()
    };
    cells.iter().map(|cell| cell.rows.iter().map(figures).collect()).collect()
}

#[test]
fn held_leases_are_renewed_and_none_is_lost() {
    let found = &measure("held", "0.0008")[0][0];
    assert_eq!((found["leases"], found["lost"], found["size"]), (800.0, 0.0, 0.0008));
    // Three times within a ttl of 3 s, on a machine that may be busy.
    assert!((400.0..1_600.0).contains(&found["renewals"]), "{found:?}");
    assert!(found["server_us"] > 0.0 && found["client_us"] > 0.0, "{found:?}");
}

#[test]
fn clients_are_healthy_again_after_a_restart() {
    let found = &measure("restart", "0.0016")[0][0];
    // Of each client two connections, and the benchmark's own.
    assert_eq!((found["clients"], found["unhealthy"], found["connections"]), (16.0, 0.0, 33.0));
    assert!(found["half_healthy"] > 0.0 && found["half_healthy"] <= found["all_healthy"], "{found:?}");
    assert!(found["peak"] > 0.0, "{found:?}");
}

#[test]
fn leases_of_a_killed_process_expire_while_others_work() {
    let found = &measure("killed", "0.003")[0][0];
    assert_eq!((found["leases"], found["failures"]), (300.0, 0.0));
    assert!(found["expired"] >= 300.0, "{found:?}");
    assert!(
        found["pairs"] > 0.0 && found["lock_p99_after"] > 0.0 && found["release_p99_before"] > 0.0,
        "{found:?}"
    );
}

#[test]
fn waiting_clients_are_measured_beside_the_bare_chain() {
    let rows = &measure("waiting", "0.002")[0];
    let clients: Vec<Option<&f64>> = rows.iter().map(|row| row.get("clients")).collect();
    assert_eq!(clients, [Some(&2.0), Some(&20.0), Some(&2.0), Some(&20.0), None]);
    for row in &rows[..4] {
        assert!(row["rate"] > 0.0 && (0.5..4.0).contains(&row["commands"]), "{row:?}");
    }
    assert_eq!(rows[1]["overlaps"], 0.0);
    assert!(rows[4]["growth_ratio"] > 0.0);
}

#[test]
fn clusters_are_measured_while_slots_move_and_with_more_masters() {
    let cells = measure("cluster", "0.003");
    let moving = &cells[0][0];
    assert_eq!((moving["leases"], moving["slots"], moving["lost"]), (300.0, 12.0, 0.0));
    let masters: Vec<f64> = cells[1].iter().map(|row| row["masters"]).collect();
    assert_eq!(masters, [3.0, 6.0, 12.0]);
    assert!(
        cells[1][2]["flat"] >= 1.0 && cells[1].iter().all(|row| row["server_us"] > 0.0),
        "{:?}",
        cells[1]
    );
}

#[test]
fn calibration_has_every_unit_cost() {
    let found = &measure("model", "0.02")[0][0];
    let costs = found.iter().filter(|(name, _)| name.ends_with("_us") && *name != "expiry_us");
    let costs: Vec<_> = costs.collect();
    assert!(costs.len() == 10 && costs.iter().all(|(_, cost)| **cost > 0.0), "{found:?}");
}

#[test]
fn scenario_that_the_limit_of_open_files_does_not_allow_is_refused_and_nothing_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("scale.json");
    let limited = format!(
        "ulimit -n 500 && exec {} scale restart --output {}",
        env!("CARGO_BIN_EXE_leasehold-bench"),
        output.display()
    );
    let refused = Command::new("sh").args(["-c", &limited]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("a process needs 20100 open files, and the limit is 500: raise it with `ulimit -n`, or lower --size"), "{said}");
    assert!(!output.exists());
}

#[test]
fn sizes_outside_of_the_scenario_are_refused() {
    for size in ["0", "1.5", "many"] {
        let refused = scale(&["held", "--size", size], Path::new("unused"));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && said.contains("above 0, and 1 at most"), "{said}");
    }
}
