//! The metrics, read by a parser of the text format.

mod common;

use std::time::Instant;

use common::{Place, until};
use prometheus_parse::{Scrape, Value};
use serde_json::json;

async fn scrape(place: &Place) -> Scrape {
    let answer = place.get("/metrics").await.expect(200);
    Scrape::parse(answer.text.lines().map(|line| Ok(line.to_owned()))).expect("the text format")
}

fn value(scrape: &Scrape, name: &str, labels: &[(&str, &str)]) -> f64 {
    let is_wanted = |sample: &&prometheus_parse::Sample| {
        sample.metric == name && labels.iter().all(|(label, value)| sample.labels.get(label) == Some(*value))
    };
    match scrape.samples.iter().find(is_wanted).map(|sample| &sample.value) {
        Some(Value::Counter(value) | Value::Gauge(value) | Value::Untyped(value)) => *value,
        Some(Value::Histogram(counts)) => counts.last().map_or(0.0, |count| count.count),
        other => panic!("{name} {labels:?}: {other:?}"),
    }
}

/// One test, because the servers of a process share their counters.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_what_happened() {
    let place = Place::new().await;
    let held = place.acquire("a", json!({ "ttl_ms": 600_000, "wait_ms": 10_000 })).await;
    place.post("/v1/locks/mutex/a/acquire", json!({})).await.expect(409);
    // A slice that is over is no failure, unless the caller does not repeat it.
    let slice = json!({ "wait_ms": 100, "request_id": "request-0123456789abcdef" });
    place.post("/v1/locks/mutex/a/acquire", slice).await.expect(202);
    place.post("/v1/locks/mutex/a/acquire", json!({ "wait_ms": 100 })).await.expect(409);
    place.until_waiting("a", 0).await;
    let other = place.client().await;
    let guard = other.election("leader").campaign().await.unwrap();
    let waiting = other.mutex("a");
    let waiting = tokio::spawn(async move { waiting.lock().await.unwrap() });
    place.until_waiting("a", 1).await;
    let mut counted = scrape(&place).await;
    until(async || {
        counted = scrape(&place).await;
        value(&counted, "leasehold_store_waiters", &[("kind", "mutex")]) == 1.0
    })
    .await;
    for (name, labels, expected) in [
        ("leasehold_store_up", &[][..], 1.0),
        ("leasehold_store_locks_held", &[("kind", "mutex")], 1.0),
        ("leasehold_store_locks_held", &[("kind", "election")], 1.0),
        ("leasehold_store_locks_held", &[("kind", "semaphore")], 0.0),
        ("leasehold_store_holders", &[("kind", "mutex")], 1.0),
        ("leasehold_serve_acquires_total", &[("kind", "mutex"), ("outcome", "granted")], 1.0),
        ("leasehold_serve_acquires_total", &[("kind", "mutex"), ("outcome", "busy")], 1.0),
        ("leasehold_serve_acquires_total", &[("kind", "mutex"), ("outcome", "waiting")], 1.0),
        ("leasehold_serve_acquires_total", &[("kind", "mutex"), ("outcome", "timed-out")], 1.0),
        (
            "leasehold_serve_requests_total",
            &[("path", "/v1/locks/:kind/:name/acquire"), ("status", "409")],
            2.0,
        ),
    ] {
        assert_eq!(value(&counted, name, labels), expected, "{name} {labels:?}");
    }
    assert!(value(&counted, "leasehold_serve_connections", &[]) >= 1.0);
    assert!(value(&counted, "leasehold_store_latency_seconds", &[]) >= 1.0);
    assert!(
        value(&counted, "leasehold_serve_acquire_seconds", &[("kind", "mutex"), ("outcome", "granted")])
            >= 1.0
    );
    until(async || {
        value(&scrape(&place).await, "leasehold_store_oldest_wait_seconds", &[("kind", "mutex")]) > 0.3
    })
    .await;
    // Its caller learns of the loss by a renewal.
    place.post("/v1/locks/mutex/a/force-release", json!({ "token": held["token"] })).await.expect(200);
    let granted = waiting.await.unwrap();
    let lost =
        async || value(&scrape(&place).await, "leasehold_serve_leases_lost_total", &[("kind", "mutex")]);
    assert_eq!(lost().await, 0.0);
    assert_eq!(place.renew(&held).await["outcome"], "ended");
    assert_eq!(lost().await, 1.0);
    let counted = scrape(&place).await;
    drop((guard, granted));
    for sample in &counted.samples {
        for (label, text) in sample.labels.iter() {
            assert!(text.len() < 80 && label != "name", "{label} {text}");
        }
        let name = sample.metric.trim_end_matches("_sum").trim_end_matches("_count");
        assert!(counted.docs.contains_key(name), "{name} has no description");
    }
    health_look_ups_are_shared(&place).await;
}

#[test]
fn every_query_of_the_grafana_dashboards_and_of_the_alerts_names_a_metric() {
    let pages = [include_str!("../../../docs/metrics.md"), include_str!("../../../docs/operations.md")];
    let rows = pages.iter().flat_map(|page| page.lines()).filter(|line| line.starts_with("| `leasehold_"));
    let metrics: Vec<&str> =
        rows.flat_map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2)).collect();
    assert!(metrics.len() > 25, "{metrics:?}");
    let is_metric = |name: &str| {
        let parts = ["_bucket", "_count", "_sum"];
        metrics.contains(&name)
            || parts.iter().any(|part| name.strip_suffix(part).is_some_and(|base| metrics.contains(&base)))
    };
    assert!(!is_metric("leasehold_serve_nothing_total"));
    let expressions = |dashboard: &str| -> Vec<String> {
        let dashboard: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
        targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
    };
    let rules = include_str!("../../../examples/serve/prometheus/leasehold.rules.yaml").lines();
    let rules = rules.filter_map(|line| Some(line.trim().strip_prefix("expr: ")?.to_owned())).collect();
    for (expressions, least) in [
        (expressions(include_str!("../../../examples/grafana/leasehold.json")), 10),
        (expressions(include_str!("../../../examples/grafana/leasehold-library.json")), 14),
        (rules, 15),
    ] {
        assert!(expressions.len() >= least, "{expressions:?}");
        for expression in expressions {
            let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            let names: Vec<&str> = words.filter(|word| word.starts_with("leasehold_")).collect();
            assert!(!names.is_empty(), "{expression}");
            names.iter().for_each(|name| assert!(is_metric(name), "{name}: {expression}"));
        }
    }
}

/// Requests for `/healthz` within a moment cost the store one command. Called by the one test.
async fn health_look_ups_are_shared(place: &Place) {
    let count = async || value(&scrape(place).await, "leasehold_store_latency_seconds", &[]);
    let (before, began) = (count().await, Instant::now());
    for _ in 0..200 {
        place.get("/healthz").await.expect(200);
    }
    let made = count().await - before;
    // Ten a second, and those of the polls: one of the last scrape, and one every five seconds.
    let limit = began.elapsed().as_secs_f64() * 11.0 + 3.0;
    assert!(made <= limit, "{made} look-ups, and the limit is {limit}");
}
