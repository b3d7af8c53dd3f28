//! Hand-off from a release in one process to the critical section in another, and the cost of waiting.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use leasehold::{Client, Mutex};
use leasehold_testkit::Server;
use redis::{AsyncConnectionConfig, ProtocolVersion, PushInfo, PushKind};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;

use crate::bare;
use crate::program::Program;
use crate::report::Report;
use crate::server_cost::server_seconds;
use crate::{median, runtime};

const ROUNDS: usize = 301;
/// Pause between two rounds, so that both processes sleep when a round begins.
const REST: Duration = Duration::from_millis(1);
const NAME: &str = "bench:handoff";
const CHANNEL: &str = "bench:handoff:bare";
const ACQUISITIONS: u32 = 2_000;
/// Long enough for each waiter to re-check at least twice.
const WATCHED: Duration = Duration::from_secs(60);

/// `handoff`.
///
/// # Panics
///
/// If a server does not start or sends an unexpected reply.
pub fn run(report: &mut Report, program: Program) {
    let server = program.start();
    runtime().block_on(between_processes(report, &server.url()));
    for waiters in [1, 10, 100, 1_000] {
        runtime().block_on(crowd(report, &server, waiters));
    }
}

/// `waiting`.
///
/// # Panics
///
/// If a server does not start or sends an unexpected reply.
pub fn run_waiting(report: &mut Report, program: Program) {
    let server = program.start();
    runtime().block_on(waiting(report, &server));
    runtime().block_on(waiting_for_many(report, &server));
}

/// A clock that all processes of the machine share, in seconds.
fn clock() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0)).as_secs_f64()
}

// --- Two processes -------------------------------------------------------------------------------

/// The other process.
struct Peer {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    fn start(url: &str) -> Self {
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(program);
        command.args(["--peer", url]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let orders = child.stdin.take().expect("piped");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        let mut peer = Self { child, orders, answers };
        peer.answer();
        peer
    }

    fn order(&mut self, word: &str) {
        writeln!(self.orders, "{word}").expect("it listens");
    }

    fn answer(&mut self) -> f64 {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("it answers");
        line.trim().parse().expect("a time")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The second process: on each order it waits for the lock or for a message, and reports the time at which it arrived.
///
/// # Panics
///
/// If the server sends an unexpected reply.
pub fn peer(url: &str) {
    let (order, mut orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if order.send(line).is_err() {
                return;
            }
        }
    });
    runtime().block_on(async move {
        let (tell, mut told) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new().set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Message {
                return tell.send(());
            }
            Ok(())
        });
        let client = redis::Client::open(with_resp3(url)).expect("an address");
        let connecting = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connecting.expect("connects");
        connection.subscribe(CHANNEL).await.expect("subscribes");
        let client = Client::connect(url).await.expect("connects");
        let mutex = client.mutex(NAME);
        println!("{}", clock());
        while let Some(line) = orders.recv().await {
            if line == "lock" {
                let guard = mutex.lock().await.expect("granted");
                let at = clock();
                guard.release().await.expect("released");
                println!("{at:.9}");
            } else {
                told.recv().await.expect("a message");
                println!("{:.9}", clock());
            }
        }
    });
}

fn with_resp3(url: &str) -> redis::ConnectionInfo {
    let info: redis::ConnectionInfo =
        redis::IntoConnectionInfo::into_connection_info(url).expect("an address");
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    info.set_redis_settings(settings)
}

async fn between_processes(report: &mut Report, url: &str) {
    let mut peer = Peer::start(url);
    let mut connection = bare::connection(url).await;
    let client = Client::connect(url).await.expect("connects");
    let mutex = client.mutex(NAME);
    let (mut bare, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        peer.order("hear");
        tokio::time::sleep(REST).await;
        let began = clock();
        let heard = redis::cmd("PUBLISH").arg(CHANNEL).arg("x").query_async::<u32>(&mut connection).await;
        assert_eq!(heard.expect("answers"), 1);
        bare.push(peer.answer() - began);

        let guard = mutex.lock().await.expect("granted");
        peer.order("lock");
        while mutex.inspect().await.expect("answers").waiters.is_empty() {}
        tokio::time::sleep(REST).await;
        let began = clock();
        guard.release().await.expect("released");
        ours.push(peer.answer() - began);
    }
    let ratio = median(ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect());
    report.title(&format!("from one process to another that waits ({ROUNDS} rounds, in turn)"));
    let (bare, ours) = (median(bare), median(ours));
    report.time("PUBLISH to receive", bare, 1.0);
    report.time("release to critical section", ours, ours / bare);
    report.figure("median of each round's ratio", ratio, "x");
    report.at_most("against PUBLISH to receive", ours / bare, 1.4);
}

// --- Many clients --------------------------------------------------------------------------------

