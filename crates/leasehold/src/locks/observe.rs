//! Counts an attempt and its hold, measures them, and traces them.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::time::Duration;

use leasehold_core::LocalTime;
use tracing::{Instrument as _, Span};

use crate::engine::QueuedGrant;
use crate::error::Error;
use crate::guard::Guard;
use crate::locks::lock::{Lock, WaitMode};
use crate::telemetry::{AttemptOutcome, spans};

impl Lock {
    /// Counts a grant that needed one command.
    pub(super) fn granted_at_once(&self, guard: &mut Guard, started: LocalTime) {
        let now = self.handle.now();
        self.granted(guard, None, now.since(started), now, &Span::none());
    }

    /// Runs an attempt in its span, and counts how it ended. A dropped attempt counts as cancelled. The attempt is borrowed, because
    /// this future would have room for it twice.
    pub(super) async fn observe(
        &self,
        wait: WaitMode,
        span: Span,
        attempt: Pin<&mut impl Future<Output = Result<Option<Guard>, Error>>>,
    ) -> Result<Option<Guard>, Error> {
        let started = self.handle.now();
        let mut observed = Observed { lock: self, span: Some(&span), is_over: false };
        // A task that is granted the lock at its first poll has not waited, and needs no second look at the clock.
        let mut waiting = None;
        let mut attempt = pin!(attempt.instrument(span.clone()));
        let mut ended = poll_fn(|context| {
            let polled = attempt.as_mut().poll(context);
            if polled.is_pending() {
                waiting.get_or_insert_with(|| self.telemetry.waits());
            }
            polled
        })
        .await;
        match &mut ended {
            Ok(Some(guard)) => {
                let now = if waiting.is_some() { self.handle.now() } else { started };
                let queued = if waiting.is_some() { guard.queued_grant() } else { None };
                observed.is_over = true;
                self.granted(guard, queued, now.since(started), now, &span);
            }
            Ok(None) => observed.end(wait.not_granted()),
            Err(error) => observed.end(failed(error)),
        }
        ended
    }

    /// Counts a grant, and begins the guard's hold.
    fn granted(
        &self,
        guard: &mut Guard,
        queued: Option<QueuedGrant>,
        waited: Duration,
        now: LocalTime,
        span: &Span,
    ) {
        let outcome = if queued.is_some() { AttemptOutcome::Waited } else { AttemptOutcome::Immediate };
        self.telemetry.ended(outcome, Some(waited));
        spans::record_outcome(span, outcome);
        spans::record_grant(span, guard.token(), waited);
        if let Some(QueuedGrant { granted_at: Some(granted_at) }) = queued {
            self.telemetry.handed_over(now.since(granted_at));
        }
        guard.begin_hold(self.telemetry.hold(now), span);
    }
}

impl WaitMode {
    /// How an attempt that ended without the lock, and without an error, ended.
    fn not_granted(self) -> AttemptOutcome {
        if matches!(self, Self::NoWait) { AttemptOutcome::Busy } else { AttemptOutcome::TimedOut }
    }
}

fn failed(error: &Error) -> AttemptOutcome {
    if error.is_unavailable() { AttemptOutcome::Unavailable } else { AttemptOutcome::Failed }
}

/// An attempt in progress.
struct Observed<'a> {
    lock: &'a Lock,
    span: Option<&'a Span>,
    is_over: bool,
}

impl Observed<'_> {
    fn end(&mut self, outcome: AttemptOutcome) {
        self.is_over = true;
        self.lock.telemetry.ended(outcome, None);
        if let Some(span) = self.span {
            spans::record_outcome(span, outcome);
        }
    }
}

/// One command in progress for several locks. Dropped, it counts as cancelled for each of them.
pub(super) struct ObservedBatch<'a>(Vec<Observed<'a>>);

impl<'a> ObservedBatch<'a> {
    pub(super) fn begin(locks: &[&'a Lock]) -> Self {
        Self(locks.iter().map(|lock| Observed { lock, span: None, is_over: false }).collect())
    }

    /// The locks were granted, which is counted elsewhere, or each of them has an attempt of its own now.
    pub(super) fn leave(mut self) {
        for observed in &mut self.0 {
            observed.is_over = true;
        }
    }

    pub(super) fn not_granted(mut self, wait: WaitMode) {
        for observed in &mut self.0 {
            observed.end(wait.not_granted());
        }
    }

    pub(super) fn failed(mut self, error: &Error) {
        for observed in &mut self.0 {
            observed.end(failed(error));
        }
    }
}

impl Drop for Observed<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.end(AttemptOutcome::Cancelled);
        }
    }
}
