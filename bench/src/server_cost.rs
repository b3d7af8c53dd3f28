//! CPU time of the server per lock and release, as the kernel counts it.

use futures_util::future::join_all;
use leasehold::Client;
use leasehold_testkit::Server;

use crate::bare::{self, Bare, Hash};
use crate::program::Program;
use crate::report::Report;
use crate::rounds::{Contender, measure_rounds, medians, ratio};
use crate::runtime;

const PAIRS: u32 = 20_000;
const ROUNDS: u32 = 9;

/// `server-cost`.
///
/// # Panics
///
/// If a server does not start or sends an unexpected reply.
pub fn run(report: &mut Report, program: Program) {
    let server = program.start();
    runtime().block_on(async {
        compare(report, &server, 50, 50, program.limit(1.35, 1.2)).await;
        compare(report, &server, 1, 1_000, program.limit(2.2, 1.5)).await;
    });
}

async fn compare(report: &mut Report, server: &Server, connections: u32, tasks: u32, bar: f64) {
    let url = server.url();
    let (mut bare, mut hash, mut clients) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..connections {
        let connection = bare::connection(&url).await;
        bare.push(Bare::new(connection.clone()));
        hash.push(Hash::new(connection));
        clients.push(Client::connect(&url).await.expect("connects"));
    }
    let (bare, hash, clients) = (&bare, &hash, &clients);
    let each = PAIRS / tasks;
    let of = |task: u32| (task % connections) as usize;
    let mut contenders = [
        Contender::new("SET NX PX, compare and delete", move || async move {
            let all = (0..tasks).map(|task| (bare[of(task)].clone(), format!("bench:bare:{task}")));
            all_at_once(all.map(|(mut bare, name)| async move {
                for _ in 0..each {
                    bare.pair(&name).await;
                }
            }))
            .await;
        }),
        Contender::new("Redisson's scripts", move || async move {
            let all = (0..tasks).map(|task| (hash[of(task)].clone(), format!("bench:hash:{task}")));
            all_at_once(all.map(|(mut hash, name)| async move {
                for _ in 0..each {
                    hash.pair(&name).await;
                }
            }))
            .await;
        }),
        Contender::new("leasehold", move || async move {
            let all = (0..tasks).map(|task| clients[of(task)].mutex(format!("bench:{task}")));
            all_at_once(all.map(|mutex| async move {
                for _ in 0..each {
                    mutex.lock().await.expect("it is free").release().await.expect("is released");
                }
            }))
            .await;
        }),
    ];
    let pid = server.pid();
    let used = measure_rounds(ROUNDS, &mut contenders, &move || server_seconds(pid)).await;
    report.title(&format!(
        "the server's processor time for a lock + release: {tasks} tasks, {connections} connections"
    ));
    for (index, (contender, time)) in contenders.iter().zip(medians(&used)).enumerate() {
        report.time(contender.name, time / f64::from(each * tasks), ratio(&used, index, 0));
    }
    report.at_most("against SET NX PX, compare and delete", ratio(&used, 2, 0), bar);
    report.at_most("against Redisson's scripts", ratio(&used, 2, 1), 1.0);
}

async fn all_at_once<F: Future<Output = ()>>(all: impl Iterator<Item = F>) {
    join_all(all).await;
}

/// CPU time of the server's main thread, in seconds.
///
/// # Panics
///
/// If the server is gone, or the system is not Linux.
#[must_use]
pub fn server_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).expect("it runs, on Linux");
    let nanoseconds: u64 = stat.split(' ').next().and_then(|field| field.parse().ok()).expect("a number");
    std::time::Duration::from_nanos(nanoseconds).as_secs_f64()
}
