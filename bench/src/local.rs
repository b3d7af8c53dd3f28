//! Local hand-off among the tasks of one client, and its fairness to other clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::{Client, Mutex};
use leasehold_testkit::Server;
use tokio::task::JoinHandle;

use crate::handoff::sent;
use crate::program::Program;
use crate::report::Report;
use crate::rounds::{Contender, measure_rounds, medians, ratio, wall};
use crate::runtime;

const NAME: &str = "bench:local";
const TASKS: u32 = 1_000;
const EACH: u32 = 500;
/// One after the other.
const PAIRS: u32 = 500;
const ROUNDS: u32 = 15;
/// Number of acquisitions by the other client.
const OTHER_ACQUISITIONS: u32 = 50;
const CLIENTS: u32 = 16;
const HOLD: Duration = Duration::from_millis(1);
/// Maximum time of a lease among local tasks once another client waits, plus the hold that ends it and the hand-off.
const BOUND: Duration = Duration::from_millis(10 + 2 + 1);

/// `local`.
///
/// # Panics
///
/// If a server does not start or sends an unexpected reply, or a token does not increase.
pub fn run(report: &mut Report, program: Program) {
    let server = program.start();
    runtime().block_on(async {
        alone(report, &server).await;
        with_another(report, &server).await;
        uncontended(report, &server).await;
    });
}

/// The cost of the local queue for a single task.
async fn uncontended(report: &mut Report, server: &Server) {
    let mutex = Client::connect(&server.url()).await.expect("connects").mutex(NAME);
    let (global_fifo, mutex) = (&mutex.clone().global_fifo(), &mutex);
    let pairs = |mutex| async move {
        for _ in 0..PAIRS {
            Mutex::lock(mutex).await.expect("it is free").release().await.expect("is released");
        }
    };
    let mut contenders = [
        Contender::new("mutex, global FIFO", move || pairs(global_fifo)),
        Contender::new("mutex, local hand-off", move || pairs(mutex)),
    ];
    let used = measure_rounds(ROUNDS, &mut contenders, &wall()).await;
    report.title(&format!("lock + release, one after the other ({ROUNDS} rounds of {PAIRS})"));
    for (index, (contender, time)) in contenders.iter().zip(medians(&used)).enumerate() {
        report.time(contender.name, time / f64::from(PAIRS), ratio(&used, index, 0));
    }
    report.at_most("local hand-off against global FIFO", ratio(&used, 1, 0), 1.05);
}

/// Acquires and releases, `each` times or until `end`, with an empty critical section.
fn crowd(mutex: &Mutex, each: u32, end: &Arc<AtomicBool>) -> Vec<JoinHandle<u32>> {
    let highest = Arc::new(AtomicU64::new(0));
    let task = |_| {
        let (mutex, end, highest) = (mutex.clone(), end.clone(), highest.clone());
        tokio::spawn(async move {
            let mut acquisitions = 0;
            while acquisitions < each && !end.load(Ordering::Relaxed) {
                let guard = mutex.lock().await.expect("granted");
                let token = guard.token().get();
                assert!(highest.swap(token, Ordering::Relaxed) < token, "every token is higher");
                guard.release().await.expect("released");
                acquisitions += 1;
            }
            acquisitions
        })
    };
    (0..TASKS).map(task).collect()
}

async fn total(tasks: Vec<JoinHandle<u32>>) -> f64 {
    join_all(tasks)
        .await
        .into_iter()
        .map(|acquisitions| f64::from(acquisitions.expect("it does not panic")))
        .sum()
}

async fn alone(report: &mut Report, server: &Server) {
    let mutex = Client::connect(&server.url()).await.expect("connects").mutex(NAME);
    let (before, began) = (sent(server), Instant::now());
    let all = total(crowd(&mutex, EACH, &Arc::default())).await;
    let (span, commands) = (began.elapsed().as_secs_f64(), sent(server) - before);
    report.title(&format!("{TASKS} tasks of one client on one mutex, empty critical section"));
    report.at_least("acquisitions per second", all / span, 500_000.0);
    report.at_most("percent of acquisitions that send a command", commands / all * 100.0, 1.0);
}

