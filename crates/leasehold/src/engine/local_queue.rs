//! FIFO queue of this client's tasks for one lock, so that the client needs one place in the store's queue.
//!
//! The queue owns the store attempt and the lease; tasks only borrow the lease. A task that is dropped, or that stops being
//! polled, therefore never blocks the tasks behind it. The driver sends what the queue asks the store while no task is
//! polled. An empty queue is removed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, HandoffBudget, HandoffDecision, HandoffLimits, LeaseTerms,
    LocalTime, Outcome, Resource, Token, WaitFor, WaitPolicy,
};

use super::entry::Entry;
use super::session::{AttemptEnd, Request, Session};
use super::table::{Effects, Table};
use crate::store::StoreError;

/// What a queue's tasks ask the store for. Tasks with equal keys share a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AcquireKey {
    pub(crate) resource: Arc<Resource>,
    pub(crate) terms: LeaseTerms,
    pub(crate) wait: WaitFor,
    /// The policy of the queue's attempt: each task has a deadline of its own.
    pub(crate) patience: WaitPolicy,
    pub(crate) metadata: Arc<str>,
    pub(crate) hand_off: HandoffLimits,
}

/// A task's place in a local queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) queue: u64,
    number: u64,
}

/// Why a task can't join a local queue.
pub(crate) enum EnqueueError {
    Closed,
    QueueFull,
}

/// How the wait in a local queue ended.
pub(crate) enum WaitOutcome {
    /// This lease is assigned to the task, with this token.
    Granted(u64, Token),
    Ended(AttemptEnd),
}

/// The state of a local queue after one of its tasks cancelled its wait.
pub(crate) enum CancelledWait {
    /// Another task of the client has the lease.
    LeaseInUse,
    /// The attempt goes on for the tasks that still wait.
    AttemptContinues,
    /// No task is left: the entry must be released. `may_be_in_store`: the store may have received the attempt.
    LastWaiter { sequence: u64, may_be_in_store: bool },
}

/// All local queues of a client.
#[derive(Default)]
pub(super) struct LocalQueues {
    by_id: BTreeMap<u64, LocalQueue>,
    /// Usually one per resource: most tasks that use a lock use it with the same options.
    by_resource: HashMap<Arc<Resource>, Vec<u64>>,
}

struct LocalQueue {
    key: AcquireKey,
    state: QueueState,
    /// By ticket number. A task stays in here until it has seen its assignment.
    waiting: BTreeMap<u64, Option<Waker>>,
    /// How the attempt ended, for each task that waited for it and has not been polled since.
    ended: BTreeMap<u64, AttemptEnd>,
}

#[derive(Clone, Copy, Debug)]
enum QueueState {
    Idle,
    /// An acquire for the whole queue is in flight, or queued in the store.
    Acquiring(u64),
    /// The lease is the queue's, but its token range is used up: a renewal is fetching more.
    AwaitingTokens(u64),
    /// The lease is assigned to the task with this ticket number, which has not been polled since.
    Assigned {
        lease: u64,
        number: u64,
        token: Token,
    },
    /// A task holds the lease.
    Held(u64),
}

impl LocalQueues {
    fn find(&self, key: &AcquireKey) -> Option<u64> {
        let ids = self.by_resource.get(&key.resource)?;
        ids.iter().copied().find(|id| self.by_id.get(id).is_some_and(|queue| queue.key == *key))
    }

    fn add(&mut self, id: u64, key: AcquireKey) {
        self.by_resource.entry(key.resource.clone()).or_default().push(id);
        let queue =
            LocalQueue { key, state: QueueState::Idle, waiting: BTreeMap::new(), ended: BTreeMap::new() };
        self.by_id.insert(id, queue);
    }

    fn remove_if_empty(&mut self, id: u64) {
        let Some(queue) = self.by_id.get(&id).filter(|queue| queue.is_empty()) else { return };
        if let Some(ids) = self.by_resource.get_mut(&queue.key.resource) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_resource.remove(&queue.key.resource);
            }
        }
        self.by_id.remove(&id);
    }
}

