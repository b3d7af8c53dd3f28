//! A client that lives long: memory, open files, threads and keys do not grow with the number of its operations.
//!
//! One test only, since it counts what the whole process has. A night makes it as many operations as 100 a second for an
//! hour, a release for eight.

#![cfg(target_os = "linux")]

use std::fmt::Write as _;
use std::fs;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_testkit::Server;

const TASKS: usize = 16;

/// Connections are closed by the server each time after so many operations.
const OPERATIONS_PER_CUT: u64 = 20_000;

/// Attempts that are given up are at so few locks, because the key of a lock with a tombstone stays for an hour.
const GIVEN_UP_LOCKS: u64 = 32;

/// After so many operations: those, the lock that many want, the clock of tokens, the layout, and the records of both clients; and
/// the locks of commands that a cut left without an answer, at most one for each task and cut.
fn max_keys(operations: u64) -> u64 {
    GIVEN_UP_LOCKS + 5 + (operations / OPERATIONS_PER_CUT + 1) * TASKS as u64
}

/// The longest time until the key of an unused lock expires: a tombstone, and the hour for which its key is spared.
const LONGEST_EXPIRY: Duration = Duration::from_secs(60 + 3_600);

const SETTLE_LIMIT: Duration = Duration::from_secs(30);

/// What a process and its server have.
#[derive(Clone, Copy, Debug)]
struct Usage {
    memory_kb: usize,
    files: usize,
    threads: usize,
    keys: u64,
}

impl Usage {
    fn now(server: &Server) -> Self {
        let count = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count);
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self {
            memory_kb: line.trim().trim_end_matches(" kB").parse().unwrap(),
            files: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            keys: server.query(&["DBSIZE"]).unwrap(),
        }
    }

    /// Not more than before, or keys than these. Memory is not given back to the last page.
    fn is_within(self, before: Self, keys: u64) -> bool {
        self.memory_kb <= before.memory_kb + before.memory_kb / 10 + 4_096
            && self.files <= before.files
            && self.threads <= before.threads
            && self.keys <= keys
    }
}

/// No key of a lock stays for longer than it has to.
fn assert_expiring(server: &Server) {
    let keys: Vec<String> = server.query(&["KEYS", "leasehold:4:{*"]).unwrap();
    for key in keys {
        let left: i64 = server.query(&["PTTL", &key]).unwrap();
        // A key that has just expired has no time left.
        let is_expiring =
            left == -2 || u128::try_from(left).is_ok_and(|left| left <= LONGEST_EXPIRY.as_millis());
        assert!(is_expiring, "{key} stays for {left} ms");
    }
}

/// Operation `number`: mostly a lock of its own, sometimes a lock that many want, an attempt that is given up, or another kind.
/// Errors are those of a connection that was just closed.
async fn operate(client: &Client, number: u64) {
    let mut name = String::new();
    let _ = write!(name, "job:{number}");
    match number % 20 {
        0..12 => {
            if let Ok(guard) = client.mutex(&name).lock().await {
                let _ = guard.release().await;
            }
        }
        12 => drop(client.mutex(&name).lock().await),
        13 | 14 => {
            if let Ok(guard) = client.mutex("hot").lock().await {
                let _ = guard.release().await;
            }
        }
        15 => {
            let _ = client.mutex("hot").lock_timeout(Duration::from_millis(1)).await;
        }
        16 => drop(client.mutex("hot").global_fifo().try_lock().await),
        17 => {
            // Given up after the first poll.
            let mutex = client.mutex(format!("given-up:{}", number / 20 % GIVEN_UP_LOCKS));
            let mut attempt = pin!(mutex.lock());
            std::future::poll_fn(|context| {
                let _ = attempt.as_mut().poll(context);
                Poll::Ready(())
            })
            .await;
        }
        18 => {
            if let Ok(guard) = client.rw_lock(&name).write().await
                && let Ok(reader) = guard.downgrade().await
            {
                let _ = reader.release().await;
            }
        }
        _ => {
            if let Ok(guard) = client.semaphore(&name, 3).acquire(2).await {
                let _ = guard.renew().await;
            }
        }
    }
}

/// Without an operation for so long, a task hangs.
const STUCK: Duration = Duration::from_secs(120);

/// Runs operations of both clients until there were so many.
async fn run(clients: &[Client; 2], server: &Server, next: &Arc<AtomicU64>, until: u64) {
    let tasks = (0..TASKS).map(|task| {
        let (client, next) = (clients[task % 2].clone(), next.clone());
        tokio::spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= until {
                    return;
                }
                operate(&client, number).await;
            }
        })
    });
    let tasks: Vec<_> = tasks.collect();
    let mut cut_at = next.load(Ordering::Relaxed) + OPERATIONS_PER_CUT;
    let mut progress = (0, Instant::now());
    for task in tasks {
        while !task.is_finished() {
            let number = next.load(Ordering::Relaxed);
            if number != progress.0 {
                progress = (number, Instant::now());
            }
            assert!(
                progress.1.elapsed() < STUCK,
                "operation {number} of {until}: none has begun for {STUCK:?}"
            );
            if next.load(Ordering::Relaxed) >= cut_at {
                cut_at += OPERATIONS_PER_CUT;
                for kind in ["normal", "pubsub"] {
                    let _: Result<u64, _> = server.query(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]);
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        task.await.unwrap();
    }
}

#[tokio::test]
async fn long_lived_client_needs_no_more_after_eight_hours_of_operations() {
    const HOUR: u64 = 3_600 * 100;
    let operations = leasehold_testkit::extent(30_000, HOUR, 8 * HOUR);
    let server = Server::on_socket();
    let clients =
        [Client::connect(&server.url()).await.unwrap(), Client::connect(&server.url()).await.unwrap()];
    let next = Arc::new(AtomicU64::new(0));
    let settled = async |limit: Option<Usage>| {
        let give_up = Instant::now() + SETTLE_LIMIT;
        loop {
            let usage = Usage::now(&server);
            let keys = max_keys(next.load(Ordering::Relaxed));
            let is_settled = limit.map_or(usage.keys <= keys, |limit| usage.is_within(limit, keys));
            if is_settled {
                return usage;
            }
            assert!(Instant::now() < give_up, "{usage:?}, more than {limit:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    // The first sixth fills what stays: tables, buffers, the allocator's pages.
    run(&clients, &server, &next, operations / 6).await;
    let before = settled(None).await;
    next.store(operations / 6, Ordering::Relaxed);
    run(&clients, &server, &next, operations).await;
    let after = settled(Some(before)).await;
    println!("{operations} operations: {before:?}, then {after:?}");
    assert_expiring(&server);
    let [first, second] = clients;
    first.close().await.unwrap();
    second.close().await.unwrap();
}
