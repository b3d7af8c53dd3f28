//! Three servers behind a balancer, of which one is killed or stopped every few seconds: a caller that renews loses nothing.
#![cfg(feature = "serve")]

mod common;

use std::fs;
use std::io::{ErrorKind, Read, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use common::{Place, Started, until};
use leasehold_testkit::{Postgres, Server, extent};
use serde_json::{Value, json};

/// How long one caller may wait, with a queue of all others before it and a server that goes away twice meanwhile.
const LONGEST_WAIT: Duration = Duration::from_secs(120);

/// Three times as long as a caller may find no server.
const TTL: Duration = Duration::from_secs(30);

const TOKEN: &str = "write-0123456789abcdef";

/// A server that is started again after each end.
struct Backend {
    place: Arc<Place>,
    program: Started,
    port: Arc<AtomicU64>,
}

impl Backend {
    fn start(place: &Arc<Place>) -> Self {
        let (program, port) = start(place);
        Self { place: place.clone(), program, port: Arc::new(AtomicU64::new(port)) }
    }

    fn end(&mut self, signal: &str) {
        self.program.signal(signal);
        self.program.end();
        let (program, port) = start(&self.place);
        self.program = program;
        self.port.store(port, Ordering::SeqCst);
    }
}

fn start(place: &Place) -> (Started, u64) {
    let tokens = place.path("tokens").display().to_string();
    let mut program = place.start(&["serve", "--listen", "127.0.0.1:0", "--tokens", &tokens]);
    let line = program.line();
    let port = line.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    (program, port.unwrap_or_else(|| panic!("{line}")))
}

/// Passes each connection to the next server that accepts it, and knows nothing of HTTP.
struct Balancer {
    address: String,
    is_over: Arc<AtomicBool>,
}

impl Balancer {
    fn start(ports: Vec<Arc<AtomicU64>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = is_over.clone();
        thread::spawn(move || {
            let mut next = 0;
            while !ends.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((client, _)) => {
                        next += 1;
                        let ports: Vec<u64> = (0..ports.len())
                            .map(|at| ports[(next + at) % ports.len()].load(Ordering::SeqCst))
                            .collect();
                        thread::spawn(move || pass(client, &ports));
                    }
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        Self { address, is_over }
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

fn pass(client: TcpStream, ports: &[u64]) {
    client.set_nonblocking(false).unwrap();
    let connect = |port: &u64| TcpStream::connect(("127.0.0.1", u16::try_from(*port).ok()?)).ok();
    let Some(server) = ports.iter().find_map(connect) else { return };
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
        let _ = from.shutdown(Shutdown::Read);
    };
    let (other_client, other_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let back = thread::spawn(move || copy(other_server, other_client));
    copy(client, server);
    let _ = back.join();
}

/// A caller of whatever server the balancer chooses, as one in any language is: each request has a connection of its own.
struct Caller {
    address: String,
}

impl Caller {
    /// One request; none without a whole answer.
    fn once(&self, path: &str, body: &Value) -> Option<(u16, Value)> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        );
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).ok()?;
        let mut answer = String::new();
        match stream.read_to_string(&mut answer) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => return None,
            _ => {}
        }
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some((head.split(' ').nth(1)?.parse().ok()?, serde_json::from_str(body).ok()?))
    }

    /// The same until a server answers with something else than that it can't.
    fn call(&self, path: &str, body: &Value) -> (u16, Value) {
        let deadline = Instant::now() + LONGEST_WAIT;
        loop {
            match self.once(path, body) {
                Some((status, answer)) if status != 503 => return (status, answer),
                last => assert!(Instant::now() < deadline, "no server answers: {last:?}"),
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Acquires the lock by one request that is repeated until it is granted. A request that has ended is replaced by a new one.
    fn acquire(&self, name: &str, requests: &AtomicU64) -> Value {
        let deadline = Instant::now() + LONGEST_WAIT;
        loop {
            let id = format!("request-{:016}", requests.fetch_add(1, Ordering::SeqCst));
            loop {
                let body = json!({ "request_id": id, "wait_ms": 5_000, "ttl_ms": TTL.as_millis() });
                match self.call(&format!("/v1/locks/mutex/{name}/acquire"), &body) {
                    (200, grant) => return grant,
                    (202, _) => {}
                    // It found no server for too long.
                    (410, _) => break,
                    (status, problem) => panic!("{status}: {problem}"),
                }
                assert!(Instant::now() < deadline, "it waits longer than {LONGEST_WAIT:?}");
            }
        }
    }

    fn outcome(&self, what: &str, lease: &Value) -> String {
        let (status, answer) = self.call(&format!("/v1/leases/{what}"), &json!({ "leases": [lease] }));
        assert_eq!(status, 200, "{answer}");
        answer["leases"][0]["outcome"].as_str().unwrap().to_owned()
    }
}

/// What all callers have done under the lock.
#[derive(Default)]
struct Seen {
    last_token: u64,
    done: u64,
    longest: Duration,
}

/// Adds one to the number in the file, which has no protection of its own.
fn count(path: &Path) {
    let number: u64 = fs::read_to_string(path).unwrap().parse().unwrap();
    thread::sleep(Duration::from_millis(2));
    fs::write(path, (number + 1).to_string()).unwrap();
}

fn callers_lose_nothing(url: &str, callers: usize, lasts: Duration) {
    let place = Arc::new(if url.is_empty() { Place::new() } else { Place::on(url) });
    let tokens = place.path("tokens");
    fs::write(&tokens, format!("caller write {TOKEN}\n")).unwrap();
    fs::set_permissions(&tokens, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let counter: PathBuf = place.path("counter");
    fs::write(&counter, "0").unwrap();
    let mut backends: Vec<Backend> = (0..3).map(|_| Backend::start(&place)).collect();
    let balancer = Balancer::start(backends.iter().map(|backend| backend.port.clone()).collect());
    let (is_over, requests) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let seen = Arc::new(Mutex::new(Seen::default()));
    let tasks: Vec<_> = (0..callers)
        .map(|number| {
            let caller = Caller { address: balancer.address.clone() };
            let (is_over, requests, seen, counter) =
                (is_over.clone(), requests.clone(), seen.clone(), counter.clone());
            thread::spawn(move || {
                while !is_over.load(Ordering::SeqCst) {
                    let asked = Instant::now();
                    let grant = caller.acquire("counter", &requests);
                    let waited = asked.elapsed();
                    let token = grant["token"].as_u64().unwrap();
                    {
                        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                        assert!(
                            token > seen.last_token,
                            "caller {number}: token {token} after {}",
                            seen.last_token
                        );
                        seen.last_token = token;
                        seen.done += 1;
                        seen.longest = seen.longest.max(waited);
                    }
                    count(&counter);
                    // As one whose work lasts longer.
                    assert_eq!(caller.outcome("renew", &grant["lease"]), "renewed", "caller {number}");
                    count(&counter);
                    let released = caller.outcome("release", &grant["lease"]);
                    assert!(["released", "already-ended"].contains(&released.as_str()), "{released}");
                }
            })
        })
        .collect();
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < lasts {
        thread::sleep(Duration::from_secs(3));
        let signal = if round % 2 == 0 { "KILL" } else { "TERM" };
        backends[round % 3].end(signal);
        round += 1;
    }
    is_over.store(true, Ordering::SeqCst);
    for task in tasks {
        task.join().expect("no caller has lost anything");
    }
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let counted: u64 = fs::read_to_string(&counter).unwrap().parse().unwrap();
    assert_eq!(counted, 2 * seen.done, "two were at work at once");
    assert!(seen.done > callers as u64, "{} turns in {lasts:?}", seen.done);
    println!("{} turns, the longest wait was {:?}", seen.done, seen.longest);
    drop(seen);
    // Nothing is left of requests whose answers were lost.
    until(|| (place.show("counter")["holders"] == json!([])).then_some(()));
}

/// Minutes at night, with more callers.
fn check(url: &str) {
    let (callers, seconds) = extent((20, 12), (50, 120), (50, 120));
    callers_lose_nothing(url, callers, Duration::from_secs(seconds));
}

#[test]
fn callers_behind_a_balancer_lose_nothing_on_redis() {
    let server = Server::on_port();
    check(&server.url());
}

#[test]
fn callers_behind_a_balancer_lose_nothing_on_postgres() {
    let server = Postgres::on_port();
    check(&server.url());
}

#[test]
fn callers_behind_a_balancer_lose_nothing_on_sqlite() {
    check("");
}
