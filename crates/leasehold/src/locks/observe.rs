//! Counts an attempt and its hold, and measures them.

use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;

use leasehold_core::LocalTime;

use crate::engine::QueuedGrant;
use crate::error::Error;
use crate::guard::Guard;
use crate::locks::lock::{Lock, WaitMode};
use crate::telemetry::{AttemptOutcome, LockTelemetry};

impl Lock {
    /// Counts a grant that needed one command.
    pub(super) fn granted_at_once(&self, guard: &mut Guard, started: LocalTime) {
        if LockTelemetry::IS_ON {
            let now = self.handle.now();
            self.granted(guard, None, now.since(started), now);
        }
    }

    /// Runs an attempt, and counts how it ended. A dropped attempt counts as cancelled.
    pub(super) async fn observe(
        &self,
        wait: WaitMode,
        attempt: impl Future<Output = Result<Option<Guard>, Error>>,
    ) -> Result<Option<Guard>, Error> {
        if !LockTelemetry::IS_ON {
            return attempt.await;
        }
        let started = self.handle.now();
        let mut observed = Observed { lock: self, is_over: false };
        // A task that is granted the lock at its first poll has not waited, and needs no second look at the clock.
        let mut waiting = None;
        let mut attempt = pin!(attempt);
        let mut ended = poll_fn(|context| {
            let polled = attempt.as_mut().poll(context);
            if polled.is_pending() {
                waiting.get_or_insert_with(|| self.telemetry.waits());
            }
            polled
        })
        .await;
        observed.is_over = true;
        match &mut ended {
            Ok(Some(guard)) => {
                let now = if waiting.is_some() { self.handle.now() } else { started };
                let queued = if waiting.is_some() { guard.queued_grant() } else { None };
                self.granted(guard, queued, now.since(started), now);
            }
            Ok(None) if matches!(wait, WaitMode::NoWait) => self.telemetry.ended(AttemptOutcome::Busy, None),
            Ok(None) => self.telemetry.ended(AttemptOutcome::TimedOut, None),
            Err(error) if error.is_unavailable() => {
                self.telemetry.ended(AttemptOutcome::Unavailable, None);
            }
            Err(_) => self.telemetry.ended(AttemptOutcome::Failed, None),
        }
        ended
    }

    /// Counts a grant, and begins the guard's hold.
    fn granted(&self, guard: &mut Guard, queued: Option<QueuedGrant>, waited: Duration, now: LocalTime) {
        let outcome = if queued.is_some() { AttemptOutcome::Waited } else { AttemptOutcome::Immediate };
        self.telemetry.ended(outcome, Some(waited));
        if let Some(QueuedGrant { granted_at: Some(granted_at) }) = queued {
            self.telemetry.handed_over(now.since(granted_at));
        }
        guard.begin_hold(self.telemetry.hold(now));
    }
}

/// An attempt in progress.
struct Observed<'a> {
    lock: &'a Lock,
    is_over: bool,
}

impl Drop for Observed<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.lock.telemetry.ended(AttemptOutcome::Cancelled, None);
        }
    }
}
