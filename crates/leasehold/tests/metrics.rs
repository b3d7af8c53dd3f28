//! Each metric of `docs/metrics.md` after a real sequence.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use leasehold::{Client, Kind, Loss, MutexSet};
use leasehold_testkit::{Server, until};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, SharedString, Unit};
use metrics_util::registry::{AtomicStorage, Registry};

/// Keeps everything, as the recorder of an exporter does.
struct Recorder {
    registry: Registry<Key, AtomicStorage>,
    /// Rows as in `docs/metrics.md`.
    described: Mutex<BTreeSet<String>>,
}

impl Recorder {
    fn describe(&self, kind: &str, name: &KeyName, unit: Option<Unit>, text: &str) {
        let unit = unit.map_or_else(String::new, |unit| unit.as_str().to_owned());
        let mut row = format!("| `{}` | {kind} | {unit} | ", name.as_str());
        let _ = write!(row, "{text} |");
        self.described.lock().unwrap().insert(row);
    }
}

struct Shared(Arc<Recorder>);

impl metrics::Recorder for Shared {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.0.describe("counter", &name, unit, &text);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.0.describe("gauge", &name, unit, &text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.0.describe("histogram", &name, unit, &text);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.0.registry.get_or_create_counter(key, |counter| Counter::from_arc(counter.clone()))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.0.registry.get_or_create_gauge(key, |gauge| Gauge::from_arc(gauge.clone()))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.0.registry.get_or_create_histogram(key, |histogram| Histogram::from_arc(histogram.clone()))
    }
}

fn recorder() -> &'static Recorder {
    static RECORDER: OnceLock<Arc<Recorder>> = OnceLock::new();
    RECORDER.get_or_init(|| {
        let registry = Registry::new(AtomicStorage);
        let recorder = Arc::new(Recorder { registry, described: Mutex::default() });
        metrics::set_global_recorder(Shared(recorder.clone())).ok().unwrap();
        recorder
    })
}

async fn connect(url: &str) -> Client {
    recorder();
    Client::connect(url).await.unwrap()
}

/// Whether the key is of this metric, with these labels among others.
fn is(key: &Key, name: &str, labels: &[(&str, &str)]) -> bool {
    let has = |(name, value): &(&str, &str)| {
        key.labels().any(|label| label.key() == *name && label.value() == *value)
    };
    key.name() == name && labels.iter().all(has)
}

fn counter(name: &str, labels: &[(&str, &str)]) -> u64 {
    let mut sum = 0;
    recorder().registry.visit_counters(|key, value| {
        if is(key, name, labels) {
            sum += value.load(std::sync::atomic::Ordering::SeqCst);
        }
    });
    sum
}

fn gauge(name: &str, labels: &[(&str, &str)]) -> f64 {
    let mut sum = 0.0;
    recorder().registry.visit_gauges(|key, value| {
        if is(key, name, labels) {
            sum += f64::from_bits(value.load(std::sync::atomic::Ordering::SeqCst));
        }
    });
    sum
}

fn histogram(name: &str, labels: &[(&str, &str)]) -> Vec<f64> {
    let mut values = Vec::new();
    recorder().registry.visit_histograms(|key, bucket| {
        if is(key, name, labels) {
            values.extend(bucket.data());
        }
    });
    values
}

fn acquisitions(label: &str, outcome: &str) -> u64 {
    counter("leasehold_acquisitions_total", &[("label", label), ("outcome", outcome)])
}

const SHORT: Duration = Duration::from_millis(20);

#[tokio::test]
async fn attempt_counts_once_by_its_outcome() {
    let client = connect("memory:").await;
    let lock = client.mutex("a").global_fifo().metrics_label("outcomes");
    let held = lock.lock().await.unwrap();
    assert_eq!(acquisitions("outcomes", "immediate"), 1);
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(acquisitions("outcomes", "busy"), 1);
    assert!(lock.lock_timeout(SHORT).await.unwrap().is_none());
    assert_eq!(acquisitions("outcomes", "timeout"), 1);
    assert!(tokio::time::timeout(SHORT, lock.lock()).await.is_err());
    assert_eq!(acquisitions("outcomes", "cancelled"), 1);
    assert!(lock.clone().max_waiters(0).lock().await.unwrap_err().is_queue_full());
    assert_eq!(acquisitions("outcomes", "error"), 1);
    drop(held);
    let all = counter("leasehold_acquisitions_total", &[("label", "outcomes")]);
    assert_eq!((acquisitions("outcomes", "waited"), all), (0, 5));
    assert_eq!(histogram("leasehold_wait_seconds", &[("label", "outcomes")]).len(), 1);
}

