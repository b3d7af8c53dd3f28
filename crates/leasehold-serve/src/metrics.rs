//! Metrics for Prometheus: what this server counts, what its store holds, and what the library counts in this process.
//!
//! Labels have few values: kinds of lock, paths of the API, outcomes. A lock's name is never a label.

use std::sync::OnceLock;
use std::time::Duration;

use leasehold::Kind;
use metrics::{
    Counter, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::description;
use crate::observer::Snapshot;
use crate::problem::Code;

/// Upper bounds of the histograms, in seconds: from a local store to a long wait.
const BUCKETS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 60.0, 300.0];

/// The recorder of this process; the servers of one process share it, as they share its counters.
static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// The metrics of this process.
pub(crate) struct Metrics(PrometheusHandle);

/// The label values of counters. They are registered with 0 when the server starts, because the increase of a counter that begins
/// with 1 is 0: an alert would miss the first event.
const REFUSALS: [&str; 7] = ["too_many", "evicted", "slow", "withdrawn", "tls", "no_http", "accept_failed"];

/// The problems that a request that acquires may end with.
const NOT_GRANTED: [Code; 8] = [
    Code::Busy,
    Code::TimedOut,
    Code::InvalidRequest,
    Code::Unsupported,
    Code::LimitReached,
    Code::RequestEnded,
    Code::Stopping,
    Code::StoreUnavailable,
];

/// What a request that acquires was answered with.
#[derive(Clone, Copy)]
pub(crate) enum Outcome {
    Granted,
    /// A slice of a longer wait is over, and the caller repeats the request.
    Waiting,
    Refused(Code),
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Waiting => "waiting",
            Self::Refused(code) => code.as_str(),
        }
    }
}

/// A request that acquires a lock. If it is dropped without an outcome, its caller has gone.
pub(crate) struct AcquireTimer {
    kind: Kind,
    started: std::time::Instant,
    outcome: &'static str,
}

impl AcquireTimer {
    pub(crate) fn start(kind: Kind) -> Self {
        gauge!("leasehold_serve_acquiring").increment(1.0);
        Self { kind, started: std::time::Instant::now(), outcome: CANCELLED }
    }

    pub(crate) fn end(mut self, outcome: Outcome) {
        self.outcome = outcome.as_str();
    }
}

impl Drop for AcquireTimer {
    fn drop(&mut self) {
        gauge!("leasehold_serve_acquiring").decrement(1.0);
        acquires(self.kind, self.outcome).increment(1);
        durations(self.kind, self.outcome).record(self.started.elapsed().as_secs_f64());
    }
}

const CANCELLED: &str = "cancelled";

fn request(method: &'static str, path: &str, status: u16) -> Counter {
    // Some readers of metrics do not expect braces in a label.
    let path = path.replace('{', ":").replace('}', "");
    let labels = [("method", method.to_owned()), ("path", path), ("status", status.to_string())];
    counter!("leasehold_serve_requests_total", &labels)
}

fn acquires(kind: Kind, outcome: &'static str) -> Counter {
    counter!("leasehold_serve_acquires_total", "kind" => kind.as_str(), "outcome" => outcome)
}

fn durations(kind: Kind, outcome: &'static str) -> Histogram {
    histogram!("leasehold_serve_acquire_seconds", "kind" => kind.as_str(), "outcome" => outcome)
}

fn lost(kind: Kind) -> Counter {
    counter!("leasehold_serve_leases_lost_total", "kind" => kind.as_str())
}

fn refused(reason: &'static str) -> Counter {
    counter!("leasehold_serve_refused_connections_total", "reason" => reason)
}

/// An open connection.
pub(crate) struct ConnectionGauge;

impl ConnectionGauge {
    pub(crate) fn open() -> Self {
        gauge!("leasehold_serve_connections").increment(1.0);
        Self
    }
}

impl Drop for ConnectionGauge {
    fn drop(&mut self) {
        gauge!("leasehold_serve_connections").decrement(1.0);
    }
}

/// Installs the recorder that `/metrics` shows, once per process.
///
/// Call it before the client connects, because a client looks up its metrics once; otherwise `/metrics` lacks those of the
/// library (its feature `metrics`). If the program has installed another recorder, that one gets everything.
///
/// ```
/// leasehold_serve::install_recorder();
/// ```
pub fn install_recorder() {
    handle();
}

fn handle() -> &'static PrometheusHandle {
    RECORDER.get_or_init(|| {
        let recorder = recorder();
        let handle = recorder.handle();
        let _ = metrics::set_global_recorder(recorder);
        describe();
        handle
    })
}

fn recorder() -> PrometheusRecorder {
    let builder = PrometheusBuilder::new();
    // It refuses no buckets only.
    builder
        .set_buckets(&BUCKETS)
        .map_or_else(|_| PrometheusBuilder::new().build_recorder(), PrometheusBuilder::build_recorder)
}

