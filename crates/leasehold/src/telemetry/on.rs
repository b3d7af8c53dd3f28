//! With the feature `metrics`: handles to the metrics of the recorder that is installed when they are first needed.
//!
//! A handle is looked up once and kept, because a look-up by name and labels costs more than the metrics may add to an
//! uncontended lock in memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_core::{Command, Kind, LocalTime, Loss};
use leasehold_store::clock::Clock;
use leasehold_store::{CallResult, Store};
use metrics::{Counter, Gauge, Histogram, Label, counter, gauge, histogram};

use super::metered::Metered;
use super::{AttemptOutcome, names, renewal_outcome};

/// The maximum number of labels per client. Further labels count as [`OTHER`], because a recorder never removes a label.
const MAX_LABELS: usize = 100;

/// The label of locks whose own label came after [`MAX_LABELS`] others.
const OTHER: &str = "other";

/// The causes of losses, which count from 0 when the client is created: the increase of a counter that begins with 1 is 0.
const CAUSES: [&str; 4] = ["expired", "gone", "max_hold", "bridge"];

/// The metrics of one client.
#[derive(Clone)]
pub(crate) struct ClientTelemetry(Arc<Handles>);

struct Handles {
    /// The scheme of the store's address.
    store: Arc<str>,
    /// Of locks without a label, by position in `Kind::ALL`.
    by_kind: [LockTelemetry; Kind::ALL.len()],
    by_label: Mutex<HashMap<(Kind, String), LockTelemetry>>,
    renewals: Renewals,
    reconnects: Counter,
}

struct Renewals {
    ok: Counter,
    failed: Counter,
    lost: Counter,
    latency: Histogram,
}

impl ClientTelemetry {
    pub(crate) fn new(url: &str) -> Self {
        names::describe();
        let scheme = url.split(':').next().unwrap_or_default();
        let store: Arc<str> = scheme.into();
        let renewals =
            |outcome: &'static str| counter!(names::RENEWALS, "store" => store.clone(), "outcome" => outcome);
        let renewals = Renewals {
            ok: renewals("ok"),
            failed: renewals("failed"),
            lost: renewals("lost"),
            latency: histogram!(names::RENEWAL, "store" => store.clone()),
        };
        let reconnects = counter!(names::RECONNECTS, "store" => store.clone());
        let by_kind = std::array::from_fn(|at| register(&store, Kind::ALL[at], Kind::ALL[at].as_str()));
        for kind in Kind::ALL {
            for cause in CAUSES {
                drop(lost(&store, *kind, cause));
            }
        }
        Self(Arc::new(Handles { store, by_kind, by_label: Mutex::default(), renewals, reconnects }))
    }

    /// The store, with its commands counted and timed by the client's clock.
    pub(crate) fn meter(&self, store: Arc<dyn Store>, clock: Clock) -> Arc<dyn Store> {
        Arc::new(Metered::new(store, &self.0.store, clock))
    }

    /// The metrics of the locks of this kind without a label.
    pub(crate) fn lock(&self, kind: Kind) -> LockTelemetry {
        match Kind::ALL.iter().position(|known| *known == kind) {
            Some(at) => self.0.by_kind[at].clone(),
            // The admission queue of a quorum is part of the attempt that waits in it.
            None => LockTelemetry(None),
        }
    }

    /// The metrics of the locks of this kind with this label.
    pub(crate) fn labelled_lock(&self, kind: Kind, label: &str) -> LockTelemetry {
        let mut known = self.0.by_label.lock().unwrap_or_else(PoisonError::into_inner);
        let label = if known.len() < MAX_LABELS || known.contains_key(&(kind, label.to_owned())) {
            label
        } else {
            OTHER
        };
        known.entry((kind, label.to_owned())).or_insert_with(|| register(&self.0.store, kind, label)).clone()
    }

    /// Counts a renewal. Other commands are counted by the callers that know their lock.
    pub(crate) fn answered(&self, command: &Command, took: Duration, answered: &CallResult) {
        if !matches!(command, Command::Renew(_)) {
            return;
        }
        let renewals = &self.0.renewals;
        match renewal_outcome(answered) {
            "ok" => renewals.ok.increment(1),
            "lost" => renewals.lost.increment(1),
            _ => renewals.failed.increment(1),
        }
        renewals.latency.record(took);
    }

    pub(crate) fn lost(&self, kind: Kind, loss: Loss) {
        let cause = match loss {
            Loss::Expired => "expired",
            Loss::Gone => "gone",
            Loss::MaxHold => "max_hold",
            Loss::Closed => "closed",
            Loss::Bridge => "bridge",
            _ => "other",
        };
        // A loss is rare enough for a look-up.
        lost(&self.0.store, kind, cause).increment(1);
    }

    pub(crate) fn reconnected(&self) {
        self.0.reconnects.increment(1);
    }
}

