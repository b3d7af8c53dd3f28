//! Ids of leases and of requests are secrets: nothing but the answer to their caller has them.

mod common;

use std::fmt::{Debug, Write as _};
use std::sync::{Arc, Mutex};

use common::{Place, read_until};
use leasehold_serve::Notices;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Everything that this process logs, at all levels.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<String>>);

impl Log {
    fn write(&self, what: &str) {
        writeln!(self.0.lock().unwrap(), "{what}").unwrap();
    }

    fn text(&self) -> String {
        self.0.lock().unwrap().clone()
    }
}

impl Visit for &Log {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.write(&format!("{field}={value:?}"));
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        span.record(&mut &*self);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        values.record(&mut &*self);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        self.write(event.metadata().target());
        event.record(&mut &*self);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The beginning of a stream of events, up to this text.
async fn events(place: &Place, path: &str, until: &str) -> String {
    let mut stream = place.unix().await;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).await.unwrap();
    read_until(&mut stream, until).await
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_of_leases_and_requests_are_in_no_list_event_metric_log_or_error() {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let notices = log.clone();
    let place = Place::with(|config| config.notices = Notices::new(move |text| notices.write(text))).await;
    let request_id = "request-0123456789abcdef";
    let acquire = "/v1/locks/mutex/a/acquire";
    let grant = place.acquire("a", json!({ "ttl_ms": 600_000, "request_id": request_id })).await;
    let plain = place.acquire("b", json!({ "ttl_ms": 600_000, "wait_ms": 1000 })).await;
    let waiting = json!({ "wait_ms": 100, "request_id": "waiting-0123456789abcdef" });
    let mut seen = String::new();
    let mut see = |text: &str| writeln!(seen, "{text}").unwrap();
    see(&place.post(acquire, waiting).await.expect(202).text);
    see(&place.post(acquire, json!({ "wait_ms": 100 })).await.expect(409).text);
    see(&place.state("a").await.to_string());
    see(&place.get("/v1/locks").await.expect(200).text);
    see(&events(&place, "/v1/events", "\"b\"").await);
    see(&events(&place, "/v1/events?kind=mutex&name=a", "event: lock").await);
    let id = grant["lease"].as_str().unwrap();
    let damaged: Vec<Value> =
        [format!("{id}0"), id[..id.len() - 1].to_owned(), id.to_uppercase(), format!("{id}\n")]
            .into_iter()
            .chain([format!("{}.{id}", &id[..6])])
            .map(Value::String)
            .collect();
    for action in ["renew", "release"] {
        let outcomes = place.leases(action, &damaged).await;
        assert!(outcomes.iter().all(|outcome| outcome["outcome"] == "invalid"), "{outcomes:?}");
        see(&json!(outcomes).to_string());
    }
    let body = json!({ "leases": id });
    see(&place.post("/v1/leases/renew", body).await.expect(400).text);
    see(&place.post(acquire, json!({ "lease": id })).await.expect(400).text);
    see(&place.post(acquire, json!({ "request_id": [request_id] })).await.expect(400).text);
    see(&place
        .post("/v1/leases/renew", Value::String(format!("{{\"leases\": [\"{id}")))
        .await
        .expect(400)
        .text);
    see(&json!(place.leases("renew", &[grant["lease"].clone(), plain["lease"].clone()]).await).to_string());
    place.post("/v1/locks/mutex/a/force-release", json!({})).await.expect(200);
    see(&json!(place.leases("renew", &[grant["lease"].clone()]).await).to_string());
    // It is granted to the request that waited, until its caller does not repeat it.
    place.until_free("a").await;
    let again = place.acquire("c", json!({ "request_id": request_id })).await;
    assert_eq!(place.release(&again).await, "released");
    let again = place.post("/v1/locks/mutex/c/acquire", json!({ "request_id": request_id })).await;
    see(&again.expect(410).text);
    see(&json!(place.leases("release", &[grant["lease"].clone(), plain["lease"].clone()]).await).to_string());
    see(&place.get("/metrics").await.expect(200).text);
    let log = log.text();
    assert!(log.contains("leasehold"), "nothing was logged");
    let known = [
        request_id.to_owned(),
        "waiting-0123456789abcdef".to_owned(),
        hex(request_id),
        id.to_owned(),
        id.rsplit('.').next().unwrap().to_owned(),
        secret_of(id),
        secret_of(plain["lease"].as_str().unwrap()),
    ];
    for secret in known {
        for (what, text) in [("an answer", &seen), ("the log", &log)] {
            if let Some(at) = text.to_lowercase().find(&secret.to_lowercase()) {
                panic!("{what} has {secret}: {}", &text[at.saturating_sub(200)..at]);
            }
        }
    }
}

/// The random part of a lease's id.
fn secret_of(id: &str) -> String {
    let secret = id.rsplit('.').next().unwrap();
    assert!(secret.len() >= 32, "{secret}");
    secret[..32].to_owned()
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}
