//! What the library reports, for `logging`: it is kept until a Python thread asks for it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use leasehold_store::event_text::text_of;
use leasehold_store::process::PerProcess;
use pyo3::prelude::*;
use tracing::{Event, Level, Metadata, Subscriber, level_filters::LevelFilter, span};

use crate::completions::{Completions, queue_of};
use crate::core::{Core, Value, done};
use crate::operation::Operation;

/// Older ones are dropped.
const MAX_RECORDS: usize = 1_000;

pub(crate) struct Record {
    /// As `logging` counts.
    pub(crate) level: u8,
    pub(crate) message: String,
}

impl Value for Vec<Record> {
    fn into_object(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let records: Vec<_> = self.into_iter().map(|record| (record.level, record.message)).collect();
        Ok(records.into_pyobject(py)?.unbind())
    }
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
pub(crate) fn capture() {
    // An error means that it does so already.
    let _ = tracing::subscriber::set_global_default(Capture);
}

/// The records since the last call: a list of levels and messages. Waits until there is one.
#[pyfunction]
#[pyo3(signature = (completions=None))]
pub(crate) fn records(completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
    let next = poll_fn(|context| {
        let mut kept = kept();
        if kept.records.is_empty() {
            kept.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(done(kept.records.drain(..).collect::<Vec<_>>()))
    });
    Ok(Operation::new(Core::start(next, queue_of(completions)?.as_ref())))
}
