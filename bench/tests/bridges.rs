//! Bridges against the real libraries, for a few seconds each. `leasehold-bench bridges` runs them for a minute.
//!
//! The libraries are built by `bench/setup`, which needs Java, Go and Node. A library that is not built fails its test.

use std::time::Duration;

use leasehold_bench::bridges::{LIBRARIES, Mixed, run};

const SPAN: Duration = Duration::from_secs(10);
const HOLD: Duration = Duration::from_millis(5);

fn with(program: &str) -> Mixed {
    let library = LIBRARIES.into_iter().find(|library| library.program == program).unwrap();
    let mixed = run(library, [4, 4], SPAN, HOLD).unwrap();
    mixed.check().unwrap();
    assert!(mixed.failures.is_empty(), "{mixed:?}");
    // Neither side is starved: a library that polls every 100 ms to 250 ms gets a turn every other second at least.
    assert!(mixed.turns.iter().all(|turns| *turns >= 5), "{mixed:?}");
    println!("{mixed:?}");
    mixed
}

#[test]
#[ignore = "needs the peers that bench/setup builds: scripts/test bridges"]
fn redisson_shares_a_lock_and_both_sides_are_woken() {
    let mixed = with("redisson");
    for time in mixed.handover.map(Option::unwrap) {
        assert!(time < Duration::from_millis(50), "{mixed:?}");
    }
}

#[test]
#[ignore = "needs the peers that bench/setup builds: scripts/test bridges"]
fn redis_py_shares_a_lock() {
    with("redis-py");
}

#[test]
#[ignore = "needs the peers that bench/setup builds: scripts/test bridges"]
fn redsync_shares_a_lock() {
    with("redsync");
}

#[test]
#[ignore = "needs the peers that bench/setup builds: scripts/test bridges"]
fn node_redlock_shares_a_lock() {
    with("redlock");
}

#[test]
#[ignore = "needs the peers that bench/setup builds: scripts/test bridges"]
fn rslock_shares_a_lock() {
    with("rslock");
}
