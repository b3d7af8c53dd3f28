//! Uncontended lock and release: sequentially, over a slow network, and by many tasks at once.

use futures_util::future::join_all;
use leasehold::{Client, Mutex};
use leasehold_testkit::Server;
use redis::aio::MultiplexedConnection;

use crate::bare::{self, Bare, two_pings};
use crate::compare::Used;
use crate::program::Program;
use crate::report::Report;
use crate::rounds::{Contender, measure_rounds, medians, ratio, wall};
use crate::runtime;

/// One after the other, at full speed.
const PAIRS: u32 = 500;
const ROUNDS: u32 = 31;
/// Through the slow network.
const SLOW_PAIRS: u32 = 20;
const SLOW_ROUNDS: u32 = 9;
/// Number of concurrent pairs.
const CROWD_PAIRS: u32 = 10_000;
const CROWD_ROUNDS: u32 = 9;

/// `pair`.
///
/// # Panics
///
/// If a server does not start or sends an unexpected reply.
pub fn run(report: &mut Report, program: Program) {
    let server = program.start();
    runtime().block_on(async {
        sequential(report, &server.url(), "one after the other, on loopback", PAIRS, ROUNDS, &[1.3, 1.25])
            .await;
        let proxy = leasehold_testkit::Proxy::before(&server);
        let half = std::time::Duration::from_micros(500);
        proxy.delay_requests(half);
        proxy.delay_replies(half);
        let url = proxy.url();
        sequential(report, &url, "one after the other, 1 ms further away", SLOW_PAIRS, SLOW_ROUNDS, &[1.03])
            .await;
        bytes(report, &server).await;
        crowd(report, &server.url(), 64, program.limit(0.55, 0.60)).await;
        crowd(report, &server.url(), 1_000, program.limit(0.55, 0.65)).await;
    });
}

async fn connect(url: &str) -> (MultiplexedConnection, Client) {
    let connection = bare::connection(url).await;
    let ours = Client::connect(url).await.expect("connects");
    (connection, ours)
}

async fn ours(mutex: &Mutex) {
    mutex.lock().await.expect("it is free").release().await.expect("is released");
}

async fn sequential(report: &mut Report, url: &str, title: &str, pairs: u32, rounds: u32, bars: &[f64]) {
    let (connection, client) = connect(url).await;
    let mutex = client.mutex("bench:pair");
    let (connection, mutex) = (&connection, &mutex);
    let mut contenders = [
        Contender::new("two PINGs", move || async move {
            let mut connection = connection.clone();
            for _ in 0..pairs {
                two_pings(&mut connection).await;
            }
        }),
        Contender::new("SET NX PX, compare and delete", move || async move {
            let mut bare = Bare::new(connection.clone());
            for _ in 0..pairs {
                bare.pair("bench:bare").await;
            }
        }),
        Contender::new("leasehold", move || async move {
            for _ in 0..pairs {
                ours(mutex).await;
            }
        }),
    ];
    let used = measure_rounds(rounds, &mut contenders, &wall()).await;
    report.title(&format!("lock + release, {title} ({rounds} rounds of {pairs})"));
    for (index, (contender, time)) in contenders.iter().zip(medians(&used)).enumerate() {
        report.time(contender.name, time / f64::from(pairs), ratio(&used, index, 0));
    }
    for (bar, (to, name)) in bars.iter().zip([(0, "two PINGs"), (1, "SET NX PX, compare and delete")]) {
        report.at_most(&format!("against {name}"), ratio(&used, 2, to), *bar);
    }
}

/// The traffic of both directions, as the server counts it.
async fn bytes(report: &mut Report, server: &Server) {
    let (connection, client) = connect(&server.url()).await;
    let mut bare = Bare::new(connection);
    let name = "orders:42";
    let mutex = client.mutex(name);
    // The server learns the scripts first.
    bare.pair(name).await;
    ours(&mutex).await;
    let before = Used::now(std::slice::from_ref(server), None, &[]);
    for _ in 0..PAIRS {
        bare.pair(name).await;
    }
    let between = Used::now(std::slice::from_ref(server), None, &[]);
    for _ in 0..PAIRS {
        ours(&mutex).await;
    }
    let after = Used::now(std::slice::from_ref(server), None, &[]);
    report.title(&format!("bytes of a lock + release, both directions ({PAIRS} pairs)"));
    let (bare, ours) =
        (between.since(before).bytes / f64::from(PAIRS), after.since(between).bytes / f64::from(PAIRS));
    report.figure("SET NX PX, compare and delete", bare, "bytes");
    report.figure("leasehold", ours, "bytes");
    report.at_most("bytes per pair", ours, 400.0);
}

async fn crowd(report: &mut Report, url: &str, tasks: u32, bar: f64) {
    let (connection, client) = connect(url).await;
    let each = CROWD_PAIRS / tasks;
    let bare = Bare::new(connection);
    let mutexes: Vec<Mutex> = (0..tasks).map(|task| client.mutex(format!("bench:crowd:{task}"))).collect();
    let (bare, mutexes) = (&bare, &mutexes);
    let mut contenders = [
        Contender::new("SET NX PX, compare and delete", move || async move {
            let all = (0..tasks).map(|task| {
                let mut bare = bare.clone();
                tokio::spawn(async move {
                    let name = format!("bench:crowd:bare:{task}");
                    for _ in 0..each {
                        bare.pair(&name).await;
                    }
                })
            });
            join_all(all).await.into_iter().for_each(|done| done.expect("it does not panic"));
        }),
        Contender::new("leasehold", move || async move {
            let all = mutexes.iter().cloned().map(|mutex| {
                tokio::spawn(async move {
                    for _ in 0..each {
                        ours(&mutex).await;
                    }
                })
            });
            join_all(all).await.into_iter().for_each(|done| done.expect("it does not panic"));
        }),
    ];
    let used = measure_rounds(CROWD_ROUNDS, &mut contenders, &wall()).await;
    report.title(&format!("lock + release by {tasks} tasks at once, each with a name of its own"));
    let times = medians(&used);
    for (contender, time) in contenders.iter().zip(&times) {
        report.figure(contender.name, f64::from(each * tasks) / time, "pairs/s");
    }
    report.at_least("throughput against SET NX PX, compare and delete", ratio(&used, 0, 1), bar);
}
