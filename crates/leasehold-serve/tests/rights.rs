//! What a token may do: its rights, its names, its share of the limits, and what the operator is told.

mod common;

use std::sync::{Arc, Mutex};

use common::{Answer, Place, READ, SOON, WRITE, checked, read_until, send, until};
use leasehold_serve::{Config, Notices, Tokens};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const CI: &str = "ci-0123456789abcdef";
const FORCE: &str = "force-0123456789abcdef";

/// Tokens of four names; that of `ci` is for the names that begin with `jobs:`, and has all rights.
fn tokens() -> String {
    format!(
        "ops write {WRITE}\nci write,force {CI} jobs: other-secret-prefix:\noncall force {FORCE}\nread {READ}\n"
    )
}

fn set_tokens(config: &mut Config) {
    config.tokens = Tokens::parse(&tokens()).unwrap();
}

/// What the operator is told.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn notices(&self) -> Notices {
        let log = self.0.clone();
        Notices::new(move |text| log.lock().unwrap().push(text.to_owned()))
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// Opens an event stream over TCP.
async fn watch(place: &Place, token: &str, query: &str) -> TcpStream {
    let mut stream = place.tcp().await;
    let head = format!("GET /v1/events{query} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

async fn is_closed(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut rest)).await.expect("it is closed");
}