impl LocalQueue {
    fn is_empty(&self) -> bool {
        matches!(self.state, QueueState::Idle) && self.waiting.is_empty() && self.ended.is_empty()
    }

    /// The table entry of the queue's attempt or lease.
    fn entry(&self) -> Option<u64> {
        match self.state {
            QueueState::Idle => None,
            QueueState::Acquiring(sequence)
            | QueueState::AwaitingTokens(sequence)
            | QueueState::Held(sequence) => Some(sequence),
            QueueState::Assigned { lease, .. } => Some(lease),
        }
    }

    /// Assigns the lease to the first waiting task.
    fn assign(&mut self, lease: u64, token: Token, effects: &mut Effects) {
        let Some((&number, waker)) = self.waiting.iter_mut().next() else { return };
        effects.wakers.extend(waker.take());
        self.state = QueueState::Assigned { lease, number, token };
    }

    /// Ends every task's wait with the outcome of the queue's attempt.
    fn end_waits(&mut self, outcome: Outcome, last_error: Option<&StoreError>, effects: &mut Effects) {
        self.state = QueueState::Idle;
        for (number, waker) in std::mem::take(&mut self.waiting) {
            self.ended.insert(number, (outcome, last_error.cloned()));
            effects.wakers.extend(waker);
        }
    }
}

