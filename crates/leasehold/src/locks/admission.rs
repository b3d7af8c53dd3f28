//! Admission for quorum stores: only one client at a time polls the nodes for a lock; the others queue at one node.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{LocalTime, Resource};

use crate::error::Error;
use crate::guard::Guard;
use crate::locks::lock::{Lock, WaitMode};
use crate::store::admission_queue_of;

/// The ttl of an admission: as long as a single store waits for a frozen waiter. A client that crashes while admitted delays
/// the others by at most this, also if the lock's ttl is longer.
const ADMISSION_TTL: Duration = Duration::from_secs(3);

impl Lock {
    /// Tries the nodes once, then waits in the admission queue, whose first client polls the nodes. If two clients
    /// polled at the same time, each could get the grants of some nodes and neither a majority.
    ///
    /// Mutual exclusion does not depend on admission: if the queue is unavailable, the client polls without it.
    pub(crate) fn acquire_with_admission(
        &self,
        weight: u32,
        wait: WaitMode,
    ) -> Pin<Box<dyn Future<Output = Result<Option<Guard>, Error>> + Send + '_>> {
        Box::pin(async move {
            let resource = self.check(weight)?;
            let deadline = wait.deadline(self.handle.now());
            // A client that has just met contention here does not overtake the admission queue.
            let queues_first = deadline.is_some() && self.handle.store.is_contended(resource);
            let has_queue = if queues_first {
                true
            } else {
                match self.attempt(resource, weight, None, WaitMode::NoWait).await {
                    Ok(Some(guard)) => return Ok(Some(guard)),
                    tried if deadline.is_none() => return tried,
                    Ok(None) => true,
                    // Nodes in their restart grace vote soon: wait for them.
                    Err(_) if self.handle.store.in_restart_grace() => false,
                    // The votes are split: wait, as long as a quorum responds.
                    Err(error) if error.is_unavailable() && self.look_up().await.is_ok() => true,
                    Err(error) => return Err(error),
                }
            };
            let waited = self.acquire_after_admission(resource, weight, deadline, has_queue).await;
            let is_over = || deadline.is_some_and(|deadline| self.handle.now() >= deadline);
            match waited {
                // The queue is at one node, and the last responses of the others may be old. `None` needs a fresh vote.
                Ok(None) => self.attempt(resource, weight, None, WaitMode::NoWait).await,
                Err(error) if error.is_unavailable() && is_over() => {
                    self.attempt(resource, weight, None, WaitMode::NoWait).await
                }
                waited => waited,
            }
        })
    }

    async fn acquire_after_admission(
        &self,
        resource: &Arc<Resource>,
        weight: u32,
        deadline: Option<LocalTime>,
        has_queue: bool,
    ) -> Result<Option<Guard>, Error> {
        let admission = if has_queue { self.admission_lock(resource) } else { None };
        let admission = match admission {
            None => None,
            Some(admission) => {
                match admission.acquire(1, None, WaitMode::until(deadline, self.handle.now())).await {
                    Ok(None) => return Ok(None),
                    Ok(admission) => admission,
                    Err(error) if error.is_unavailable() => None,
                    Err(error) => return Err(error),
                }
            }
        };
        let mut guard =
            self.attempt(resource, weight, None, WaitMode::until(deadline, self.handle.now())).await;
        if let Ok(Some(guard)) = &mut guard {
            guard.set_admitted();
        }
        // Admits the next client.
        drop(admission);
        guard
    }

    /// The lock whose holder is admitted; none if the resource's name is too long for one.
    fn admission_lock(&self, resource: &Resource) -> Option<Self> {
        let queue = admission_queue_of(resource)?;
        let mut admission = Self::new(self.handle.clone(), queue.kind, queue.name.as_str(), 1);
        // The admitted client is a waiter too.
        admission.max_waiters = self.max_waiters.saturating_sub(1);
        // No lease may exceed the quorum's `max_ttl`.
        admission.terms.ttl =
            self.handle.capabilities.max_ttl.map_or(ADMISSION_TTL, |longest| longest.min(ADMISSION_TTL));
        admission.metadata = self.metadata.clone();
        Some(admission)
    }
}
