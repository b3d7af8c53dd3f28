//! The API: locks, leases, tokens and problems. Every answer is compared with the description of its operation.

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use common::{Place, READ, SOON, WRITE, checked, send, until};
use leasehold::Client;
use leasehold::testing::TestStore;
use leasehold_serve::Tokens;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const LOCK: &str = "/v1/locks/mutex/a";

#[tokio::test(flavor = "multi_thread")]
async fn lock_is_acquired_renewed_shown_and_released() {
    let place = Place::new().await;
    let grant = place.acquire("a", json!({ "ttl_ms": 30_000, "label": "import" })).await;
    let remaining = grant["expires_in_ms"].as_u64().unwrap();
    assert!((20_000..=30_000).contains(&remaining), "{grant}");
    let state = place.state("a").await;
    assert_eq!(state["holders"][0]["token"], grant["token"]);
    assert_eq!(state["holders"][0]["metadata"]["label"], "import");

    assert_eq!(place.post(&format!("{LOCK}/acquire"), json!({})).await.expect(409).code(), "busy");
    let renewed = place.renew(&grant).await;
    assert_eq!((&renewed["outcome"], &renewed["token"]), (&json!("renewed"), &grant["token"]));
    assert!((20_000..=30_000).contains(&renewed["expires_in_ms"].as_u64().unwrap()), "{renewed}");
    assert_eq!(place.release(&grant).await, "released");
    // A release whose answer was lost can be repeated.
    assert_eq!(place.release(&grant).await, "already-ended");
    assert_eq!(place.renew(&grant).await["outcome"], "ended");
    let next = place.acquire("a", json!({})).await;
    assert!(next["token"].as_u64() > grant["token"].as_u64());
    // The lease of the holder before is not this one.
    assert_eq!(place.release(&grant).await, "already-ended");
    assert_eq!(place.renew(&grant).await["outcome"], "ended");
    assert_eq!(place.state("a").await["holders"][0]["token"], next["token"]);
}

