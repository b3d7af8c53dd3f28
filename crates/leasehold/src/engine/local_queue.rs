//! FIFO queue of this client's tasks for one lock, so that the client needs one place in the store's queue.
//!
//! The queue owns the store attempt and the lease; tasks only borrow the lease. A task that is dropped, or that stops being
//! polled, therefore never blocks the tasks behind it. The driver sends what the queue asks the store while no task is
//! polled. An empty queue is removed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, HandoffBudget, HandoffLimits, LeaseTerms, LocalTime, Outcome,
    Resource, Token, WaitFor, WaitPolicy,
};

use super::entry::{AttemptEnd, Entry};
use crate::store::StoreError;

/// What a queue's tasks ask the store for. Tasks with equal keys share a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AcquireKey {
    pub(crate) resource: Arc<Resource>,
    pub(crate) terms: LeaseTerms,
    pub(crate) wait: WaitFor,
    /// The policy of the queue's attempt: each task has a deadline of its own.
    pub(crate) wait_policy: WaitPolicy,
    pub(crate) metadata: Arc<str>,
    pub(crate) hand_off: HandoffLimits,
}

/// A task's place in a local queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) queue: u64,
    pub(super) number: u64,
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
    pub(super) by_id: BTreeMap<u64, LocalQueue>,
    /// Usually one per resource: most tasks that use a lock use it with the same options.
    by_resource: HashMap<Arc<Resource>, Vec<u64>>,
}

pub(super) struct LocalQueue {
    pub(super) key: AcquireKey,
    pub(super) state: QueueState,
    /// By ticket number. A task stays in here until it has seen its assignment.
    pub(super) waiting: BTreeMap<u64, Option<Waker>>,
    /// How the attempt ended, for each task that waited for it and has not been polled since.
    pub(super) ended: BTreeMap<u64, AttemptEnd>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum QueueState {
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
    pub(super) fn find(&self, key: &AcquireKey) -> Option<u64> {
        let ids = self.by_resource.get(&key.resource)?;
        ids.iter().copied().find(|id| self.by_id.get(id).is_some_and(|queue| queue.key == *key))
    }

    pub(super) fn add(&mut self, id: u64, key: AcquireKey) {
        self.by_resource.entry(key.resource.clone()).or_default().push(id);
        let queue =
            LocalQueue { key, state: QueueState::Idle, waiting: BTreeMap::new(), ended: BTreeMap::new() };
        self.by_id.insert(id, queue);
    }

    pub(super) fn remove_if_empty(&mut self, id: u64) {
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
    pub(super) fn entry(&self) -> Option<u64> {
        match self.state {
            QueueState::Idle => None,
            QueueState::Acquiring(sequence)
            | QueueState::AwaitingTokens(sequence)
            | QueueState::Held(sequence) => Some(sequence),
            QueueState::Assigned { lease, .. } => Some(lease),
        }
    }

    /// Assigns the lease to the first waiting task.
    pub(super) fn assign(&mut self, lease: u64, token: Token, wakers: &mut Vec<Waker>) {
        let Some((&number, waker)) = self.waiting.iter_mut().next() else { return };
        wakers.extend(waker.take());
        self.state = QueueState::Assigned { lease, number, token };
    }

    /// Ends every task's wait with the outcome of the queue's attempt.
    pub(super) fn end_waits(
        &mut self,
        outcome: Outcome,
        last_error: Option<&StoreError>,
        wakers: &mut Vec<Waker>,
    ) {
        self.state = QueueState::Idle;
        for (number, waker) in std::mem::take(&mut self.waiting) {
            self.ended.insert(number, (outcome, last_error.cloned()));
            wakers.extend(waker);
        }
    }

    /// A new attempt for this queue, whose caller inserts it.
    pub(super) fn start_attempt(&mut self, id: u64, acquisition: Acquisition, now: LocalTime) -> Box<Entry> {
        let key = &self.key;
        // A single task needs no range of tokens, and unused tokens would make the counter run ahead of the clock.
        let reserve = if self.waiting.len() > 1 { HandoffBudget::initial_reserve(key.hand_off) } else { 0 };
        let command = Acquire {
            reserve,
            wait: Some(key.wait),
            metadata: key.metadata.clone(),
            ..Acquire::exclusive(acquisition, key.terms.ttl.max(key.terms.min_lifetime))
        };
        let machine = AcquireMachine::new(command, Some(key.wait_policy), now);
        let mut entry = Entry::new(key.resource.clone(), None, key.terms, Duration::ZERO, machine);
        entry.local_queue = Some((id, key.hand_off));
        self.state = QueueState::Acquiring(acquisition.sequence);
        Box::new(entry)
    }
}
