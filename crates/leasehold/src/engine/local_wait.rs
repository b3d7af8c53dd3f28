//! A task's wait in a local queue: joining it, waiting, cancelling, and handing the lease to the next task.

use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use leasehold_core::{LocalTime, Outcome};

use super::entry::Transmit;
use super::local_queue::{
    AcquireKey, CancelledWait, EnqueueError, LocalQueue, QueueState, Ticket, WaitOutcome,
};
use super::session::Session;
use super::table::Effects;

impl Session {
    /// Joins the end of a local queue. The first task also gets the command to send.
    pub(crate) fn enqueue(
        &self,
        key: AcquireKey,
        now: LocalTime,
    ) -> Result<(Ticket, Option<Transmit>), EnqueueError> {
        let number = self.sequence.fetch_add(1, Ordering::Relaxed);
        let mut effects = Effects::default();
        let enqueued = self.table().enqueue(key, number, now, &mut effects);
        self.apply_effects(effects);
        enqueued
    }

    /// Whether a task of this client has the lease, so that an attempt without waiting need not ask the store.
    pub(crate) fn holds_lease(&self, key: &AcquireKey) -> bool {
        let table = self.table();
        let queue = table.local_queues.find(key).and_then(|id| table.local_queues.by_id.get(&id));
        queue.is_some_and(|queue| !matches!(queue.state, QueueState::Idle | QueueState::Acquiring(_)))
    }

    pub(crate) fn poll_wait(&self, ticket: Ticket, context: &mut Context<'_>) -> Poll<WaitOutcome> {
        let replaced;
        {
            let mut table = self.table();
            let Some(queue) = table.local_queues.by_id.get_mut(&ticket.queue) else {
                return Poll::Ready(WaitOutcome::Ended((Outcome::Cancelled, None)));
            };
            if let QueueState::Assigned { lease, number, token } = queue.state
                && number == ticket.number
            {
                queue.state = QueueState::Held(lease);
                replaced = queue.waiting.remove(&number);
                drop(table);
                drop(replaced);
                return Poll::Ready(WaitOutcome::Granted(lease, token));
            }
            if let Some(ended) = queue.ended.remove(&ticket.number) {
                table.local_queues.remove_if_empty(ticket.queue);
                return Poll::Ready(WaitOutcome::Ended(ended));
            }
            replaced = queue.waiting.insert(ticket.number, Some(context.waker().clone()));
        }
        // Dropping a waker may drop its task, and with it a guard of this session, which takes the mutex.
        drop(replaced);
        Poll::Pending
    }

    /// Takes a task out of its local queue.
    pub(crate) fn cancel_wait(&self, ticket: Ticket, now: LocalTime) -> CancelledWait {
        let mut effects = Effects::default();
        let (cancelled, waker) = {
            let mut table = self.table();
            let queue = table.local_queues.by_id.get_mut(&ticket.queue);
            let waker = queue.and_then(|queue| queue.waiting.remove(&ticket.number));
            (table.cancel_wait(ticket, now, &mut effects), waker)
        };
        drop(waker);
        self.apply_effects(effects);
        cancelled
    }

    /// Ends a task's hold of this lease. Returns whether the queue keeps the lease for its next task.
    pub(crate) fn hand_off(&self, queue: u64, lease: u64, now: LocalTime) -> bool {
        let mut effects = Effects::default();
        let is_handed_off = {
            let mut table = self.table();
            let has_lease =
                |queue: &LocalQueue| matches!(queue.state, QueueState::Held(held) if held == lease);
            let is_handed_off = table.local_queues.by_id.get(&queue).is_some_and(has_lease)
                && table.hand_off(queue, lease, now, &mut effects);
            table.reconcile(lease, now, &mut effects);
            is_handed_off
        };
        self.apply_effects(effects);
        is_handed_off
    }
}
