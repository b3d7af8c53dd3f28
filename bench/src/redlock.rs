//! A quorum of servers against a single one: the cost of a lock, and that slow nodes do not delay it.

use std::time::{Duration, Instant};

use leasehold::{Client, Mutex};
use leasehold_testkit::{Proxy, Server};

use crate::program::Program;
use crate::report::Report;
use crate::rounds::{Contender, measure_rounds, medians, ratio, wall};
use crate::{percentile, runtime};

const PAIRS: u32 = 200;
const ROUNDS: u32 = 31;
const SLOW_PAIRS: u32 = 20;
const SLOW_ROUNDS: u32 = 9;
/// For the latency while nodes fail.
const LOCKS: usize = 2_000;

/// `redlock`.
///
/// # Panics
///
/// If a server does not start or sends an unexpected reply.
pub fn run(report: &mut Report, program: Program) {
    let servers: Vec<Server> = (0..5).map(|_| program.start()).collect();
    runtime().block_on(async {
        let ports: Vec<u16> = servers.iter().map(Server::port).collect();
        let bars = [(3, "", 2.2), (3, "?unfenced", 1.8), (5, "", 3.3), (5, "?unfenced", 2.5)];
        pairs(report, &ports, "on loopback", (PAIRS, ROUNDS), &bars).await;
        let proxies: Vec<Proxy> =
            servers.iter().map(|server| near(server, Duration::from_micros(500))).collect();
        let ports: Vec<u16> = proxies.iter().map(Proxy::port).collect();
        let bars = [(5, "", 1.6), (5, "?unfenced", 1.1)];
        pairs(report, &ports, "1 ms further away", (SLOW_PAIRS, SLOW_ROUNDS), &bars).await;
        faults(report, &servers).await;
    });
}

fn near(server: &Server, half: Duration) -> Proxy {
    let proxy = Proxy::before(server);
    proxy.delay_requests(half);
    proxy.delay_replies(half);
    proxy
}

fn quorum(ports: &[u16], parameters: &str) -> String {
    let hosts: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("redlock://{}{parameters}", hosts.join(","))
}

async fn mutex_at(url: &str) -> Mutex {
    // Without local hand-off, which a quorum does not have.
    Client::connect(url).await.expect("connects").mutex("bench:redlock").global_fifo()
}

async fn pairs(
    report: &mut Report,
    ports: &[u16],
    title: &str,
    (pairs, rounds): (u32, u32),
    bars: &[(usize, &str, f64)],
) {
    let mut mutexes =
        vec![("one server".to_owned(), mutex_at(&format!("redis://127.0.0.1:{}", ports[0])).await)];
    for (nodes, parameters, _) in bars {
        let name = format!("{nodes} nodes{}", parameters.replace('?', ", "));
        mutexes.push((name, mutex_at(&quorum(&ports[..*nodes], parameters)).await));
    }
    let mut contenders: Vec<Contender<'_>> = mutexes
        .iter()
        .map(|(name, mutex)| {
            Contender::new(name, move || async move {
                for _ in 0..pairs {
                    mutex.lock().await.expect("it is free").release().await.expect("is released");
                }
            })
        })
        .collect();
    let used = measure_rounds(rounds, &mut contenders, &wall()).await;
    report.title(&format!("Redlock: lock + release, {title} ({rounds} rounds of {pairs})"));
    for (index, (contender, time)) in contenders.iter().zip(medians(&used)).enumerate() {
        report.time(contender.name, time / f64::from(pairs), ratio(&used, index, 0));
    }
    for (index, (nodes, parameters, bar)) in (1..).zip(bars) {
        report.at_most(
            &format!("{nodes} nodes{parameters} against one server"),
            ratio(&used, index, 0),
            *bar,
        );
    }
}

/// Time to acquire a lock while two of five nodes fail, for several kinds of failure.
async fn faults(report: &mut Report, servers: &[Server]) {
    let proxies: Vec<Proxy> = servers.iter().map(|server| near(server, Duration::ZERO)).collect();
    let ports: Vec<u16> = proxies.iter().map(Proxy::port).collect();
    let mutex = mutex_at(&quorum(&ports, "")).await;
    report.title("Redlock: 5 nodes, acquiring while two of them fail");
    let healthy = latencies(&mutex).await;
    report.time("all healthy, p99", healthy, 1.0);
    for signal in ["STOP", "CONT"] {
        servers[..2].iter().for_each(|server| server.signal(signal));
        if signal == "STOP" {
            told(report, "two stand still", latencies(&mutex).await, healthy);
        }
    }
    proxies[..2].iter().for_each(|proxy| proxy.delay_replies(Duration::from_secs(2)));
    told(report, "two are slow by 2 s", latencies(&mutex).await, healthy);
    proxies[..2].iter().for_each(|proxy| {
        proxy.delay_replies(Duration::ZERO);
        proxy.refuse(true);
        proxy.cut();
    });
    told(report, "two can't be reached", latencies(&mutex).await, healthy);
}

fn told(report: &mut Report, what: &str, p99: f64, healthy: f64) {
    report.time(&format!("{what}, p99"), p99, p99 / healthy);
    report.at_most(&format!("p99 while {what}, against all healthy"), p99 / healthy, 3.0);
}

/// The 99th percentile.
async fn latencies(mutex: &Mutex) -> f64 {
    let mut took = Vec::new();
    for _ in 0..LOCKS {
        let began = Instant::now();
        let guard = mutex.lock().await.expect("a minority may fail");
        took.push(began.elapsed().as_secs_f64());
        guard.release().await.expect("is released");
    }
    percentile(&mut took, 0.99)
}