impl Session {
    /// Joins the end of a local queue. The first task also gets the request to send.
    pub(crate) fn enqueue(
        &self,
        key: AcquireKey,
        now: LocalTime,
    ) -> Result<(Ticket, Option<Request>), EnqueueError> {
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

impl Table {
    fn enqueue(
        &mut self,
        key: AcquireKey,
        number: u64,
        now: LocalTime,
        effects: &mut Effects,
    ) -> Result<(Ticket, Option<Request>), EnqueueError> {
        if self.is_closed {
            return Err(EnqueueError::Closed);
        }
        let id = self.local_queues.find(&key).unwrap_or_else(|| {
            self.local_queues.add(number, key);
            number
        });
        let ticket = Ticket { queue: id, number };
        let Some(queue) = self.local_queues.by_id.get_mut(&id) else { return Err(EnqueueError::Closed) };
        let is_first = queue.entry().is_none();
        if !is_first && queue.waiting.len() >= queue.key.wait.max_queue as usize {
            return Err(EnqueueError::QueueFull);
        }
        queue.waiting.insert(number, None);
        if !is_first {
            return Ok((ticket, None));
        }
        let Some((sequence, mut entry)) = self.start_attempt(id, now) else { return Ok((ticket, None)) };
        let request = entry.poll_transmit(sequence, now);
        self.insert(sequence, entry, now, effects);
        Ok((ticket, request))
    }

    fn cancel_wait(&mut self, ticket: Ticket, now: LocalTime, effects: &mut Effects) -> CancelledWait {
        let Some(queue) = self.local_queues.by_id.get_mut(&ticket.queue) else {
            return CancelledWait::AttemptContinues;
        };
        queue.ended.remove(&ticket.number);
        let cancelled = match queue.state {
            QueueState::Assigned { lease, number, .. } if number == ticket.number => {
                let is_handed_off = self.hand_off(ticket.queue, lease, now, effects);
                self.reconcile(lease, now, effects);
                if is_handed_off {
                    CancelledWait::LeaseInUse
                } else {
                    CancelledWait::LastWaiter { sequence: lease, may_be_in_store: true }
                }
            }
            QueueState::Assigned { .. } | QueueState::Held(_) => CancelledWait::LeaseInUse,
            QueueState::Acquiring(sequence) | QueueState::AwaitingTokens(sequence)
                if queue.waiting.is_empty() =>
            {
                queue.state = QueueState::Idle;
                let may_be_in_store =
                    self.entries.get(&sequence).is_some_and(|entry| entry.may_be_in_store());
                CancelledWait::LastWaiter { sequence, may_be_in_store }
            }
            QueueState::Idle | QueueState::Acquiring(_) | QueueState::AwaitingTokens(_) => {
                CancelledWait::AttemptContinues
            }
        };
        self.local_queues.remove_if_empty(ticket.queue);
        cancelled
    }

    /// A new attempt for this queue, whose caller inserts it.
    fn start_attempt(&mut self, id: u64, now: LocalTime) -> Option<(u64, Box<Entry>)> {
        let queue = self.local_queues.by_id.get_mut(&id)?;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let key = &queue.key;
        // A single task needs no range of tokens, and unused tokens would make the counter run ahead of the clock.
        let reserve = if queue.waiting.len() > 1 { HandoffBudget::initial_reserve(key.hand_off) } else { 0 };
        let command = Acquire {
            reserve,
            wait: Some(key.wait),
            metadata: key.metadata.clone(),
            ..Acquire::exclusive(
                Acquisition { client: self.id, sequence },
                key.terms.ttl.max(key.terms.min_lifetime),
            )
        };
        let machine = AcquireMachine::new(command, Some(key.patience), now);
        let mut entry = Entry::new(key.resource.clone(), None, key.terms, Duration::ZERO, machine);
        entry.local_queue = Some((id, key.hand_off));
        queue.state = QueueState::Acquiring(sequence);
        Some((sequence, Box::new(entry)))
    }

    fn insert(&mut self, sequence: u64, entry: Box<Entry>, now: LocalTime, effects: &mut Effects) {
        self.entries.insert(sequence, entry);
        self.unsettled += 1;
        self.reconcile(sequence, now, effects);
    }

    /// Gives a lease that its task no longer uses to the next task. Returns false if the lease must be released; if tasks
    /// wait then, the queue has begun a new attempt for them.
    fn hand_off(&mut self, id: u64, lease: u64, now: LocalTime, effects: &mut Effects) -> bool {
        let Some(queue) = self.local_queues.by_id.get_mut(&id) else { return false };
        if queue.waiting.is_empty() {
            queue.state = QueueState::Idle;
            self.local_queues.remove_if_empty(id);
            return false;
        }
        match self.entries.get_mut(&lease).map_or(HandoffDecision::Release, |entry| entry.hand_off(now)) {
            HandoffDecision::Next(token) => queue.assign(lease, token, effects),
            HandoffDecision::AwaitTokens => queue.state = QueueState::AwaitingTokens(lease),
            HandoffDecision::Release if self.is_closed => {
                queue.end_waits(Outcome::Cancelled, None, effects);
                return false;
            }
            HandoffDecision::Release => {
                if let Some((sequence, entry)) = self.start_attempt(id, now) {
                    // The driver sends it.
                    self.insert(sequence, entry, now, effects);
                }
                return false;
            }
        }
        true
    }

    /// Updates a queue after its entry, the attempt or the lease, has changed.
    pub(super) fn on_entry_changed(&mut self, id: u64, sequence: u64, now: LocalTime, effects: &mut Effects) {
        let Some(queue) = self.local_queues.by_id.get_mut(&id) else { return };
        let Some(entry) = self.entries.get_mut(&sequence) else { return };
        if queue.entry() != Some(sequence) {
            return;
        }
        if let QueueState::Acquiring(_) = queue.state {
            match entry.outcome {
                None => {}
                Some(Outcome::Granted { grant, .. }) => queue.assign(sequence, grant.tokens.first, effects),
                Some(outcome) => {
                    entry.is_referenced = false;
                    queue.end_waits(outcome, entry.last_error.as_ref(), effects);
                }
            }
            return;
        }
        let is_held = matches!(queue.state, QueueState::Held(_));
        let is_free = matches!(queue.state, QueueState::AwaitingTokens(_)) || entry.remaining(now).is_err();
        if is_free && !self.hand_off(id, sequence, now, effects) && !is_held {
            self.abandon(sequence, now);
        }
    }

    /// Releases a lease that no guard refers to. A guard would release it itself.
    fn abandon(&mut self, sequence: u64, now: LocalTime) {
        if let Some(entry) = self.entries.get_mut(&sequence) {
            entry.is_referenced = false;
            entry.abandon(now);
        }
    }
}
