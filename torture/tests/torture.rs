//! Runs of seconds with real servers and processes. leasehold passes, and each specimen that is broken on purpose is caught.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use leasehold_torture::check::{Check, Terms, check};
use leasehold_torture::faults::StoreKind;
use leasehold_torture::history::History;
use leasehold_torture::page;
use leasehold_torture::report::Report;

/// Runs the program itself, since workers are started from it. Returns the exit code and what it prints.
fn run(folder: &Path, workers: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let done = Command::new(env!("CARGO_BIN_EXE_leasehold-torture"))
        .args(["--seed", "7", "--workers", workers, "--out"])
        .arg(folder)
        .args(arguments)
        .output()
        .unwrap();
    let printed =
        [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (done.status.code(), printed)
}

/// Returns the exit code and the report.
fn torture(arguments: &[&str]) -> (Option<i32>, Report) {
    let folder = tempfile::tempdir().unwrap();
    let (code, printed) = run(folder.path(), "3", arguments);
    println!("{printed}");
    let report =
        Report::read(&folder.path().join("report.json")).unwrap_or_else(|error| panic!("{error}: {printed}"));
    for file in ["report.txt", "timeline.svg", "history.json"] {
        assert!(Path::new(&folder.path().join(file)).exists(), "{file}");
    }
    (code, report)
}

const TERMS: Terms = Terms { store: StoreKind::Memory, ttl: Duration::from_secs(2), has_bound: true };

/// So many stops in this time that some are longer than the ttl and hit the holder.
const SHORT_LEASES: [&str; 8] =
    ["--store", "redis", "--faults", "worker-stop", "--minutes", "0.4", "--ttl-ms", "500"];

/// What a pause of the whole machine may cause. It lets no two sections overlap: a worker reads the clock before it asks.
const BY_PAUSE: [Check; 7] = [
    Check::Stall,
    Check::LostWaiter,
    Check::Starved,
    Check::Loss,
    Check::Failure,
    Check::Left,
    Check::Descriptors,
];

fn is_unsafe(report: &Report) -> bool {
    report.findings.iter().any(|finding| !finding.is_exempt && !BY_PAUSE.contains(&finding.check))
}

/// What one process or server causes that the machine gives no time. The controller does not notice that.
fn is_of_a_slow_process(report: &Report) -> bool {
    let mut counted = report.findings.iter().filter(|finding| !finding.is_exempt).peekable();
    counted.peek().is_some() && counted.all(|finding| matches!(finding.check, Check::Loss | Check::Failure))
}

/// A run says nothing if the machine paused meanwhile, or was so slow that a fault had no turn or a lease was lost, and is then repeated
/// a few times.
fn judged(arguments: &[&str], judge: impl Fn(Option<i32>, &Report) -> bool) -> Report {
    const ATTEMPTS: usize = 4;
    let mut arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
    for attempt in 1..=ATTEMPTS {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (code, report) = torture(&words);
        if judge(code, &report) {
            return report;
        }
        let is_too_short =
            code == Some(2) && report.shortfall().is_some_and(|why| why.starts_with("not injected"));
        let says_nothing = report.paused_ms > 0 || is_too_short || is_of_a_slow_process(&report);
        assert!(says_nothing && attempt < ATTEMPTS, "exit code {code:?}\n{}", report.text());
        eprintln!(
            "paused for {} ms, exit code {code:?}: this run does not count\n{}",
            report.paused_ms,
            report.text()
        );
        if is_too_short {
            let at = arguments.iter().position(|word| word == "--minutes").expect("each run has a time") + 1;
            arguments[at] = (2.0 * arguments[at].parse::<f64>().expect("a number")).to_string();
        }
    }
    unreachable!("the last attempt returns or panics")
}

fn passes(arguments: &[&str]) -> Report {
    judged(arguments, |code, report| {
        assert!(!is_unsafe(report), "{}", report.text());
        let is_clean = code == Some(0) && !report.is_violated && report.left.keys == Some(0);
        is_clean && report.total().sections >= 20 && report.total().overlaps == 0
    })
}

fn violates(report: &Report, check: Check) -> bool {
    report.findings.iter().any(|finding| finding.check == check && !finding.is_exempt)
}

/// The specimen breaks what its checker looks for.
fn caught(specimen: &str, check: Check, arguments: &[&str]) -> Report {
    judged(&[&["--target", specimen], arguments].concat(), |code, report| {
        code == Some(1) && report.is_violated && violates(report, check)
    })
}

#[test]
fn leasehold_passes_on_memory_with_a_stopped_process() {
    passes(&["--store", "memory", "--minutes", "0.1"]);
}

#[test]
fn leasehold_passes_on_sqlite_with_stopped_processes() {
    passes(&["--store", "sqlite", "--faults", "worker-stop", "--minutes", "0.1"]);
}

#[test]
fn leasehold_passes_on_redis_with_faults() {
    let faults = "worker-stop,client-kill,script-flush,net-cut,server-kill";
    passes(&["--store", "redis", "--faults", faults, "--minutes", "0.4"]);
}

#[test]
fn leasehold_passes_on_postgres_with_faults() {
    let faults = "worker-stop,client-kill,net-cut,server-stop,server-kill";
    passes(&["--store", "postgres", "--faults", faults, "--minutes", "0.4"]);
}

#[test]
fn detached_leases_pass_on_redis_and_sqlite_with_faults() {
    let faults = "worker-stop,worker-kill,client-kill,net-cut";
    let detached = ["--target", "leasehold-detached"];
    passes(&[&detached[..], &["--store", "redis", "--faults", faults, "--minutes", "0.3"]].concat());
    passes(&[&detached[..], &["--store", "sqlite", "--faults", "worker-stop", "--minutes", "0.1"]].concat());
}

#[test]
fn callers_of_servers_behind_a_balancer_pass_with_faults() {
    let served = ["--target", "leasehold-serve"];
    let faults =
        "worker-stop,serve-kill,serve-term,serve-stop,serve-cut,acquire-unanswered,release-unanswered";
    passes(&[&served[..], &["--store", "redis", "--faults", faults, "--minutes", "0.4"]].concat());
    let faults = "serve-kill,serve-cut,acquire-unanswered";
    passes(&[&served[..], &["--store", "sqlite", "--faults", faults, "--minutes", "0.2"]].concat());
}

#[test]
fn caller_that_repeats_nothing_is_caught() {
    let arguments = ["--store", "redis", "--faults", "serve-cut,serve-term", "--minutes", "0.2"];
    caught("broken-asks-once", Check::Failure, &arguments);
}

/// Every kind beside mutexes. Without a killed process, whose places in queues are there for 80 s.
#[test]
fn all_kinds_pass_on_redis_with_faults() {
    let faults = "worker-stop,client-kill,net-cut,stranger";
    passes(&["--target", "leasehold-mixed", "--store", "redis", "--faults", faults, "--minutes", "0.4"]);
}

#[test]
fn kinds_that_exclude_nobody_are_caught_each() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.2"];
    let folder = tempfile::tempdir().unwrap();
    let (code, printed) = run(folder.path(), "3", &[&["--target", "broken-kinds"], &arguments[..]].concat());
    assert_eq!(code, Some(1), "{printed}");
    let history: History =
        serde_json::from_slice(&std::fs::read(folder.path().join("history.json")).unwrap()).unwrap();
    for lock in history.locks() {
        let found = check(&history.of(|other| other == lock), &TERMS).count(Check::Overlap);
        assert!(found > 0, "{lock} of {}", history.sections.len());
    }
}

