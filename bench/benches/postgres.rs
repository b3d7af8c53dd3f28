//! `cargo bench --bench postgres`: what locks in PostgreSQL cost, against the bare statements on the same server.
//!
//! `cargo bench --bench postgres -- PART…` runs some of it: pair, handover, bloat. `LEASEHOLD_BENCH_SECONDS` is the length of the
//! last one, 30 s by default.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold::tokio_postgres::{AsyncMessage, Client as Database, NoTls, connect};
use leasehold_bench::median;
use leasehold_testkit::{Postgres, until};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const PAIRS: usize = 2_000;
const ROUNDS: usize = 300;
const REST: Duration = Duration::from_millis(2);

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    if let [peer, url] = &arguments[..]
        && peer == "--peer"
    {
        runtime.block_on(serve(url));
        return;
    }
    let is_chosen = |part: &str| arguments.is_empty() || arguments.iter().any(|word| word == part);
    for (name, fsync, commit) in [("on, with fsync", "on", "on"), ("off", "on", "off")] {
        let server = Postgres::builder().setting(&format!("fsync={fsync}")).start();
        server.run(&format!("ALTER SYSTEM SET synchronous_commit = '{commit}'"));
        server.run("SELECT pg_reload_conf()");
        let url = format!("{}?synchronous_commit={commit}", server.url());
        println!("synchronous_commit = {name}");
        if is_chosen("pair") {
            runtime.block_on(pair(&server, &url));
        }
        if is_chosen("handover") {
            runtime.block_on(handover(&server, &url));
        }
    }
    if is_chosen("bloat") {
        runtime.block_on(bloat());
    }
}

async fn database(server: &Postgres) -> (Database, UnboundedReceiver<AsyncMessage>) {
    let (database, mut connection) = connect(&server.url(), NoTls).await.expect("it connects");
    let (send, messages) = unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            let _ = send.send(message);
        }
    });
    (database, messages)
}

fn micros(times: Vec<f64>) -> f64 {
    median(times) * 1e6
}

/// An uncontended acquire and release, against the two transactions of a row with the same index.
async fn pair(server: &Postgres, url: &str) {
    server.run("CREATE TABLE bare (name text PRIMARY KEY, token int8 NOT NULL) WITH (fillfactor = 50)");
    let (bare, _messages) = database(server).await;
    let insert = bare
        .prepare(
            "INSERT INTO bare VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET token = $2 RETURNING token",
        )
        .await
        .expect("it is SQL");
    let delete = bare.prepare("DELETE FROM bare WHERE name = $1").await.expect("it is SQL");
    let client = Client::connect(url).await.expect("it connects");
    let mutex = client.mutex("pair").global_fifo();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..PAIRS {
        // In turn, so that both have the same machine.
        let begun = Instant::now();
        bare.query_one(&insert, &[&"pair", &1_i64]).await.expect("it is inserted");
        bare.execute(&delete, &[&"pair"]).await.expect("it is deleted");
        let bare_took = begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        let guard = mutex.lock().await.expect("it is free");
        guard.release().await.expect("it is ours");
        if round > PAIRS / 10 {
            ours.push(begun.elapsed().as_secs_f64());
            theirs.push(bare_took);
        }
    }
    let (ours, theirs) = (micros(ours), micros(theirs));
    println!("  pair: {ours:.0} µs, bare {theirs:.0} µs: {:.2} × (limit 2.2)", ours / theirs);
}

/// A clock that all processes of the machine share, in seconds.
fn clock() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0)).as_secs_f64()
}

/// The other process: it waits for a lock, or for a notification, and prints when it came.
async fn serve(url: &str) {
    let client = Client::connect(url).await.expect("it connects");
    let bare_url = url.split('?').next().unwrap_or(url);
    let (database, mut connection) = connect(bare_url, NoTls).await.expect("it connects");
    let (send, mut messages) = unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            let _ = send.send(message);
        }
    });
    database.batch_execute("LISTEN bare").await.expect("it listens");
    println!("0");
    for line in std::io::stdin().lock().lines() {
        match line.expect("it is text").as_str() {
            "lock" => {
                let guard = client.mutex("handover").global_fifo().lock().await.expect("it is granted");
                let at = clock();
                guard.release().await.expect("it is ours");
                println!("{at}");
            }
            _ => {
                messages.recv().await.expect("it is notified");
                println!("{}", clock());
            }
        }
    }
}

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
        writeln!(self.orders, "{word}").expect("it reads");
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

/// From a release in one process to the lock in another, against a bare notification, which writes nothing.
async fn handover(server: &Postgres, url: &str) {
    let (database, _messages) = database(server).await;
    let client = Client::connect(url).await.expect("it connects");
    let mutex = client.mutex("handover").global_fifo();
    let mut peer = Peer::start(url);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let guard = mutex.lock().await.expect("it is granted");
        peer.order("lock");
        until(async || mutex.inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
        tokio::time::sleep(REST).await;
        let released = clock();
        guard.release().await.expect("it is ours");
        ours.push(peer.answer() - released);
        peer.order("notification");
        tokio::time::sleep(REST).await;
        let sent = clock();
        database.batch_execute("NOTIFY bare, 'x'").await.expect("it is sent");
        theirs.push(peer.answer() - sent);
    }
    let (ours, theirs) = (micros(ours), micros(theirs));
    println!("  hand-over: {ours:.0} µs, bare NOTIFY {theirs:.0} µs: {:.2} × (limit 2.5)", ours / theirs);
}

/// A thousand acquisitions a second, over a hundred locks: the size of the table at the end of each tenth.
async fn bloat() {
    let seconds =
        std::env::var("LEASEHOLD_BENCH_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(30);
    let server = Postgres::builder().setting("autovacuum_naptime=15s").start();
    let client =
        Client::connect(&format!("{}?synchronous_commit=off", server.url())).await.expect("it connects");
    let begun = Instant::now();
    let (mut done, mut sizes) = (0_u32, Vec::new());
    let whole = Duration::from_secs(seconds);
    while begun.elapsed() < whole {
        let due = u32::try_from(begun.elapsed().as_millis()).unwrap_or(u32::MAX);
        while done < due {
            let guard = client.mutex(format!("lock {}", done % 100)).lock().await.expect("it is free");
            guard.release().await.expect("it is ours");
            done += 1;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        if begun.elapsed() > whole / 10 * (u32::try_from(sizes.len()).unwrap_or(0) + 1) {
            sizes.push(server.run("SELECT pg_total_relation_size('leasehold.resource') / 1024"));
        }
    }
    println!(
        "bloat: {done} acquisitions in {seconds} s over 100 locks; KiB with indexes: {}",
        sizes.join(" ")
    );
}