#[tokio::test]
async fn waiter_is_counted_while_it_waits_and_measures_wait_hand_off_and_hold() {
    let (one, other) = (connect("memory:waits").await, connect("memory:waits").await);
    let labels = [("label", "waits"), ("store", "memory"), ("kind", "mutex")];
    let lock = |client: &Client| client.mutex("a").metrics_label("waits");
    let began = Instant::now();
    let held = lock(&one).lock().await.unwrap();
    let took = began.elapsed().as_secs_f64();
    assert_eq!(gauge("leasehold_leases_held", &labels), 1.0);
    let uncontended = histogram("leasehold_wait_seconds", &labels);
    assert!(uncontended.len() == 1 && uncontended[0] <= took, "{uncontended:?} in {took} s");
    let waiting = tokio::spawn(async move { lock(&other).lock().await.unwrap() });
    until(async || gauge("leasehold_attempts_waiting", &labels) == 1.0).await;
    tokio::time::sleep(SHORT).await;
    held.release().await.unwrap();
    let guard = waiting.await.unwrap();
    assert_eq!(gauge("leasehold_attempts_waiting", &labels), 0.0);
    assert_eq!((acquisitions("waits", "immediate"), acquisitions("waits", "waited")), (1, 1));
    let mut waits = histogram("leasehold_wait_seconds", &labels);
    assert_eq!(waits.len(), 2);
    let first = waits.iter().position(|wait| *wait == uncontended[0]).expect("it is kept");
    waits.remove(first);
    assert!(waits[0] >= 0.02, "{waits:?}");
    let handoffs = histogram("leasehold_handoff_seconds", &labels);
    assert!(handoffs.len() == 1 && handoffs[0] < waits[0], "{handoffs:?} {waits:?}");
    drop(guard);
    assert_eq!(gauge("leasehold_leases_held", &labels), 0.0);
    let holds = histogram("leasehold_hold_seconds", &labels);
    assert!(holds.len() == 2 && holds.iter().any(|hold| *hold >= 0.02), "{holds:?}");
}

#[tokio::test]
async fn hand_off_between_tasks_is_counted_and_has_no_latency() {
    let client = connect("memory:").await;
    let lock = client.mutex("a").metrics_label("local");
    let held = lock.lock().await.unwrap();
    let waiting = tokio::spawn(async move { lock.lock().await.unwrap() });
    until(async || gauge("leasehold_attempts_waiting", &[("label", "local")]) == 1.0).await;
    drop(held);
    drop(waiting.await.unwrap());
    assert_eq!(counter("leasehold_local_handoffs_total", &[("label", "local")]), 1);
    assert_eq!(acquisitions("local", "waited"), 1);
    assert!(histogram("leasehold_handoff_seconds", &[("label", "local")]).is_empty());
    assert_eq!(gauge("leasehold_leases_held", &[("label", "local")]), 0.0);
}

#[tokio::test]
async fn every_lock_of_a_set_is_counted() {
    let client = connect("memory:").await;
    let lock = |name| client.mutex(name).metrics_label("set");
    let set = MutexSet::new([lock("a"), lock("b")]).lock().await.unwrap();
    assert_eq!(acquisitions("set", "immediate"), 2);
    assert_eq!(gauge("leasehold_leases_held", &[("label", "set")]), 2.0);
    drop(set);
    assert_eq!(gauge("leasehold_leases_held", &[("label", "set")]), 0.0);
}

/// Also if one command was sent for all of them.
#[tokio::test]
async fn failed_attempt_counts_for_every_lock_of_its_set() {
    let client = connect("memory:").await;
    let lock = |name| client.mutex(name).global_fifo().metrics_label("failed sets");
    let set = MutexSet::new([lock("a"), lock("b")]);
    let held = lock("b").lock().await.unwrap();
    assert!(set.try_lock().await.unwrap().is_none());
    assert_eq!(acquisitions("failed sets", "busy"), 2);
    assert!(set.lock_timeout(Duration::from_nanos(1)).await.unwrap().is_none());
    assert_eq!(acquisitions("failed sets", "timeout"), 2);
    // The mutexes before the one that is held were granted, one by one.
    assert!(set.lock_timeout(SHORT).await.unwrap().is_none());
    assert_eq!(acquisitions("failed sets", "timeout"), 3);
    assert_eq!(acquisitions("failed sets", "immediate"), 2);
    drop(held);
    client.clone().close().await.unwrap();
    assert!(set.try_lock().await.unwrap_err().is_closed());
    assert_eq!(acquisitions("failed sets", "error"), 2);
}

