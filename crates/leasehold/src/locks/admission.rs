//! Where several stores vote: who waits, and who waits for that.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{LocalTime, Resource};

use crate::engine::clock;
use crate::error::Error;
use crate::guard::Guard;
use crate::locks::lock::{Lock, WaitMode};
use crate::store::admission_queue_of;

/// The ttl of a turn: as long as a single store waits for a waiter that is frozen. A client that dies in its turn delays the
/// others by no more than this, whatever the lock's own ttl is.
const ADMISSION_TTL: Duration = Duration::from_secs(3);

impl Lock {
    /// Where several stores vote: at once, and otherwise first in a queue of this store's clients, of whom only the first
    /// waits at all nodes. Two who waited there might stand in two orders, and each be granted a part.
    ///
    /// Turns are a courtesy, and nobody's right depends on them: where that queue can't be had, one waits without.
    pub(crate) fn acquire_with_admission(
        &self,
        weight: u32,
        wait: WaitMode,
    ) -> Pin<Box<dyn Future<Output = Result<Option<Guard>, Error>> + Send + '_>> {
        Box::pin(async move {
            let resource = self.check(weight)?;
            let deadline = wait.deadline();
            // A client that has just met others here does not overtake those who wait for their turn.
            let queues_first = deadline.is_some() && self.handle.store.is_contended(resource);
            let has_queue = if queues_first {
                true
            } else {
                match self.attempt(resource, weight, None, WaitMode::NoWait).await {
                    Ok(Some(guard)) => return Ok(Some(guard)),
                    tried if deadline.is_none() => return tried,
                    Ok(None) => true,
                    // Those who may vote soon are waited for.
                    Err(_) if self.handle.store.in_restart_grace() => false,
                    // The nodes that answer do not agree: that is a reason to wait, as long as a quorum answers.
                    Err(error) if error.is_unavailable() && self.inspect().await.is_ok() => true,
                    Err(error) => return Err(error),
                }
            };
            let waited = self.acquire_after_admission(resource, weight, deadline, has_queue).await;
            let is_over = || deadline.is_some_and(|deadline| clock::local() >= deadline);
            match waited {
                // The queue is one node's, and the attempt may have heard nothing from the others for long. Only the
                // nodes' word now makes this a lock that is not free.
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
        let turn = if has_queue { self.turn(resource) } else { None };
        let turn = match turn {
            None => None,
            Some(turn) => match turn.acquire(1, None, WaitMode::until(deadline)).await {
                Ok(None) => return Ok(None),
                Ok(turn) => turn,
                Err(error) if error.is_unavailable() => None,
                Err(error) => return Err(error),
            },
        };
        let guard = self.attempt(resource, weight, None, WaitMode::until(deadline)).await;
        // Now the next one may wait at the nodes.
        drop(turn);
        guard
    }

    /// The queue of those who wait for this resource, where it has one.
    fn turn(&self, resource: &Resource) -> Option<Self> {
        let queue = admission_queue_of(resource)?;
        let mut turn = Self::new(self.handle.clone(), queue.kind, queue.name.as_str(), 1);
        // The first of those who wait has the turn.
        turn.max_waiters = self.max_waiters.saturating_sub(1);
        // Nothing may be held for longer than the longest that was named.
        turn.terms.ttl =
            self.handle.store.max_ttl().map_or(ADMISSION_TTL, |longest| longest.min(ADMISSION_TTL));
        turn.metadata = self.metadata.clone();
        Some(turn)
    }
}
