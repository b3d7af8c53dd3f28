//! Requests of hostile, broken and slow clients: each gets a clear answer or a closed connection, and the server goes on.

mod common;

use std::time::{Duration, Instant};

use common::{Place, SOON, WRITE, checked, send, until};
use leasehold::Client;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, Interest};

const ACQUIRE: &str = "/v1/locks/mutex/a/acquire";

/// What the server sends until it closes the connection.
async fn rest(mut stream: impl AsyncRead + Unpin) -> String {
    let mut bytes = Vec::new();
    // A reset connection has ended, too.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut bytes)).await.expect("the connection ends");
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn raw(place: &Place, bytes: &[u8]) -> String {
    let mut stream = place.unix().await;
    // The server may refuse before it has everything.
    let _ = stream.write_all(bytes).await;
    rest(stream).await
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_names_kinds_and_paths_are_refused() {
    let place = Place::new().await;
    let long = "x".repeat(513);
    let two_bytes = "%C3%A4".repeat(257);
    for name in ["", long.as_str(), &two_bytes, "a%00b", "a%0Ab", "%1b%5b31m", "%ff", "%c3%28", "%C2%85"] {
        let answer = place.post(&format!("/v1/locks/mutex/{name}/acquire"), json!({})).await.expect(400);
        assert_eq!(answer.code(), "invalid-request", "{name}");
        assert!(!answer.text.contains('\u{1b}'));
    }
    for kind in ["queue", "mutexes", "%F0%9F%94%92", "Mutex", &long] {
        let answer = place.post(&format!("/v1/locks/{kind}/a/acquire"), json!({})).await.expect(400);
        assert!(answer.json()["detail"].as_str().unwrap().len() < 1000);
    }
    for path in ["/v1/locks/mutex/a/b/acquire", "/v1", "/v1/locks/mutex/a/steal", "/%2e%2e/etc/passwd"] {
        let answer = place.call("POST", path, None).await;
        assert!([404, 405].contains(&answer.status), "{path}: {answer:?}");
        answer.code();
    }
    for method in ["PUT", "PATCH", "OPTIONS", "TRACE", "BREW"] {
        assert_eq!(place.call(method, "/v1/locks", None).await.expect(405).code(), "method-not-allowed");
    }
    // What is unusual is no error.
    for name in ["..", "%2e%2e%2f", "%7Bkind%7D", "%25", "a?b=c", "%F0%9F%94%92", &long[..512]] {
        place
            .post(&format!("/v1/locks/mutex/{}/acquire", name.replace('?', "%3F")), json!({}))
            .await
            .expect(200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_bodies_are_refused() {
    let place = Place::new().await;
    let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    for body in [
        "{",
        "null",
        "[]",
        "7",
        "\"\"",
        "{} {}",
        r#"{"wait_ms": -1}"#,
        r#"{"wait_ms": 1.5}"#,
        r#"{"wait_ms": "1"}"#,
        r#"{"wait_ms": 3600001}"#,
        r#"{"wait_ms": 99999999999999999999999}"#,
        r#"{"ttl_ms": 99}"#,
        r#"{"ttl_ms": 0}"#,
        r#"{"ttl_ms": 18446744073709551615}"#,
        r#"{"ttl": 1000}"#,
        r#"{"ttl_ms": 1000, "ttl_ms": 1000}"#,
        r#"{"mode": "append"}"#,
        "\u{feff}{}",
        deep.as_str(),
        "{\"label\": \"\\ud800\"}",
    ] {
        let answer = place.post(ACQUIRE, Value::String(body.to_owned())).await.expect(400);
        assert_eq!(answer.code(), "invalid-request", "{body:.100}");
        assert!(answer.text.len() < 2000);
    }
    let label = json!({ "label": "x".repeat(1025) });
    assert_eq!(place.post(ACQUIRE, label.clone()).await.expect(400).code(), "invalid-request");
    assert_eq!(place.post("/v1/sessions", label).await.expect(400).code(), "invalid-request");
    assert_eq!(
        place.post("/v1/sessions", json!({ "heartbeat_ms": 1 })).await.expect(400).code(),
        "invalid-request"
    );
    let large = json!({ "label": "x".repeat(17_000) });
    assert_eq!(place.post(ACQUIRE, large).await.expect(413).code(), "body-too-large");
    for media in ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""] {
        let headers = [("content-type", media)];
        let answer = send(place.unix().await, "POST", ACQUIRE, Some(json!({})), &headers).await;
        assert_eq!(checked("POST", ACQUIRE, answer).expect(415).code(), "not-json");
    }
    assert_eq!(place.state("a").await["holders"], json!([]), "nothing was granted");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_http_is_answered_with_an_error() {
    let place = Place::with_limits(|limits| limits.receive_timeout = Duration::from_secs(8)).await;
    let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(40_000));
    let headers = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(1000));
    let wide = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(40_000));
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"\x00\x00\x00\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        long.as_bytes(),
        headers.as_bytes(),
        wide.as_bytes(),
    ] {
        let answer = raw(&place, bytes).await;
        let status = answer.split(' ').nth(1).unwrap_or_default();
        assert!(answer.is_empty() || status.starts_with('4'), "{}: {answer}", String::from_utf8_lossy(bytes));
    }
    for authorization in [
        "Basic d3JpdGU6",
        "Bearer",
        "bearer",
        "Bearer  ",
        &"x".repeat(9000),
        "Bearer \u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}",
    ] {
        let request = format!(
            "GET /v1/locks HTTP/1.1\r\nHost: a\r\nAuthorization: {authorization}\r\nConnection: close\r\n\r\n"
        );
        let mut stream = place.tcp().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        assert!(rest(stream).await.starts_with("HTTP/1.1 401"), "{authorization:.20}");
    }
    place.get("/healthz").await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_request_is_ended_after_the_time_limit() {
    let place = Place::with_limits(|limits| limits.receive_timeout = Duration::from_secs(2)).await;
    let begin = Instant::now();
    let body = raw(&place, b"POST /v1/locks/mutex/a/acquire HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{").await;
    assert!(body.starts_with("HTTP/1.1 408") && body.contains("slow-body"), "{body}");
    let chunked = raw(&place, b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n").await;
    assert!(chunked.starts_with("HTTP/1.1 408"), "{chunked}");
    // Half a header, nothing at all, and a connection that is idle after its request.
    for bytes in [&b"GET / HT"[..], b"", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"] {
        raw(&place, bytes).await;
    }
    assert!(begin.elapsed() >= Duration::from_secs(10), "{:?}", begin.elapsed());
    assert_eq!(place.state("a").await["holders"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_does_not_read_is_cut_off() {
    // The test itself reads such an answer, and may pause.
    let place = Place::with_limits(|limits| limits.send_timeout = Duration::from_secs(8)).await;
    let client = place.client().await;
    let mut guards = Vec::new();
    for index in 0..1500 {
        let lock = client.mutex(format!("{index}-{}", "x".repeat(400))).ttl(SOON);
        guards.push(lock.lock().await.unwrap());
    }
    let list = async || place.get("/v1/locks?limit=10000").await.expect(200).text.len();
    // The first list may be from before the last locks. This one is more than the buffers of a socket.
    until(async || list().await > 1_000_000).await;
    let whole = list().await;
    let mut stream = place.unix().await;
    stream.write_all(b"GET /v1/locks?limit=10000 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    until(async || stream.ready(Interest::READABLE).await.unwrap().is_read_closed()).await;
    let received = rest(stream).await;
    assert!(received.len() < whole, "the answer was cut");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_leases_sessions_and_watchers_have_limits() {
    let place = Place::with_limits(|limits| {
        (limits.connections, limits.leases, limits.sessions, limits.watchers) = (20, 2, 1, 1);
    })
    .await;
    place.acquire("a", json!({})).await;
    place.acquire("b", json!({})).await;
    assert_eq!(place.post("/v1/locks/mutex/c/acquire", json!({})).await.expect(429).code(), "limit-reached");
    place.call("POST", "/v1/sessions", None).await.expect(201);
    assert_eq!(place.call("POST", "/v1/sessions", None).await.expect(429).code(), "limit-reached");
    let watch = b"GET /v1/events HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut watcher = place.unix().await;
    watcher.write_all(watch).await.unwrap();
    let mut first = [0; 15];
    watcher.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    assert_eq!(place.get("/v1/events").await.expect(429).code(), "limit-reached");
    drop(watcher);

    let mut open = Vec::new();
    until(async || {
        // An earlier connection may end only now, and leave its place to the next one.
        open.push(place.tcp().await);
        open.len() >= 20 && rest_of_refused(&place).await
    })
    .await;
    open.clear();
    until(async || {
        let mut stream = place.unix().await;
        let asked = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await;
        asked.is_ok() && rest(stream).await.starts_with("HTTP/1.1 200")
    })
    .await;
}

/// Whether a new connection is refused with a complete problem.
async fn rest_of_refused(place: &Place) -> bool {
    let mut stream = place.unix().await;
    let mut first = [0; 12];
    let answered = tokio::time::timeout(Duration::from_millis(500), stream.read_exact(&mut first)).await;
    if !matches!(answered, Ok(Ok(_))) {
        return false;
    }
    assert_eq!(&first, b"HTTP/1.1 503");
    let answer = rest(stream).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{answer}");
    let problem: Value = serde_json::from_str(body).unwrap();
    assert_eq!((&problem["code"], &problem["status"]), (&json!("limit-reached"), &json!(503)));
    assert!(problem["type"].as_str().is_some_and(|page| page.ends_with("limit-reached")), "{problem}");
    true
}

/// A request that waits for ten minutes, for a lease of ten minutes.
fn long_poll() -> String {
    let body = json!({ "wait_ms": 600_000, "ttl_ms": 600_000 }).to_string();
    format!(
        "POST {ACQUIRE} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {WRITE}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_sends_more_and_closes_leaves_the_queue() {
    let place = Place::new().await;
    place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    for more in ["\r\n", "GET /he", "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", long_poll().as_str()] {
        // With the request, and later.
        let mut early = place.unix().await;
        early.write_all(format!("{}{more}", long_poll()).as_bytes()).await.unwrap();
        let mut late = place.tcp().await;
        late.write_all(long_poll().as_bytes()).await.unwrap();
        place.until_waiting("a", 2).await;
        late.write_all(more.as_bytes()).await.unwrap();
        drop(early);
        place.until_waiting("a", 1).await;
        drop(late);
        place.until_waiting("a", 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_of_a_stream_whose_client_sent_more_and_closed_ends() {
    let place = Place::new().await;
    // Longer than the pause after which the server writes into the stream, and so finds that it is closed.
    let session = place.post("/v1/sessions", json!({ "heartbeat_ms": 60_000 })).await.expect(201).json();
    let path = format!("/v1/sessions/{}", session["session"].as_str().unwrap());
    let mut stream = place.unix().await;
    let request = format!("GET {path}/events HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut first = [0; 15];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    let is_open = async || place.get(&path).await.expect(200).json()["expires_in_ms"] == 60_000;
    assert!(is_open().await, "an open stream holds the deadline");
    drop(stream);
    let begin = Instant::now();
    until(async || !is_open().await).await;
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_sends_too_much_during_its_wait_is_cut_off() {
    let place = Place::new().await;
    place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let mut stream = place.unix().await;
    stream.write_all(long_poll().as_bytes()).await.unwrap();
    place.until_waiting("a", 1).await;
    let _ = stream.write_all(&vec![b'x'; 1 << 20]).await;
    assert_eq!(rest(stream).await, "");
    place.until_waiting("a", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelined_requests_are_answered_in_their_order() {
    let place = Place::new().await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let mut stream = place.unix().await;
    let show = "GET /v1/locks/mutex/a HTTP/1.1\r\nHost: a\r\n\r\n";
    let last = "GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    // More than the buffer of the connection's parser.
    let requests = format!("{}{}{last}", long_poll(), show.repeat(800));
    stream.write_all(requests.as_bytes()).await.unwrap();
    place.until_waiting("a", 1).await;
    place.post("/v1/locks/mutex/a/release", json!({ "lease": held["lease"] })).await.expect(204);
    let answers = rest(stream).await;
    let parts: Vec<&str> = answers.split("HTTP/1.1 200 OK").collect();
    assert_eq!(parts.len(), 803);
    assert!(parts[1].contains("\"lease\"") && parts[2].contains("\"holders\""), "{}", parts[1]);
    assert!(!parts[802].contains("\"holders\""));
}

/// The server learns of the grant before it looks at the connection.
#[tokio::test]
async fn request_that_is_granted_at_the_end_of_its_connection_gets_no_lease() {
    let store = format!("memory:{}", std::process::id());
    let client = Client::connect(&store).await.unwrap();
    let place = Place::of(Client::connect(&store).await.unwrap()).await;
    for _ in 0..20 {
        let held = client.mutex("a").lock().await.unwrap();
        let mut stream = place.tcp().await;
        stream.write_all(long_poll().as_bytes()).await.unwrap();
        place.until_waiting("a", 1).await;
        // The server's tasks run on this thread, so that they see both ends only now.
        drop(stream);
        drop(held);
        place.until_free("a").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_requests_leave_nothing_behind() {
    let place = Place::new().await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let request = long_poll();
    for round in 0..300 {
        let mut stream = place.tcp().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        if round % 3 == 0 {
            tokio::task::yield_now().await;
        }
        drop(stream);
    }
    place.until_waiting("a", 0).await;
    place.post("/v1/locks/mutex/a/release", json!({ "lease": held["lease"] })).await.expect(204);
    // The server may read the last requests only now.
    place.until_free("a").await;
}
