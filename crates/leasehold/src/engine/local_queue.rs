//! FIFO queue of this client's tasks for one lock, so that the client needs one place in the store's queue.
//!
//! The queue owns the store attempt and the lease; tasks only borrow the lease. A task that is dropped, or that stops being
//! polled while it waits, therefore never blocks the tasks behind it. The driver sends what the queue asks the store while no
//! task is polled. A lease that was assigned to a task waits for it: until it is polled or dropped. An empty queue is removed.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, LazyLock};
use std::task::Waker;

use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, HandoffBudget, HandoffLimits, LeaseTerms, LocalTime, Outcome,
    Resource, Token, WaitFor, WaitPolicy,
};
use leasehold_store::StoreError;

use super::entry::{AttemptEnd, Entry, MinHold};
use super::ids::{EntryId, QueueId, TicketNumber};
use super::number_map::NumberMap;
use super::waiting::Waiting;

/// What a queue's tasks ask the store for. Tasks with equal keys share a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AcquireKey {
    pub(crate) hash: ResourceHash,
    pub(crate) resource: Arc<Resource>,
    pub(crate) terms: LeaseTerms,
    pub(crate) wait: WaitFor,
    /// The policy of the queue's attempt: each task has a deadline of its own.
    pub(crate) wait_policy: WaitPolicy,
    pub(crate) metadata: Arc<str>,
    pub(crate) hand_off: HandoffLimits,
}

/// The hash of a resource. A lock computes it once, and not with every acquire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResourceHash(u64);

impl ResourceHash {
    pub(crate) fn of(resource: &Resource) -> Self {
        // With random keys, because names may come from anywhere.
        static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        Self(KEYS.hash_one(resource))
    }
}

/// A task's place in a local queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) queue: QueueId,
    pub(super) number: TicketNumber,
}

/// Why a task can't join a local queue.
pub(crate) enum EnqueueError {
    Closed,
    QueueFull,
}

/// How the wait in a local queue ended.
pub(crate) enum WaitOutcome {
    /// This lease is assigned to the task, with this token.
    Granted(EntryId, Token),
    Ended(AttemptEnd),
}

/// The state of a local queue after one of its tasks cancelled its wait.
pub(crate) enum CancelledWait {
    /// Another task of the client has the lease.
    LeaseInUse,
    /// The attempt continues for the tasks that still wait.
    AttemptContinues,
    /// No task is left: the entry must be released. `may_be_in_store`: the store may have received the attempt.
    LastWaiter { entry: EntryId, may_be_in_store: bool },
}

/// All local queues of a client.
#[derive(Default)]
pub(super) struct LocalQueues {
    pub(super) by_id: NumberMap<QueueId, LocalQueue>,
    /// The newest queue of each resource hash. The others follow by [`LocalQueue::next`].
    by_hash: NumberMap<u64, QueueId>,
}

pub(super) struct LocalQueue {
    pub(super) key: AcquireKey,
    /// Another queue with the same resource hash. Usually there is none: most tasks that use a lock use it with the same options.
    next: Option<QueueId>,
    pub(super) state: QueueState,
    /// A task stays in here until it has seen its assignment.
    pub(super) waiting: Waiting,
    /// How the attempt ended, for each task that waited for it and has not been polled since.
    pub(super) ended: BTreeMap<TicketNumber, AttemptEnd>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum QueueState {
    Idle,
    /// An acquire for the whole queue is in flight, or queued in the store.
    Acquiring(EntryId),
    /// The lease is the queue's, but its token range is used up: a renewal is fetching more.
    AwaitingTokens(EntryId),
    /// The lease is assigned to the task with this ticket number, which has not been polled since.
    Assigned {
        lease: EntryId,
        number: TicketNumber,
        token: Token,
    },
    /// A task holds the lease.
    Held(EntryId),
}

impl LocalQueues {
    pub(super) fn find(&self, key: &AcquireKey) -> Option<QueueId> {
        let mut at = self.by_hash.get(&key.hash.0).copied();
        while let Some(id) = at {
            let queue = self.by_id.get(&id)?;
            if queue.key == *key {
                return Some(id);
            }
            at = queue.next;
        }
        None
    }

    pub(super) fn add(&mut self, id: QueueId, key: AcquireKey) {
        let next = self.by_hash.insert(key.hash.0, id);
        let (state, waiting, ended) = (QueueState::Idle, Waiting::default(), BTreeMap::new());
        self.by_id.insert(id, LocalQueue { key, next, state, waiting, ended });
    }

    pub(super) fn remove_if_empty(&mut self, id: QueueId) {
        if !self.by_id.get(&id).is_some_and(LocalQueue::is_empty) {
            return;
        }
        let Some(removed) = self.by_id.remove(id) else { return };
        let hash = removed.key.hash.0;
        let Some(&newest) = self.by_hash.get(&hash) else { return };
        if newest != id {
            self.unlink(newest, id, removed.next);
        } else if let Some(next) = removed.next {
            self.by_hash.insert(hash, next);
        } else {
            self.by_hash.remove(hash);
        }
    }