/// Commands sent by clients. Scripts call other commands than these.
pub(crate) fn sent(server: &Server) -> f64 {
    const OF_CLIENTS: [&str; 4] = ["evalsha", "eval", "ping", "subscribe"];
    let stats: String = server.query(&["INFO", "commandstats"]).expect("answers");
    let calls = |line: &str| {
        let (name, fields) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let is_counted = OF_CLIENTS.contains(&name);
        fields.split(',').next()?.parse::<f64>().ok().filter(|_| is_counted)
    };
    stats.lines().filter_map(calls).sum()
}

async fn clients(server: &Server, count: u32) -> Vec<Mutex> {
    let mut mutexes = Vec::new();
    for _ in 0..count {
        mutexes.push(Client::connect(&server.url()).await.expect("connects").mutex(NAME));
    }
    mutexes
}

async fn crowd(report: &mut Report, server: &Server, waiters: u32) {
    let mutexes = clients(server, waiters + 1).await;
    let left = Arc::new(AtomicU32::new(ACQUISITIONS.max(3 * waiters)));
    let all = left.load(Ordering::Relaxed);
    let (before, began, worked) = (sent(server), clock(), server_seconds(server.pid()));
    let tasks = mutexes.into_iter().map(|mutex| {
        let left = left.clone();
        tokio::spawn(async move {
            let take = |left: u32| left.checked_sub(1);
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                let guard = mutex.lock().await.expect("granted");
                tokio::task::yield_now().await;
                guard.release().await.expect("released");
            }
        })
    });
    join_all(tasks).await.into_iter().for_each(|done| done.expect("it does not panic"));
    let (span, commands) = (clock() - began, sent(server) - before);
    report.title(&format!("one lock, {waiters} waiting, each a client of its own ({all} acquisitions)"));
    report.figure("acquisitions", f64::from(all) / span, "per second");
    report.figure("commands", commands / f64::from(all), "per acquisition");
    let server_time = (server_seconds(server.pid()) - worked) * 1e6 / f64::from(all);
    report.figure("the server's processor", server_time, "µs per acquisition");
    report.at_most("commands per acquisition", commands / f64::from(all), 2.1);
}

async fn waiting(report: &mut Report, server: &Server) {
    const WAITERS: u32 = 1_000;
    let holder = Client::connect(&server.url()).await.expect("connects").mutex(NAME);
    for (what, mutexes, bar) in [
        ("1,000 clients", clients(server, WAITERS).await, 50.0),
        (
            "1,000 tasks of one client",
            vec![clients(server, 1).await.remove(0).global_fifo(); WAITERS as usize],
            1.0,
        ),
    ] {
        let guard = holder.lock().await.expect("granted");
        let tasks: Vec<_> = mutexes
            .into_iter()
            .map(|mutex| tokio::spawn(async move { mutex.lock().await.map(drop) }))
            .collect();
        while holder.inspect().await.expect("answers").waiters.len() < WAITERS as usize {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let before = sent(server);
        tokio::time::sleep(WATCHED).await;
        // The holder renews its lease meanwhile.
        let renewals = WATCHED.as_secs_f64() / (10.0 / 3.0);
        let rate = (sent(server) - before - renewals).max(0.0) / WATCHED.as_secs_f64();
        report.title(&format!("waiting on one held lock: {what}, for {WATCHED:?}"));
        report.at_most("commands per second", rate, bar);
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
        join_all(tasks).await;
        guard.release().await.expect("released");
    }
}

/// Many locks with two waiters each: the first re-checks when the lease expires, the second a little later.
async fn waiting_for_many(report: &mut Report, server: &Server) {
    const LOCKS: usize = 500;
    let connect = async || Client::connect(&server.url()).await.expect("connects");
    let (holder, first, second) = (connect().await, connect().await, connect().await);
    let names: Vec<String> = (0..LOCKS).map(|number| format!("{NAME}-{number}")).collect();
    let guards = join_all(names.iter().map(async |name| holder.mutex(name).lock().await.expect("granted")));
    let guards = guards.await;
    let mut tasks = Vec::new();
    for (client, place) in [(&first, 1), (&second, 2)] {
        for name in &names {
            let mutex = client.mutex(name);
            tasks.push(tokio::spawn(async move { mutex.lock().await.map(drop) }));
        }
        for name in &names {
            while holder.mutex(name).inspect().await.expect("answers").waiters.len() < place {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    let before = (sent(server), server_seconds(server.pid()));
    tokio::time::sleep(WATCHED).await;
    let seconds = WATCHED.as_secs_f64();
    let rate = (sent(server) - before.0) / seconds;
    let busy = (server_seconds(server.pid()) - before.1) / seconds * 100.0;
    report.title(&format!("{LOCKS} held locks, two clients wait for each, for {WATCHED:?}"));
    report.figure("commands, the holder's renewals included", rate, "per second");
    report.figure("the server's processor", busy, "% of a core");
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    join_all(tasks).await;
    drop(guards);
}
