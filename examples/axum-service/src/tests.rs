//! Tests of the service. The locks are in memory, and their clock moves only when a test moves it.

use std::pin::pin;
use std::sync::Arc;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::RETRY_AFTER;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use leasehold::testing::TestStore;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tower_service::Service as _;

use crate::order_lock::{MAX_WAIT, TTL};
use crate::orders::Orders;
use crate::routes::router;
use crate::state::Service;

const ORDER: &str = r#"{"id":"1001","parcel":null}"#;
const SHIPPED: &str = r#"{"id":"1001","parcel":1}"#;

static METRICS: LazyLock<PrometheusHandle> =
    LazyLock::new(|| PrometheusBuilder::new().install_recorder().expect("the only recorder"));

/// Any number of hosts with one store of locks, one database and one carrier.
struct Place {
    store: TestStore,
    orders: Orders,
    /// The calls of the carrier so far.
    calls: Arc<AtomicI64>,
    /// The carrier answers a call for each permit.
    answers: Arc<Semaphore>,
}

impl Place {
    fn new() -> Self {
        let orders = Orders::open(":memory:").expect("a database");
        Self { store: TestStore::new(), orders, calls: Arc::default(), answers: Arc::new(Semaphore::new(0)) }
    }

    /// A host: a client of its own.
    fn host(&self) -> Router {
        let (calls, answers) = (self.calls.clone(), self.answers.clone());
        router(Service {
            metrics: METRICS.clone(),
            shipments: TaskTracker::new(),
            locks: self.store.client().expect("a client"),
            orders: self.orders.clone(),
            carrier: Arc::new(move |_order: &str| {
                let (parcel, answers) = (calls.fetch_add(1, Ordering::SeqCst) + 1, answers.clone());
                Box::pin(async move {
                    answers.acquire().await.expect("it is open").forget();
                    parcel
                })
            }),
        })
    }

    async fn until_called(&self, calls: i64) {
        until(async || self.calls.load(Ordering::SeqCst) == calls).await;
    }

    async fn until_waiting(&self, count: usize) {
        let client = self.store.client().expect("a client");
        let lock = client.mutex("order:1001");
        until(async || lock.inspect().await.expect("a state").waiters.len() == count).await;
    }
}

/// Waits for a condition, in bounded time.
async fn until(mut holds: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("the condition holds in time");
}

async fn call(mut host: Router, method: &str, path: &str) -> (StatusCode, String) {
    let request = Request::builder().method(method).uri(path).body(Body::empty()).expect("a request");
    let answer = host.call(request).await.expect("an answer");
    let is_final =
        answer.status() != StatusCode::CONFLICT && answer.status() != StatusCode::SERVICE_UNAVAILABLE;
    assert_eq!(is_final, !answer.headers().contains_key(RETRY_AFTER));
    let status = answer.status();
    let body = answer.into_body().collect().await.expect("a body").to_bytes();
    (status, String::from_utf8(body.to_vec()).expect("UTF-8"))
}

async fn ship(host: Router) -> (StatusCode, String) {
    call(host, "POST", "/orders/1001/ship").await
}

