//! What the library reports, for the language's log: it is kept until the language asks for it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use leasehold_store::event_text::text_of;
use leasehold_store::process::PerProcess;
use tracing::{Event, Level, Metadata, Subscriber, level_filters::LevelFilter, span};

/// Older ones are dropped.
const MAX_RECORDS: usize = 1_000;

/// One line of it.
pub struct Record {
    /// As Python's `logging` counts: 20 information, 30 warning, 40 error.
    pub level: u8,
    /// What happened, and its fields.
    pub message: String,
}

struct Kept {
    records: VecDeque<Record>,
    waker: Option<Waker>,
}

static KEPT: PerProcess<Mutex<Kept>> = PerProcess::of_first(Kept::none());

impl Kept {
    const fn none() -> Mutex<Self> {
        Mutex::new(Self { records: VecDeque::new(), waker: None })
    }
}

fn kept() -> MutexGuard<'static, Kept> {
    KEPT.get(Kept::none).lock().unwrap_or_else(PoisonError::into_inner)
}

struct Capture;

impl Subscriber for Capture {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO && metadata.is_event() && metadata.target().starts_with("leasehold")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            _ => 20,
        };
        let message = text_of(event);
        let mut kept = kept();
        if kept.records.len() == MAX_RECORDS {
            kept.records.pop_front();
        }
        kept.records.push_back(Record { level, message });
        let waker = kept.waker.take();
        drop(kept);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Keeps what the library reports from now on.
pub fn capture() {
    // An error means that it does so already.
    let _ = tracing::subscriber::set_global_default(Capture);
}

/// The records since the last call. Waits until there is one; the last one who waits gets it.
pub(crate) async fn next_records() -> Vec<Record> {
    poll_fn(|context| {
        let mut kept = kept();
        if kept.records.is_empty() {
            kept.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(kept.records.drain(..).collect())
    })
    .await
}
