//! Where this client waits for admission, and at which locks it has met others.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Acquisition, Answer, Command, Kind, LocalTime, Reply, Resource};
use leasehold_store::CallResult;

/// How long the node of an attempt is remembered after its last command. Admissions and queue entries expire sooner, so an
/// unanswered release leaves nothing behind.
const ROUTE_MEMORY: Duration = Duration::from_secs(60);

/// Interval of removing old entries.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// First sequence number of attempts that have moved to another node. The range is disjoint from the session's attempt numbers
/// and from the node attempts'.
const FIRST_MOVED_SEQUENCE: u64 = 1 << 62;

/// Where an attempt is queued or admitted.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) node: usize,
    /// The attempt's id at that node. Each move takes a new one: the release at the node that was left has a tombstone, which
    /// would reject the attempt if it came back.
    pub(super) acquisition: Acquisition,
    pub(super) resource: Arc<Resource>,
    /// The node may have a queue entry or an admission.
    is_used: bool,
    until: LocalTime,
}

/// The node at which each of this client's attempts is queued or admitted.
#[derive(Debug)]
pub(super) struct AdmissionNodes {
    routes: HashMap<Acquisition, Route>,
    next_moved: u64,
    swept_at: LocalTime,
}

impl Default for AdmissionNodes {
    fn default() -> Self {
        Self { routes: HashMap::new(), next_moved: FIRST_MOVED_SEQUENCE, swept_at: LocalTime::ZERO }
    }
}

impl AdmissionNodes {
    pub(super) fn route(&self, attempt: Acquisition) -> Option<&Route> {
        self.routes.get(&attempt)
    }

    /// Sends an attempt to a node. Returns its id there, and the route that it leaves, if something may be left there.
    pub(super) fn send_to(
        &mut self,
        attempt: Acquisition,
        node: usize,
        resource: &Arc<Resource>,
        now: LocalTime,
    ) -> (Acquisition, Option<Route>) {
        let before = self.routes.get(&attempt);
        if let Some(route) = before.filter(|route| route.node == node) {
            return (route.acquisition, None);
        }
        let acquisition = match before {
            None => attempt,
            Some(_) => {
                self.next_moved += 1;
                Acquisition { sequence: self.next_moved, ..attempt }
            }
        };
        let (resource, until) = (resource.clone(), now + ROUTE_MEMORY);
        let route = Route { node, acquisition, resource, is_used: false, until };
        let left = self.routes.insert(attempt, route).filter(|left| left.is_used);
        (acquisition, left)
    }

    /// Records a node's answer to a command of an attempt, which was sent there with this id.
    pub(super) fn handle_answered(
        &mut self,
        attempt: Acquisition,
        (node, sent): (usize, Acquisition),
        command: &Command,
        answered: &CallResult,
        now: LocalTime,
    ) {
        let is_current = |route: &&mut Route| route.node == node && route.acquisition == sent;
        if let Some(route) = self.routes.get_mut(&attempt).filter(is_current) {
            let is_there = match (command, answered) {
                // A node that was restarted may still have the entry of before, and says nothing of it.
                (_, Ok(Answer { reply: Reply::Abstains(_), .. })) => route.is_used,
                (_, Ok(Answer { reply, .. })) => {
                    route.is_used = true;
                    matches!(reply, Reply::Granted(_) | Reply::Queued(_) | Reply::Renewed { .. })
                }
                // It may be queued there.
                (Command::Acquire(_), Err(error)) => {
                    route.is_used |= error.failure.may_have_effect();
                    // An attempt that has moved keeps its new id.
                    route.is_used || route.acquisition != attempt
                }
                // An unanswered release may not have arrived.
                (_, Err(_)) => true,
            };
            route.until = now + ROUTE_MEMORY;
            if !is_there {
                self.routes.remove(&attempt);
            }
        }
        if now >= self.swept_at + SWEEP_INTERVAL {
            self.routes.retain(|_, route| route.until > now);
            self.swept_at = now;
        }
    }

    /// The attempt that a node's push is for. `None` if the attempt has left that node.
    pub(super) fn attempt_at(&self, node: usize, acquisition: Acquisition) -> Option<Acquisition> {
        let is_current = |route: &Route| route.node == node && route.acquisition == acquisition;
        if acquisition.sequence >= FIRST_MOVED_SEQUENCE {
            return self.routes.iter().find(|(_, route)| is_current(route)).map(|(attempt, _)| *attempt);
        }
        self.routes.get(&acquisition).is_none_or(is_current).then_some(acquisition)
    }

    /// The nodes at which attempts are queued or admitted.
    pub(super) fn nodes(&self) -> BTreeSet<usize> {
        self.routes.values().map(|route| route.node).collect()
    }