#[tokio::test]
async fn requests_of_two_hosts_for_one_order_send_one_parcel() {
    let place = Place::new();
    let first = tokio::spawn(ship(place.host()));
    place.until_called(1).await;
    let second = tokio::spawn(ship(place.host()));
    place.until_waiting(1).await;
    place.answers.add_permits(2);
    for answer in [first.await.unwrap(), second.await.unwrap()] {
        assert_eq!(answer, (StatusCode::OK, SHIPPED.to_owned()));
    }
    assert_eq!(place.calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn requests_for_different_orders_do_not_wait_for_each_other() {
    let place = Place::new();
    let first = tokio::spawn(ship(place.host()));
    let second = tokio::spawn(call(place.host(), "POST", "/orders/1002/ship"));
    place.until_called(2).await;
    place.answers.add_permits(2);
    assert_eq!((first.await.unwrap().0, second.await.unwrap().0), (StatusCode::OK, StatusCode::OK));
    assert_eq!(call(place.host(), "POST", "/orders/9/ship").await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn request_that_waits_too_long_is_answered_with_409() {
    let place = Place::new();
    let other = place.store.client().unwrap();
    let _held = other.mutex("order:1001").lock().await.unwrap();
    let request = tokio::spawn(ship(place.host()));
    place.until_waiting(1).await;
    place.store.advance(MAX_WAIT - Duration::from_millis(1));
    place.until_waiting(1).await;
    place.store.advance(Duration::from_millis(1));
    assert_eq!(request.await.unwrap().0, StatusCode::CONFLICT);
    place.until_waiting(0).await;
}

#[tokio::test]
async fn request_is_answered_with_503_while_the_store_is_away() {
    let place = Place::new();
    let host = place.host();
    place.store.set_reachable(false);
    let mut request = pin!(ship(host.clone()));
    let answer = loop {
        tokio::select! {
            biased;
            answer = &mut request => break answer,
            // Its retries are over some time after its limit.
            () = tokio::task::yield_now() => place.store.advance(Duration::from_millis(100)),
        }
        assert!(place.store.elapsed() < MAX_WAIT * 10);
    };
    assert_eq!(answer.0, StatusCode::SERVICE_UNAVAILABLE);
    place.store.set_reachable(true);
    place.answers.add_permits(1);
    assert_eq!(ship(host).await.0, StatusCode::OK);
}

#[tokio::test]
async fn request_whose_host_was_suspended_writes_nothing() {
    let place = Place::new();
    let request = tokio::spawn(ship(place.host()));
    place.until_called(1).await;
    // Longer than the lease: a minute of renewals changes nothing, a suspended host does.
    place.store.advance(TTL * 6);
    assert!(!request.is_finished());
    place.store.suspend(TTL);
    assert_eq!(request.await.unwrap().0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(call(place.host(), "GET", "/orders/1001").await, (StatusCode::OK, ORDER.to_owned()));
    place.answers.add_permits(1);
    assert_eq!(ship(place.host()).await, (StatusCode::OK, SHIPPED.replace(":1}", ":2}")));
}

#[tokio::test]
async fn dropped_request_is_finished_and_calls_the_carrier_once() {
    let place = Place::new();
    let request = tokio::spawn(ship(place.host()));
    place.until_called(1).await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    // The second click waits for the first one, and finds its parcel.
    let second = tokio::spawn(ship(place.host()));
    place.until_waiting(1).await;
    place.answers.add_permits(2);
    assert_eq!(second.await.unwrap(), (StatusCode::OK, SHIPPED.to_owned()));
    assert_eq!(place.calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn dropped_request_that_waits_leaves_the_queue() {
    let place = Place::new();
    let _first = tokio::spawn(ship(place.host()));
    place.until_called(1).await;
    let second = tokio::spawn(ship(place.host()));
    place.until_waiting(1).await;
    second.abort();
    place.until_waiting(0).await;
}

#[tokio::test]
async fn late_write_of_a_former_holder_is_refused() {
    let place = Place::new();
    let lock = place.store.client().unwrap().mutex("order:1001");
    let former = lock.lock().await.unwrap().token();
    let later = lock.lock().await.unwrap().token();
    place.orders.set_parcel("1001", 2, later).await.unwrap();
    assert!(place.orders.set_parcel("1001", 1, former).await.is_err());
    assert_eq!(place.orders.find("1001").await.unwrap().parcel, Some(2));
}

#[tokio::test]
async fn metrics_count_the_acquisitions() {
    let place = Place::new();
    place.answers.add_permits(1);
    assert_eq!(ship(place.host()).await.0, StatusCode::OK);
    let (status, text) = call(place.host(), "GET", "/metrics").await;
    assert_eq!(status, StatusCode::OK);
    let counted = text
        .lines()
        .find(|line| line.starts_with("leasehold_acquisitions_total{") && line.contains("label=\"order\""));
    assert!(counted.is_some(), "{text}");
}
