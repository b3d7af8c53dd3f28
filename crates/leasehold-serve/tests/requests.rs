//! Requests that are repeated, at any server, and callers that are gone.

mod common;

use std::io::Read as _;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Answer, Place, SOON, WRITE, checked, send, until, until_within};
use futures_util::future::join_all;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use leasehold::{Client, Kind};
use leasehold_serve::Tokens;
use leasehold_testkit::{Server, extent, unless_paused};
use serde_json::{Value, json};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

const ACQUIRE: &str = "/v1/locks/mutex/a/acquire";

/// The id of a request, which no other test uses.
const ID: &str = "request-0123456789abcdef";

/// A caller repeats within 2 s: what a test may lose.
const PAUSE: Duration = Duration::from_secs(1);

/// Sends the request over a connection that stays open until the answer is there.
async fn begin(place: &Place, body: Value) -> JoinHandle<Answer> {
    let stream = place.unix().await;
    tokio::spawn(
        async move { checked("POST", ACQUIRE, send(stream, "POST", ACQUIRE, Some(body), &[]).await) },
    )
}

/// The whole text of a request that acquires this lock, or the locks of the body.
fn request_text(name: &str, body: &Value) -> String {
    let lock = if body["names"].is_null() { format!("mutex/{name}/") } else { String::new() };
    let body = body.to_string();
    let head = format!(
        "POST /v1/locks/{lock}acquire HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {WRITE}\r\n"
    );
    format!("{head}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Numbers that differ from run to run.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).expect("random bytes");
        let seed = u64::from_ne_bytes(seed) | 1;
        println!("seed {seed}");
        Self(seed)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).expect("it is below the limit")
    }

    /// Steps until a close or a release: usually a few.
    fn soon(&mut self) -> usize {
        let limit = 1 + self.below(60);
        self.below(limit)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn same_request_gets_the_same_lease_at_any_server() {
    let first = Place::new().await;
    let second = first.beside().await;
    let body = json!({ "request_id": ID, "ttl_ms": 600_000 });
    let grant = first.acquire("a", body.clone()).await;
    for place in [&second, &first, &second] {
        let again = place.acquire("a", body.clone()).await;
        assert_eq!((&again["lease"], &again["token"]), (&grant["lease"], &grant["token"]));
    }
    assert_eq!(first.state("a").await["holders"].as_array().unwrap().len(), 1);
    // Another request is another one, and so is the same one for another lock.
    let other = json!({ "request_id": "another-0123456789abcdef" });
    assert_eq!(second.post(ACQUIRE, other).await.expect(409).code(), "busy");
    let elsewhere = second.acquire("b", body.clone()).await;
    assert_ne!(elsewhere["lease"], grant["lease"]);
    // It is over with its lease.
    assert_eq!(second.release(&grant).await, "released");
    for place in [&first, &second] {
        assert_eq!(place.post(ACQUIRE, body.clone()).await.expect(410).code(), "request-ended");
    }
    assert_eq!(first.state("a").await["holders"], json!([]));
    // The lease of another kind of lock is found again, too.
    for (lock, mut body) in [
        ("semaphore/s", json!({ "capacity": 2 })),
        ("rw/r", json!({ "mode": "read" })),
        ("rw/w", json!({ "mode": "write" })),
        ("election/e", json!({})),
    ] {
        (body["request_id"], body["ttl_ms"]) = (json!(ID), json!(600_000));
        let path = format!("/v1/locks/{lock}/acquire");
        let grant = first.post(&path, body.clone()).await.expect(200).json();
        let again = second.post(&path, body).await.expect(200).json();
        assert_eq!(grant["lease"], again["lease"], "{lock}");
    }
}

/// As a caller does whose time is over.
#[tokio::test(flavor = "multi_thread")]
async fn request_that_waits_and_then_tries_is_busy() {
    unless_paused(PAUSE, async || {
        let place = Place::new().await;
        let other = place.beside().await;
        place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
        place.post(ACQUIRE, json!({ "request_id": ID, "wait_ms": 300 })).await.expect(202);
        for server in [&other, &place] {
            let asked = server.post(ACQUIRE, json!({ "request_id": ID, "wait_ms": 0 }));
            let answer = tokio::time::timeout(SOON, asked).await.expect("it does not wait");
            assert_eq!(answer.expect(409).code(), "busy");
        }
        until(async || place.state("a").await["waiters"] == json!([])).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_with_other_terms_is_another_one() {
    let place = Place::new().await;
    let ask = async |lock: &str, mut body: Value| {
        body["request_id"] = json!(ID);
        place.post(&format!("/v1/locks/{lock}/acquire"), body).await
    };
    ask("rw/r", json!({ "mode": "read" })).await.expect(200);
    assert_eq!(ask("rw/r", json!({ "mode": "write" })).await.expect(409).code(), "busy");
    ask("semaphore/s", json!({ "capacity": 5 })).await.expect(200);
    assert_eq!(ask("semaphore/s", json!({ "capacity": 5, "permits": 5 })).await.expect(409).code(), "busy");
    ask("mutex/m", json!({ "owner": "job-7" })).await.expect(200);
    assert_eq!(ask("mutex/m", json!({ "owner": "job-8" })).await.expect(409).code(), "busy");
}

/// The name of a token is not the beginning of another one's id.
#[tokio::test(flavor = "multi_thread")]
async fn name_of_a_token_and_the_id_are_apart() {
    let place = Place::with(|config| {
        config.tokens = Tokens::parse("a write a-0123456789abcdef\nab write ab-0123456789abcdef").unwrap();
    })
    .await;
    for (token, id, status) in [
        ("a-0123456789abcdef", "b-request-0123456789abcdef", 200),
        ("ab-0123456789abcdef", "-request-0123456789abcdef", 409),
    ] {
        let body = json!({ "request_id": id });
        place.call_with(Some(token), "POST", ACQUIRE, Some(body)).await.expect(status);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_with_different_tokens_and_the_same_id_have_two_requests() {
    const CI: &str = "ci-0123456789abcdef";
    let place = Place::with(|config| {
        config.tokens = Tokens::parse(&format!("ops write {WRITE}\nci write {CI}")).unwrap();
    })
    .await;
    let body = json!({ "request_id": ID, "ttl_ms": 600_000 });
    let ask = async |token: &str| place.call_with(Some(token), "POST", ACQUIRE, Some(body.clone())).await;
    let grant = ask(WRITE).await.expect(200).json();
    let other = ask(CI).await.expect(409);
    assert_eq!(other.code(), "busy");
    assert!(!other.text.contains(grant["lease"].as_str().unwrap()));
    assert_eq!(ask(WRITE).await.expect(200).json()["lease"], grant["lease"]);
    assert_eq!(place.post(ACQUIRE, body.clone()).await.expect(409).code(), "busy", "nor is it the socket's");
}

#[tokio::test(flavor = "multi_thread")]
async fn request_keeps_its_place_over_slices_and_servers() {
    unless_paused(PAUSE, async || {
        let first = Place::new().await;
        let second = first.beside().await;
        let held = first.acquire("a", json!({ "ttl_ms": 600_000 })).await;
        let slice = json!({ "request_id": ID, "wait_ms": 300, "ttl_ms": 600_000 });
        let waiting = first.post(ACQUIRE, slice.clone()).await.expect(202).json();
        assert_eq!((&waiting["status"], &waiting["repeat_within_ms"]), (&json!("waiting"), &json!(2000)));
        first.until_waiting("a", 1).await;
        let later = begin(&second, json!({ "wait_ms": 50_000, "ttl_ms": 600_000 })).await;
        first.until_waiting("a", 2).await;
        for place in [&second, &first, &first, &second] {
            place.post(ACQUIRE, slice.clone()).await.expect(202);
            let state = first.state("a").await;
            assert_eq!(state["waiters"].as_array().unwrap().len(), 2, "{state}");
        }
        assert_eq!(second.release(&held).await, "released");
        let grant = first.acquire("a", slice.clone()).await;
        assert!(!later.is_finished(), "the request was in front of it");
        assert_eq!(second.acquire("a", slice.clone()).await["lease"], grant["lease"]);
        assert_eq!(second.release(&grant).await, "released");
        let later = later.await.unwrap().expect(200).json();
        assert!(later["token"].as_u64() > grant["token"].as_u64());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_that_does_not_wait_is_answered_with_busy() {
    let place = Place::new().await;
    place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let body = json!({ "request_id": ID, "wait_ms": 0 });
    assert_eq!(place.post(ACQUIRE, body).await.expect(409).code(), "busy");
    place.until_waiting("a", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_that_is_repeated_ends_its_former_connection() {
    let place = Place::new().await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let body = json!({ "request_id": ID, "wait_ms": 50_000, "ttl_ms": 600_000 });
    let mut current = begin(&place, body.clone()).await;
    place.until_waiting("a", 1).await;
    for _ in 0..5 {
        let next = begin(&place, body.clone()).await;
        let ended = tokio::time::timeout(SOON / 2, current).await.expect("at once").unwrap();
        assert_eq!(ended.expect(202).json()["status"], "waiting");
        let state = place.state("a").await;
        assert!(state["waiters"].as_array().unwrap().len() <= 1, "it competes with itself: {state}");
        current = next;
    }
    place.until_waiting("a", 1).await;
    assert_eq!(place.release(&held).await, "released");
    let grant = current.await.unwrap().expect(200).json();
    assert_eq!(place.state("a").await["holders"][0]["token"], grant["token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn request_at_a_server_that_stops_goes_on_at_another_one_in_its_place() {
    unless_paused(PAUSE, async || {
        let mut first = Place::new().await;
        let second = first.beside().await;
        let held = second.acquire("a", json!({ "ttl_ms": 600_000 })).await;
        let body = json!({ "request_id": ID, "wait_ms": 50_000, "ttl_ms": 600_000 });
        let request = begin(&first, body.clone()).await;
        second.until_waiting("a", 1).await;
        let later = begin(&second, json!({ "wait_ms": 50_000, "ttl_ms": 600_000 })).await;
        second.until_waiting("a", 2).await;
        first.stop();
        let stopped = tokio::time::timeout(SOON / 2, request).await.expect("at once").unwrap().expect(503);
        assert_eq!((stopped.code().as_str(), &stopped.json()["try_another"]), ("stopping", &json!(true)));
        assert!(stopped.headers.contains_key("retry-after"), "{stopped:?}");
        let again = begin(&second, body.clone()).await;
        // The first server ends, and with it its client.
        first.ended().await;
        assert_eq!(second.state("a").await["waiters"].as_array().unwrap().len(), 2);
        assert_eq!(second.release(&held).await, "released");
        let grant = again.await.unwrap().expect(200).json();
        assert!(!later.is_finished(), "the request was in front of it");
        assert_eq!(second.release(&grant).await, "released");
        assert!(later.await.unwrap().expect(200).json()["token"].as_u64() > grant["token"].as_u64());
    })
    .await;
}

/// A caller of one request behind a proxy, as its connections are: kept until the proxy ends them.
struct Caller {
    proxy: SocketAddr,
    connection: Option<SendRequest<Full<Bytes>>>,
}

impl Caller {
    /// One request over the connection that is open, or over a new one. None if the connection was cut before the answer.
    async fn ask(&mut self, body: &Value) -> Option<(u16, Value)> {
        let mut sender = match self.connection.take() {
            Some(open) => open,
            None => {
                let stream = TcpStream::connect(self.proxy).await.unwrap();
                let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
                tokio::spawn(connection);
                sender
            }
        };
        let request = Request::post(ACQUIRE)
            .header(HOST, "localhost")
            .header(AUTHORIZATION, format!("Bearer {WRITE}"))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        let answer = sender.send_request(request).await.ok()?;
        let status = answer.status().as_u16();
        let bytes = answer.into_body().collect().await.ok()?.to_bytes();
        self.connection = Some(sender);
        Some((status, serde_json::from_slice(&bytes).unwrap()))
    }

    /// Repeats the request until it is granted: the grant, and how many slices were over, and how many connections were cut.
    async fn wait(mut self, body: Value) -> (Value, usize, usize) {
        let (mut slices, mut cuts) = (0, 0);
        loop {
            match self.ask(&body).await {
                Some((200, grant)) => return (grant, slices, cuts),
                Some((202, _)) => slices += 1,
                None => cuts += 1,
                Some((status, problem)) => panic!("{status}: {problem}"),
            }
        }
    }
}

/// A proxy that passes connections to these servers in turn, and ends each of them after this time.
async fn proxy(servers: [&Place; 2], age: Duration) -> SocketAddr {
    let servers = servers.map(|server| server.tcp_address().to_owned());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for server in servers.iter().cycle() {
            let (mut caller, _) = listener.accept().await.unwrap();
            let mut server = TcpStream::connect(server).await.unwrap();
            tokio::spawn(tokio::time::timeout(age, async move {
                copy_bidirectional(&mut caller, &mut server).await
            }));
        }
    });
    address
}

/// With the lengths of the field at night: ten minutes, and a proxy that ends each connection after one.
#[tokio::test(flavor = "multi_thread")]
async fn wait_through_a_proxy_that_cuts_each_connection_keeps_its_place() {
    let millis = Duration::from_millis;
    let (age, slice, wait) = extent(
        (millis(1_000), millis(700), millis(12_000)),
        (millis(60_000), millis(42_000), millis(600_000)),
        (millis(60_000), millis(42_000), millis(600_000)),
    );
    unless_paused(PAUSE, async || {
        let first = Place::new().await;
        let second = first.beside().await;
        let held = first.acquire("a", json!({ "ttl_ms": 3_600_000 })).await;
        let through = proxy([&first, &second], age).await;
        let caller = || Caller { proxy: through, connection: None };
        let request = |name: &str| {
            json!({ "request_id": format!("{ID}-{name}"), "wait_ms": slice.as_millis(), "ttl_ms": 600_000, "label": name })
        };
        let mut waiting = Vec::new();
        for (before, name) in ["one", "two", "three"].into_iter().enumerate() {
            waiting.push(tokio::spawn(caller().wait(request(name))));
            first.until_waiting("a", before + 1).await;
        }
        let began = Instant::now();
        until_within(wait + SOON, async || {
            let state = first.state("a").await;
            let waiters = state["waiters"].as_array().unwrap();
            let names: Vec<&str> =
                waiters.iter().map(|waiter| waiter["metadata"]["label"].as_str().unwrap()).collect();
            assert_eq!(names, ["one", "two", "three"], "after {:?}", began.elapsed());
            began.elapsed() >= wait
        })
        .await;
        // Each passes the lock on to the next one.
        let mut before = held;
        for waiting in waiting {
            assert!(!waiting.is_finished(), "it has passed another one");
            assert_eq!(second.release(&before).await, "released");
            let (grant, slices, cuts) = tokio::time::timeout(SOON, waiting).await.expect("it is granted").unwrap();
            assert!(grant["token"].as_u64() > before["token"].as_u64());
            assert!(slices > 3 && cuts > 3, "{slices} slices were over, and {cuts} connections were cut");
            before = grant;
        }
        assert_eq!(first.release(&before).await, "released");
        first.until_waiting("a", 0).await;
    })
    .await;
}

/// A quorum does not know the same attempt again.
#[tokio::test(flavor = "multi_thread")]
async fn request_with_an_id_is_refused_over_a_quorum() {
    let servers: Vec<Server> = (0..3).map(|_| Server::on_socket()).collect();
    let nodes: Vec<String> = servers.iter().map(Server::url).collect();
    let store = format!("redlock:{} ?max_ttl_ms=60000&node_timeout_ms=5000", nodes.join(" "));
    let place = Place::of(Client::connect(&store).await.unwrap()).await;
    for wait_ms in [0, 50_000] {
        let body = json!({ "request_id": ID, "wait_ms": wait_ms, "ttl_ms": 20_000 });
        let refused = place.post(ACQUIRE, body).await.expect(422);
        assert_eq!(refused.code(), "unsupported");
        assert!(refused.json()["detail"].as_str().unwrap().contains("quorum"), "{refused:?}");
    }
    place.until_waiting("a", 0).await;
    place.until_free("a").await;
}

/// How a client ends its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Close {
    Unix,
    Tcp,
    /// TCP, with a reset.
    Reset,
}

/// A connection that is closed at a random moment of its request. Everything runs on this thread: nothing happens between the look for an
/// answer and the close. The lock is free, or another client releases it at another random moment.
async fn round(place: &Place, other: &Client, random: &mut Random, name: &str, body: &Value, close: Close) {
    let mut held = match random.below(2) {
        0 => None,
        _ => Some(other.mutex(name).lock().await.unwrap()),
    };
    let text = request_text(name, body);
    let (release_at, close_at) = match close {
        // Whether the server hears of the end of what its client sends before it writes its answer is a matter of microseconds: the lock is
        // released after the end, or the request comes together with its end.
        Close::Tcp if held.is_some() => (usize::MAX, random.soon()),
        Close::Tcp => (0, 0),
        Close::Unix | Close::Reset => (random.soon(), random.soon()),
    };
    let mut steps = async || {
        for step in 0..close_at {
            if step == release_at {
                drop(held.take());
            }
            tokio::task::yield_now().await;
        }
    };
    let mut bytes = vec![0; 4096];
    let read = if close == Close::Unix {
        let mut stream = place.unix().await;
        stream.write_all(text.as_bytes()).await.unwrap();
        steps().await;
        (&*SockRef::from(&stream)).read(&mut bytes)
    } else {
        let mut stream = place.tcp().await;
        stream.write_all(text.as_bytes()).await.unwrap();
        steps().await;
        if close == Close::Reset {
            SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
        (&*SockRef::from(&stream)).read(&mut bytes)
    };
    if let Ok(count @ 1..) = read {
        // The caller has its answer.
        let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
        let (head, answer) = text.split_once("\r\n\r\n").expect("an answer");
        let grant: Value = serde_json::from_str(answer).unwrap();
        if head.starts_with("HTTP/1.1 200") {
            let grants = grant["leases"].as_array().cloned().unwrap_or_else(|| vec![grant.clone()]);
            for grant in grants {
                assert_eq!(place.release(&grant).await, "released", "{grant}");
            }
        } else {
            assert!(head.starts_with("HTTP/1.1 409"), "{text}");
        }
    }
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    drop(held);
}

/// The server, the callers and the store on one thread, which looks at its connections after every step.
fn on_one_thread(test: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().event_interval(1).build().unwrap().block_on(test);
}

#[test]
fn caller_that_is_gone_leaves_no_lease() {
    on_one_thread(async {
        let store = format!("memory:gone-{}", std::process::id());
        let other = Client::connect(&store).await.unwrap();
        let place = Place::of(Client::connect(&store).await.unwrap()).await;
        let mut random = Random::new();
        for number in 0..100 {
            // The end of a TCP connection of a request that does not wait may be the end of what its client sends.
            for (close, wait_ms) in [
                (Close::Unix, 0),
                (Close::Unix, 50_000),
                (Close::Tcp, 50_000),
                (Close::Reset, 0),
                (Close::Reset, 50_000),
            ] {
                let name = format!("lock-{}", number % 7);
                // It is granted first, and waits with its lease for the other one.
                let second = format!("a-{name}");
                let one = json!({ "wait_ms": wait_ms, "ttl_ms": 600_000 });
                let two = json!({ "wait_ms": wait_ms, "ttl_ms": 600_000, "names": [second, name] });
                for body in [one, two] {
                    round(&place, &other, &mut random, &name, &body, close).await;
                    for name in [&name, &second] {
                        place.until_waiting(name, 0).await;
                        place.until_free(name).await;
                    }
                }
            }
        }
        assert!(until_quiet(&other).await);
    });
}

/// With an id the store keeps it for a caller that repeats it, for 2.5 s.
#[test]
fn caller_that_does_not_repeat_its_request_leaves_no_lease() {
    on_one_thread(async {
        let store = format!("memory:gone-for-good-{}", std::process::id());
        let other = Client::connect(&store).await.unwrap();
        let place = Place::of(Client::connect(&store).await.unwrap()).await;
        let mut random = Random::new();
        for number in 0..200 {
            let close = [Close::Unix, Close::Reset, Close::Tcp, Close::Unix, Close::Reset][number % 5];
            let wait_ms = if close == Close::Tcp { 50_000 } else { [0, 50_000][number % 2] };
            let request_id = format!("{ID}-{number}");
            let body = json!({ "wait_ms": wait_ms, "ttl_ms": 600_000, "request_id": request_id });
            round(&place, &other, &mut random, &format!("lock-{number}"), &body, close).await;
        }
        assert!(until_quiet(&other).await);
    });
}

/// Waits until no lock has a holder or a waiter.
async fn until_quiet(client: &Client) -> bool {
    // A request that the server has not read yet may be granted once more.
    for _ in 0..3 {
        until(async || {
            let locks = client.list().await.unwrap();
            locks.iter().all(|lock| lock.holders.is_empty() && lock.waiters.is_empty())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn request_that_is_repeated_a_thousand_times_has_one_lease() {
    let store = format!("memory:repeated-{}", std::process::id());
    let observer = Client::connect(&store).await.unwrap();
    let mut places = Vec::new();
    for _ in 0..3 {
        places.push(Place::of(Client::connect(&store).await.unwrap()).await);
    }
    let mut random = Random::new();
    let leases = AtomicU64::new(0);
    // A request that was not repeated in time, on a busy machine, has ended: another one takes its place.
    for number in 0..10 {
        let body = json!({ "request_id": format!("{ID}-{number}"), "ttl_ms": 600_000, "wait_ms": 1000 });
        let text = request_text("a", &body);
        let mut known: Option<Value> = None;
        let mut has_ended = false;
        for _ in 0..100 {
            let mut stream = places[random.below(3)].unix().await;
            let length = match random.below(4) {
                0 => random.below(text.len()),
                _ => text.len(),
            };
            stream.write_all(&text.as_bytes()[..length]).await.unwrap();
            match random.below(4) {
                0 => {}
                1 => tokio::task::yield_now().await,
                2 => tokio::time::sleep(Duration::from_micros(random.below(1500) as u64)).await,
                _ if length == text.len() => {
                    let mut bytes = vec![0; 4096];
                    let read = tokio::time::timeout(SOON, stream.read(&mut bytes)).await.unwrap().unwrap();
                    let answer = String::from_utf8_lossy(&bytes[..read]).into_owned();
                    let (head, answer) = answer.split_once("\r\n\r\n").expect("an answer");
                    match &head[9..12] {
                        "200" => {
                            let grant: Value = serde_json::from_str(answer).unwrap();
                            let first = known.get_or_insert_with(|| grant.clone());
                            assert_eq!(grant["lease"], first["lease"]);
                            assert!(!has_ended, "it had ended");
                            leases.fetch_add(1, Ordering::Relaxed);
                        }
                        // Another request with this id has come.
                        "202" => {}
                        "410" => has_ended = true,
                        status => panic!("{status}: {answer}"),
                    }
                }
                _ => {}
            }
            let state = observer.inspect(Kind::Mutex, "a").await.unwrap();
            assert!(state.holders.len() + state.waiters.len() <= 1, "{state:?}");
        }
        if let Some(grant) = known {
            let place = &places[random.below(3)];
            let released = place.release(&grant).await;
            assert!(released == "released" || has_ended, "{released}");
        }
        // A late one of the repeats finds that it has ended.
        until(async || {
            let state = observer.inspect(Kind::Mutex, "a").await.unwrap();
            state.holders.is_empty() && state.waiters.is_empty()
        })
        .await;
        let late = join_all(places.iter().map(|place| place.post(ACQUIRE, body.clone()))).await;
        for answer in late {
            assert!(answer.status != 200 || !has_ended, "{answer:?}");
            if answer.status == 200 {
                // No answer had arrived, and the caller has come back in time.
                places[0].release(&answer.json()).await;
            }
        }
    }
    assert!(leases.load(Ordering::Relaxed) > 10, "the request was granted again and again");
}
