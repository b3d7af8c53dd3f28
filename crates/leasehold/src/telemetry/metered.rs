//! A store whose commands are counted and timed.
//!
//! What a store runs inline is part of the caller's own time and is not counted.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Acquire, Answer, Command, LocalTime, Resource, StoreTime};
use leasehold_store::clock::Clock;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, ClientRecords, Diagnose, ListResult, Store, StoreError,
    VotedAttempts,
};
use metrics::{Gauge, Histogram, gauge, histogram};

use super::names;

/// A longer round trip says too little about the clocks.
const MAX_ROUND_TRIP: Duration = Duration::from_millis(100);

pub(super) struct Metered {
    store: Arc<dyn Store>,
    handles: Arc<Handles>,
}

struct Handles {
    /// The clock of the client, so that a test that moves it measures no real time.
    clock: Clock,
    in_flight: Gauge,
    acquire: Histogram,
    renew: Histogram,
    release: Histogram,
    other: Histogram,
    /// For stores on a server whose answers carry its wall clock.
    clock_offset: Option<Gauge>,
}

impl Metered {
    pub(super) fn new(store: Arc<dyn Store>, scheme: &Arc<str>, clock: Clock) -> Self {
        let seconds = |command: &'static str| histogram!(names::COMMAND, "store" => scheme.clone(), "command" => command);
        let has_clock = scheme.starts_with("redis");
        let handles = Handles {
            clock,
            in_flight: gauge!(names::COMMANDS_IN_FLIGHT, "store" => scheme.clone()),
            acquire: seconds("acquire"),
            renew: seconds("renew"),
            release: seconds("release"),
            other: seconds("other"),
            clock_offset: has_clock.then(|| gauge!(names::CLOCK_OFFSET, "store" => scheme.clone())),
        };
        Self { store, handles: Arc::new(handles) }
    }
}

impl Handles {
    fn of(&self, command: &Command) -> &Histogram {
        match command {
            Command::Acquire(_) => &self.acquire,
            Command::Renew(_) => &self.renew,
            Command::Release(_) => &self.release,
            Command::Inspect | Command::ForceRelease => &self.other,
        }
    }

    /// The server ran the command at some time between the send and the answer.
    fn compare_clocks(&self, at: StoreTime, took: Duration) {
        let Some(offset) = &self.clock_offset else { return };
        // A short answer may have no time.
        if at == StoreTime::ZERO || took > MAX_ROUND_TRIP {
            return;
        }
        let (server, now) =
            (Duration::from_micros(at.as_micros()), Duration::from_micros(self.clock.wall().as_micros()));
        offset.set(server.as_secs_f64() - (now.as_secs_f64() - took.as_secs_f64() / 2.0));
    }
}

/// Commands in flight. They are not any more when this is dropped.
struct InFlight {
    handles: Arc<Handles>,
    count: f64,
    sent: LocalTime,
}

impl InFlight {
    fn begin(handles: &Arc<Handles>, count: usize) -> Self {
        let count = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
        handles.in_flight.increment(count);
        Self { handles: handles.clone(), count, sent: handles.clock.local() }
    }

    fn answered<'a>(&self, histogram: &Histogram, answers: impl Iterator<Item = &'a Answer>) {
        let took = self.handles.clock.local().since(self.sent);
        histogram.record(took);
        if let Some(answer) = answers.last() {
            self.handles.compare_clocks(answer.at, took);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.handles.in_flight.decrement(self.count);
    }
}

impl Store for Metered {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult> {
        self.store.try_call_inline(resource, command)
    }

    fn call(&self, call: Call, replicas: u32) -> BoxFuture<CallResult> {
        let (in_flight, histogram) =
            (InFlight::begin(&self.handles, 1), self.handles.of(&call.command).clone());
        let sent = self.store.call(call, replicas);
        Box::pin(async move {
            let answered = sent.await;
            in_flight.answered(&histogram, answered.iter());
            answered
        })
    }

    fn call_batch(&self, batch: Batch, replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let first = batch.first().map(|call| self.handles.of(&call.command));
        let histogram = first.unwrap_or(&self.handles.other).clone();
        let in_flight = InFlight::begin(&self.handles, batch.len());
        let sent = self.store.call_batch(batch, replicas);
        Box::pin(async move {
            let answers = sent.await;
            in_flight.answered(&histogram, answers.iter().flatten());
            answers
        })
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        let sent = self.store.acquire_all(attempts)?;
        let in_flight = InFlight::begin(&self.handles, attempts.len());
        Some(Box::pin(async move {
            let answers = sent.await;
            in_flight.answered(&in_flight.handles.acquire, answers.iter().flatten());
            answers
        }))
    }

    fn foreign_keys(&self, servers: &[String]) -> Result<Arc<dyn leasehold_store::ForeignKeys>, StoreError> {
        self.store.foreign_keys(servers)
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        self.store.list()
    }

    fn inspect_all(&self) -> Option<BoxFuture<ListResult>> {
        self.store.inspect_all()
    }

    fn shard(&self, resource: &Resource, command: &Command) -> u64 {
        self.store.shard(resource, command)
    }

    fn client_records(&self) -> Option<&dyn ClientRecords> {
        self.store.client_records()
    }

    fn voted_attempts(&self) -> Option<&dyn VotedAttempts> {
        self.store.voted_attempts()
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        self.store.doctor()
    }
}
