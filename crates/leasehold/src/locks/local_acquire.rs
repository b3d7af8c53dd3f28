//! Acquires a lock through the client's local queue, in which the lease is handed off from task to task.
//!
//! The session decides which task is next and with which token; this file waits for that on behalf of one task.

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use leasehold_core::{Failure, HandoffLimits, LocalTime, Outcome, Resource, WaitFor, WaitPolicy};

use crate::engine::clock;
use crate::engine::{AcquireKey, CancelledWait, EnqueueError, Request, Sleep, Ticket, WaitOutcome};
use crate::error::Error;
use crate::guard::Guard;
use crate::handle::{Handle, missing_response};
use crate::locks::acquire::{CANCEL_LIMIT, await_cancellation};
use crate::locks::acquire_all::with_deadline;
use crate::locks::lock::{Lock, WaitMode};
use crate::store::{BoxFuture, CallResult, StoreError};

impl Lock {
    /// The limits for handing a lease off between this client's tasks; none if each task needs a lease of its own.
    ///
    /// An owner, a maximum or a minimum hold belongs to one holder. A lease without renewal would be almost over when the next
    /// task gets it.
    pub(crate) fn handoff_limits(&self) -> Option<HandoffLimits> {
        let is_plain = self.owner.is_none()
            && self.terms.renews
            && self.terms.max_hold.is_none()
            && self.terms.min_lifetime.is_zero()
            && self.min_hold.is_zero();
        self.hand_off.filter(|_| is_plain)
    }

    pub(crate) fn acquire_key(&self, resource: &Arc<Resource>, hand_off: HandoffLimits) -> AcquireKey {
        let intervals = self.handle.store.poll_intervals();
        AcquireKey {
            resource: resource.clone(),
            terms: self.terms,
            wait: WaitFor { entry_ttl: intervals.entry_ttl, max_queue: self.max_waiters },
            patience: WaitPolicy {
                deadline: LocalTime::NEVER,
                repoll_interval: intervals.repoll_interval,
                confirms_pushes: self.terms.replicas > 0,
            },
            metadata: self.metadata.clone(),
            hand_off,
        }
    }

    /// Waits in the client's local queue, in FIFO order.
    pub(crate) async fn acquire_queued(
        &self,
        resource: &Arc<Resource>,
        key: AcquireKey,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        let handle = &self.handle;
        let deadline = wait.deadline().unwrap_or(LocalTime::NEVER);
        let (ticket, request) =
            handle.session.enqueue(key, clock::local()).map_err(|refused| match refused {
                EnqueueError::Closed => handle.closed(),
                EnqueueError::QueueFull => self.failed(resource, Outcome::QueueFull, None),
            })?;
        let mut waiting = QueuedTask { handle, resource, ticket, call: None, is_over: false };
        match waiting.wait(request, deadline).await {
            Some(WaitOutcome::Granted(lease, token)) => {
                waiting.is_over = true;
                tracing::debug!(%resource, %token, "lease granted");
                Ok(Some(Guard::from_local_queue(
                    handle.clone(),
                    lease,
                    resource.clone(),
                    token,
                    ticket.queue,
                )))
            }
            Some(WaitOutcome::Ended((outcome, last_error))) => {
                waiting.is_over = true;
                Err(self.failed(resource, outcome, last_error.as_ref()))
            }
            None => self.time_out(resource, waiting).await,
        }
    }

    /// Ends a wait at its deadline: `None` if the store confirms within [`CANCEL_LIMIT`] that the lock was not granted.
    async fn time_out(
        &self,
        resource: &Arc<Resource>,
        mut waiting: QueuedTask<'_>,
    ) -> Result<Option<Guard>, Error> {
        let unknown = || Err(self.failed(resource, Outcome::TimedOut, None));
        let until = clock::local() + CANCEL_LIMIT;
        match waiting.cancel() {
            CancelledWait::LeaseInUse => Ok(None),
            CancelledWait::LastWaiter { sequence, may_be_in_store } => {
                if await_cancellation(&self.handle, sequence, until).await && may_be_in_store {
                    Ok(None)
                } else {
                    unknown()
                }
            }
            // The attempt goes on for the other tasks, and its last response may be old: ask the store once more. This attempt
            // does not wait, so it overtakes no waiter in the store's queue.
            CancelledWait::AttemptContinues => {
                let tried = self.attempt(resource, 1, None, WaitMode::NoWait);
                with_deadline(&self.handle, Some(until), tried).await.unwrap_or_else(unknown)
            }
        }
    }
}

/// A task in a local queue. Dropping it cancels the wait and releases a lease that was assigned to it.
struct QueuedTask<'a> {
    handle: &'a Arc<Handle>,
    resource: &'a Arc<Resource>,
    ticket: Ticket,
    /// The request that the first task of a queue sends for all of them.
    call: Option<(Request, BoxFuture<Vec<CallResult>>)>,
    is_over: bool,
}

impl QueuedTask<'_> {
    /// Waits for an assignment; `None` at the deadline.
    async fn wait(&mut self, request: Option<Request>, deadline: LocalTime) -> Option<WaitOutcome> {
        let (session, store) = (&self.handle.session, &self.handle.store);
        if let Some(request) = request {
            match store.try_call_inline(self.resource, &request.command) {
                Some(answered) => drop(session.handle_response(&request, clock::local(), &answered)),
                None => {
                    let batch = vec![(self.resource.clone(), request.command.clone())];
                    let sent = store.call_replicated(batch, request.replicas);
                    self.call = Some((request, sent));
                }
            }
        }
        let mut limit = (deadline != LocalTime::NEVER).then(|| Sleep::until(session, deadline));
        poll_fn(|context| {
            if let Some((request, sent)) = &mut self.call
                && let Poll::Ready(mut answers) = sent.as_mut().poll(context)
            {
                let answered = answers.pop().unwrap_or_else(missing_response);
                session.handle_response(request, clock::local(), &answered);
                self.call = None;
            }
            if let Poll::Ready(outcome) = session.poll_wait(self.ticket, context) {
                return Poll::Ready(Some(outcome));
            }
            match &mut limit {
                Some(limit) => Pin::new(limit).poll(context).map(|()| None),
                None => Poll::Pending,
            }
        })
        .await
    }

    fn cancel(&mut self) -> CancelledWait {
        self.is_over = true;
        let cancelled = self.handle.session.cancel_wait(self.ticket, clock::local());
        match (&cancelled, self.call.take()) {
            (CancelledWait::LastWaiter { sequence, .. }, _) => self.handle.abandon(self.resource, *sequence),
            (CancelledWait::LeaseInUse | CancelledWait::AttemptContinues, Some((request, _))) => {
                // The other tasks need the response, which this task no longer polls for: the driver asks again.
                let message = "the task that sent the request was cancelled".to_owned();
                let lost = Err(StoreError::new(Failure::Unknown, message));
                self.handle.session.handle_response(&request, clock::local(), &lost);
            }
            (CancelledWait::LeaseInUse | CancelledWait::AttemptContinues, None) => {}
        }
        cancelled
    }
}

impl Drop for QueuedTask<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.cancel();
        }
    }
}
