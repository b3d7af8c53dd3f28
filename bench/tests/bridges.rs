//! Bridges against the real libraries, for some seconds each. `leasehold-bench bridges` runs them for a minute.
//!
//! `bench/setup` builds the libraries, which needs Java, Go and Node: `scripts/test bridges` does both. A library that is not built
//! fails its test.

use std::process::Command;
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold::bridge::Foreign;
use leasehold_bench::compare::process::Process;
use leasehold_bench_peer::protocol::{Hold, Open, Order};
use leasehold_testkit::Server;
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

/// With three keys and with one. It is woken by key tracking, and so is leasehold.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn rueidislock_shares_a_lock() {
    with("rueidislock");
    with("rueidislock-1");
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn bsm_redislock_shares_a_lock() {
    with("bsm");
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn pottery_shares_a_lock() {
    with("pottery");
}

/// Its waiters wait for an element of a list, which leasehold's releases add.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn python_redis_lock_shares_a_lock() {
    with("python-redis-lock");
}

/// Over three servers: programs of the library vote, and so does leasehold.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn libraries_that_vote_share_a_lock() {
    for program in ["redsync-3", "redlock-3", "redisson-3"] {
        with(program);
    }
}

/// The library's process crashes, or stops for longer than its lock lasts: leasehold gets the lock when it has expired, and keeps it.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn lock_of_a_crashed_or_stopped_process_is_taken_when_it_expires() {
    const TTL: Duration = Duration::from_secs(2);
    let server = Server::on_port();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for signal in ["KILL", "STOP"] {
        let mut old = Process::start("redis-py").unwrap();
        let ttl_ms = u64::try_from(TTL.as_millis()).unwrap();
        let open = Open { urls: vec![server.url()], clients: 1, ttl_ms };
        old.ask(&Order::Open(open), TTL).unwrap();
        let hold = Hold { lock: "mutex".into(), is_tuned: false, name: "jobs".into(), count: 1 };
        old.ask(&Order::Hold(hold), TTL).unwrap();
        let held = Instant::now();
        let sent = Command::new("kill").args(["-s", signal, &old.pid().to_string()]).status().unwrap();
        assert!(sent.success());
        runtime.block_on(async {
            let client = Client::connect(&server.url()).await.unwrap();
            let mutex = client.mutex("own").bridge(Foreign::redis_py("jobs"));
            assert!(mutex.try_lock().await.unwrap().is_none(), "{signal}: the lock has not expired");
            let guard = mutex.lock().await.unwrap();
            assert!(held.elapsed() < 3 * TTL, "{signal}: {:?}", held.elapsed());
            let sent = Command::new("kill").args(["-s", "CONT", &old.pid().to_string()]).status().unwrap();
            assert!(sent.success() || signal == "KILL");
            if signal == "STOP" {
                // It finds that it does not hold the lock any more.
                let answer = old.ask(&Order::Held, TTL).unwrap();
                assert_eq!(answer.held, 0);
            }
            guard.renew().await.unwrap();
            guard.release().await.unwrap();
        });
        assert_eq!(server.query::<i64>(&["EXISTS", "jobs"]).unwrap(), 0, "{signal}");
    }
}
