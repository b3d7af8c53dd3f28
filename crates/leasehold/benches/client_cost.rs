//! What an uncontended lock and its release cost the client: with a store that answers at once, and over Redis beside the same
//! commands without a library.
//!
//!     cargo bench -p leasehold --features _simulation --bench client_cost -- [engine|redis|bare|busy|handover]… [--pairs N] [--tasks N] [--url URL]
//!
//! By default these are `engine`, `redis` and `bare`. `busy` tries a lock that another client holds, and `handover` passes one lock
//! on among three clients. The server is one of its own, or that of `--url`.
//!
//! Times depend on the machine and its load. `bench/instructions` counts instructions and allocations, which do not.

use std::hint::black_box;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::{Client, Mutex};
use leasehold_testkit::Server;
use redis::aio::MultiplexedConnection;
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{Builder, Runtime};

/// Rounds before the measured ones: connections, scripts on the server, the allocator.
const WARM_UP_PAIRS: u32 = 1_000;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: u32| {
        let at = words.iter().position(|word| word == name);
        at.and_then(|at| words.get(at + 1)?.parse().ok()).unwrap_or(default)
    };
    let (pairs, tasks) = (number("--pairs", 100_000), number("--tasks", 64));
    let (usual, other) = (["engine", "redis", "bare"], ["busy", "handover"]);
    let names = |part: &str| words.iter().any(|word| word == part);
    let is_default = !usual.iter().chain(&other).any(|part| names(part));
    let is_chosen = |part: &str| names(part) || is_default && usual.contains(&part);
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    if is_chosen("engine") {
        let mutex = leasehold::simulation::instant_client().mutex("orders:42");
        let mutexes = vec![mutex];
        leasehold_pairs(&runtime, &mutexes, WARM_UP_PAIRS);
        report("engine, a store that answers at once", pairs, || measured_engine(&runtime, &mutexes, pairs));
    }
    if ![&usual[1..], &other[..]].concat().into_iter().any(is_chosen) {
        return;
    }
    let given = words.iter().position(|word| word == "--url").and_then(|at| words.get(at + 1).cloned());
    let server = given.is_none().then(Server::on_socket);
    let url = given.or_else(|| Some(server.as_ref()?.url())).expect("one of them is there");
    let connect = || runtime.block_on(Client::connect(&url)).expect("connects");
    if is_chosen("bare") {
        let client = redis::Client::open(url.as_str()).expect("an address");
        let connection = runtime.block_on(client.get_multiplexed_async_connection()).expect("connects");
        bare_pairs(&runtime, &connection, tasks, WARM_UP_PAIRS.max(tasks));
        report(&format!("bare commands, {tasks} tasks"), pairs, || {
            measured_bare(&runtime, &connection, tasks, pairs);
        });
    }
    if is_chosen("redis") {
        let client = connect();
        let mutexes: Vec<Mutex> = (0..tasks).map(|task| client.mutex(format!("orders:{task}"))).collect();
        leasehold_pairs(&runtime, &mutexes, WARM_UP_PAIRS.max(tasks));
        report(&format!("leasehold on Redis, {tasks} tasks"), pairs, || {
            measured_redis(&runtime, &mutexes, pairs);
        });
    }
    if is_chosen("busy") {
        let [holder, other] = [connect(), connect()].map(|client| client.mutex("orders:busy"));
        let held = runtime.block_on(holder.lock()).expect("it is free");
        report("try_lock on a held lock", pairs, || runtime.block_on(try_in_vain(&other, pairs)));
        runtime.block_on(held.release()).expect("is released");
    }
    if is_chosen("handover") {
        let mutexes = [connect(), connect(), connect()].map(|client| client.mutex("orders:handover"));
        report("a lock passed to a waiter", pairs, || runtime.block_on(pass_on(&mutexes, pairs)));
    }
}

/// The CPU time of this process, all threads.
fn processor_time() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec.unsigned_abs(), u32::try_from(used.tv_nsec).unwrap_or(0))
}

fn report(name: &str, pairs: u32, work: impl FnOnce()) {
    let (began, used) = (Instant::now(), processor_time());
    work();
    let (took, used) = (began.elapsed() / pairs, (processor_time() - used) / pairs);
    println!("{name:<44} {took:>10.2?} per pair, {used:>10.2?} of CPU");
}

// Functions with a name of their own, so that a profiler can count what runs within them.

#[inline(never)]
fn measured_engine(runtime: &Runtime, mutexes: &[Mutex], pairs: u32) {
    leasehold_pairs(runtime, mutexes, black_box(pairs));
}

#[inline(never)]
fn measured_redis(runtime: &Runtime, mutexes: &[Mutex], pairs: u32) {
    leasehold_pairs(runtime, mutexes, black_box(pairs));
}

#[inline(never)]
fn measured_bare(runtime: &Runtime, connection: &MultiplexedConnection, tasks: u32, pairs: u32) {
    bare_pairs(runtime, connection, tasks, black_box(pairs));
}

fn leasehold_pairs(runtime: &Runtime, mutexes: &[Mutex], pairs: u32) {
    let each = pairs / u32::try_from(mutexes.len()).expect("few");
    let tasks = mutexes.iter().cloned().map(|mutex| async move {
        for _ in 0..each {
            let guard = mutex.lock().await.expect("it is free");
            black_box(guard.token());
            guard.release().await.expect("is released");
        }
    });
    runtime.block_on(async { join_all(tasks.map(tokio::spawn)).await }).into_iter().for_each(|task| {
        task.expect("it does not panic");
    });
}

async fn try_in_vain(mutex: &Mutex, times: u32) {
    for _ in 0..times {
        assert!(mutex.try_lock().await.expect("the store answers").is_none());
    }
}

/// While one client holds the lock, the other two wait for it.
async fn pass_on(mutexes: &[Mutex; 3], times: u32) {
    let tasks = mutexes.iter().cloned().map(|mutex| async move {
        for _ in 0..times / 3 {
            mutex.lock().await.expect("it is granted").release().await.expect("is released");
        }
    });
    for task in join_all(tasks.map(tokio::spawn)).await {
        task.expect("it does not panic");
    }
}

fn bare_pairs(runtime: &Runtime, connection: &MultiplexedConnection, tasks: u32, pairs: u32) {
    const DELETE: &str =
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";
    let each = pairs / tasks;
    let tasks = (0..tasks).map(|task| {
        let (mut connection, delete) = (connection.clone(), redis::Script::new(DELETE));
        async move {
            let name = format!("orders:{task}");
            for _ in 0..each {
                let mut set = redis::cmd("SET");
                set.arg(&name).arg("7a1f9c52b0d34e68").arg("NX").arg("PX").arg(10_000);
                let _: String = set.query_async(&mut connection).await.expect("it is free");
                let deleted = delete.key(&name).arg("7a1f9c52b0d34e68").invoke_async(&mut connection).await;
                assert_eq!(deleted, Ok(1));
            }
        }
    });
    runtime.block_on(async { join_all(tasks.map(tokio::spawn)).await }).into_iter().for_each(|task| {
        task.expect("it does not panic");
    });
}
