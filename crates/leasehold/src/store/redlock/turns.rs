//! Whose turn it is to wait at the nodes: a queue for each lock, at one of them. What is had there is a turn and no lock.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use leasehold_core::{Acquisition, Answer, Command, Failure, Kind, Reply, Resource};

use super::Quorum;
use crate::store::Answered;
use crate::store::redis::slot_of;

impl Quorum {
    /// The queue for a turn to try is at one node: the first that answers, beginning where the name says.
    pub(super) async fn call_queue(self: &Arc<Self>, resource: Arc<Resource>, command: Command) -> Answered {
        let acquisition = match &command {
            Command::Acquire(acquire) => Some(acquire.acquisition),
            Command::Renew(renew) => Some(renew.acquisition),
            Command::Release(release) => Some(release.acquisition),
            Command::Inspect | Command::ForceRelease => None,
        };
        let known = acquisition.and_then(|acquisition| self.turns().get(&acquisition).copied());
        // Whoever waits goes where the others are; what was given there is given back there.
        let goes_on =
            |node: &usize| !matches!(command, Command::Acquire(_)) || self.nodes[*node].store.is_up();
        let node = known.filter(goes_on).unwrap_or_else(|| self.queue_node(&resource));
        let answered = self.nodes[node].clone().call_one(resource, command, None).await;
        if let Some(acquisition) = acquisition {
            match &answered {
                Ok(Answer { reply: Reply::Granted(_) | Reply::Queued(_), .. }) => {
                    self.turns().insert(acquisition, node);
                }
                Ok(Answer { reply: Reply::Renewed { .. }, .. }) => {}
                Err(error) if error.failure == Failure::Unknown => {
                    self.turns().entry(acquisition).or_insert(node);
                }
                _ => drop(self.turns().remove(&acquisition)),
            }
        }
        answered
    }

    fn turns(&self) -> MutexGuard<'_, HashMap<Acquisition, usize>> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn queue_node(&self, resource: &Resource) -> usize {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        // Everybody goes by the addresses, in whatever order they were given.
        order.sort_by(|a, b| self.nodes[*a].name.cmp(&self.nodes[*b].name));
        let first = usize::from(slot_of(resource)) % order.len();
        order.rotate_left(first);
        order.iter().copied().find(|node| self.nodes[*node].store.is_up()).unwrap_or(order[0])
    }
}

pub(super) fn is_queue(resource: &Resource) -> bool {
    resource.kind == Kind::Queue
}
