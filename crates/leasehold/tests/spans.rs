//! The spans of `docs/operations.md`: their targets, levels and fields.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::Client;
use leasehold_testkit::until;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

/// What was traced, as lines: `target name field=value …`, a span at its close.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static SPANS: Mutex<BTreeMap<u64, Traced>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

struct Traced {
    line: Line,
    references: u32,
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        use fmt::Write as _;
        let _ = write!(self.0, " {field}={value:?}");
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        use fmt::Write as _;
        let _ = write!(self.0, " {field}={value}");
    }
}

struct Tracer;

impl Tracer {
    fn line(metadata: &Metadata<'_>) -> Line {
        Line(format!("{} {} {}", metadata.level(), metadata.target(), metadata.name()))
    }
}

impl Subscriber for Tracer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("leasehold")
    }

    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        let mut line = Self::line(attributes.metadata());
        attributes.record(&mut line);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        SPANS.lock().unwrap().insert(id, Traced { line, references: 1 });
        span::Id::from_u64(id)
    }

    fn record(&self, span: &span::Id, values: &span::Record<'_>) {
        values.record(&mut SPANS.lock().unwrap().get_mut(&span.into_u64()).unwrap().line);
    }

    fn record_follows_from(&self, span: &span::Id, _follows: &span::Id) {
        SPANS.lock().unwrap().get_mut(&span.into_u64()).unwrap().line.0 += " follows";
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Self::line(event.metadata());
        event.record(&mut line);
        LINES.lock().unwrap().push(line.0);
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}

    fn clone_span(&self, span: &span::Id) -> span::Id {
        SPANS.lock().unwrap().get_mut(&span.into_u64()).unwrap().references += 1;
        span.clone()
    }

    fn try_close(&self, span: span::Id) -> bool {
        let mut spans = SPANS.lock().unwrap();
        let traced = spans.get_mut(&span.into_u64()).unwrap();
        traced.references -= 1;
        if traced.references > 0 {
            return false;
        }
        let traced = spans.remove(&span.into_u64()).unwrap();
        LINES.lock().unwrap().push(traced.line.0);
        true
    }
}

/// The lines about this lock that contain all parts.
fn lines(lock: &str, parts: &[&str]) -> Vec<String> {
    let lines = LINES.lock().unwrap();
    let is_meant = |line: &&String| {
        line.contains(&format!("lock={lock} ")) && parts.iter().all(|part| line.contains(part))
    };
    lines.iter().filter(is_meant).cloned().collect()
}

#[tokio::test]
async fn spans_tell_the_story_of_a_lock_and_info_is_quiet() {
    tracing::subscriber::set_global_default(Tracer).unwrap();
    let client = Client::connect("memory:").await.unwrap();
    // Its loss on a busy machine would be logged.
    let lock = client.mutex("story").ttl(Duration::from_secs(9)).global_fifo();
    let guard = lock.lock().await.unwrap();
    let token = format!("token={}", guard.token());
    let granted = ["kind=mutex", "store=memory:", &token, "waited=0ns", "outcome=immediate"];
    let acquire = "DEBUG leasehold::acquire acquire";
    assert_eq!(lines("story", &[&[acquire], &granted[..]].concat()).len(), 1, "{LINES:?}");
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(lines("story", &[acquire, "outcome=busy"]).len(), 1, "{LINES:?}");
    until(async || !lines("story", &["DEBUG leasehold::renew", "outcome=ok"]).is_empty()).await;
    assert!(lines("story", &["leasehold::hold"]).is_empty(), "it lasts");
    guard.release().await.unwrap();
    let hold = ["DEBUG leasehold::hold hold", "kind=mutex", &token, "follows", "outcome=released"];
    assert_eq!(lines("story", &hold).len(), 1, "{LINES:?}");
    let release = ["DEBUG leasehold::release release", &token, "outcome=released"];
    assert_eq!(lines("story", &release).len(), 1, "{LINES:?}");
    let loud = |line: &&String| {
        [Level::ERROR, Level::WARN, Level::INFO].iter().any(|level| line.starts_with(level.as_str()))
    };
    assert_eq!(LINES.lock().unwrap().iter().filter(loud).count(), 0, "{LINES:?}");
}

#[tokio::test]
async fn trace_id_of_the_holder_is_shown() {
    let client = Client::connect("memory:").await.unwrap();
    let lock = client.mutex("traced").label("export").trace_id("4bf92f3577b34da6a3ce929d0e0e4736");
    let guard = lock.lock().await.unwrap();
    let metadata = &lock.inspect().await.unwrap().holders[0].metadata;
    assert_eq!(metadata.trace_id.as_deref(), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
    assert_eq!(metadata.label.as_deref(), Some("export"));
    drop(guard);
}