#[test]
fn lock_that_lets_two_in_is_caught() {
    caught(
        "broken-lets-two-in",
        Check::Overlap,
        &["--store", "memory", "--faults", "none", "--minutes", "0.05"],
    );
}

#[test]
fn worker_that_ignores_the_lost_signal_is_caught() {
    caught("broken-ignores-loss", Check::Overlap, &SHORT_LEASES);
}

#[test]
fn set_nx_without_a_token_is_caught() {
    let report = caught("broken-set-nx", Check::Overlap, &SHORT_LEASES);
    assert!(report.total().stale_fenced > 0, "{}", report.text());
}

#[test]
fn falling_tokens_are_caught() {
    caught(
        "broken-falling-token",
        Check::TokenOrder,
        &["--store", "memory", "--faults", "none", "--minutes", "0.05"],
    );
}

/// With one process, so that the fault kills the one that has failed.
#[test]
fn worker_that_panics_is_not_forgotten_when_it_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let failing = ["--target", "broken-panics-once", "--store", "redis"];
    let faults = ["--faults", "worker-kill", "--minutes", "0.1"];
    let (code, printed) = run(folder.path(), "1", &[failing, faults].concat());
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("has failed"), "{printed}");
}

#[test]
fn lost_waiter_is_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.05"];
    caught("broken-lost-waiter", Check::LostWaiter, &arguments);
}

