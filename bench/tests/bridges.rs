//! Bridges against the real libraries, for some seconds each. `leasehold-bench bridges` runs them for a minute.
//!
//! `bench/setup` builds the libraries, which needs Java, Go and Node: `scripts/test bridges` does both. A library that is not built
//! fails its test.

use std::process::Command;

use serde_json::Value;

/// Fails if the lock let two in, and if one of the first `sides` has fewer than five turns.
fn run(program: &str, arguments: &[&str], sides: usize) -> Value {
    let done = Command::new(env!("CARGO_BIN_EXE_leasehold-bench"))
        .args(["bridges", "--json", "--only", program])
        .args(arguments)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mixed: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(mixed["failures"], Value::Array(Vec::new()), "{mixed}");
    for turns in mixed["turns"].as_array().unwrap().iter().take(sides) {
        assert!(turns.as_u64().unwrap() >= 5, "{mixed}");
    }
    mixed
}

/// Runs four processes of each side. A library that polls gets a turn every other second at least.
fn with(program: &str) -> Value {
    run(program, &["--seconds", "10"], 2)
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

/// Old processes, then both legs, then leasehold alone: the three deployments of docs/migration.md.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn processes_of_redisson_redsync_and_redis_py_are_replaced_one_by_one() {
    for program in ["redisson", "redsync", "redis-py"] {
        run(program, &["--replace"], 3);
    }
}

/// It is woken by key tracking, and so is leasehold.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn rueidislock_with_one_key_shares_a_lock() {
    with("rueidislock");
}