async fn with_another(report: &mut Report, server: &Server) {
    let mutex = Client::connect(&server.url()).await.expect("connects").mutex(NAME);
    let other = Client::connect(&server.url()).await.expect("connects").mutex(NAME);
    let end = Arc::new(AtomicBool::new(false));
    let (before, began) = (sent(server), Instant::now());
    let tasks = crowd(&mutex, u32::MAX, &end);
    let mut longest = Duration::ZERO;
    for _ in 0..OTHER_ACQUISITIONS {
        let asked = Instant::now();
        let guard = other.lock().await.expect("granted");
        longest = longest.max(asked.elapsed());
        guard.release().await.expect("released");
        tokio::time::sleep(HOLD).await;
    }
    end.store(true, Ordering::Relaxed);
    let all = total(tasks).await + f64::from(OTHER_ACQUISITIONS);
    let (span, commands) = (began.elapsed().as_secs_f64(), sent(server) - before);
    report.title(&format!("the same, while another client acquires {OTHER_ACQUISITIONS} times"));
    report.figure("acquisitions", all / span, "per second");
    report.figure("commands", commands / all * 100.0, "percent of the acquisitions");
    report.at_most(
        "longest wait of the other client in ms",
        longest.as_secs_f64() * 1e3,
        BOUND.as_secs_f64() * 1e3,
    );
}

/// `fairness`.
///
/// # Panics
///
/// If a server does not start or sends an unexpected reply.
pub fn fairness(report: &mut Report, program: Program, span: Duration) {
    let server = program.start();
    runtime().block_on(async {
        let (acquisitions, _) = contest(&server, 1, Mutex::global_fifo, span).await;
        let (least, most) = extremes(&acquisitions);
        report.title(&format!(
            "{CLIENTS} clients on one mutex with a hold of {HOLD:?}, strictly, for {span:?}"
        ));
        report.figure("fewest acquisitions", least, "per client");
        report.figure("most acquisitions", most, "per client");
        report.at_most("difference in percent", (most - least) / most * 100.0, 5.0);

        let (acquisitions, longest) = contest(&server, 4, |mutex| mutex, span).await;
        let (least, most) = extremes(&acquisitions);
        report.title(&format!("the same with four tasks each and local hand-off, for {span:?}"));
        report.figure("fewest acquisitions", least, "per client");
        report.figure("most acquisitions", most, "per client");
        let bound = BOUND * (CLIENTS - 1);
        report.at_most("the longest wait in ms", longest.as_secs_f64() * 1e3, bound.as_secs_f64() * 1e3);
    });
}

fn extremes(acquisitions: &[u32]) -> (f64, f64) {
    let least = acquisitions.iter().min().copied().unwrap_or(0);
    let most = acquisitions.iter().max().copied().unwrap_or(0);
    (f64::from(least), f64::from(most))
}

/// Acquisitions of each client, and the longest time in which one of them had none.
async fn contest(
    server: &Server,
    tasks: u32,
    set: fn(Mutex) -> Mutex,
    span: Duration,
) -> (Vec<u32>, Duration) {
    let end = Instant::now() + span;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mutex = set(Client::connect(&server.url()).await.expect("connects").mutex(NAME));
        let acquisitions = Arc::new(AtomicU32::new(0));
        let last = Arc::new(std::sync::Mutex::new((Instant::now(), Duration::ZERO)));
        let all: Vec<_> = (0..tasks)
            .map(|_| tokio::spawn(acquire_until(mutex.clone(), acquisitions.clone(), last.clone(), end)))
            .collect();
        clients.push((all, acquisitions, last));
    }
    let (mut acquisitions, mut longest) = (Vec::new(), Duration::ZERO);
    for (all, count, last) in clients {
        join_all(all).await.into_iter().for_each(|done| done.expect("it does not panic"));
        acquisitions.push(count.load(Ordering::Relaxed));
        longest = longest.max(last.lock().expect("no thread panics").1);
    }
    (acquisitions, longest)
}

/// End of the client's last acquisition, and the longest time between two of them.
type Last = Arc<std::sync::Mutex<(Instant, Duration)>>;

async fn acquire_until(mutex: Mutex, acquisitions: Arc<AtomicU32>, last: Last, end: Instant) {
    while Instant::now() < end {
        let guard = mutex.lock().await.expect("granted");
        {
            let mut last = last.lock().expect("no thread panics");
            last.1 = last.1.max(last.0.elapsed());
        }
        tokio::time::sleep(HOLD).await;
        last.lock().expect("no thread panics").0 = Instant::now();
        acquisitions.fetch_add(1, Ordering::Relaxed);
        guard.release().await.expect("released");
    }
}