    /// Whether an attempt at this resource is queued or admitted at a node.
    pub(super) fn is_at(&self, node: usize, resource: &Resource) -> bool {
        self.routes.values().any(|route| route.node == node && *route.resource == *resource)
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
    use leasehold_core::Failure;
    use leasehold_core::{Acquire, ClientId, Name, Queued, Release, StoreTime};
    use leasehold_store::StoreError;

    use super::*;

    fn at(seconds: u64) -> LocalTime {
        LocalTime::ZERO + Duration::from_secs(1_000 + seconds)
    }

    fn attempt(sequence: u64) -> (Acquisition, Command, Command) {
        let acquisition = Acquisition { client: ClientId::new(1), sequence };
        let acquire = Command::from(Acquire::exclusive(acquisition, Duration::from_secs(3)));
        (acquisition, acquire, Command::Release(Release::now(acquisition)))
    }

    fn queue() -> Arc<Resource> {
        Arc::new(Resource { kind: Kind::Admission, name: Name::new("mutex:a").unwrap() })
    }

    fn node_of(nodes: &AdmissionNodes, attempt: Acquisition) -> Option<usize> {
        nodes.route(attempt).map(|route| route.node)
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
        let mut nodes = AdmissionNodes::default();
        let (first, acquire, release) = attempt(1);
        assert_eq!(nodes.send_to(first, 2, &queue(), at(0)).0, first);
        nodes.handle_answered(first, (2, first), &acquire, &queued(), at(0));
        for failure in [Failure::Unknown, Failure::NotSent] {
            nodes.handle_answered(first, (2, first), &release, &failed(failure), at(1));
            assert_eq!(node_of(&nodes, first), Some(2));
        }
        let (other, acquire, release) = attempt(2);
        nodes.send_to(other, 0, &queue(), at(59));
        nodes.handle_answered(other, (0, other), &acquire, &failed(Failure::Unknown), at(59));
        assert_eq!(nodes.routes.len(), 2);
        nodes.handle_answered(other, (0, other), &acquire, &queued(), at(70));
        assert_eq!((node_of(&nodes, first), node_of(&nodes, other)), (None, Some(0)));
        nodes.handle_answered(other, (0, other), &release, &answer(Reply::NotHeld), at(71));
        assert!(nodes.routes.is_empty());
    }

    #[test]
    fn attempt_at_a_node_that_abstains_after_a_restart_is_released_there() {
        let mut nodes = AdmissionNodes::default();
        let abstains = || answer(Reply::Abstains(StoreTime::NEVER));
        let (queued_before, acquire, release) = attempt(1);
        nodes.send_to(queued_before, 2, &queue(), at(0));
        nodes.handle_answered(queued_before, (2, queued_before), &acquire, &queued(), at(0));
        nodes.handle_answered(queued_before, (2, queued_before), &acquire, &abstains(), at(1));
        assert_eq!(node_of(&nodes, queued_before), Some(2));
        nodes.handle_answered(queued_before, (2, queued_before), &release, &answer(Reply::Released), at(1));
        assert!(nodes.routes.is_empty());
        let (new, acquire, _) = attempt(2);
        nodes.send_to(new, 2, &queue(), at(2));
        nodes.handle_answered(new, (2, new), &acquire, &abstains(), at(2));
        assert!(nodes.routes.is_empty(), "it was never queued there");
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
        let mut nodes = AdmissionNodes::default();
        let (acquisition, acquire, _) = attempt(1);
        nodes.send_to(acquisition, 2, &queue(), at(0));
        nodes.handle_answered(acquisition, (2, acquisition), &acquire, &failed(Failure::NotSent), at(1));
        assert_eq!(node_of(&nodes, acquisition), None);
    }

    #[test]
    fn moved_attempt_has_a_new_id_and_is_released_where_it_was_queued() {
        let mut nodes = AdmissionNodes::default();
        let (own, acquire, _) = attempt(1);
        nodes.send_to(own, 2, &queue(), at(0));
        nodes.handle_answered(own, (2, own), &acquire, &queued(), at(0));
        let (moved, left) = nodes.send_to(own, 0, &queue(), at(1));
        assert_ne!(moved, own);
        assert_eq!(left.map(|route| (route.node, route.acquisition)), Some((2, own)));
        assert_eq!(nodes.send_to(own, 0, &queue(), at(1)).0, moved, "it stays at that node");
        // Nothing was sent there, so nothing is released, but the attempt does not get its first id again.
        nodes.handle_answered(own, (0, moved), &acquire, &failed(Failure::NotSent), at(2));
        let (back, left) = nodes.send_to(own, 2, &queue(), at(3));
        assert!(back != own && back != moved && left.is_none(), "{back:?} {left:?}");
    }

    #[test]
    fn push_of_a_node_that_was_left_has_no_attempt() {
        let mut nodes = AdmissionNodes::default();
        let (own, acquire, _) = attempt(1);
        assert_eq!(nodes.attempt_at(2, own), Some(own), "the push may overtake the answer");
        nodes.send_to(own, 2, &queue(), at(0));
        nodes.handle_answered(own, (2, own), &acquire, &queued(), at(0));
        assert_eq!((nodes.attempt_at(2, own), nodes.attempt_at(0, own)), (Some(own), None));
        let (moved, _) = nodes.send_to(own, 0, &queue(), at(1));
        assert_eq!((nodes.attempt_at(2, own), nodes.attempt_at(2, moved)), (None, None));
        assert_eq!(nodes.attempt_at(0, moved), Some(own));
        assert!(nodes.is_at(0, &queue()) && !nodes.is_at(2, &queue()));
    }
}
