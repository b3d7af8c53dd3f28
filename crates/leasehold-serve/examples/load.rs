//! Load for a running server, through its Unix socket:
//!
//! ```text
//! cargo run --release -p leasehold-serve --example load -- SOCKET rate 64        # acquisitions/s on distinct names, 64 connections
//! cargo run --release -p leasehold-serve --example load -- SOCKET polls 1000     # long polls on one lock, handed from one to the next
//! cargo run --release -p leasehold-serve --example load -- SOCKET aborts 100000 PID   # aborted long polls; memory and files of PID
//! cargo run --release -p leasehold-serve --example load -- SOCKET idle 10000 PID      # open connections that send nothing
//! ```

use std::error::Error;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// How long the rate is measured.
const MEASURED: Duration = Duration::from_secs(10);

/// One connection that is kept alive.
struct Connection {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open(socket: &str) -> io::Result<Self> {
        loop {
            match UnixStream::connect(socket).await {
                Ok(stream) => return Ok(Self { stream, buffer: Vec::new() }),
                // The connections that the server has not accepted yet fill the socket's queue.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn send(&mut self, path: &str, body: &Value) -> io::Result<()> {
        let body = body.to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await
    }

    async fn receive(&mut self) -> Outcome<(u16, Value)> {
        loop {
            if let Some((status, head, length)) = answer_length(&self.buffer)
                && self.buffer.len() >= head + length
            {
                let body = serde_json::from_slice(&self.buffer[head..head + length]).unwrap_or_default();
                self.buffer.drain(..head + length);
                return Ok((status, body));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err("the server closed the connection".into());
            }
        }
    }

    async fn call(&mut self, path: &str, body: &Value) -> Outcome<(u16, Value)> {
        self.send(path, body).await?;
        self.receive().await
    }
}

/// The status, and the lengths of head and body.
fn answer_length(bytes: &[u8]) -> Option<(u16, usize, usize)> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (head, _) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    Some((status, head.len() + 4, length.unwrap_or(0)))
}

async fn acquire(connection: &mut Connection, name: &str, wait_ms: u64) -> Outcome<Value> {
    let body = json!({ "wait_ms": wait_ms, "ttl_ms": 60_000 });
    let (status, grant) = connection.call(&format!("/v1/locks/mutex/{name}/acquire"), &body).await?;
    if status == 200 { Ok(grant) } else { Err(format!("{status}: {grant}").into()) }
}

async fn release(connection: &mut Connection, grant: &Value) -> Outcome<()> {
    let leases = json!({ "leases": [grant["lease"]] });
    match connection.call("/v1/leases/release", &leases).await? {
        (200, answer) if answer["leases"][0]["outcome"] == "released" => Ok(()),
        (status, answer) => Err(format!("{status}: {answer}").into()),
    }
}

/// A lease after a wait that no one request may last.
async fn wait_for(connection: &mut Connection, name: &str, number: u64) -> Outcome<Value> {
    // The test is the only caller of this server, so the id is new, but not secret.
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let body =
        json!({ "wait_ms": 50_000, "ttl_ms": 60_000, "request_id": format!("load-{now:020}-{number}") });
    loop {
        match connection.call(&format!("/v1/locks/mutex/{name}/acquire"), &body).await? {
            (200, grant) => return Ok(grant),
            (202, _) => {}
            (status, answer) => return Err(format!("{status}: {answer}").into()),
        }
    }
}

async fn rate(socket: &str, connections: u64) -> Outcome<()> {
    let done = Arc::new(AtomicU64::new(0));
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..connections {
        let (done, mut connection) = (done.clone(), Connection::open(socket).await?);
        tasks.spawn(async move {
            let mut number = 0_u64;
            while begin.elapsed() < MEASURED {
                let name = format!("load-{task}-{number}");
                let grant = acquire(&mut connection, &name, 0).await?;
                release(&mut connection, &grant).await?;
                done.fetch_add(1, Ordering::Relaxed);
                number += 1;
            }
            Outcome::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    let (count, elapsed) = (done.load(Ordering::Relaxed), begin.elapsed());
    println!(
        "{count} acquisitions and releases in {elapsed:.1?}: {:.0}/s",
        count as f64 / elapsed.as_secs_f64()
    );
    Ok(())
}

async fn polls(socket: &str, count: u64) -> Outcome<()> {
    let mut holder = Connection::open(socket).await?;
    let held = acquire(&mut holder, "polled", 0).await?;
    let mut tasks = JoinSet::new();
    for number in 0..count {
        let mut connection = Connection::open(socket).await?;
        tasks.spawn(async move {
            let grant = wait_for(&mut connection, "polled", number).await?;
            release(&mut connection, &grant).await?;
            Outcome::Ok(grant["token"].as_u64().unwrap_or_default())
        });
    }
    let begin = Instant::now();
    until_queued(socket, "polled", count).await?;
    println!("{count} long polls are queued after {:.1?}", begin.elapsed());
    let begin = Instant::now();
    release(&mut holder, &held).await?;
    let mut tokens = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        tokens.push(ended??);
    }
    let elapsed = begin.elapsed();
    tokens.sort_unstable();
    tokens.dedup();
    println!(
        "{} grants with different tokens in {elapsed:.1?}: {:.0}/s",
        tokens.len(),
        tokens.len() as f64 / elapsed.as_secs_f64()
    );
    Ok(())
}

/// Waits until the lock has this many waiters.
async fn until_queued(socket: &str, name: &str, count: u64) -> Outcome<()> {
    loop {
        let mut stream = Connection::open(socket).await?.stream;
        let request =
            format!("GET /v1/locks/mutex/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        if text.matches("\"waiting_for_ms\"").count() as u64 == count {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn aborts(socket: &str, count: u64, pid: u32) -> Outcome<()> {
    let mut holder = Connection::open(socket).await?;
    let held = acquire(&mut holder, "aborted", 0).await?;
    println!("before: {}", usage(pid)?);
    // The first tenth fills caches and pools.
    for (part, name) in [(count / 10, "after the first tenth"), (count - count / 10, "after all")] {
        let begin = Instant::now();
        let mut tasks = JoinSet::new();
        for task in 0..32 {
            let (socket, mine) = (socket.to_owned(), part / 32 + u64::from(task < part % 32));
            tasks.spawn(async move {
                for _ in 0..mine {
                    let mut connection = Connection::open(&socket).await?;
                    let body = json!({ "wait_ms": 50_000 });
                    connection.send("/v1/locks/mutex/aborted/acquire", &body).await?;
                    tokio::task::yield_now().await;
                }
                Outcome::Ok(())
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        until_queued(socket, "aborted", 0).await?;
        println!("{name} ({part} in {:.1?}): {}", begin.elapsed(), usage(pid)?);
    }
    release(&mut holder, &held).await
}

async fn idle(socket: &str, count: u64, pid: u32) -> Outcome<()> {
    println!("before: {}", usage(pid)?);
    let mut open = Vec::new();
    for _ in 0..count {
        open.push(Connection::open(socket).await?);
    }
    println!("{count} connections: {}", usage(pid)?);
    drop(open);
    let grant = loop {
        // Refused until the server has seen that they are closed.
        let mut connection = Connection::open(socket).await?;
        if let Ok(grant) = acquire(&mut connection, "afterwards", 0).await {
            break grant;
        }
    };
    println!("closed, and a lock was granted (token {}): {}", grant["token"], usage(pid)?);
    Ok(())
}

/// Memory and open files of a process.
fn usage(pid: u32) -> io::Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    let files = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
    Ok(format!("{} resident, {files} open files", memory.trim()))
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let _ = leasehold_serve::raise_open_files();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        [socket, "rate", count] => rate(socket, count.parse()?).await,
        [socket, "polls", count] => polls(socket, count.parse()?).await,
        [socket, "aborts", count, pid] => aborts(socket, count.parse()?, pid.parse()?).await,
        [socket, "idle", count, pid] => idle(socket, count.parse()?, pid.parse()?).await,
        _ => Err(
            "arguments: SOCKET rate CONNECTIONS, SOCKET polls N, SOCKET aborts N PID, or SOCKET idle N PID"
                .into(),
        ),
    }
}