/// A refusal that can succeed later, or at another server.
fn assert_full(answer: &Answer) {
    assert_eq!((answer.status, answer.code().as_str()), (429, "limit-reached"), "{answer:?}");
    assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
    assert_eq!(answer.json()["try_another"], true, "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn token_with_prefixes_reaches_no_lock_outside_of_them() {
    let place = Place::with(set_tokens).await;
    // Names that differ from an allowed one in a byte, and names of other kinds.
    let names =
        ["orders", "jobs", "Jobs:1", "%20jobs:1", "job%73", "jobs%00:", "..jobs:1", "a%2Fjobs:1", "%6Fps"];
    let mut locks: Vec<String> = names.iter().map(|name| format!("mutex/{name}")).collect();
    for kind in ["semaphore", "rw", "election", "latch", "barrier"] {
        locks.push(format!("{kind}/orders"));
    }
    let held = place.acquire("orders", json!({ "ttl_ms": 600_000 })).await;
    for lock in &locks {
        for (method, path, body) in [
            ("GET", String::new(), None),
            ("POST", "/acquire".to_owned(), Some(json!({ "ttl_ms": 600_000 }))),
            ("POST", "/force-release".to_owned(), Some(json!({}))),
            ("POST", "/force-release".to_owned(), Some(json!({ "token": held["token"] }))),
        ] {
            let path = format!("/v1/locks/{lock}{path}");
            let answer = place.call_with(Some(CI), method, &path, body).await;
            if lock.contains("%00") {
                assert_eq!(answer.expect(400).code(), "invalid-request", "{path}");
                continue;
            }
            assert_eq!(answer.status, 403, "{method} {path}: {answer:?}");
            assert_eq!(answer.code(), "name-not-allowed", "{path}");
            assert!(!answer.text.contains("other-secret-prefix") && !answer.text.contains(CI), "{answer:?}");
        }
    }
    for query in ["name=orders", "name=.."] {
        let path = format!("/v1/locks/mutex/_?{query}");
        assert_eq!(
            place.call_with(Some(CI), "GET", &path, None).await.expect(403).code(),
            "name-not-allowed"
        );
    }
    let path = "/v1/events?kind=mutex&name=orders";
    assert_eq!(place.call_with(Some(CI), "GET", path, None).await.expect(403).code(), "name-not-allowed");
    for action in ["renew", "release"] {
        let (path, body) = (format!("/v1/leases/{action}"), json!({ "leases": [held["lease"]] }));
        let answer = place.call_with(Some(CI), "POST", &path, Some(body)).await.expect(200);
        assert_eq!(answer.json()["leases"][0]["outcome"], "not-allowed", "{answer:?}");
        assert!(!answer.text.contains("other-secret-prefix") && !answer.text.contains(CI), "{answer:?}");
    }
    let several = Some(json!({ "names": ["jobs:5", "orders"] }));
    let answer = place.call_with(Some(CI), "POST", "/v1/locks/acquire", several).await.expect(403);
    assert_eq!(answer.code(), "name-not-allowed");
    assert_eq!(place.state("jobs:5").await["holders"], json!([]));
    let state = place.state("orders").await;
    assert_eq!(state["holders"][0]["token"], held["token"], "nothing has changed: {state}");
    // Its own locks are free for it, of every kind.
    let own = json!({ "ttl_ms": 600_000 });
    for lock in ["mutex/jobs:1", "election/jobs:", "rw/jobs:%C3%A4", "mutex/_"] {
        let query = if lock.ends_with('_') { "?name=jobs:2" } else { "" };
        let path = format!("/v1/locks/{lock}/acquire{query}");
        place.call_with(Some(CI), "POST", &path, Some(own.clone())).await.expect(200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_and_event_streams_leave_out_names_that_the_token_may_not_use() {
    let place = Place::with(set_tokens).await;
    let held = place.acquire("orders", json!({ "ttl_ms": 600_000 })).await;
    place.acquire("jobs:1", json!({ "ttl_ms": 600_000 })).await;
    let names = async |token: &str, query: &str| -> Vec<String> {
        let path = format!("/v1/locks{query}");
        let page = place.call_with(Some(token), "GET", &path, None).await.expect(200).json();
        assert!(page["next"].is_null(), "{page}");
        page["locks"].as_array().unwrap().iter().map(|lock| lock["name"].as_str().unwrap().into()).collect()
    };
    until(async || names(READ, "").await == ["jobs:1", "orders"]).await;
    for query in ["", "?limit=1", "?search=", "?kind=mutex", "?after=mutex%2Fa"] {
        assert_eq!(names(CI, query).await, ["jobs:1"], "{query}");
    }
    assert!(names(CI, "?search=orders").await.is_empty());
    let (mut seen, mut all) = (watch(&place, CI, "").await, watch(&place, READ, "").await);
    let first = read_until(&mut seen, "\"locks\":1,").await;
    assert!(first.contains("jobs:1") && !first.contains("orders"), "{first}");
    read_until(&mut all, "orders").await;
    // Its end is as invisible as its beginning.
    assert_eq!(place.release(&held).await, "released");
    read_until(&mut all, "\"gone\":[[\"mutex\",\"orders\"]]").await;
    place.acquire("orders", json!({ "ttl_ms": 600_000 })).await;
    place.acquire("jobs:2", json!({ "ttl_ms": 600_000 })).await;
    let rest = read_until(&mut seen, "jobs:2").await;
    assert!(!rest.contains("orders"), "{rest}");
    let mut own = watch(&place, CI, "?kind=mutex&name=jobs:1").await;
    let own = read_until(&mut own, "event: lock").await;
    assert!(!own.contains("orders"), "{own}");
}

#[tokio::test(flavor = "multi_thread")]
async fn force_is_a_right_that_write_does_not_include() {
    let place = Place::with(set_tokens).await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let lock = "/v1/locks/mutex/a";
    let (force, acquire) = (format!("{lock}/force-release"), format!("{lock}/acquire"));
    for (token, path, lacks) in [
        (WRITE, force.as_str(), "force"),
        (READ, &force, "force"),
        (READ, &acquire, "write"),
        (FORCE, &acquire, "write"),
        (FORCE, "/v1/locks/acquire", "write"),
        (FORCE, "/v1/leases/release", "write"),
        (FORCE, "/v1/leases/renew", "write"),
    ] {
        let body = json!({ "leases": [held["lease"]] });
        let answer = place.call_with(Some(token), "POST", path, Some(body)).await.expect(403);
        assert_eq!(answer.code(), "missing-right");
        assert!(answer.json()["detail"].as_str().unwrap().contains(&format!("`{lacks}`")), "{answer:?}");
        assert!(!answer.text.contains(token), "{answer:?}");
    }
    assert_eq!(place.state("a").await["holders"][0]["token"], held["token"]);
    place.call_with(Some(FORCE), "GET", lock, None).await.expect(200);
    let path = format!("{lock}/force-release");
    place.call_with(Some(FORCE), "POST", &path, Some(json!({ "token": held["token"] }))).await.expect(200);
    let access = place.call_with(Some(CI), "GET", "/v1/access", None).await.expect(200).json();
    assert_eq!((&access["name"], &access["rights"]), (&json!("ci"), &json!(["read", "write", "force"])));
    assert_eq!(access["prefixes"], json!(["jobs:", "other-secret-prefix:"]));
    let access = place.get("/v1/access").await.expect(200).json();
    let uid = format!("uid {}", rustix::process::getuid().as_raw());
    assert_eq!((&access["name"], &access["prefixes"]), (&json!(uid), &json!([])));
    assert_eq!(access["rights"], json!(["read", "write", "force"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_release_is_reported_with_the_caller_the_lock_and_the_tokens() {
    let log = Log::default();
    let place = Place::with(|config| {
        set_tokens(config);
        config.notices = log.notices();
    })
    .await;
    let path = "/v1/locks/semaphore/a%20%22b/force-release";
    let slots = json!({ "capacity": 2, "ttl_ms": 600_000 });
    let mut held = Vec::new();
    for _ in 0..2 {
        let grant = place.post("/v1/locks/semaphore/a%20%22b/acquire", slots.clone()).await.expect(200);
        held.push(grant.json()["token"].as_u64().unwrap());
    }
    // One that is refused, and one that finds no such holder.
    place.call_with(Some(WRITE), "POST", path, Some(json!({}))).await.expect(403);
    place.call_with(Some(FORCE), "POST", path, Some(json!({ "token": 1 }))).await.expect(409);
    assert!(log.take().is_empty());
    let headers = [("authorization", &*format!("Bearer {FORCE}"))];
    let stream = place.tcp().await;
    let peer = stream.local_addr().unwrap();
    let answer = send(stream, "POST", path, Some(json!({ "token": held[0] })), &headers).await;
    checked("POST", path, answer).expect(200);
    let expected = format!(
        "oncall at {peer} has released semaphore \"a \\\"b\" by force: holder with token {}",
        held[0]
    );
    assert_eq!(log.take(), [expected]);
    place.post(path, json!({})).await.expect(200);
    let said = log.take().join("\n");
    let uid = rustix::process::getuid().as_raw();
    let who = format!("uid {uid} (pid {}) has released", std::process::id());
    assert!(said.starts_with(&who) && said.ends_with(&format!("holder with token {}", held[1])), "{said}");
    place.post(path, json!({})).await.expect(409);
    assert!(log.take().is_empty(), "nothing was released");
}

/// Requests that wait for the lock `jobs:a`, each over a connection of its own.
async fn wait_for(place: &Place, token: &str, queued: std::ops::RangeInclusive<usize>) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for count in queued {
        let mut stream = place.tcp().await;
        let body = json!({ "ttl_ms": 600_000, "wait_ms": 50_000 }).to_string();
        let head = format!(
            "POST /v1/locks/mutex/jobs:a/acquire HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        );
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).await.unwrap();
        place.until_waiting("jobs:a", count).await;
        streams.push(stream);
    }
    streams
}

#[tokio::test(flavor = "multi_thread")]
async fn one_token_uses_its_share_of_the_waits_and_leaves_the_rest() {
    let place = Place::with(|config| {
        set_tokens(config);
        config.limits.waits = 4;
    })
    .await;
    let acquire = async |token: &str, path: &str, body: Value| {
        place.call_with(Some(token), "POST", path, Some(body)).await
    };
    let one = "/v1/locks/mutex/jobs:b/acquire";
    acquire(WRITE, "/v1/locks/mutex/jobs:a/acquire", json!({ "ttl_ms": 600_000 })).await.expect(200);
    let waiting = wait_for(&place, CI, 1..=2).await;
    assert_full(&acquire(CI, one, json!({})).await);
    assert_full(&acquire(CI, "/v1/locks/acquire", json!({ "names": ["jobs:b"] })).await);
    // The other token has as much, and then nothing is left for the socket.
    let _others = wait_for(&place, WRITE, 3..=4).await;
    assert_full(&acquire(WRITE, one, json!({})).await);
    assert_full(&place.post(one, json!({})).await);
    drop(waiting);
    place.until_waiting("jobs:a", 2).await;
    until(async || acquire(CI, one, json!({})).await.status == 200).await;
    // Leases use no part of it.
    for name in ["jobs:c", "jobs:d", "jobs:e"] {
        acquire(CI, &format!("/v1/locks/mutex/{name}/acquire"), json!({})).await.expect(200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_token_of_a_server_can_use_the_whole_limit() {
    let place = Place::with(|config| {
        config.tokens = Tokens::parse(&format!("ci write {CI}\nci write {WRITE}")).unwrap();
        config.limits.waits = 4;
    })
    .await;
    place.acquire("jobs:a", json!({ "ttl_ms": 600_000 })).await;
    let _first = wait_for(&place, CI, 1..=1).await;
    let _second = wait_for(&place, WRITE, 2..=2).await;
    let _rest = wait_for(&place, CI, 3..=4).await;
    assert_full(&place.post("/v1/locks/mutex/b/acquire", json!({})).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_token_uses_its_share_of_the_connections_and_event_streams() {
    let place = Place::with(|config| {
        set_tokens(config);
        (config.limits.connections, config.limits.watchers) = (8, 2);
    })
    .await;
    let mut streams = Vec::new();
    for _ in 0..3 {
        let mut stream = place.tcp().await;
        let head = format!("GET /v1/access HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {CI}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        read_until(&mut stream, "\"name\":\"ci\"").await;
        streams.push(stream);
    }
    let mut watching = watch(&place, CI, "").await;
    read_until(&mut watching, "200 OK").await;
    assert_full(&place.call_with(Some(CI), "GET", "/v1/locks", None).await);
    place.call_with(Some(WRITE), "GET", "/v1/locks", None).await.expect(200);
    place.call_with(None, "GET", "/healthz", None).await.expect(200);
    streams.clear();
    until(async || place.call_with(Some(CI), "GET", "/v1/locks", None).await.status == 200).await;
    assert_full(&place.call_with(Some(CI), "GET", "/v1/events", None).await);
    let mut other = watch(&place, WRITE, "").await;
    read_until(&mut other, "200 OK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_whose_token_loses_a_name_or_a_right_is_closed() {
    let place = Place::with(set_tokens).await;
    for (before, after) in [
        ("ci write TOKEN jobs:", "ci write TOKEN jobs:1"),
        ("ci write TOKEN", "ci write TOKEN jobs:"),
        ("ci write,force TOKEN jobs:", "ci write TOKEN jobs:"),
        ("ci write,force TOKEN jobs:", "ci force TOKEN jobs:"),
    ] {
        let line = |text: &str| format!("read {READ}\n{}", text.replace("TOKEN", CI));
        place.control.set_tokens(Tokens::parse(&line(before)).unwrap()).unwrap();
        let mut kept = watch(&place, READ, "").await;
        let mut closed = watch(&place, CI, "").await;
        read_until(&mut closed, "event: status").await;
        read_until(&mut kept, "event: status").await;
        // One that may do more is as good as before.
        place.control.set_tokens(Tokens::parse(&line("ops write,force TOKEN")).unwrap()).unwrap();
        read_until(&mut closed, "event: status").await;
        place.control.set_tokens(Tokens::parse(&line(after)).unwrap()).unwrap();
        is_closed(&mut closed).await;
        read_until(&mut kept, "event: status").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn open_waits_are_answered_at_once_when_the_server_stops() {
    let mut place = Place::with(|config| config.drain = SOON * 10).await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let stop = place.stopper();
    let place_ref = &place;
    let wait = async |is_tcp: bool| {
        let body = Some(json!({ "wait_ms": 50_000, "ttl_ms": 600_000 }));
        let path = "/v1/locks/mutex/a/acquire";
        if is_tcp {
            place_ref.call_with(Some(WRITE), "POST", path, body).await
        } else {
            place_ref.call("POST", path, body).await
        }
    };
    let waits = futures_util::future::join_all((0..10).map(|number| wait(number % 2 == 0)));
    let waits = tokio::time::timeout(SOON * 2, waits);
    let (answers, ()) = tokio::join!(waits, async {
        place.until_waiting("a", 10).await;
        drop(stop);
    });
    let answers = answers.expect("the answers come long before the end of the drain");
    for answer in answers {
        assert_eq!(answer.code(), "stopping");
        assert!(answer.headers.contains_key("retry-after") && answer.json()["try_another"] == true);
        answer.expect(503);
    }
    let problem: Value = place.get("/healthz").await.expect(503).json();
    assert_eq!(problem["code"], "stopping", "it still drains");
    assert_eq!(place.release(&held).await, "released");
}
