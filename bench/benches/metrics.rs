//! What metrics cost on the uncontended path in memory: `cargo bench -p leasehold-bench --features metrics --bench metrics`.
//!
//! The first client connects before a recorder is installed, so its metrics do nothing. The second one has the counters of a
//! real recorder.

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_util::registry::{AtomicStorage, Registry};

use leasehold_bench::{Contestant, bar, compare};

const PAIRS: u32 = 20_000;

/// Keeps counters, gauges and the values of histograms, as an exporter for Prometheus does.
struct Atomic(Registry<Key, AtomicStorage>);

impl Recorder for Atomic {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.0.get_or_create_counter(key, |counter| Counter::from_arc(counter.clone()))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.0.get_or_create_gauge(key, |gauge| Gauge::from_arc(gauge.clone()))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.0.get_or_create_histogram(key, |histogram| Histogram::from_arc(histogram.clone()))
    }
}

fn pairs(mutex: &leasehold::Mutex) {
    pollster::block_on(async {
        for _ in 0..PAIRS {
            let guard = mutex.lock().await.expect("granted");
            std::hint::black_box(guard.token());
            guard.release().await.expect("released");
        }
    });
}

fn mutex() -> leasehold::Mutex {
    pollster::block_on(leasehold::Client::connect("memory:")).expect("opens").mutex("bench")
}

fn main() {
    let silent = mutex();
    assert!(metrics::set_global_recorder(Atomic(Registry::new(AtomicStorage))).is_ok(), "the first recorder");
    let counted = mutex();
    let result = compare(
        "uncontended lock + release in memory",
        51,
        vec![
            Contestant::new("without a recorder", PAIRS, || pairs(&silent)),
            Contestant::new("with a recorder", PAIRS, || pairs(&counted)),
        ],
    );
    bar("metrics, in nanoseconds", (result.seconds[1] - result.seconds[0]) * 1e9, 50.0);
}
