//! Runs the committed seeds, which once broke a promise, and a bounded number of others.

use std::time::{Duration, Instant};

use leasehold_sim::plan::Case;
use leasehold_sim::planted::Planted;
use leasehold_sim::run::{run, run_twice};

/// How long other seeds are run.
const LIMIT: Duration = Duration::from_secs(10);

/// Runs a case twice: its history must be the same.
fn check(case: &Case) {
    let outcome = run_twice(case);
    if let Some(violation) = outcome.violation {
        let timeline = run(case, None, Some(60)).timeline;
        panic!(
            "{timeline}\nseed {case} breaks a promise: {}: {}\n\
             cargo run --release -p leasehold-sim -- --seed \"{case}\"",
            violation.promise, violation.what
        );
    }
}

#[test]
fn committed_seeds_break_no_promise() {
    let lines = include_str!("../seeds.txt").lines();
    let cases = lines.map(|line| line.split('#').next().unwrap_or("").trim()).filter(|line| !line.is_empty());
    for case in cases {
        check(&case.parse().expect("a line of seeds.txt is a case"));
    }
}

#[test]
fn fresh_seeds_break_no_promise() {
    let began = Instant::now();
    // Each day other ones; a failure prints its seed.
    let days = std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs() / 86_400);
    let mut seed = days * 1_000_000;
    while began.elapsed() < LIMIT {
        check(&Case { seed, ..Case::default() });
        seed += 1;
    }
}

#[test]
fn planted_bugs_are_found() {
    for bug in Planted::ALL {
        let found = (1..=500).find(|seed| {
            let outcome = run(&Case { seed: *seed, ..Case::default() }, Some(bug), None);
            outcome.violation.is_some_and(|violation| violation.promise == bug.breaks())
        });
        assert!(found.is_some(), "{bug} was not found in 500 seeds");
    }
}