/// The metrics of the locks of one kind with one label, with the value 0.
fn register(store: &Arc<str>, kind: Kind, label: &str) -> LockTelemetry {
    let labels = [
        Label::new("store", store.clone()),
        Label::from_static_parts("kind", kind.as_str()),
        Label::new("label", label.to_owned()),
    ];
    let outcome = |outcome: AttemptOutcome| {
        let outcome = Label::from_static_parts("outcome", outcome.as_str());
        counter!(names::ACQUISITIONS, labels.iter().cloned().chain([outcome]).collect::<Vec<_>>())
    };
    let labels = || labels.to_vec();
    LockTelemetry(Some(Arc::new(LockHandles {
        outcomes: Outcomes {
            immediate: outcome(AttemptOutcome::Immediate),
            waited: outcome(AttemptOutcome::Waited),
            busy: outcome(AttemptOutcome::Busy),
            timed_out: outcome(AttemptOutcome::TimedOut),
            unavailable: outcome(AttemptOutcome::Unavailable),
            failed: outcome(AttemptOutcome::Failed),
            cancelled: outcome(AttemptOutcome::Cancelled),
        },
        wait: histogram!(names::WAIT, labels()),
        hold: histogram!(names::HOLD, labels()),
        handoff: histogram!(names::HANDOFF, labels()),
        leases_held: gauge!(names::LEASES_HELD, labels()),
        attempts_waiting: gauge!(names::ATTEMPTS_WAITING, labels()),
        local_handoffs: counter!(names::LOCAL_HANDOFFS, labels()),
    })))
}

/// The losses of the locks of one kind.
fn lost(store: &Arc<str>, kind: Kind, cause: &'static str) -> Counter {
    counter!(names::LEASES_LOST, "store" => store.clone(), "kind" => kind.as_str(), "cause" => cause)
}

/// The metrics of all locks of one kind with one label. None for what is not a lock of the caller.
#[derive(Clone)]
pub(crate) struct LockTelemetry(Option<Arc<LockHandles>>);

struct LockHandles {
    outcomes: Outcomes,
    wait: Histogram,
    hold: Histogram,
    handoff: Histogram,
    leases_held: Gauge,
    attempts_waiting: Gauge,
    local_handoffs: Counter,
}

/// `leasehold_acquisitions_total` by outcome.
struct Outcomes {
    immediate: Counter,
    waited: Counter,
    busy: Counter,
    timed_out: Counter,
    unavailable: Counter,
    failed: Counter,
    cancelled: Counter,
}

impl Outcomes {
    fn of(&self, outcome: AttemptOutcome) -> &Counter {
        match outcome {
            AttemptOutcome::Immediate => &self.immediate,
            AttemptOutcome::Waited => &self.waited,
            AttemptOutcome::Busy => &self.busy,
            AttemptOutcome::TimedOut => &self.timed_out,
            AttemptOutcome::Unavailable => &self.unavailable,
            AttemptOutcome::Failed => &self.failed,
            AttemptOutcome::Cancelled => &self.cancelled,
        }
    }
}

impl LockTelemetry {
    pub(crate) const IS_ON: bool = true;

    /// Counts a task as waiting until the result is dropped.
    pub(crate) fn waits(&self) -> Waiting {
        if let Some(handles) = &self.0 {
            handles.attempts_waiting.increment(1);
        }
        Waiting(self.0.clone())
    }

    /// Counts the end of an attempt. `waited`: the time until the grant.
    pub(crate) fn ended(&self, outcome: AttemptOutcome, waited: Option<Duration>) {
        let Some(handles) = &self.0 else { return };
        handles.outcomes.of(outcome).increment(1);
        if let Some(waited) = waited {
            handles.wait.record(waited);
        }
    }

    /// Records the time from the store's grant until the waiter's task ran.
    pub(crate) fn handed_over(&self, latency: Duration) {
        if let Some(handles) = &self.0 {
            handles.handoff.record(latency);
        }
    }

    /// Begins a hold.
    pub(crate) fn hold(&self, now: LocalTime) -> Hold {
        if let Some(handles) = &self.0 {
            handles.leases_held.increment(1);
        }
        Hold(self.0.clone().map(|handles| (handles, now)))
    }
}

/// A task that waits.
pub(crate) struct Waiting(Option<Arc<LockHandles>>);

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(handles) = &self.0 {
            handles.attempts_waiting.decrement(1);
        }
    }
}

/// A hold that has begun and not ended.
pub(crate) struct Hold(Option<(Arc<LockHandles>, LocalTime)>);

impl Hold {
    /// Counts nothing.
    pub(crate) const fn none() -> Self {
        Self(None)
    }

    /// Counts a hand-off to another task of the client.
    pub(crate) fn handed_off(&self) {
        if let Some((handles, _)) = &self.0 {
            handles.local_handoffs.increment(1);
        }
    }

    /// Ends the hold. A second call does nothing, and does not read the clock.
    pub(crate) fn end(&mut self, now: impl FnOnce() -> LocalTime) {
        if let Some((handles, since)) = self.0.take() {
            handles.leases_held.decrement(1);
            handles.hold.record(now().since(since));
        }
    }
}
