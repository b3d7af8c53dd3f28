//! Whose turn it is to wait at the nodes: a queue for each lock, at one of them. What is had there is a turn and no lock.

use std::sync::{Arc, MutexGuard, PoisonError};

use leasehold_core::{Command, Resource};

use super::Quorum;
use super::admission_state::{AdmissionNodes, ContendedLocks};
use crate::engine::clock;
use crate::store::CallResult;
use crate::store::redis::slot_of;

impl Quorum {
    /// Others have this lock, or may wait for it.
    pub(super) fn note_contended(&self, resource: &Arc<Resource>) {
        self.contended().note(resource, clock::local());
    }

    pub(super) fn is_contended(&self, resource: &Resource) -> bool {
        self.contended().has(resource, clock::local())
    }

    fn contended(&self) -> MutexGuard<'_, ContendedLocks> {
        self.contended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queue for a turn to try is at one node: the first that answers, beginning where the name says.
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
        // Whoever waits goes where the others are; what was given there is given back there.
        let retries =
            |node: &usize| !matches!(command, Command::Acquire(_)) || self.nodes[*node].store.is_connected();
        let node = known.filter(retries).unwrap_or_else(|| self.admission_node(&resource));
        let answered = self.nodes[node].clone().call_one(resource, command.clone(), None).await;
        if let Some(acquisition) = acquisition {
            self.admission_nodes().handle_answered(acquisition, node, &command, &answered, clock::local());
        }
        answered
    }

    fn admission_nodes(&self) -> MutexGuard<'_, AdmissionNodes> {
        self.admission_nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn admission_node(&self, resource: &Resource) -> usize {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        // Everybody goes by the addresses, in whatever order they were given.
        order.sort_by(|a, b| self.nodes[*a].name.cmp(&self.nodes[*b].name));
        let first = usize::from(slot_of(resource)) % order.len();
        order.rotate_left(first);
        order.iter().copied().find(|node| self.nodes[*node].store.is_connected()).unwrap_or(order[0])
    }
}
