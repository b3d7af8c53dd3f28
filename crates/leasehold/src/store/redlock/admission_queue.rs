//! The admission queue of each lock, at one node: its head may queue at all nodes. Admission is not a lock.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::{Acquire, Acquisition, Command, Release, Renew, Resource, TOMBSTONE_TTL};

use super::Quorum;
use super::admission_state::{AdmissionNodes, ContendedLocks};
use super::limits::POLL_INTERVALS;
use super::node::PendingRelease;
use crate::store::CallResult;
use crate::store::redis::slot_of;

impl Quorum {
    /// Records that other clients hold this lock or may wait for it.
    pub(super) fn note_contended(&self, resource: &Arc<Resource>) {
        self.contended().note(resource, self.now());
    }

    pub(super) fn is_contended(&self, resource: &Resource) -> bool {
        self.contended().has(resource, self.now())
    }

    fn contended(&self) -> MutexGuard<'_, ContendedLocks> {
        self.contended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a command of the admission queue, at the first connected node in the order that the lock's name decides.
    ///
    /// A waiter that has lost its node queues where the others do; a release goes to the node that granted.
    pub(super) async fn call_admission_queue(
        self: &Arc<Self>,
        resource: Arc<Resource>,
        command: Command,
    ) -> CallResult {
        let attempt = match &command {
            Command::Acquire(acquire) => acquire.acquisition,
            Command::Renew(renew) => renew.acquisition,
            Command::Release(release) => release.acquisition,
            Command::Inspect | Command::ForceRelease => {
                let node = self.admission_node(&resource);
                return self.nodes[node].clone().call(resource, command, None).await;
            }
        };
        let known = self.admission_nodes().route(attempt).map(|route| (route.node, route.acquisition));
        let (node, acquisition) = match (&command, known) {
            (Command::Acquire(_), known) => {
                let connected = known.filter(|(node, _)| self.nodes[*node].store.is_connected());
                let node = connected.map_or_else(|| self.admission_node(&resource), |(node, _)| node);
                (node, self.send_to(attempt, node, &resource))
            }
            (_, Some(route)) => route,
            (_, None) => (self.admission_node(&resource), attempt),
        };
        let sent = with_acquisition(command.clone(), acquisition);
        let answered = self.nodes[node].clone().call(resource, sent, None).await;
        self.admission_nodes().handle_answered(attempt, (node, acquisition), &command, &answered, self.now());
        answered
    }

    /// Sends an attempt to a node, and returns its id there. The node that it leaves releases its entry as soon as possible:
    /// once granted, an entry that no client claims would block the queue for a claim window.
    fn send_to(&self, attempt: Acquisition, node: usize, resource: &Arc<Resource>) -> Acquisition {
        let now = self.now();
        let (acquisition, left) = self.admission_nodes().send_to(attempt, node, resource, now);
        if let Some(left) = left {
            let tombstone = TOMBSTONE_TTL;
            let release = Release {
                acquisition: left.acquisition,
                min_hold: Duration::ZERO,
                tombstone,
                as_granted: None,
            };
            // Later the entry has expired, also that of an acquire which is in flight now.
            let until = now + TOMBSTONE_TTL + POLL_INTERVALS.entry_ttl;
            let (node, resource) = (left.node, left.resource);
            self.nodes[node].add_pending_release(PendingRelease { resource, release, until, requests: None });
            self.releases_pending.notify_one();
        }
        acquisition
    }

    /// The attempt that a push of a node's admission queue is for, unless it is queued at another node now.
    pub(super) fn admission_attempt(&self, node: usize, acquisition: Acquisition) -> Option<Acquisition> {
        self.admission_nodes().attempt_at(node, acquisition)
    }

    /// Whether a reconnect to a node concerns attempts at an admission queue: those that are there, and those that would go there.
    pub(super) fn admits_at(&self, node: usize, resource: &Resource) -> bool {
        self.admission_nodes().is_at(node, resource) || self.admission_node(resource) == node
    }

    fn admission_nodes(&self) -> MutexGuard<'_, AdmissionNodes> {
        self.admission_nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn admission_node(&self, resource: &Resource) -> usize {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        // By address, so that all clients agree whatever the order of their lists.
        order.sort_by(|a, b| self.nodes[*a].name.cmp(&self.nodes[*b].name));
        let first = usize::from(slot_of(resource)) % order.len();
        order.rotate_left(first);
        order.iter().copied().find(|node| self.nodes[*node].store.is_connected()).unwrap_or(order[0])
    }
}

/// The same command for another id of the attempt.
fn with_acquisition(command: Command, acquisition: Acquisition) -> Command {
    match command {
        Command::Acquire(acquire) if acquire.acquisition == acquisition => Command::Acquire(acquire),
        Command::Acquire(acquire) => Command::from(Acquire { acquisition, ..(*acquire).clone() }),
        Command::Renew(renew) => Command::Renew(Renew { acquisition, ..renew }),
        Command::Release(release) => Command::Release(Release { acquisition, ..release }),
        other => other,
    }
}
