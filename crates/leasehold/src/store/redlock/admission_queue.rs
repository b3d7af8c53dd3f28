//! The admission queue of each lock, at one node: its head may queue at all nodes. Admission is not a lock.

use std::sync::{Arc, MutexGuard, PoisonError};

use leasehold_core::{Command, Resource};

use super::Quorum;
use super::admission_state::{AdmissionNodes, ContendedLocks};
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
    pub(super) async fn call_admission_queue(
        self: &Arc<Self>,
        resource: Arc<Resource>,
        command: Command,
    ) -> CallResult {
        let acquisition = match &command {
            Command::Acquire(acquire) => Some(acquire.acquisition),
            Command::Renew(renew) => Some(renew.acquisition),
            Command::Release(release) => Some(release.acquisition),
            Command::Inspect | Command::ForceRelease => None,
        };
        let known = acquisition.and_then(|acquisition| self.admission_nodes().node_of(acquisition));
        // A waiter queues where the others do; a release goes to the node that granted.
        let retries =
            |node: &usize| !matches!(command, Command::Acquire(_)) || self.nodes[*node].store.is_connected();
        let node = known.filter(retries).unwrap_or_else(|| self.admission_node(&resource));
        let answered = self.nodes[node].clone().call(resource, command.clone(), None).await;
        if let Some(acquisition) = acquisition {
            self.admission_nodes().handle_answered(acquisition, node, &command, &answered, self.now());
        }
        answered
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