#[test]
fn lock_that_is_never_released_is_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.05"];
    caught("broken-keeps-lock", Check::Stall, &arguments);
}

/// A lock of 2 s that is not renewed is lost in the sections that are longer.
#[test]
fn leases_that_are_never_renewed_are_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.4"];
    caught("broken-never-renews", Check::Loss, &arguments);
}

#[test]
fn leases_that_are_lost_at_once_are_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.05"];
    caught("broken-always-lost", Check::Loss, &arguments);
}

#[test]
fn calls_that_fail_are_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.05"];
    caught("broken-fails-calls", Check::Failure, &arguments);
}

/// A lease of 2 s of which the release is not sent.
#[test]
fn releases_that_are_not_sent_are_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.2"];
    caught("broken-drops-releases", Check::Stall, &arguments);
}

#[test]
fn release_that_hangs_is_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.1"];
    caught("broken-hangs-in-release", Check::Stall, &arguments);
}

#[test]
fn lease_that_is_left_is_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.05"];
    caught("broken-leaves-lease", Check::Left, &arguments);
}

/// The write arrives after the lease has ended and the next holders have begun. The fence compares tokens, which are all the same.
#[test]
fn stale_write_that_the_fence_accepts_is_caught() {
    let arguments = [
        "--store",
        "sqlite",
        "--faults",
        "none",
        "--minutes",
        "0.1",
        "--ttl-ms",
        "500",
        "--write-ms",
        "1500",
    ];
    caught("broken-same-token", Check::StaleFenced, &arguments);
}

#[test]
fn task_that_starves_is_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.3"];
    caught("broken-starves", Check::Starved, &arguments);
}

#[test]
fn leaked_files_are_caught() {
    let arguments = ["--store", "memory", "--faults", "none", "--minutes", "0.1"];
    caught("broken-leaks-files", Check::Descriptors, &arguments);
}

#[test]
fn run_in_which_no_task_holds_the_lock_fails() {
    let folder = tempfile::tempdir().unwrap();
    let (code, printed) =
        run(folder.path(), "1", &["--store", "memory", "--faults", "none", "--minutes", "0"]);
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("no task has held the lock"), "{printed}");
}

#[test]
fn run_that_is_too_short_for_its_faults_fails() {
    let folder = tempfile::tempdir().unwrap();
    let (code, printed) = run(folder.path(), "1", &["--store", "redis", "--minutes", "0.02"]);
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("not injected: "), "{printed}");
}

#[test]
fn fault_that_does_not_apply_names_those_that_do() {
    let done = Command::new(env!("CARGO_BIN_EXE_leasehold-torture"))
        .args(["--store", "memory", "--faults", "flush-all"])
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(2));
    let why = String::from_utf8_lossy(&done.stderr);
    assert!(why.contains("flush-all does not apply to leasehold on memory; there are: worker-stop"), "{why}");
}

#[test]
fn page_is_generated_from_the_kept_reports() {
    let documents = page::documents();
    let page = std::fs::read_to_string(documents.join("torture.md")).unwrap();
    let generated = page::write(&documents.join("torture")).unwrap();
    assert!(page == generated, "run: cargo run -p leasehold-torture -- report");
}
