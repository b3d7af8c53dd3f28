//! Bridges against the real libraries, for some seconds each. `leasehold-bench bridges` runs them for a minute.
//!
//! `bench/setup` builds the libraries, which needs Java, Go and Node: `scripts/test bridges` does both. A library that is not built
//! fails its test.

use std::process::Command;

use serde_json::Value;

/// Runs four processes of each side. Fails if the lock let two in.
fn with(program: &str) -> Value {
    let done = Command::new(env!("CARGO_BIN_EXE_leasehold-bench"))
        .args(["bridges", "--seconds", "10", "--json", "--only", program])
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mixed: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(mixed["failures"], Value::Array(Vec::new()), "{mixed}");
    // Neither side is starved: a library that polls gets a turn every other second at least.
    for turns in mixed["turns"].as_array().unwrap() {
        assert!(turns.as_u64().unwrap() >= 5, "{mixed}");
    }
    mixed
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn redisson_shares_a_lock_and_both_sides_are_woken() {
    let mixed = with("redisson");
    for time in mixed["handover"].as_array().unwrap() {
        let nanos = time["secs"].as_u64().unwrap() * 1_000_000_000 + time["nanos"].as_u64().unwrap();
        assert!(nanos < 50_000_000, "no side polls: {mixed}");
    }
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn redis_py_shares_a_lock() {
    with("redis-py");
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn redsync_shares_a_lock() {
    with("redsync");
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn node_redlock_shares_a_lock() {
    with("redlock");
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn rslock_shares_a_lock() {
    with("rslock");
}