#[tokio::test]
async fn label_is_the_kind_by_default_and_other_after_a_hundred() {
    let client = connect("memory:").await;
    assert_eq!(client.latch("a", 2).count_down().await.unwrap(), 1);
    assert_eq!(acquisitions("latch", "immediate"), 1);
    for number in 0..120 {
        let lock = client.semaphore("a", 1).metrics_label(format!("label-{number}"));
        lock.acquire(1).await.unwrap().release().await.unwrap();
    }
    assert_eq!((acquisitions("label-99", "immediate"), acquisitions("label-100", "immediate")), (1, 0));
    assert_eq!(counter("leasehold_acquisitions_total", &[("kind", "semaphore"), ("label", "other")]), 20);
}

#[tokio::test]
async fn renewal_and_loss_are_counted() {
    let client = connect("memory:").await;
    // The forced release is noticed long before the lease would expire, on a busy machine too.
    let lock = client.mutex("a").ttl(Duration::from_secs(9));
    let guard = lock.lock().await.unwrap();
    until(async || counter("leasehold_renewals_total", &[("store", "memory"), ("outcome", "ok")]) > 0).await;
    assert!(!histogram("leasehold_renewal_seconds", &[("store", "memory")]).is_empty());
    client.force_release(Kind::Mutex, "a").await.unwrap();
    assert_eq!(guard.lost().await, Loss::Gone);
    until(async || counter("leasehold_leases_lost_total", &[("kind", "mutex"), ("cause", "gone")]) > 0).await;
    let bounded = client.semaphore("b", 1).max_hold(Duration::from_millis(150)).acquire(1).await.unwrap();
    assert_eq!(bounded.lost().await, Loss::MaxHold);
    let max_hold = [("kind", "semaphore"), ("cause", "max_hold")];
    until(async || counter("leasehold_leases_lost_total", &max_hold) == 1).await;
}

#[tokio::test]
async fn outage_of_a_server_is_counted() {
    let server = Server::on_socket();
    let client = connect(&server.url()).await;
    let store = ("store", "redis+unix");
    // Several renewals fail before it expires.
    let guard = client.mutex("a").ttl(Duration::from_secs(9)).lock().await.unwrap();
    assert_eq!(histogram("leasehold_command_seconds", &[store, ("command", "acquire")]).len(), 1);
    // A slow answer measures nothing. Both clocks are this machine's; a pause during the measurement counts half.
    until(async || {
        let seen = client.inspect(Kind::Mutex, "a").await.is_ok();
        seen && gauge("leasehold_clock_offset_seconds", &[store]) != 0.0
    })
    .await;
    assert!(gauge("leasehold_clock_offset_seconds", &[store]).abs() < 10.0);

    // The connections break, and are re-established.
    let admin = redis::Client::open(server.url()).unwrap();
    let mut admin = admin.get_multiplexed_async_connection().await.unwrap();
    for kind in ["normal", "pubsub"] {
        let mut kill = redis::cmd("CLIENT");
        kill.arg("KILL").arg("TYPE").arg(kind).arg("SKIPME").arg("yes");
        let _: i64 = kill.query_async(&mut admin).await.unwrap();
    }
    until(async || counter("leasehold_reconnects_total", &[store]) > 0).await;

    server.signal("STOP");
    until(async || gauge("leasehold_commands_in_flight", &[store]) > 0.0).await;
    assert_eq!(guard.lost().await, Loss::Expired);
    until(async || counter("leasehold_renewals_total", &[store, ("outcome", "failed")]) > 0).await;
    until(async || counter("leasehold_leases_lost_total", &[store, ("cause", "expired")]) == 1).await;
    assert!(client.mutex("b").metrics_label("stopped").try_lock().await.unwrap_err().is_unavailable());
    assert_eq!(acquisitions("stopped", "unavailable"), 1);
    server.signal("CONT");
    drop(guard);
    until(async || gauge("leasehold_commands_in_flight", &[store]) == 0.0).await;
}

#[tokio::test]
async fn docs_list_every_metric_with_type_unit_and_meaning() {
    drop(connect("memory:").await);
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    let page = std::fs::read_to_string(page).unwrap();
    // The labels are a column of the page, and not part of a description.
    let rows = page.lines().filter(|line| line.starts_with("| `leasehold_")).map(|line| {
        let cells: Vec<&str> = line.split(" | ").collect();
        format!("{} | {} | {} | {}", cells[0], cells[1], cells[2], cells[4])
    });
    assert_eq!(rows.collect::<BTreeSet<_>>(), *recorder().described.lock().unwrap());
}