impl Metrics {
    /// The metrics of this process, with 0 for everything that has not happened yet.
    pub(crate) fn new() -> Self {
        let metrics = Self(handle().clone());
        for (method, path, status) in description::answers() {
            drop(request(method, &path, status));
        }
        for kind in Kind::ALL {
            let refused = NOT_GRANTED.iter().map(|code| Outcome::Refused(*code));
            let answered = [Outcome::Granted, Outcome::Waiting].into_iter().chain(refused);
            answered.for_each(|outcome| drop(acquires(*kind, outcome.as_str())));
            drop(acquires(*kind, CANCELLED));
            drop(lost(*kind));
            drop(durations(*kind, Outcome::Granted.as_str()));
        }
        REFUSALS.iter().for_each(|reason| drop(refused(reason)));
        gauge!("leasehold_serve_acquiring").increment(0.0);
        gauge!("leasehold_serve_connections").increment(0.0);
        drop(histogram!("leasehold_store_latency_seconds"));
        metrics
    }

    /// Adds the samples of histograms up. Without this they would be kept until the metrics are read.
    pub(crate) fn upkeep(&self) {
        self.0.run_upkeep();
    }

    pub(crate) fn request(&self, method: &'static str, path: &str, status: u16) {
        request(method, path, status).increment(1);
    }

    pub(crate) fn refused(&self, reason: &'static str) {
        refused(reason).increment(1);
    }

    /// A renewal has found that its lease has ended.
    pub(crate) fn lease_lost(&self, kind: Kind) {
        lost(kind).increment(1);
    }

    /// The text of all metrics, with what the store held at this moment.
    pub(crate) fn render(&self, snapshot: &Snapshot) -> String {
        set_store(snapshot);
        self.0.render()
    }
}

fn set_store(snapshot: &Snapshot) {
    gauge!("leasehold_store_up").set(if snapshot.error.is_none() { 1.0 } else { 0.0 });
    // A poll that fails at once would look like a fast list, and like a new one.
    let listed = snapshot.listed;
    gauge!("leasehold_store_list_seconds").set(listed.took.map_or(f64::NAN, |took| took.as_secs_f64()));
    gauge!("leasehold_store_age_seconds").set(listed.at.elapsed().as_secs_f64());
    for kind in Kind::ALL {
        let of_kind = snapshot.locks.iter().filter(|lock| lock.kind == *kind);
        let (mut held, mut holders, mut waiters, mut oldest) = (0, 0, 0, Duration::ZERO);
        for lock in of_kind {
            held += usize::from(!lock.holders.is_empty());
            holders += lock.holders.len();
            waiters += lock.waiters.len();
            oldest = lock.waiters.iter().map(|waiter| waiter.waiting_for).fold(oldest, Duration::max);
        }
        let kind = kind.as_str();
        gauge!("leasehold_store_locks_held", "kind" => kind).set(held as f64);
        gauge!("leasehold_store_holders", "kind" => kind).set(holders as f64);
        gauge!("leasehold_store_waiters", "kind" => kind).set(waiters as f64);
        gauge!("leasehold_store_oldest_wait_seconds", "kind" => kind).set(oldest.as_secs_f64());
    }
}

fn describe() {
    describe_counter!("leasehold_serve_requests_total", "Requests by method, path and status");
    describe_counter!("leasehold_serve_acquires_total", "Requests that acquire, by kind and outcome");
    describe_histogram!("leasehold_serve_acquire_seconds", Unit::Seconds, "From the request to its outcome");
    describe_gauge!("leasehold_serve_acquiring", "Requests that acquire or wait now");
    describe_gauge!("leasehold_serve_connections", "Open connections");
    describe_counter!(
        "leasehold_serve_leases_lost_total",
        "Leases that had ended when their callers renewed them, by kind"
    );
    describe_counter!(
        "leasehold_serve_refused_connections_total",
        "Connections that were refused, by reason"
    );
    describe_gauge!("leasehold_store_up", "1 if the store answered the last poll, or else 0");
    describe_gauge!(
        "leasehold_store_list_seconds",
        Unit::Seconds,
        "How long the last list that the store answered took; NaN before the first"
    );
    describe_gauge!(
        "leasehold_store_age_seconds",
        Unit::Seconds,
        "How old the last list that the store answered is"
    );
    describe_gauge!("leasehold_store_locks_held", "Locks with a holder, by kind");
    describe_gauge!("leasehold_store_holders", "Holders, by kind");
    describe_gauge!("leasehold_store_waiters", "Waiters in queues, by kind");
    describe_gauge!("leasehold_store_oldest_wait_seconds", Unit::Seconds, "The longest wait now, by kind");
    describe_histogram!(
        "leasehold_store_latency_seconds",
        Unit::Seconds,
        "Round trip of one command to the store"
    );
}
