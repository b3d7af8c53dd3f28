//! Bridges against the real libraries, for some seconds each. `leasehold-bench bridges` runs them for a minute.
//!
//! `bench/setup` builds the libraries, which needs Java, Go and Node: `scripts/test bridges` does both. A library that is not built
//! fails its test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::bridge::Foreign;
use leasehold::{Client, Error, Guard};
use leasehold_bench::compare::process::Process;
use leasehold_bench_peer::clock::now_ns;
use leasehold_bench_peer::protocol::{Contend, Hold, Open, Order};
use leasehold_testkit::{Server, until};
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

/// Runs four processes of each side. Each of them has a turn each second at least, whether it polls or is woken.
fn with(program: &str) -> Value {
    run(program, &["--seconds", "5"], 2)
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn redisson_shares_a_lock_and_both_sides_are_woken() {
    assert_woken(&with("redisson"));
}

/// Of the median of the hand-overs in both directions.
fn assert_woken(mixed: &Value) {
    for time in mixed["handover"].as_array().unwrap() {
        let nanos = time["secs"].as_u64().unwrap() * 1_000_000_000 + time["nanos"].as_u64().unwrap();
        assert!(nanos < 50_000_000, "no side polls: {mixed}");
    }
}

/// Half of the sections are those of readers.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn redisson_shares_its_read_write_lock_and_readers_of_both_sides_are_together() {
    let mixed = with("redisson-rw");
    assert_woken(&mixed);
    assert!(mixed["together"].as_u64().unwrap() >= 5, "{mixed}");
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn redisson_shares_its_fenced_lock() {
    assert_woken(&with("redisson-fenced"));
}

/// A resource to which both sides report the token of each section, as they enter.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn tokens_of_a_fenced_lock_rise_across_both_sides() {
    const SPAN: Duration = Duration::from_secs(5);
    let server = Server::on_port();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("resource");
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let listener = UnixListener::bind(&path).unwrap();
    let seen = tokens.clone();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().map_while(Result::ok).enumerate() {
            let seen = seen.clone();
            std::thread::spawn(move || note_tokens(stream, number, &seen));
        }
    });
    let open = Open { urls: vec![server.url()], clients: 1, ttl_ms: 10_000 };
    let order = |lock: &str| Contend {
        lock: lock.to_owned(),
        name: "jobs".to_owned(),
        resource: path.display().to_string(),
        tasks: 1,
        hold_us: 4_000,
        step_us: 1_000,
        end_ns: now_ns() + u64::try_from(SPAN.as_nanos()).unwrap(),
        ..Contend::default()
    };
    let mut peers: Vec<Process> = (0..2).map(|_| Process::start("redisson").unwrap()).collect();
    peers.extend((0..2).map(|_| leasehold()));
    for peer in &mut peers {
        peer.ask(&Order::Open(open.clone()), SPAN).unwrap();
    }
    for (number, peer) in peers.iter_mut().enumerate() {
        let lock = if number < 2 { "fenced" } else { "bridge:redisson-fenced" };
        peer.tell(&Order::Contend(order(lock))).unwrap();
    }
    for peer in &peers {
        peer.answer(SPAN).unwrap();
    }
    let tokens = tokens.lock().unwrap();
    assert!(tokens.is_sorted_by(|one: &(u64, usize), next| one.0 < next.0), "{tokens:?}");
    let changes = tokens.windows(2).filter(|pair| pair[0].1 != pair[1].1).count();
    assert!(changes >= 20, "the lock goes from process to process: {tokens:?}");
    let counter: u64 = server.query(&["GET", "redisson_lock_token:{jobs}"]).unwrap();
    assert_eq!(tokens.last().unwrap().0, counter);
}

/// Notes the token of each section that begins, with the number of its process, and confirms each report that waits for that.
fn note_tokens(stream: UnixStream, process: usize, seen: &Mutex<Vec<(u64, usize)>>) {
    let mut answers = stream.try_clone().unwrap();
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["begin", _, token] = words[..] {
            seen.lock().unwrap().push((token.parse().unwrap(), process));
        }
        if ["begin", "write"].contains(&words[0]) && answers.write_all(b"ok\n").is_err() {
            return;
        }
    }
}

fn leasehold() -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold-bench"));
    command.args(["peer", "leasehold"]);
    Process::spawn(command).unwrap()
}

#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn spring_integration_shares_a_lock() {
    with("spring");
    with("spring-pub-sub");
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
    // leasehold gets few turns: docs/bridges.md.
    for program in ["rueidislock", "rueidislock-1"] {
        run(program, &["--seconds", "20"], 2);
    }
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
    with("redsync-3");
    // Its waiter keeps the key on a minority until its retries are used up, for about 2 s: docs/bridges.md.
    run("redlock-3", &["--seconds", "60"], 2);
    // Four Java processes with connections to three servers take some seconds to warm up. Until then the releases of one of them reach
    // the servers 10 ms apart, and leasehold's tries find one server free at a time.
    run("redisson-3", &["--seconds", "20"], 2);
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

