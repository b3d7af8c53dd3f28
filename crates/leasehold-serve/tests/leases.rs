//! Leases by their ids alone: any server of the store renews and releases them, and nothing else tells the ids.

mod common;

use std::time::{Duration, Instant};

use common::{Place, SOON, WRITE, send, until};
use leasehold_serve::Tokens;
use serde_json::{Value, json};

const CI: &str = "ci-0123456789abcdef";

fn word(outcome: &Value) -> &str {
    outcome["outcome"].as_str().expect("a word")
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_is_renewed_and_released_at_another_server() {
    let first = Place::new().await;
    let mut second = first.beside().await;
    let grant = first.acquire("a", json!({ "ttl_ms": 60_000 })).await;
    let renewed = second.renew(&grant).await;
    assert_eq!((word(&renewed), &renewed["token"]), ("renewed", &grant["token"]));
    // The server that has renewed it stops, and another one begins.
    second.stop();
    second.ended().await;
    let third = first.beside().await;
    assert_eq!(word(&third.renew(&grant).await), "renewed");
    assert_eq!(first.state("a").await["holders"][0]["token"], grant["token"]);
    assert_eq!(third.release(&grant).await, "released");
    assert_eq!(first.state("a").await["holders"], json!([]));
    for place in [&first, &third] {
        assert_eq!(word(&place.renew(&grant).await), "ended");
        assert_eq!(place.release(&grant).await, "already-ended");
    }
    // Every kind with leases.
    for (lock, body) in [
        ("semaphore/b", json!({ "capacity": 3, "permits": 2 })),
        ("rw/b", json!({ "mode": "read" })),
        ("rw/c", json!({ "mode": "write" })),
        ("election/b", json!({})),
    ] {
        let grant = first.post(&format!("/v1/locks/{lock}/acquire"), body).await.expect(200).json();
        assert_eq!(word(&third.renew(&grant).await), "renewed", "{lock}");
        assert_eq!(third.release(&grant).await, "released", "{lock}");
        let state = first.get(&format!("/v1/locks/{lock}")).await.expect(200).json();
        assert_eq!(state["holders"], json!([]), "{lock}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn renewal_gives_the_whole_ttl_again_and_the_lease_lasts_without_the_server_that_granted_it() {
    let mut first = Place::new().await;
    let second = first.beside().await;
    let grant = first.acquire("a", json!({ "ttl_ms": 6_000 })).await;
    first.stop();
    first.ended().await;
    let begin = Instant::now();
    until(async || {
        let renewed = second.renew(&grant).await;
        assert_eq!(word(&renewed), "renewed", "{renewed}");
        assert!((5_000..=6_000).contains(&renewed["expires_in_ms"].as_u64().unwrap()), "{renewed}");
        begin.elapsed() > Duration::from_secs(7)
    })
    .await;
    assert_eq!(second.state("a").await["holders"][0]["token"], grant["token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_lease_of_a_request_has_an_outcome_of_its_own() {
    let place = Place::with(|config| {
        config.tokens = Tokens::parse(&format!("ops write {WRITE}\nci write {CI} jobs:")).unwrap();
    })
    .await;
    let own = place.acquire("jobs:1", json!({ "ttl_ms": 60_000 })).await;
    let other = place.acquire("orders", json!({ "ttl_ms": 60_000 })).await;
    let ended = place.acquire("jobs:2", json!({ "ttl_ms": 60_000 })).await;
    assert_eq!(place.release(&ended).await, "released");
    let id = own["lease"].as_str().unwrap();
    // Another secret of the same form, an id that was cut, and one of another lock with the same secret.
    let mut forged = id.to_owned();
    let last = if forged.pop() == Some('0') { '1' } else { '0' };
    forged.push(last);
    let moved = id.replace("6a6f62733a31", "6a6f62733a39");
    assert_ne!(moved, id);
    let ids = json!([ended["lease"], other["lease"], id[..id.len() - 1], forged, moved, "", own["lease"]]);
    for (action, words) in [
        ("renew", ["ended", "not-allowed", "invalid", "ended", "ended", "invalid", "renewed"]),
        (
            "release",
            [
                "already-ended",
                "not-allowed",
                "invalid",
                "already-ended",
                "already-ended",
                "invalid",
                "released",
            ],
        ),
    ] {
        let path = format!("/v1/leases/{action}");
        let answer =
            place.call_with(Some(CI), "POST", &path, Some(json!({ "leases": ids }))).await.expect(200);
        let outcomes = answer.json()["leases"].as_array().unwrap().clone();
        assert_eq!(outcomes.iter().map(word).collect::<Vec<_>>(), words, "{answer:?}");
        assert!(!answer.text.contains(&id[id.len() - 32..]), "an outcome repeats no id");
    }
    assert_eq!(place.state("orders").await["holders"][0]["token"], other["token"]);
    assert_eq!(place.state("jobs:1").await["holders"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_leases_go_in_one_request_of_a_quarter_mebibyte() {
    let place = Place::new().await;
    let names: Vec<String> = (0..500).map(|number| format!("lock-{number}")).collect();
    let mut ids = Vec::new();
    for hundred in names.chunks(100) {
        let body = json!({ "names": hundred, "ttl_ms": 600_000 });
        let grants = place.post("/v1/locks/acquire", body).await.expect(200).json();
        ids.extend(grants["leases"].as_array().unwrap().iter().map(|grant| grant["lease"].clone()));
    }
    let outcomes = place.leases("renew", &ids).await;
    assert!(outcomes.iter().all(|outcome| word(outcome) == "renewed"), "{outcomes:?}");
    // Outcomes have the order of the ids.
    let renewed: Vec<&str> = outcomes.iter().map(|outcome| outcome["name"].as_str().unwrap()).collect();
    assert_eq!(renewed, names);
    let padded = |length: usize| {
        let mut body = json!({ "leases": ids }).to_string();
        body.insert_str(1, &" ".repeat(length - body.len()));
        Value::String(body)
    };
    let longest = 256 * 1024;
    place.post("/v1/leases/renew", padded(longest)).await.expect(200);
    let longer = place.post("/v1/leases/renew", padded(longest + 1)).await.expect(413);
    assert_eq!(longer.code(), "body-too-large");
    // Other requests have no more than before.
    let other = Value::String(format!("{{{}}}", " ".repeat(16 * 1024)));
    place.post("/v1/locks/mutex/a/acquire", other).await.expect(413);
    let released = place.leases("release", &ids).await;
    assert!(released.iter().all(|outcome| word(outcome) == "released"), "{released:?}");
    let more: Vec<&Value> = ids.iter().chain(&ids[..1]).collect();
    for action in ["renew", "release"] {
        let refused =
            place.post(&format!("/v1/leases/{action}"), json!({ "leases": more })).await.expect(400);
        assert_eq!(refused.code(), "invalid-request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn several_locks_are_granted_all_or_none() {
    let place = Place::new().await;
    let held = place.acquire("b", json!({ "ttl_ms": 600_000 })).await;
    let ask = |wait_ms: u64| json!({ "names": ["c", "a", "b"], "ttl_ms": 600_000, "wait_ms": wait_ms });
    assert_eq!(place.post("/v1/locks/acquire", ask(0)).await.expect(409).code(), "busy");
    assert_eq!(place.post("/v1/locks/acquire", ask(300)).await.expect(409).code(), "timed-out");
    for name in ["a", "c"] {
        assert_eq!(place.state(name).await["holders"], json!([]), "{name}");
    }
    // A client that goes away during its wait leaves nothing.
    let stream = place.unix().await;
    let body = Some(ask(50_000));
    let request = tokio::spawn(async move { send(stream, "POST", "/v1/locks/acquire", body, &[]).await });
    place.until_waiting("b", 1).await;
    request.abort();
    place.until_waiting("b", 0).await;
    for name in ["a", "c"] {
        place.until_free(name).await;
    }
    let (answer, ()) = tokio::join!(place.post("/v1/locks/acquire", ask(50_000)), async {
        place.until_waiting("b", 1).await;
        assert_eq!(place.release(&held).await, "released");
    });
    let grants = answer.expect(200).json()["leases"].as_array().unwrap().clone();
    let names: Vec<&str> = grants.iter().map(|grant| grant["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    for grant in &grants {
        let state = place.state(grant["name"].as_str().unwrap()).await;
        assert_eq!(state["holders"][0]["token"], grant["token"], "{state}");
        assert_eq!(place.renew(grant).await["outcome"], "renewed");
    }
    let ids: Vec<Value> = grants.iter().map(|grant| grant["lease"].clone()).collect();
    assert!(place.leases("release", &ids).await.iter().all(|outcome| word(outcome) == "released"));
    for name in ["a", "b", "c"] {
        assert_eq!(place.state(name).await["holders"], json!([]), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn released_lock_stays_taken_for_its_minimum_hold_or_its_period() {
    let first = Place::new().await;
    let second = first.beside().await;
    for (name, option) in [("hold", "min_hold_ms"), ("once", "once_per_ms")] {
        let mut body = json!({ "ttl_ms": 600_000 });
        body[option] = json!(600_000);
        let grant = first.acquire(name, body.clone()).await;
        assert_eq!(second.release(&grant).await, "released");
        for place in [&first, &second] {
            let again = place.post(&format!("/v1/locks/mutex/{name}/acquire"), body.clone()).await;
            assert_eq!(again.expect(409).code(), "busy", "{name}");
        }
        let state = first.state(name).await;
        assert_eq!(state["holders"][0]["retained"], true, "{state}");
    }
    // Without it the lock is free at once, and a short one ends.
    let grant = first.acquire("plain", json!({})).await;
    assert_eq!(second.release(&grant).await, "released");
    assert_eq!(first.state("plain").await["holders"], json!([]));
    let grant = first.acquire("short", json!({ "min_hold_ms": 300 })).await;
    assert_eq!(second.release(&grant).await, "released");
    second.acquire("short", json!({ "wait_ms": 50_000 })).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_acquires_again_at_another_server() {
    let first = Place::new().await;
    let second = first.beside().await;
    let body = json!({ "owner": "job-7", "ttl_ms": 600_000 });
    let outer = first.acquire("a", body.clone()).await;
    let inner = second.acquire("a", body.clone()).await;
    assert_ne!(outer["lease"], inner["lease"], "each acquisition is released by itself");
    let stranger = json!({ "owner": "job-8" });
    second.post("/v1/locks/mutex/a/acquire", stranger.clone()).await.expect(409);
    // Whichever is released first, at whichever server.
    assert_eq!(first.release(&inner).await, "released");
    first.post("/v1/locks/mutex/a/acquire", stranger.clone()).await.expect(409);
    assert_eq!(word(&second.renew(&outer).await), "renewed");
    assert_eq!(second.release(&outer).await, "released");
    first.post("/v1/locks/mutex/a/acquire", stranger).await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_of_another_caller_is_another_one() {
    const CI: &str = "ci-0123456789abcdef";
    let place = Place::with(|config| {
        config.tokens = Tokens::parse(&format!("ops write {WRITE}\nci write {CI}")).unwrap();
    })
    .await;
    let path = "/v1/locks/mutex/a/acquire";
    let ask = async |token: &str| {
        place.call_with(Some(token), "POST", path, Some(json!({ "owner": "job-7", "ttl_ms": 600_000 }))).await
    };
    ask(WRITE).await.expect(200);
    ask(WRITE).await.expect(200);
    // The state of the lock shows the owner to every token that may read it.
    assert_eq!(ask(CI).await.expect(409).code(), "busy");
    let on_the_socket = place.post(path, json!({ "owner": "job-7" })).await;
    assert_eq!(on_the_socket.expect(409).code(), "busy");
}

#[tokio::test(flavor = "multi_thread")]
async fn period_that_has_begun_elsewhere_is_answered_at_once() {
    let place = Place::new().await;
    place.acquire("a", json!({ "once_per_ms": 3_600_000 })).await;
    for id in [json!(null), json!("another-0123456789abcdef")] {
        let body = json!({ "once_per_ms": 3_600_000, "wait_ms": 50_000, "request_id": id });
        let asked = place.post("/v1/locks/mutex/a/acquire", body);
        let answer = tokio::time::timeout(SOON, asked).await.expect("it does not wait");
        assert_eq!(answer.expect(409).code(), "busy");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn time_of_a_lease_counts_from_the_request() {
    let place = Place::new().await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000 })).await;
    let (began, ttl) = (Instant::now(), Duration::from_secs(6));
    let wait = place.acquire("a", json!({ "ttl_ms": ttl.as_millis(), "wait_ms": 50_000 }));
    let (granted, least) = tokio::join!(wait, async {
        place.until_waiting("a", 1).await;
        let queued = Instant::now();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let least = queued.elapsed();
        assert_eq!(place.release(&held).await, "released");
        least
    });
    let most = began.elapsed() + ttl;
    let expires_in = Duration::from_millis(granted["expires_in_ms"].as_u64().unwrap());
    // The clocks of the caller, of the server and of the store may differ by a few hundredths.
    assert!(expires_in <= most && expires_in > (least + ttl) * 9 / 10, "{expires_in:?}");
    assert!(expires_in > ttl, "{expires_in:?}");
    // A renewal counts from its own request.
    let renewed = place.renew(&granted).await;
    assert!(renewed["expires_in_ms"].as_u64() <= Some(6_000), "{renewed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn holder_that_is_shown_is_the_caller() {
    let place = Place::new().await;
    let path = "/v1/locks/mutex/a/acquire";
    let body = json!({ "ttl_ms": 600_000, "label": "nightly" });
    place.call_with(Some(WRITE), "POST", path, Some(body)).await.expect(200);
    let shown =
        json!({ "program": "ops", "host": "127.0.0.1", "pid": null, "label": "nightly", "trace_id": null });
    assert_eq!(place.state("a").await["holders"][0]["metadata"], shown);
    let several = json!({ "names": ["b"], "ttl_ms": 600_000, "label": "nightly" });
    place.call_with(Some(WRITE), "POST", "/v1/locks/acquire", Some(several)).await.expect(200);
    assert_eq!(place.state("b").await["holders"][0]["metadata"], shown);
    for request_id in [json!(null), json!("0123456789abcdef")] {
        let header = format!("Bearer {WRITE}");
        let body = json!({ "wait_ms": 50_000, "request_id": request_id });
        let stream = place.tcp().await;
        let request = tokio::spawn(async move {
            send(stream, "POST", path, Some(body), &[("authorization", &header)]).await
        });
        place.until_waiting("a", 1).await;
        let state = place.state("a").await;
        let waiter = &state["waiters"][0]["metadata"];
        assert_eq!(
            (&waiter["program"], &waiter["host"], &waiter["pid"]),
            (&json!("ops"), &json!("127.0.0.1"), &Value::Null)
        );
        request.abort();
        place.until_waiting("a", 0).await;
    }
    // On the socket it is the process that has connected, which is this one here.
    place.acquire("c", json!({})).await;
    let state = place.state("c").await;
    let holder = &state["holders"][0]["metadata"];
    let uid = format!("uid {}", rustix::process::getuid().as_raw());
    let peer = format!("unix, pid {}", std::process::id());
    assert_eq!(
        (&holder["program"], &holder["host"], &holder["pid"]),
        (&json!(uid), &json!(peer), &Value::Null)
    );
}
