//! Runs the committed seeds, which once broke a promise, and a bounded number of others: of one server, and of a quorum.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use leasehold_sim::checks::Promise;
use leasehold_sim::plan::{Case, Plan};
use leasehold_sim::planted::Planted;
use leasehold_sim::quorum;
use leasehold_sim::run::{Outcome, run, run_twice};

/// How long other seeds are run.
const LIMIT: Duration = Duration::from_secs(10);

/// Runs a case twice: its history must be the same.
fn check(case: &Case) {
    check_with(case, "", run_twice, |case| run(case, None, Some(60)));
}

/// As `check`, with a quorum.
fn check_quorum(case: &Case) {
    check_with(case, " --quorum", quorum::run::run_twice, |case| quorum::run::run(case, None, Some(60)));
}

fn check_with(
    case: &Case,
    option: &str,
    run_twice: impl Fn(&Case) -> Outcome,
    run: impl Fn(&Case) -> Outcome,
) {
    let outcome = run_twice(case);
    if let Some(violation) = outcome.violation {
        let timeline = run(case).timeline;
        panic!(
            "{timeline}\nseed {case} breaks a promise: {}: {}\n\
             cargo run --release -p leasehold-sim --{option} --seed \"{case}\"",
            violation.promise, violation.what
        );
    }
}

#[test]
fn committed_seeds_break_no_promise() {
    let lines = include_str!("../seeds.txt").lines();
    let cases = lines.map(|line| line.split('#').next().unwrap_or("").trim()).filter(|line| !line.is_empty());
    for case in cases {
        match case.strip_prefix("quorum ") {
            Some(case) => check_quorum(&case.parse().expect("a line of seeds.txt is a case")),
            None => check(&case.parse().expect("a line of seeds.txt is a case")),
        }
    }
}

/// Each day other ones; a failure prints its seed.
fn fresh_seeds(case: impl Fn(u64) -> Case, check: impl Fn(&Case)) {
    fresh_seeds_for(LIMIT, case, check);
}

fn fresh_seeds_for(limit: Duration, case: impl Fn(u64) -> Case, check: impl Fn(&Case)) {
    let began = Instant::now();
    let days = std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs() / 86_400);
    let mut seed = days * 1_000_000;
    while began.elapsed() < limit {
        check(&case(seed));
        seed += 1;
    }
}

#[test]
fn fresh_seeds_break_no_promise() {
    fresh_seeds(Case::fresh, check);
}

#[test]
fn fresh_seeds_with_bridges_break_no_promise() {
    fresh_seeds_for(LIMIT / 2, |seed| Case { bridges: true, ..Case::fresh(seed) }, check);
}

/// However a process or one of its threads is paused, no `lock` of it fails while the server is well.
#[test]
fn paused_process_fails_no_lock() {
    fresh_seeds_for(LIMIT / 2, Plan::case_with_pauses, check);
}

#[test]
fn fresh_seeds_of_a_quorum_break_no_promise() {
    fresh_seeds(|seed| Case { seed, ..Case::default() }, check_quorum);
}

#[test]
fn contended_lock_keeps_half_of_its_rate_with_a_slow_minority() {
    for seed in 1..=6 {
        let case = Case { seed, ..Case::default() };
        if let Some(violation) = quorum::rate::run(&case, None, None).violation {
            panic!(
                "{}: {}\ncargo run --release -p leasehold-sim -- --rate --seed \"{case}\"",
                violation.promise, violation.what
            );
        }
    }
}

/// With timers that fire late, a client waits long for the answers of a silent node.
#[test]
fn slow_minority_that_is_felt_is_found() {
    let bug = quorum::planted::Planted::LateTimers;
    let found = (1..=20).any(|seed| {
        let outcome = quorum::rate::run(&Case { seed, ..Case::default() }, Some(bug), None);
        let felt = [Promise::Rate, Promise::Liveness, Promise::InTime];
        outcome.violation.is_some_and(|violation| felt.contains(&violation.promise))
    });
    assert!(found, "{bug} was not found");
}

/// Seeds that find rare bugs, tried first. They may be out of date: then the search takes longer.
const RARE: [u64; 10] = [34, 76, 108, 149, 156, 209, 225, 349, 380, 438];

fn seeds(most: u64) -> impl Iterator<Item = u64> {
    RARE.into_iter().chain(1..=most)
}

#[test]
fn planted_bugs_of_a_quorum_are_found() {
    for bug in quorum::planted::Planted::ALL {
        let found = seeds(2_000).find(|seed| {
            let outcome = quorum::run::run(&Case { seed: *seed, ..Case::default() }, Some(bug), None);
            outcome.violation.is_some_and(|violation| bug.explains(&violation))
        });
        assert!(found.is_some(), "{bug} was not found in 2,000 seeds");
    }
}

#[test]
fn planted_bugs_are_found() {
    for bug in Planted::ALL {
        let found = seeds(1_000).find(|seed| {
            let outcome = run(&bug.case(*seed), Some(bug), None);
            outcome.violation.is_some_and(|violation| bug.explains(&violation))
        });
        assert!(found.is_some(), "{bug} was not found in 1,000 seeds");
    }
}

fn simulation(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_leasehold-sim")).args(args).output().unwrap()
}

#[test]
fn run_without_seeds_is_an_error() {
    for nothing in [["--minutes", "0"], ["--seeds", "0"], ["--threads", "0"]] {
        let run = simulation(&nothing);
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.code() == Some(2) && said.contains("no seed was run"), "{nothing:?}: {said}");
    }
}

#[test]
fn planted_bug_that_a_seed_does_not_show_is_an_error() {
    let replay =
        |case| simulation(&["--planted", "TombstonesUnasked", "--seed", case, "--lines", "1"]).status;
    assert!(replay("1").success());
    assert_eq!(replay("1 without c0,c1,c2,c3,c4").code(), Some(1));
}

#[test]
fn unknown_planted_bug_is_refused() {
    let unknown = simulation(&["--planted", "Unknown"]);
    let said = String::from_utf8_lossy(&unknown.stderr);
    assert!(
        unknown.status.code() == Some(2) && said.contains("no planted bug is called \"Unknown\""),
        "{said}"
    );
}