/// How a test takes a lock of Redisson: as a reader, as a writer, or as the holder of a fenced lock. With no wait `None` is busy.
async fn take(client: &Client, kind: &str, waits: bool) -> Result<Option<Guard>, Error> {
    let ttl = Duration::from_secs(60);
    let lock = client.rw_lock("own").ttl(ttl).bridge(Foreign::redisson_read_write_lock("jobs"));
    let fenced = client.mutex("own").ttl(ttl).bridge(Foreign::redisson_fenced_lock("jobs"));
    Ok(match (kind, waits) {
        ("read", true) => Some(lock.read().await?),
        ("read", false) => lock.try_read().await?,
        ("write", true) => Some(lock.write().await?.into()),
        ("write", false) => lock.try_write().await?.map(Guard::from),
        (_, true) => Some(fenced.lock().await?),
        (_, false) => fenced.try_lock().await?,
    })
}

fn signal(process: &Process, signal: &str) {
    let sent = Command::new("kill").args(["-s", signal, &process.pid().to_string()]).status().unwrap();
    assert!(sent.success());
}

const SHORT_TTL: Duration = Duration::from_secs(2);

/// A process that holds the lock, which is renewed by its watchdog.
fn hold(mut process: Process, server: &Server, lock: &str) -> Process {
    let ttl_ms = u64::try_from(SHORT_TTL.as_millis()).unwrap();
    let open = Open { urls: vec![server.url()], clients: 1, ttl_ms };
    process.ask(&Order::Open(open), SHORT_TTL).unwrap();
    let hold = Hold { lock: lock.into(), is_tuned: false, name: "jobs".into(), count: 1 };
    process.ask(&Order::Hold(hold), SHORT_TTL).unwrap();
    process
}

/// A Java process that crashes, or stops for longer than its lock lasts, with each kind of lock: leasehold gets it when it has expired,
/// and keeps it when the watchdog goes on.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn lock_of_a_crashed_or_stopped_java_process_is_taken_when_it_expires() {
    let server = Server::on_port();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (java, ours) in [("read", "write"), ("write", "read"), ("write", "write"), ("fenced", "fenced")] {
        for sent in ["KILL", "STOP"] {
            let old = hold(Process::start("redisson").unwrap(), &server, java);
            runtime.block_on(async {
                let client = Client::connect(&server.url()).await.unwrap();
                // Beside a reader only.
                if java == "read" {
                    take(&client, "read", false).await.unwrap().unwrap().release().await.unwrap();
                }
                assert!(take(&client, ours, false).await.unwrap().is_none(), "{java}: it is held");
                signal(&old, sent);
                let stopped = Instant::now();
                let guard = take(&client, ours, true).await.unwrap().unwrap();
                assert!(stopped.elapsed() < 2 * SHORT_TTL, "{java}, {sent}: {:?}", stopped.elapsed());
                if sent == "STOP" {
                    // No renewal of leasehold follows for some seconds: the next script is the watchdog's.
                    guard.renew().await.unwrap();
                    server.run(&["CONFIG", "RESETSTAT"]);
                    signal(&old, "CONT");
                    let has_asked = async || {
                        let stats: String = server.query(&["INFO", "commandstats"]).unwrap();
                        stats.contains("cmdstat_eval")
                    };
                    until(has_asked).await;
                }
                guard.renew().await.unwrap();
                guard.release().await.unwrap();
            });
            assert_eq!(server.query::<i64>(&["EXISTS", "jobs"]).unwrap(), 0, "{java}, {sent}");
        }
    }
}

/// The same the other way round: a Java process gets the lock of a leasehold process that has crashed, or has stopped. The stopped one
/// finds its guard lost.
#[test]
#[ignore = "needs the libraries that bench/setup builds: scripts/test bridges"]
fn lock_of_a_crashed_or_stopped_leasehold_process_is_taken_in_java() {
    let server = Server::on_port();
    for (ours, java) in [("redisson-rw", "read"), ("redisson-rw", "write"), ("redisson-fenced", "fenced")] {
        for sent in ["KILL", "STOP"] {
            let mut old = hold(leasehold(), &server, &format!("bridge:{ours}"));
            signal(&old, sent);
            let stopped = Instant::now();
            let new = hold(Process::start("redisson").unwrap(), &server, java);
            // With the start of a JVM.
            assert!(
                stopped.elapsed() < SHORT_TTL + Duration::from_secs(20),
                "{ours}: {:?}",
                stopped.elapsed()
            );
            if sent == "STOP" {
                signal(&old, "CONT");
                assert_eq!(old.ask(&Order::Held, SHORT_TTL).unwrap().held, 0, "{ours}, {java}");
                drop(old);
            }
            assert_eq!(server.query::<i64>(&["EXISTS", "jobs"]).unwrap(), 1, "the Java process has it");
            drop(new);
            server.run(&["FLUSHALL"]);
        }
    }
}
