//! Without the feature `metrics`: nothing is counted, and nothing is stored.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Command, Kind, LocalTime, Loss};
use leasehold_store::clock::Clock;
use leasehold_store::{CallResult, Store};

use super::AttemptOutcome;

#[derive(Clone, Debug)]
pub(crate) struct ClientTelemetry;

impl ClientTelemetry {
    pub(crate) fn new(_url: &str) -> Self {
        Self
    }

    pub(crate) fn meter(&self, store: Arc<dyn Store>, _clock: Clock) -> Arc<dyn Store> {
        store
    }

    pub(crate) fn lock(&self, _kind: Kind) -> LockTelemetry {
        LockTelemetry
    }

    pub(crate) fn labelled_lock(&self, _kind: Kind, _label: &str) -> LockTelemetry {
        LockTelemetry
    }

    pub(crate) fn answered(&self, _command: &Command, _took: Duration, _answered: &CallResult) {}

    pub(crate) fn lost(&self, _kind: Kind, _loss: Loss) {}

    pub(crate) fn reconnected(&self) {}
}

#[derive(Clone, Debug)]
pub(crate) struct LockTelemetry;

impl LockTelemetry {
    pub(crate) const IS_ON: bool = false;

    pub(crate) fn waits(&self) -> Waiting {
        Waiting
    }

    pub(crate) fn ended(&self, _outcome: AttemptOutcome, _waited: Option<Duration>) {}

    pub(crate) fn handed_over(&self, _latency: Duration) {}

    pub(crate) fn hold(&self, _now: LocalTime) -> Hold {
        Hold
    }
}

pub(crate) struct Waiting;

pub(crate) struct Hold;

impl Hold {
    pub(crate) const fn none() -> Self {
        Self
    }

    pub(crate) fn handed_off(&self) {}

    pub(crate) fn end(&mut self, _now: impl FnOnce() -> LocalTime) {}
}
