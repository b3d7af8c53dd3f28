//! Acquires a lock: alone, through the admission queue of a quorum, or through the client's local queue, in which the lease is
//! handed off from task to task.
//!
//! The session decides which task of a local queue is next and with which token; this file waits for that on behalf of one
//! task.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{HandoffLimits, Kind, LocalTime, Outcome, Resource};

use crate::engine::{
    AcquireKey, CancelledWait, EnqueueError, Request, Ticket, WaitOutcome, release_dropped, with_deadline,
};
use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::attempt::{Attempt, CANCEL_LIMIT};
use crate::locks::lock::{AttemptIds, Lock, WaitMode};
use crate::telemetry::{LockTelemetry, spans};

impl Lock {
    pub(crate) async fn lock(&self, weight: u32) -> Result<Guard, Error> {
        let guard = self.acquire(weight, None, WaitMode::Forever).await?;
        guard.ok_or_else(|| self.handle.closed())
    }

    pub(crate) async fn try_lock(&self, weight: u32) -> Result<Option<Guard>, Error> {
        self.acquire(weight, None, WaitMode::NoWait).await
    }

    pub(crate) async fn lock_timeout(&self, weight: u32, limit: Duration) -> Result<Option<Guard>, Error> {
        self.acquire(weight, None, WaitMode::AtMost(limit)).await
    }

    /// Futures of rare paths are boxed, because every caller's future has room for all of them, and is copied.
    pub(crate) async fn acquire(
        &self,
        weight: u32,
        replaces: Option<&Guard>,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        let resource = self.check(weight)?;
        let span = spans::acquire(resource, &self.handle.url);
        let attempt = pin!(self.acquire_checked(resource, weight, replaces, wait));
        if !LockTelemetry::IS_ON && span.is_disabled() {
            return attempt.await;
        }
        self.observe(wait, span, attempt).await
    }

    async fn acquire_checked(
        &self,
        resource: &Arc<Resource>,
        weight: u32,
        replaces: Option<&Guard>,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        if let Some(foreign) = &self.bridge {
            return Box::pin(self.acquire_bridged(resource, foreign, weight, wait)).await;
        }
        if self.handle.capabilities.needs_admission_queue && resource.kind != Kind::Admission {
            return Box::pin(self.acquire_with_admission(weight, wait)).await;
        }
        if let Some(hand_off) = self.handoff_limits().filter(|_| replaces.is_none()) {
            let key = self.acquire_key(resource, hand_off);
            let now = self.handle.now();
            if let Some(deadline) = wait.deadline(now) {
                return self.acquire_queued(resource, key, deadline, now).await;
            }
            if self.handle.session.holds_lease(&key, now) {
                return Ok(None);
            }
        }
        Box::pin(self.attempt(resource, weight, replaces, wait)).await
    }

    /// The limits for handing a lease off between this client's tasks; none if each task needs a lease of its own.
    ///
    /// An owner, a maximum or a minimum hold belongs to one holder. A lease without renewal would be almost over when the next
    /// task gets it.
    pub(crate) fn handoff_limits(&self) -> Option<HandoffLimits> {
        let is_plain = self.owner.is_none()
            && self.ids == AttemptIds::Counted
            && self.terms.renews
            && self.terms.max_hold.is_none()
            && self.terms.min_lifetime.is_zero()
            && self.min_hold.is_zero();
        self.hand_off.filter(|_| is_plain)
    }

    pub(crate) fn acquire_key(&self, resource: &Arc<Resource>, hand_off: HandoffLimits) -> AcquireKey {
        AcquireKey {
            hash: self.resource_hash,
            resource: resource.clone(),
            terms: self.terms,
            wait: self.wait_for(),
            wait_policy: self.wait_policy(LocalTime::NEVER),
            metadata: self.metadata.clone(),
            hand_off,
        }
    }

