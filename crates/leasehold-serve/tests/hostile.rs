//! Requests of hostile, broken and slow clients: each gets a clear answer or a closed connection, and the server goes on.

mod common;

use std::time::{Duration, Instant};

use common::{Place, READ, SOON, WRITE, checked, send, until};
use leasehold::Client;
use leasehold_serve::Limits;
use leasehold_testkit::unless_paused;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::TcpStream;

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
        r#"{"wait_ms": 50001}"#,
        r#"{"wait_ms": 99999999999999999999999}"#,
        r#"{"ttl_ms": 99}"#,
        r#"{"ttl_ms": 0}"#,
        r#"{"ttl_ms": 18446744073709551615}"#,
        r#"{"ttl": 1000}"#,
        r#"{"ttl_ms": 1000, "ttl_ms": 1000}"#,
        r#"{"mode": "append"}"#,
        r#"{"request_id": ""}"#,
        r#"{"request_id": "0123456789abcde"}"#,
        r#"{"request_id": 1234567890123456}"#,
        r#"{"once_per_ms": 0}"#,
        r#"{"min_hold_ms": 2592000001}"#,
        r#"{"once_per_ms": 1000, "min_hold_ms": 1000}"#,
        "\u{feff}{}",
        deep.as_str(),
        "{\"label\": \"\\ud800\"}",
    ] {
        let answer = place.post(ACQUIRE, Value::String(body.to_owned())).await.expect(400);
        assert_eq!(answer.code(), "invalid-request", "{body:.100}");
        assert!(answer.text.len() < 2000);
    }
    for body in [json!({ "label": "x".repeat(1025) }), json!({ "request_id": "x".repeat(201) })] {
        assert_eq!(place.post(ACQUIRE, body).await.expect(400).code(), "invalid-request");
    }
    for body in ["{}", r#"{"leases": []}"#, r#"{"leases": null}"#, r#"{"leases": [1]}"#, r#"{"lease": "a"}"#]
    {
        for action in ["renew", "release"] {
            let answer = place.post(&format!("/v1/leases/{action}"), Value::String(body.to_owned())).await;
            assert_eq!(answer.expect(400).code(), "invalid-request", "{body}");
        }
    }
    let many: Vec<String> = (0..101).map(|number| format!("lock-{number}")).collect();
    for names in [json!([]), json!(many), json!([""]), json!(["b", "b\u{7}"]), json!("b")] {
        let answer = place.post("/v1/locks/acquire", json!({ "names": names })).await.expect(400);
        assert_eq!(answer.code(), "invalid-request", "{}", answer.text);
    }
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
        let sent = String::from_utf8_lossy(bytes);
        let answer = raw(&place, bytes).await;
        let known = problem(&answer);
        let is_large = bytes.len() > 9000 || bytes == headers.as_bytes();
        let expected = if is_large { "head-too-large" } else { "invalid-request" };
        assert_eq!(known["code"], expected, "{sent:.60}: {answer}");
        // After a request that is one.
        let both = raw(&place, &[&b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"[..], bytes].concat()).await;
        let (first, second) =
            both.split_once("{\"status\":\"ok\"}").unwrap_or_else(|| panic!("{sent:.60}: {both}"));
        assert!(first.starts_with("HTTP/1.1 200"), "{both}");
        assert_eq!(problem(second)["code"], expected, "{sent:.60}: {second}");
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
    let chunked = raw(&place, b"POST /v1/leases/renew HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n").await;
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
async fn connections_waits_and_watchers_have_limits() {
    let place = Place::with_limits(|limits| {
        (limits.connections, limits.waits, limits.watchers) = (20, 2, 1);
    })
    .await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let mut waiting = Vec::new();
    for count in 1..=2 {
        let mut stream = place.unix().await;
        stream.write_all(long_poll().as_bytes()).await.unwrap();
        waiting.push(stream);
        place.until_waiting("a", count).await;
    }
    // Requests that acquire have a limit, and leases have none.
    assert_eq!(place.post("/v1/locks/mutex/c/acquire", json!({})).await.expect(429).code(), "limit-reached");
    let several = place.post("/v1/locks/acquire", json!({ "names": ["c"] })).await.expect(429);
    assert_eq!(several.code(), "limit-reached");
    assert_eq!(place.renew(&held).await["outcome"], "renewed");
    drop(waiting);
    place.until_waiting("a", 0).await;
    for name in ["c", "d", "e"] {
        place.acquire(name, json!({})).await;
    }
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
        open.push(place.unix().await);
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

/// Whether a new connection is refused with a complete problem, although it has sent a request.
async fn rest_of_refused(place: &Place) -> bool {
    let mut stream = place.unix().await;
    if stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await.is_err() {
        return false;
    }
    let mut answer = String::new();
    tokio::time::timeout(SOON, stream.read_to_string(&mut answer)).await.expect("it ends").expect("no reset");
    if answer.starts_with("HTTP/1.1 200") {
        return false;
    }
    assert_eq!(problem(&answer)["code"], "too-many-connections");
    true
}

/// The problem of an answer, which is complete.
fn problem(answer: &str) -> Value {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    assert!(head.to_lowercase().contains(&format!("content-length: {}", body.len())), "{answer}");
    let problem: Value = serde_json::from_str(body).unwrap();
    let status = head.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
    assert_eq!(problem["status"].as_u64(), status.map(u64::from), "{answer}");
    let code = problem["code"].as_str().unwrap();
    assert!(problem["type"].as_str().is_some_and(|page| page.ends_with(code)), "{problem}");
    problem
}

/// Limits under which a stranger is never closed for its silence alone.
fn patient_limits(limits: &mut Limits) {
    (limits.connections, limits.strangers) = (4, 8);
    let long = SOON * 10;
    (limits.stranger_timeout, limits.receive_timeout, limits.send_timeout) = (long, long, long);
}

/// Sends a request over a connection that stays open, and reads the beginning of its answer.
async fn ask(stream: &mut TcpStream, method: &str, path: &str, token: Option<&str>) -> String {
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{token}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut bytes = vec![0; 4096];
    let read = tokio::time::timeout(SOON, stream.read(&mut bytes)).await.expect("an answer").unwrap();
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_in_every_place_keep_out_no_token_no_socket_and_no_health_check() {
    let place = Place::with_limits(patient_limits).await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let renewal = json!({ "leases": [held["lease"]] });
    let mut strangers = Vec::new();
    // Silent ones, halves of heads, bodies that never come, and idle ones; more than there are places.
    let said = [
        "",
        "GET / HT",
        "GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
        "POST /v1/leases/renew HTTP/1.1\r\nHost: a\r\n",
    ];
    for round in 0..40 {
        let mut stranger = place.tcp().await;
        stranger.write_all(said[round % said.len()].as_bytes()).await.unwrap();
        strangers.push(stranger);
        if round % 10 == 9 {
            let path = "/v1/leases/renew";
            place.call_with(Some(WRITE), "POST", path, Some(renewal.clone())).await.expect(200);
            place.post(path, renewal.clone()).await.expect(200);
            place.call_with(None, "GET", "/healthz", None).await.expect(200);
            place.get("/healthz").await.expect(200);
        }
    }
    // The first one has made room, and is told so: it has sent nothing, so that nothing can reset its connection.
    let mut answer = String::new();
    let oldest = strangers.remove(0).read_to_string(&mut answer).await;
    oldest.expect("no reset");
    assert_eq!(problem(&answer)["code"], "too-many-connections");
    // And so is the second one, with half a head.
    let mut answer = String::new();
    strangers.remove(0).read_to_string(&mut answer).await.expect("no reset");
    assert_eq!(problem(&answer)["code"], "too-many-connections");
}

/// Each of them has its answer, and keeps its connection open.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_that_do_not_close_hold_up_no_new_connection_with_a_token() {
    const STRANGERS: usize = 2000;
    // The server's own limit for one connection is a second, and some 140 of them have a place.
    unless_paused(Duration::from_millis(500), async || {
        let place = Place::with_limits(patient_limits).await;
        let said = [&b"GET /v1/locks HTTP/1.1\r\nHost: a\r\n\r\n"[..], b"\x00\x00\x00\x00\r\n\r\n"];
        let (begin, mut strangers) = (Instant::now(), Vec::new());
        for said in said.iter().cycle().take(STRANGERS) {
            let mut stranger = place.tcp().await;
            // The server may be through with it already.
            let _ = stranger.write_all(said).await;
            strangers.push(stranger);
        }
        place.call_with(Some(WRITE), "GET", "/v1/access", None).await.expect(200);
        assert!(begin.elapsed() < Duration::from_secs(7), "{:?}", begin.elapsed());
        // The last one has its answer nevertheless.
        let last = rest(strangers.pop().unwrap()).await;
        assert_eq!(problem(&last)["code"], "invalid-request");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_read_take_at_most_half_of_the_places_of_those_with_a_token() {
    let place = Place::with_limits(patient_limits).await;
    let open = async |token, is_admitted: bool| {
        let mut stream = place.tcp().await;
        let answer = ask(&mut stream, "GET", "/v1/access", Some(token)).await;
        if is_admitted {
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        } else {
            assert_eq!(problem(&answer)["code"], "too-many-connections");
        }
        stream
    };
    let (mut first, _second) = (open(READ, true).await, open(READ, true).await);
    open(READ, false).await;
    let _third = open(WRITE, true).await;
    // A connection that shows a better token leaves its place among the readers.
    assert!(ask(&mut first, "GET", "/v1/access", Some(WRITE)).await.contains("write"));
    let _fourth = open(READ, true).await;
    open(READ, false).await;
    open(WRITE, false).await;
    // Strangers and the socket have other places.
    place.call_with(None, "GET", "/healthz", None).await.expect(200);
    place.get("/healthz").await.expect(200);
    drop(first);
    until(async || ask(&mut place.tcp().await, "GET", "/v1/access", Some(WRITE)).await.contains("200 OK"))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_read_take_at_most_half_of_the_event_streams() {
    let place = Place::with_limits(|limits| {
        patient_limits(limits);
        (limits.connections, limits.watchers) = (20, 3);
    })
    .await;
    let watch = async |token| {
        let mut stream = place.tcp().await;
        let request = format!("GET /v1/events HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
        (stream, String::from_utf8_lossy(&status[9..]).into_owned())
    };
    let mut open = Vec::new();
    for (token, expected) in
        [(READ, "200"), (READ, "200"), (READ, "429"), (WRITE, "200"), (WRITE, "429"), (READ, "429")]
    {
        let (stream, status) = watch(token).await;
        assert_eq!(status, expected);
        open.push(stream);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stranger_has_seconds_and_one_answer_and_a_connection_with_a_token_stays() {
    let place = Place::with_limits(|limits| {
        patient_limits(limits);
        limits.stranger_timeout = Duration::from_secs(1);
    })
    .await;
    let mut known = place.tcp().await;
    assert!(ask(&mut known, "GET", "/v1/access", Some(READ)).await.starts_with("HTTP/1.1 200"));
    let silent = place.tcp().await;
    let mut half = place.tcp().await;
    half.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
    assert_eq!((rest(silent).await, rest(half).await), (String::new(), String::new()));
    for token in [None, Some("unknown-0123456789abcdef")] {
        let mut stranger = place.tcp().await;
        let answer = ask(&mut stranger, "GET", "/healthz", token).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"), "{answer}");
        assert_eq!(rest(stranger).await, "");
    }
    let answer = ask(&mut known, "GET", "/healthz", None).await;
    assert!(answer.starts_with("HTTP/1.1 200") && !answer.contains("connection: close"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_is_read_although_the_body_is_still_on_its_way() {
    // The server keeps the connection open for a second.
    unless_paused(Duration::from_millis(300), async || {
        let place = Place::new().await;
        let request = format!("POST {ACQUIRE} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n");
        for _ in 0..10 {
            let mut stream = place.tcp().await;
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = vec![0; 12];
            stream.read_exact(&mut answer).await.unwrap();
            assert_eq!(answer, b"HTTP/1.1 401");
            // The client does not look at the rest of the answer before it has sent everything.
            stream.write_all(&vec![b' '; 1_000_000]).await.expect("no reset");
            stream.read_to_end(&mut answer).await.expect("no reset");
            assert_eq!(problem(&String::from_utf8(answer).unwrap())["code"], "unauthorized");
        }
    })
    .await;
}

/// A request that waits for 50 s, for a lease of ten minutes.
fn long_poll() -> String {
    let body = json!({ "wait_ms": 50_000, "ttl_ms": 600_000 }).to_string();
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
    assert_eq!(place.release(&held).await, "released");
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
    assert_eq!(place.release(&held).await, "released");
    // The server may read the last requests only now.
    place.until_free("a").await;
}
