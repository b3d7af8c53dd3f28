//! Where this client waits for admission, and at which locks it has met others.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Acquisition, Answer, Command, Failure, Kind, LocalTime, Reply, Resource};

use crate::store::CallResult;

/// How long the node of an attempt is remembered after its last command. Admissions and queue entries expire sooner, so an
/// unanswered release leaves nothing behind.
const ROUTE_MEMORY: Duration = Duration::from_secs(60);

/// Interval of removing old entries.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// The node at which each of this client's attempts is queued or admitted.
#[derive(Debug, Default)]
pub(super) struct AdmissionNodes {
    pub(super) nodes: HashMap<Acquisition, (usize, LocalTime)>,
    pub(super) swept_at: LocalTime,
}

impl AdmissionNodes {
    pub(super) fn node_of(&self, acquisition: Acquisition) -> Option<usize> {
        self.nodes.get(&acquisition).map(|(node, _)| *node)
    }

    /// Records a node's answer to a command of an attempt.
    pub(super) fn handle_answered(
        &mut self,
        acquisition: Acquisition,
        node: usize,
        command: &Command,
        answered: &CallResult,
        now: LocalTime,
    ) {
        let is_there = match (command, answered) {
            (_, Ok(Answer { reply, .. })) => {
                matches!(reply, Reply::Granted(_) | Reply::Queued(_) | Reply::Renewed { .. })
            }
            // It may be queued there, and an unanswered release may not have arrived.
            (Command::Acquire(_), Err(error)) => error.failure == Failure::Unknown,
            (_, Err(_)) => self.nodes.contains_key(&acquisition),
        };
        if is_there {
            self.nodes.insert(acquisition, (node, now + ROUTE_MEMORY));
        } else {
            self.nodes.remove(&acquisition);
        }
        if now >= self.swept_at + SWEEP_INTERVAL {
            self.nodes.retain(|_, (_, until)| *until > now);
            self.swept_at = now;
        }
    }
}

/// How long a lock counts as contended after this client met another one there.
const CONTENTION_MEMORY: Duration = Duration::from_secs(1);

/// Recently contended locks. The client then queues for admission without trying first, because the lock may be free between
/// two waiters.
#[derive(Debug, Default)]
pub(super) struct ContendedLocks {
    pub(super) until: HashMap<Arc<Resource>, LocalTime>,
    pub(super) swept_at: LocalTime,
}

impl ContendedLocks {
    pub(super) fn note(&mut self, resource: &Arc<Resource>, now: LocalTime) {
        self.until.insert(resource.clone(), now + CONTENTION_MEMORY);
        if now >= self.swept_at + SWEEP_INTERVAL {
            self.until.retain(|_, until| *until > now);
            self.swept_at = now;
        }
    }

    pub(super) fn has(&self, resource: &Resource, now: LocalTime) -> bool {
        self.until.get(resource).is_some_and(|until| *until > now)
    }
}

pub(super) fn is_admission_queue(resource: &Resource) -> bool {
    resource.kind == Kind::Admission
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Acquire, ClientId, Name, Queued, Release, StoreTime};

    use super::*;
    use crate::store::StoreError;

    fn at(seconds: u64) -> LocalTime {
        LocalTime::ZERO + Duration::from_secs(1_000 + seconds)
    }

    fn attempt(sequence: u64) -> (Acquisition, Command, Command) {
        let acquisition = Acquisition { client: ClientId::new(1), sequence };
        let acquire = Command::from(Acquire::exclusive(acquisition, Duration::from_secs(3)));
        (acquisition, acquire, Command::Release(Release::now(acquisition)))
    }

    fn answer(reply: Reply) -> CallResult {
        Ok(Answer { at: StoreTime::ZERO, reply })
    }

    fn queued() -> CallResult {
        answer(Reply::Queued(Queued { is_head: false, repoll_at: StoreTime::NEVER }))
    }

    fn failed(failure: Failure) -> CallResult {
        Err(StoreError::new(failure, String::new()))
    }

    #[test]
    fn unanswered_release_is_routed_to_the_same_node_until_forgotten() {
        let mut admission_nodes = AdmissionNodes::default();
        let (first, acquire, release) = attempt(1);
        admission_nodes.handle_answered(first, 2, &acquire, &queued(), at(0));
        for failure in [Failure::Unknown, Failure::NotSent] {
            admission_nodes.handle_answered(first, 2, &release, &failed(failure), at(1));
            assert_eq!(admission_nodes.node_of(first), Some(2));
        }
        let (other, acquire, release) = attempt(2);
        admission_nodes.handle_answered(other, 0, &acquire, &failed(Failure::Unknown), at(59));
        assert_eq!(admission_nodes.nodes.len(), 2);
        admission_nodes.handle_answered(other, 0, &acquire, &queued(), at(70));
        assert_eq!((admission_nodes.node_of(first), admission_nodes.node_of(other)), (None, Some(0)));
        admission_nodes.handle_answered(other, 0, &release, &answer(Reply::NotHeld), at(71));
        assert!(admission_nodes.nodes.is_empty());
    }

    #[test]
    fn contention_is_remembered_for_one_second() {
        let resource = |name| Arc::new(Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() });
        let mut contended = ContendedLocks::default();
        contended.note(&resource("a"), at(0));
        assert!(contended.has(&resource("a"), at(0)) && !contended.has(&resource("b"), at(0)));
        assert!(!contended.has(&resource("a"), at(1)));
        contended.note(&resource("b"), at(20));
        assert_eq!(contended.until.len(), 1);
    }

    #[test]
    fn unsent_attempt_has_no_node() {
        let mut admission_nodes = AdmissionNodes::default();
        let (acquisition, acquire, _) = attempt(1);
        admission_nodes.handle_answered(acquisition, 2, &acquire, &queued(), at(0));
        admission_nodes.handle_answered(acquisition, 2, &acquire, &failed(Failure::NotSent), at(1));
        assert_eq!(admission_nodes.node_of(acquisition), None);
    }
}