    /// Takes a removed queue out of the list that begins at `newest`.
    fn unlink(&mut self, newest: QueueId, removed: QueueId, next: Option<QueueId>) {
        let mut at = newest;
        while let Some(queue) = self.by_id.get_mut(&at) {
            match queue.next {
                Some(other) if other == removed => {
                    queue.next = next;
                    return;
                }
                Some(other) => at = other,
                None => return,
            }
        }
    }

    /// Takes the waker of a waiting task, which then is not woken. The caller must drop it with the mutex free.
    pub(super) fn take_waker(&mut self, ticket: Ticket) -> Option<Waker> {
        self.by_id.get_mut(&ticket.queue)?.waiting.get_mut(ticket.number)?.take()
    }
}

impl LocalQueue {
    fn is_empty(&self) -> bool {
        matches!(self.state, QueueState::Idle) && self.waiting.is_empty() && self.ended.is_empty()
    }

    /// The table entry of the queue's attempt or lease.
    pub(super) fn entry(&self) -> Option<EntryId> {
        match self.state {
            QueueState::Idle => None,
            QueueState::Acquiring(entry_id)
            | QueueState::AwaitingTokens(entry_id)
            | QueueState::Held(entry_id) => Some(entry_id),
            QueueState::Assigned { lease, .. } => Some(lease),
        }
    }

    /// Assigns the lease to the first waiting task.
    pub(super) fn assign(&mut self, lease: EntryId, token: Token, wakers: &mut Vec<Waker>) {
        let Some((number, waker)) = self.waiting.first_mut() else { return };
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
        for (number, waker) in self.waiting.take() {
            self.ended.insert(number, (outcome, last_error.cloned()));
            wakers.extend(waker);
        }
    }

    /// A new attempt for this queue, whose caller inserts it. `max_queue`: at this length the store's queue refuses it.
    pub(super) fn start_attempt(
        &mut self,
        id: QueueId,
        acquisition: Acquisition,
        max_queue: u32,
        now: LocalTime,
    ) -> Box<Entry> {
        let key = &self.key;
        // A single task needs no range of tokens, and unused tokens would make the counter run ahead of the clock.
        let reserve = if self.waiting.len() > 1 { HandoffBudget::initial_reserve(key.hand_off) } else { 0 };
        let command = Acquire {
            reserve,
            wait: Some(WaitFor { max_queue, ..key.wait }),
            metadata: key.metadata.clone(),
            ..Acquire::exclusive(acquisition, key.terms.ttl.max(key.terms.min_lifetime))
        };
        let machine = AcquireMachine::new(command, Some(key.wait_policy), now);
        let mut entry = Entry::new(key.resource.clone(), None, key.terms, MinHold::default(), machine);
        entry.local_queue = Some((id, key.hand_off));
        self.state = QueueState::Acquiring(acquisition.into());
        Box::new(entry)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_core::{Kind, Name, SecretKey};

    use super::*;

    fn key(name: &str, max_queue: u32) -> AcquireKey {
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() });
        let ttl = Duration::from_secs(1);
        AcquireKey {
            hash: ResourceHash::of(&resource),
            resource,
            terms: LeaseTerms {
                ttl,
                renews: true,
                max_hold: None,
                min_lifetime: Duration::ZERO,
                replicas: 0,
            },
            wait: WaitFor { entry_ttl: ttl, max_queue },
            wait_policy: WaitPolicy {
                deadline: LocalTime::NEVER,
                repoll_interval: ttl,
                confirms_pushes: false,
                secret_key: SecretKey::new(1),
            },
            metadata: Arc::from(""),
            hand_off: HandoffLimits { max_handoffs: 1, max_duration: ttl },
        }
    }

    #[test]
    fn queues_of_one_resource_are_found_by_their_options() {
        let mut queues = LocalQueues::default();
        for (id, max_queue) in [(1, 10), (2, 20), (3, 30), (4, 40)] {
            queues.add(id.into(), key("a", max_queue));
        }
        queues.add(5.into(), key("b", 10));
        let found =
            |queues: &LocalQueues| [10, 20, 30, 40].map(|max_queue| queues.find(&key("a", max_queue)));
        let mut left = [1, 2, 3, 4].map(|id| Some(QueueId::from(id)));
        assert_eq!(found(&queues), left);
        assert_eq!(queues.find(&key("b", 20)), None);
        // The oldest one, from the middle, the newest one, and the last one.
        for removed in [1, 3, 4, 2] {
            queues.remove_if_empty(removed.into());
            left = left.map(|id| id.filter(|id| *id != removed));
            assert_eq!(found(&queues), left);
        }
        queues.remove_if_empty(5.into());
        assert!(queues.by_id.is_empty() && queues.by_hash.is_empty());
    }

    #[test]
    fn resources_have_hashes_of_their_own() {
        assert_eq!(key("a", 10).hash, key("a", 20).hash);
        assert_ne!(key("a", 10).hash, key("b", 10).hash);
    }
}