/// No look has found its end yet, and it was another caller's.
#[tokio::test(flavor = "multi_thread")]
async fn lease_that_has_ended_refuses_its_owner_nothing() {
    let store = TestStore::new();
    let place = Place::of(store.client().unwrap()).await;
    for _ in 0..5 {
        place.acquire("a", json!({ "ttl_ms": 100, "owner": "job-7" })).await;
        store.advance(Duration::from_millis(150));
    }
    // Only the store knows that it has ended. The caller that ended it waits, or does not.
    for wait_ms in [0, 50_000] {
        let ended = place.acquire("a", json!({ "ttl_ms": 3_600_000, "owner": "job-7" })).await;
        let force = json!({ "token": ended["token"] });
        place.post(&format!("{LOCK}/force-release"), force).await.expect(200);
        let began = Instant::now();
        let next = place.acquire("a", json!({ "owner": "job-7", "wait_ms": wait_ms })).await;
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        assert_ne!(next["token"], ended["token"]);
        assert_eq!(place.renew(&ended).await["outcome"], "ended");
        assert_eq!(place.release(&next).await, "released");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_release_tells_whether_the_first_one_was_carried_out() {
    let store = TestStore::new();
    let place = Place::of(store.client().unwrap()).await;
    let grant = place.acquire("a", json!({ "ttl_ms": 60_000 })).await;
    let ids = json!({ "leases": [grant["lease"]] });
    let ask = async |action: &str| place.post(&format!("/v1/leases/{action}"), ids.clone()).await;
    store.set_reachable(false);
    for action in ["release", "release", "renew"] {
        assert_eq!(ask(action).await.expect(503).code(), "store-unavailable", "nothing is known yet");
    }
    // An id that needs no store has its outcome.
    let mixed = place.leases("release", &[json!("lease1.x"), grant["lease"].clone()]).await;
    assert_eq!((&mixed[0]["outcome"], &mixed[1]["outcome"]), (&json!("invalid"), &json!("unknown")));
    store.set_reachable(true);
    let mut outcome = String::new();
    until(async || {
        let answer = ask("release").await;
        if answer.status == 200 {
            outcome = answer.json()["leases"][0]["outcome"].as_str().unwrap().to_owned();
        }
        answer.status == 200
    })
    .await;
    assert_eq!(outcome, "released", "it was not carried out before");
    assert_eq!(place.release(&grant).await, "already-ended");
    assert_eq!(place.state("a").await["holders"], json!([]));
}

/// The default user of the server loses a right, and gets it again.
#[tokio::test(flavor = "multi_thread")]
async fn refused_release_is_no_success_and_has_the_stores_word() {
    let server = leasehold_testkit::Server::on_socket();
    let place = Place::of(Client::connect(&server.url()).await.unwrap()).await;
    let grant = place.acquire("a", json!({ "ttl_ms": 60_000 })).await;
    server.run(&["ACL", "SETUSER", "default", "-del", "-evalsha", "-eval"]);
    for action in ["release", "release", "renew"] {
        let body = json!({ "leases": [grant["lease"]] });
        let refused = place.post(&format!("/v1/leases/{action}"), body).await.expect(503);
        assert_eq!(refused.code(), "store-unavailable");
        assert!(refused.text.contains("the user lacks rights: ACL SETUSER"), "{}", refused.text);
    }
    server.run(&["ACL", "SETUSER", "default", "+@all"]);
    assert_eq!(place.renew(&grant).await["outcome"], "renewed");
    assert_eq!(place.release(&grant).await, "released");
}

/// The release is not sent during the outage, after which the store does not know the lease.
#[tokio::test(flavor = "multi_thread")]
async fn release_that_arrives_after_another_holder_is_told_so() {
    let mut server = leasehold_testkit::Server::on_socket();
    let place = Place::of(Client::connect(&server.url()).await.unwrap()).await;
    let grant = place.acquire("a", json!({ "ttl_ms": 60_000 })).await;
    let release = async || place.post("/v1/leases/release", json!({ "leases": [grant["lease"]] })).await;
    server.stop();
    // From then on the client knows that the connection is lost: the release is not sent.
    place.post("/v1/locks/mutex/b/acquire", json!({})).await.expect(503);
    release().await.expect(503);
    server.start();
    let other = Client::connect(&server.url()).await.unwrap();
    let _held = other.mutex("a").lock().await.unwrap();
    let mut answer = None;
    until(async || {
        answer = Some(release().await).filter(|answer| answer.status != 503);
        answer.is_some()
    })
    .await;
    let answer = answer.unwrap().expect(200).json();
    assert_eq!(answer["leases"][0]["outcome"], "already-ended");
}

#[tokio::test(flavor = "multi_thread")]
async fn releases_of_one_lease_at_the_same_time_all_succeed() {
    let store = TestStore::new();
    let place = Place::of(store.client().unwrap()).await;
    for _ in 0..200 {
        let grant = place.acquire("a", json!({ "ttl_ms": 60_000 })).await;
        let release = async || place.release(&grant).await;
        let (first, second, third) = tokio::join!(release(), release(), release());
        let mut outcomes = [first, second, third];
        outcomes.sort();
        assert_eq!(outcomes, ["already-ended", "already-ended", "released"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_and_origin_are_checked_before_the_body_arrives() {
    let place = Place::new().await;
    let head =
        "POST /v1/leases/renew HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99999\r\n";
    let answer = async |mut stream: tokio::net::TcpStream, headers: &str| {
        stream.write_all(format!("{head}{headers}\r\n").as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        tokio::time::timeout(SOON, stream.read_exact(&mut answer)).await.unwrap().unwrap();
        String::from_utf8(answer.to_vec()).unwrap()
    };
    let host = place.tcp_address();
    assert_eq!(answer(place.tcp().await, &format!("Host: {host}\r\n")).await, "HTTP/1.1 401");
    let foreign = format!("Host: {host}\r\nOrigin: http://example.com\r\nAuthorization: Bearer {WRITE}\r\n");
    assert_eq!(answer(place.tcp().await, &foreign).await, "HTTP/1.1 403");
    let second = format!("Origin: http://{host}\r\n{foreign}");
    assert_eq!(answer(place.tcp().await, &second).await, "HTTP/1.1 403", "each of several origins counts");
}

/// Whether the end of what it sends or the answer comes first is a matter of microseconds.
#[tokio::test(flavor = "multi_thread")]
async fn client_that_sends_no_more_gets_its_answer() {
    let place = Place::new().await;
    for number in 0..200 {
        let mut stream = place.unix().await;
        let head = format!(
            "POST /v1/locks/mutex/a{number}/acquire HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        );
        stream.write_all(format!("{head}Content-Length: 2\r\n\r\n{{}}").as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(SOON, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "request {number}: {answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_that_of_the_store_at_this_moment() {
    let store = TestStore::new();
    let place = Place::of(store.client().unwrap()).await;
    let becomes = async |status: u16| until(async || place.get("/healthz").await.status == status).await;
    place.get("/healthz").await.expect(200);
    store.set_reachable(false);
    becomes(503).await;
    assert_eq!(place.get("/healthz").await.expect(503).code(), "store-unavailable");
    store.set_reachable(true);
    becomes(200).await;
}

/// Sends a request in two parts. The answer follows the second one, and the connection can be used again.
async fn send_in_two_parts(place: &Place, method: &str, path: &str, status: &str) {
    let mut stream = place.unix().await;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(300), stream.read_u8()).await;
    assert!(early.is_err(), "{method} {path} is answered before its body has arrived");
    stream
        .write_all(b"{}GET /v1/openapi.json HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answers = String::new();
    tokio::time::timeout(SOON, stream.read_to_string(&mut answers)).await.unwrap().unwrap();
    assert!(answers.starts_with(&format!("HTTP/1.1 {status}")), "{method} {path}: {answers:.300}");
    assert!(answers.contains("\"openapi\""), "{method} {path}: {answers:.300}");
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_does_not_overtake_a_body_that_its_handler_ignores() {
    let place = Place::new().await;
    send_in_two_parts(&place, "GET", "/v1/locks", "200").await;
    send_in_two_parts(&place, "GET", LOCK, "200").await;
    send_in_two_parts(&place, "GET", "/healthz", "200").await;
    send_in_two_parts(&place, "POST", "/v1/nothing", "404").await;
    send_in_two_parts(&place, "PUT", "/v1/locks", "405").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_with_leases_is_acquired() {
    let place = Place::new().await;
    let acquire =
        async |path: &str, body: Value| place.post(&format!("/v1/locks/{path}/acquire"), body).await;
    for _ in 0..2 {
        acquire("rw/prices", json!({ "mode": "read" })).await.expect(200);
    }
    assert_eq!(acquire("rw/prices", json!({ "mode": "write" })).await.expect(409).code(), "busy");
    acquire("rw/other", json!({})).await.expect(200);
    assert_eq!(acquire("rw/other", json!({ "mode": "read" })).await.expect(409).code(), "busy");
    acquire("semaphore/slots", json!({ "capacity": 3, "permits": 2 })).await.expect(200);
    assert_eq!(
        acquire("semaphore/slots", json!({ "capacity": 3, "permits": 2 })).await.expect(409).code(),
        "busy"
    );
    acquire("semaphore/slots", json!({ "capacity": 3 })).await.expect(200);
    assert_eq!(acquire("semaphore/slots", json!({})).await.expect(400).code(), "invalid-request");
    assert_eq!(
        acquire("semaphore/slots", json!({ "capacity": 2 })).await.expect(400).code(),
        "invalid-request"
    );
    acquire("election/leader", json!({})).await.expect(200);
    for _ in 0..2 {
        acquire("mutex/nested", json!({ "owner": "job-7" })).await.expect(200);
    }
    assert_eq!(acquire("mutex/nested", json!({ "owner": "job-8" })).await.expect(409).code(), "busy");
    assert_eq!(acquire("mutex/b", json!({ "owner": "" })).await.expect(400).code(), "invalid-request");
    assert_eq!(acquire("latch/done", json!({})).await.expect(422).code(), "unsupported");
    assert_eq!(acquire("mutex/a", json!({ "capacity": 2 })).await.expect(422).code(), "unsupported");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_are_granted_in_the_order_of_their_requests() {
    let place = Place::new().await;
    let first = place.acquire("a", json!({ "ttl_ms": 60_000 })).await;
    // With the same label: each of them is seen as a waiter nevertheless.
    let wait = json!({ "wait_ms": 50_000, "ttl_ms": 60_000, "label": "same" });
    let mut waiting = Vec::new();
    let path = format!("{LOCK}/acquire");
    for position in 1..=3 {
        let stream = place.unix().await;
        let (path, wait) = (path.clone(), wait.clone());
        waiting.push(tokio::spawn(async move { send(stream, "POST", &path, Some(wait), &[]).await }));
        place.until_waiting("a", position).await;
    }
    let mut before = first;
    for request in waiting {
        assert_eq!(place.release(&before).await, "released");
        let grant = checked("POST", &path, request.await.unwrap()).expect(200).json();
        assert!(grant["token"].as_u64() > before["token"].as_u64());
        // The whole ttl, and not only the few seconds in which a waiter claims its grant.
        assert!(grant["expires_in_ms"].as_u64() > Some(30_000), "{grant}");
        before = grant;
    }
}

/// The store forgets the lease before the request looks at its grant: all of this is one thread, and the calls in between do not wait.
#[tokio::test]
async fn wait_goes_on_after_a_grant_of_which_the_store_knows_nothing() {
    let store = TestStore::new();
    let other = store.client().unwrap();
    let place = Place::of(store.client().unwrap()).await;
    let held = other.mutex("a").lock().await.unwrap();
    let (stream, path) = (place.unix().await, format!("{LOCK}/acquire"));
    let wait = json!({ "wait_ms": 50_000, "ttl_ms": 60_000 });
    let request = tokio::spawn(async move { send(stream, "POST", &path, Some(wait), &[]).await });
    place.until_waiting("a", 1).await;
    held.release().await.unwrap();
    let void = other.mutex("a").force_release().await.unwrap();
    assert_eq!(void.len(), 1, "it was granted to the request");
    let grant = request.await.unwrap().expect(200).json();
    assert!(grant["token"].as_u64() > Some(void[0].token.get()), "{grant}");
    assert_eq!(place.state("a").await["holders"][0]["token"], grant["token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_ends_in_time_and_a_dropped_request_leaves_the_queue() {
    let place = Place::new().await;
    place.acquire("a", json!({ "ttl_ms": 60_000 })).await;
    let begin = Instant::now();
    let answer = place.post(&format!("{LOCK}/acquire"), json!({ "wait_ms": 200 })).await.expect(409);
    assert_eq!(answer.code(), "timed-out");
    assert!(begin.elapsed() >= Duration::from_millis(200));

    for body in [json!({ "wait_ms": 50_000 }), json!({ "wait_ms": 50_000, "request_id": "0123456789abcdef" })]
    {
        let stream = place.unix().await;
        let path = format!("{LOCK}/acquire");
        let request = tokio::spawn(async move { send(stream, "POST", &path, Some(body), &[]).await });
        place.until_waiting("a", 1).await;
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        place.until_waiting("a", 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_ends_after_its_ttl_and_each_renewal_says_so() {
    let place = Place::new().await;
    let grant = place.acquire("a", json!({ "ttl_ms": 300 })).await;
    place.until_free("a").await;
    for _ in 0..3 {
        let late = place.renew(&grant).await;
        assert_eq!((&late["outcome"], &late["token"]), (&json!("ended"), &grant["token"]));
        assert!(late["detail"].as_str().unwrap().contains("no such lease"), "{late}");
    }
    assert_eq!(place.release(&grant).await, "already-ended");
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_server_refuses_new_grants_and_goes_on_answering_while_it_drains() {
    let mut place = Place::with(|config| config.drain = SOON * 10).await;
    let held = place.acquire("a", json!({ "ttl_ms": 60_000 })).await;
    let stream = place.unix().await;
    let wait = Some(json!({ "wait_ms": 50_000 }));
    let waiting =
        tokio::spawn(async move { send(stream, "POST", &format!("{LOCK}/acquire"), wait, &[]).await });
    place.until_waiting("a", 1).await;
    place.stop();
    let answer = checked("POST", &format!("{LOCK}/acquire"), waiting.await.unwrap()).expect(503);
    assert_eq!(answer.code(), "stopping");
    assert_eq!(place.post("/v1/locks/mutex/b/acquire", json!({})).await.expect(503).code(), "stopping");
    let several = place.post("/v1/locks/acquire", json!({ "names": ["b", "c"] })).await;
    assert_eq!(several.expect(503).code(), "stopping");
    assert_eq!(place.get("/healthz").await.expect(503).code(), "stopping");
    assert_eq!(place.renew(&held).await["outcome"], "renewed");
    assert_eq!(place.release(&held).await, "released");
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_release_needs_the_token_of_a_holder_if_one_is_given() {
    let place = Place::new().await;
    let force = async |body: Value| place.post(&format!("{LOCK}/force-release"), body).await;
    assert_eq!(force(json!({})).await.expect(409).code(), "not-held");
    let grant = place.acquire("a", json!({})).await;
    let other = grant["token"].as_u64().unwrap() + 1;
    assert_eq!(force(json!({ "token": other })).await.expect(409).code(), "not-held");
    force(json!({})).await.expect(200);
    place.until_free("a").await;
    // The holder has released it, and the lock is retained.
    let guard = place.client().await.mutex("a").min_hold(Duration::from_secs(60)).lock().await.unwrap();
    let token = guard.token().get();
    guard.release().await.unwrap();
    assert_eq!(force(json!({ "token": token })).await.expect(409).code(), "not-held");
    force(json!({})).await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_release_with_a_token_frees_this_holder_only() {
    let place = Place::new().await;
    let path = "/v1/locks/semaphore/slots";
    let mut grants = Vec::new();
    for _ in 0..2 {
        let grant = place.post(&format!("{path}/acquire"), json!({ "capacity": 2, "ttl_ms": 60_000 })).await;
        grants.push(grant.expect(200).json());
    }
    let freed = json!({ "token": grants[0]["token"] });
    let released = place.post(&format!("{path}/force-release"), freed.clone()).await.expect(200).json();
    assert_eq!(released["released"].as_array().unwrap().len(), 1, "{released}");
    assert_eq!(released["released"][0]["token"], grants[0]["token"]);
    let state = place.get(path).await.expect(200).json();
    assert_eq!(state["holders"].as_array().unwrap().len(), 1, "{state}");
    assert_eq!(state["holders"][0]["token"], grants[1]["token"]);
    assert_eq!(place.post(&format!("{path}/force-release"), freed).await.expect(409).code(), "not-held");
    assert_eq!(place.renew(&grants[0]).await["outcome"], "ended");
    assert_eq!(place.renew(&grants[1]).await["outcome"], "renewed");
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_listed_in_pages_by_kind_and_part_of_the_name() {
    let place = Place::new().await;
    for name in ["b%2F1", "a%201", "c%C3%A4"] {
        place.acquire(name, json!({})).await;
    }
    place.post("/v1/locks/election/a/acquire", json!({})).await.expect(200);
    let names = |page: &Value| -> Vec<String> {
        let locks = page["locks"].as_array().unwrap().iter();
        locks
            .map(|lock| format!("{}/{}", lock["kind"].as_str().unwrap(), lock["name"].as_str().unwrap()))
            .collect()
    };
    let page = async |query: &str| place.get(&format!("/v1/locks?{query}")).await.expect(200).json();
    // A list may be as old as 100 ms.
    until(async || names(&page("").await).len() == 4).await;
    assert_eq!(names(&page("").await), ["election/a", "mutex/a 1", "mutex/b/1", "mutex/cä"]);
    assert_eq!(names(&page("kind=mutex&search=1").await), ["mutex/a 1", "mutex/b/1"]);
    let first = page("limit=3").await;
    assert_eq!(first["next"], "mutex/b/1");
    let rest = page("limit=3&after=mutex%2Fb%2F1").await;
    assert_eq!((names(&rest), &rest["next"]), (vec!["mutex/cä".to_owned()], &Value::Null));
    for query in ["kind=queue", "limit=0", "limit=10001", "limit=x", "serach=a"] {
        assert_eq!(place.get(&format!("/v1/locks?{query}")).await.expect(400).code(), "invalid-request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_decide_over_tcp_and_the_socket_is_the_owners_alone() {
    let place = Place::new().await;
    let acquire = format!("{LOCK}/acquire");
    for (token, path, method, status) in [
        (None, "/v1/locks", "GET", 401),
        (Some("wrong-0123456789abcdef"), "/v1/locks", "GET", 401),
        (Some(&READ[..READ.len() - 1]), "/v1/locks", "GET", 401),
        (Some(""), "/v1/locks", "GET", 401),
        (Some(READ), "/v1/locks", "GET", 200),
        (Some(READ), "/metrics", "GET", 200),
        (Some(READ), acquire.as_str(), "POST", 403),
        (Some(READ), "/v1/leases/renew", "POST", 403),
        (Some(READ), "/v1/leases/release", "POST", 403),
        (Some(READ), "/v1/locks/acquire", "POST", 403),
        (None, "/v1/leases/release", "POST", 401),
        (Some(WRITE), "/v1/locks", "GET", 200),
        (Some(WRITE), acquire.as_str(), "POST", 200),
        (None, "/", "GET", 200),
        (None, "/healthz", "GET", 200),
        (Some("wrong-0123456789abcdef"), "/healthz", "GET", 200),
        (None, "/v1/openapi.json", "GET", 200),
        (None, "/metrics", "GET", 401),
        (None, acquire.as_str(), "POST", 401),
    ] {
        let answer = place.call_with(token, method, path, None).await;
        assert_eq!(answer.status, status, "{token:?} {method} {path}: {}", answer.text);
    }
    for (token, name, rights) in
        [(READ, "read", json!(["read"])), (WRITE, "ops", json!(["read", "write", "force"]))]
    {
        let access = place.call_with(Some(token), "GET", "/v1/access", None).await.expect(200).json();
        assert_eq!((&access["name"], &access["rights"]), (&json!(name), &rights));
        assert_eq!(access["prefixes"], json!([]));
    }
    let mode = std::fs::symlink_metadata(place.path("socket")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_another_site_are_refused() {
    let place = Place::new().await;
    let get = async |headers: &[(&str, &str)]| {
        checked("GET", "/v1/locks", send(place.unix().await, "GET", "/v1/locks", None, headers).await)
    };
    assert_eq!(get(&[("host", "evil.example:8430")]).await.expect(403).code(), "foreign-origin");
    assert_eq!(get(&[("origin", "https://evil.example")]).await.expect(403).code(), "foreign-origin");
    assert_eq!(get(&[("origin", "null")]).await.expect(403).code(), "foreign-origin");
    get(&[("host", "localhost:8430"), ("origin", "http://localhost:8430")]).await.expect(200);
    // A page sends a GET without `Origin` for an image or a script.
    for site in ["cross-site", "same-site"] {
        let from = ("sec-fetch-site", site);
        assert_eq!(get(&[from, ("sec-fetch-mode", "no-cors")]).await.expect(403).code(), "foreign-origin");
        // A link that a person follows.
        get(&[from, ("sec-fetch-mode", "navigate")]).await.expect(200);
    }
    get(&[("sec-fetch-site", "same-origin"), ("sec-fetch-mode", "cors")]).await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn request_for_two_hosts_is_refused() {
    let place = Place::new().await;
    for (head, status) in [
        ("GET /v1/locks HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", "400"),
        ("GET /v1/locks HTTP/1.1\r\nHost: localhost\r\nHost: localhost", "400"),
        ("GET http://evil.example/v1/locks HTTP/1.1\r\nHost: localhost", "400"),
        ("GET http://localhost/v1/locks HTTP/1.1\r\nHost: localhost", "200"),
        ("GET http://evil.example/v1/locks HTTP/1.1\r\nHost: evil.example", "403"),
    ] {
        let mut stream = place.unix().await;
        stream.write_all(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(SOON, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{head}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_kind_without_a_name_are_refused() {
    let place = Place::new().await;
    for query in ["kind=mutex", "name=a", "kind=queue&name=a"] {
        // A stream of events would not end.
        let path = format!("/v1/events?{query}");
        let answer = tokio::time::timeout(SOON / 4, place.get(&path)).await.expect("no stream");
        assert_eq!(answer.expect(400).code(), "invalid-request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_that_is_not_released_in_time_outlives_the_server_until_its_ttl() {
    let mut place = Place::new().await;
    let observer = place.client().await;
    place.acquire("a", json!({ "ttl_ms": 15_000 })).await;
    place.stop();
    place.ended().await;
    assert!(!place.path("socket").exists());
    let info = observer.mutex("a").inspect().await.unwrap();
    assert_eq!(info.holders.len(), 1, "its caller may still be working");
    until(async || observer.mutex("a").inspect().await.is_ok_and(|view| view.holders.is_empty())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_address_is_refused_with_the_fix() {
    use leasehold_serve::{Config, Listen, Server};
    let place = Place::new().await;
    let client = place.client().await;
    let refused = async |listen: Listen| {
        Server::bind(Config::new([listen]), client.clone()).await.unwrap_err().to_string()
    };
    assert!(refused(Listen::Tcp("127.0.0.1:0".to_owned())).await.contains("need a token"));
    assert!(refused(Listen::Unix(place.path("socket"))).await.contains("another server listens"));
    assert!(refused(Listen::Unix(place.path("locks.db"))).await.contains("not a socket"));
    assert!(refused(Listen::Unix(place.path("missing/socket"))).await.contains("can't listen"));
    let long = format!("{}.socket", "long".repeat(40));
    assert!(refused(Listen::Unix(place.path(&long))).await.contains("no client can reach it"));
    // The socket of a server that was killed.
    let stale = place.path("stale");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    Server::bind(Config::new([Listen::Unix(stale)]), client.clone()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_whose_name_is_a_folder_is_named_in_the_query() {
    let place = Place::new().await;
    for (name, encoded) in [(".", "."), ("..", "%2E%2E"), ("_", "_"), ("a/b?c", "a%2Fb%3Fc")] {
        let at = |action: &str| format!("/v1/locks/mutex/_/{action}?name={encoded}");
        let grant = place.post(&at("acquire"), json!({ "ttl_ms": 60_000 })).await.expect(200).json();
        assert_eq!(grant["name"], name);
        let state = place.get(&format!("/v1/locks/mutex/_?name={encoded}")).await.expect(200).json();
        assert_eq!((&state["name"], &state["holders"][0]["token"]), (&json!(name), &grant["token"]));
        assert_eq!(place.renew(&grant).await["outcome"], "renewed");
        let force = json!({ "token": grant["token"] });
        place.post(&at("force-release"), force).await.expect(200);
        let grant = place.post(&at("acquire"), json!({})).await.expect(200).json();
        assert_eq!(place.release(&grant).await, "released");
    }
    // Two names, and words that are no parameters.
    for path in [
        "a/acquire?name=b",
        "_/acquire?name=a&name=b",
        "_/acquire?nmae=a",
        "_/acquire?name=",
        "_/acquire?name=%00",
    ] {
        let answer = place.post(&format!("/v1/locks/mutex/{path}"), json!({})).await.expect(400);
        assert_eq!(answer.code(), "invalid-request", "{path}");
    }
    // Without the parameter it is a name as any other.
    assert_eq!(place.acquire("_", json!({})).await["name"], "_");
}

#[tokio::test(flavor = "multi_thread")]
async fn null_is_as_good_as_no_member() {
    let place = Place::new().await;
    let optional = [
        "request_id",
        "wait_ms",
        "ttl_ms",
        "min_hold_ms",
        "once_per_ms",
        "label",
        "mode",
        "permits",
        "capacity",
        "owner",
    ];
    let body: serde_json::Map<_, _> = optional.iter().map(|name| ((*name).to_owned(), Value::Null)).collect();
    place.acquire("a", Value::Object(body)).await;
    place.post(&format!("{LOCK}/force-release"), json!({ "token": null })).await.expect(200);
    // And the description has no other member.
    let description: Value = serde_json::from_str(include_str!("../openapi.json")).unwrap();
    let described = description["components"]["schemas"]["AcquireRequest"]["properties"].as_object().unwrap();
    assert_eq!(described.keys().len(), optional.len());
    for (name, member) in described {
        assert!(
            optional.contains(&name.as_str()) && member["type"].as_array().unwrap().contains(&json!("null")),
            "{name}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_whose_token_is_withdrawn_is_closed() {
    let place = Place::new().await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let body = json!({ "wait_ms": 50_000 }).to_string();
    let request = format!(
        "POST {LOCK}/acquire HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {WRITE}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut waiting = place.tcp().await;
    waiting.write_all(request.as_bytes()).await.unwrap();
    place.until_waiting("a", 1).await;
    let mut watching = place.tcp().await;
    let request = format!("GET /v1/events HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {READ}\r\n\r\n");
    watching.write_all(request.as_bytes()).await.unwrap();
    let mut first = [0; 15];
    watching.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");

    assert!(place.control.set_tokens(Tokens::default()).unwrap_err().contains("need a token"));
    // The reader's token stays, and the writer's is replaced.
    let next = "write-fedcba9876543210";
    place.control.set_tokens(Tokens::parse(&format!("read {READ}\nwrite {next}")).unwrap()).unwrap();
    place.until_waiting("a", 0).await;
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(SOON, waiting.read_to_end(&mut rest)).await.expect("it is closed");
    assert_eq!(rest, b"");
    place.call_with(Some(WRITE), "GET", "/v1/locks", None).await.expect(401);
    let renew = async || {
        let body = json!({ "leases": [held["lease"]] });
        place.call_with(Some(next), "POST", "/v1/leases/renew", Some(body)).await
    };
    assert_eq!(renew().await.expect(200).json()["leases"][0]["outcome"], "renewed");
    let mut more = [0; 1];
    watching.read_exact(&mut more).await.expect("the stream goes on");
    // A token that allows less than before is one that was withdrawn.
    place.control.set_tokens(Tokens::parse(&format!("read {next}")).unwrap()).unwrap();
    let _ = tokio::time::timeout(SOON, watching.read_to_end(&mut rest)).await.expect("it is closed");
    renew().await.expect(403);
}