    /// Waits in the client's local queue, in FIFO order.
    async fn acquire_queued(
        &self,
        resource: &Arc<Resource>,
        key: AcquireKey,
        deadline: LocalTime,
        now: LocalTime,
    ) -> Result<Option<Guard>, Error> {
        let handle = &self.handle;
        let (ticket, transmit) = handle.session.enqueue(key, now).map_err(|refused| match refused {
            EnqueueError::Closed => handle.closed(),
            EnqueueError::QueueFull => self.failed(resource, Outcome::QueueFull, None),
        })?;
        let request = Request::send(&handle.session, &*handle.store, resource, transmit).polled_by(ticket);
        let mut waiting = QueuedTask { handle, resource, ticket, request, is_over: false };
        match waiting.wait(deadline).await {
            Some(WaitOutcome::Granted(lease, token)) => {
                waiting.is_over = true;
                tracing::debug!(%resource, %token, "lease granted");
                Ok(Some(Guard::new(handle.clone(), lease, resource.clone(), token, Some(ticket.queue))))
            }
            Some(WaitOutcome::Ended((outcome, last_error))) => {
                waiting.is_over = true;
                Err(self.failed(resource, outcome, last_error.as_ref()))
            }
            None => Box::pin(self.time_out(resource, waiting)).await,
        }
    }

    /// Ends a wait at its deadline: `None` if the store confirms within [`CANCEL_LIMIT`] that the lock was not granted.
    async fn time_out(
        &self,
        resource: &Arc<Resource>,
        mut waiting: QueuedTask<'_>,
    ) -> Result<Option<Guard>, Error> {
        let unknown = || Err(self.failed(resource, Outcome::TimedOut, None));
        let until = self.handle.now() + CANCEL_LIMIT;
        match waiting.leave() {
            CancelledWait::LeaseInUse => return Ok(None),
            CancelledWait::LastWaiter { entry, may_be_in_store } => {
                let attempt = Attempt::of_queue(&self.handle, resource, entry);
                if let Err(why) = attempt.cancel(until).await {
                    return Err(self.failed(resource, Outcome::TimedOut, why.as_ref()));
                }
                if may_be_in_store {
                    return Ok(None);
                }
                // The driver has not sent it yet, so the store has said nothing.
            }
            // The attempt continues for the other tasks, and its last response may be old.
            CancelledWait::AttemptContinues => {}
        }
        // Asks the store once more. This attempt does not wait, so it overtakes no waiter in the store's queue.
        let tried = self.attempt(resource, 1, None, WaitMode::NoWait);
        with_deadline(&self.handle.session, Some(until), tried).await.unwrap_or_else(unknown)
    }
}

/// A task in a local queue. Dropping it cancels the wait and releases a lease that was assigned to it.
struct QueuedTask<'a> {
    handle: &'a Arc<Handle>,
    resource: &'a Arc<Resource>,
    ticket: Ticket,
    /// The first task of a queue sends it for all of them.
    request: Request<'a>,
    is_over: bool,
}

impl QueuedTask<'_> {
    /// Waits for an assignment; `None` at the deadline.
    async fn wait(&mut self, deadline: LocalTime) -> Option<WaitOutcome> {
        let session = &self.handle.session;
        let assigned = poll_fn(|context| {
            self.request.poll_response(context);
            session.poll_wait(self.ticket, context)
        });
        with_deadline(session, Some(deadline), assigned).await
    }

    /// Leaves the queue. The caller cancels the attempt, or releases the lease, if no other task waits.
    fn leave(&mut self) -> CancelledWait {
        self.is_over = true;
        let cancelled = self.handle.session.cancel_wait(self.ticket, self.handle.now());
        if let CancelledWait::LeaseInUse | CancelledWait::AttemptContinues = cancelled {
            // The other tasks need the response, which this task no longer polls for.
            self.request.abandon();
        }
        cancelled
    }
}

impl Drop for QueuedTask<'_> {
    fn drop(&mut self) {
        if !self.is_over
            && let CancelledWait::LastWaiter { entry, .. } = self.leave()
        {
            release_dropped(&self.handle.session, &*self.handle.store, self.resource, entry);
        }
    }
}
