//! One of the processes.

use std::process::Command;
use std::time::Duration;

use leasehold::fence::FencedFile;
use leasehold::{Client, Guard};
use tokio::time::sleep;

use crate::TTL;
use crate::witness::Report;

pub(crate) const NAME: &str = "contended";

const TASK: &str = "LEASEHOLD_TEST_TASK";
const NODES: &str = "LEASEHOLD_TEST_NODES";
const WITNESS: &str = "LEASEHOLD_TEST_WITNESS";

/// What the process is to do, and with which servers.
pub(crate) fn tell(command: &mut Command, task: &str, nodes: &str, witness: &str) {
    command.env(TASK, task).env(NODES, nodes).env(WITNESS, witness);
}

pub(crate) fn is_one() -> bool {
    std::env::var_os(TASK).is_some()
}

pub(crate) fn work() {
    let [task, nodes, witness] = [TASK, NODES, WITNESS].map(|name| std::env::var(name).expect(name));
    let mut report = Report::to(&witness);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = connected(&nodes).await;
        match task.as_str() {
            "contend" => contend(&client, &mut report).await,
            "hold" => hold(&client, &mut report).await,
            "wait" => wait(&client, &mut report).await,
            _ => write_after_pause(&client, &mut report).await,
        }
    });
}

/// Holds the lock until it is killed.
async fn hold(client: &Client, report: &mut Report) {
    let _guard = client.mutex(NAME).ttl(TTL).lock().await.expect("it is to be had");
    report.say("it holds the lock");
    std::future::pending::<()>().await;
}

/// Has the lock once.
async fn wait(client: &Client, report: &mut Report) {
    let guard = client.mutex(NAME).ttl(TTL).lock().await.expect("it is to be had in the end");
    report.say("it had the lock");
    guard.release().await.expect("the nodes run");
}

/// There may be no quorum just now.
async fn connected(nodes: &str) -> Client {
    loop {
        match Client::connect(nodes).await {
            Ok(client) => return client,
            Err(error) => assert!(error.is_unavailable(), "{error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Has the lock again and again until it is told to end, and then once more.
async fn contend(client: &Client, report: &mut Report) {
    let mutex = client.mutex(NAME).ttl(TTL);
    loop {
        let is_last = report.is_to_end();
        let was_held = match mutex.lock_timeout(Duration::from_secs(5)).await {
            Ok(Some(guard)) => has_it(guard, report).await,
            Ok(None) => false,
            Err(error) => {
                assert!(error.is_unavailable() || error.is_lost(), "{error}");
                sleep(Duration::from_millis(20)).await;
                false
            }
        };
        if is_last && was_held {
            return;
        }
    }
}

/// Whether it was held from beginning to end.
async fn has_it(guard: Guard, report: &mut Report) -> bool {
    let token = guard.token();
    report.say(&format!("begin {token}"));
    let held_first = guard.is_held();
    sleep(a_while()).await;
    report.say(&format!("end {token}"));
    let was_held = held_first && guard.is_held();
    if was_held {
        report.say(&format!("held {token}"));
    }
    // What was lost meanwhile is an error here.
    let _ = guard.release().await;
    was_held
}

/// Mostly short; but now and then so long that servers may forget the lease meanwhile, and yet not so long that a renewal tells.
fn a_while() -> Duration {
    let random = getrandom::u32().expect("the system has random numbers");
    let longest = if random % 8 < 2 { 600 } else { 20 };
    Duration::from_millis(u64::from(random / 8 % longest))
}

/// Holds the lock, is frozen for longer than its lease, and then writes without a look at it.
async fn write_after_pause(client: &Client, report: &mut Report) {
    let guard = client.mutex(NAME).ttl(TTL).lock().await.expect("it is to be had in the end");
    let file = FencedFile::new(report.folder().join("file"));
    report.say("it holds the lock");
    while !report.is_to_end() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = file.write(guard.token(), b"theirs").expect_err("another one has written since");
    assert!(error.is_stale(), "{error}");
    assert!(!guard.is_held());
}
