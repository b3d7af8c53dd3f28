//! Uncontended lock and release: sequentially, over a slow network, and by many tasks at once.

use futures_util::future::join_all;
use leasehold::{Client, Mutex};
use redis::aio::MultiplexedConnection;

use crate::bare::{self, Bare, two_pings};
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
pub fn run(report: &mut Report) {
    let server = leasehold_testkit::Server::on_port();
    runtime().block_on(async {
        sequential(report, &server.url(), "one after the other, on loopback", PAIRS, ROUNDS, &[1.4, 1.25])
            .await;
        let proxy = leasehold_testkit::Proxy::before(&server);
        let half = std::time::Duration::from_micros(500);
        proxy.delay_requests(half);
        proxy.delay_replies(half);
        let url = proxy.url();
        sequential(report, &url, "one after the other, 1 ms further away", SLOW_PAIRS, SLOW_ROUNDS, &[1.03])
            .await;
        for tasks in [64, 1_000] {
            crowd(report, &server.url(), tasks).await;
        }
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

async fn crowd(report: &mut Report, url: &str, tasks: u32) {
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
    report.at_least("throughput against SET NX PX, compare and delete", ratio(&used, 0, 1), 0.7);
}
