//! Admission for quorum stores: only one client at a time polls the nodes for a lock; the others queue at one node.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use leasehold_core::{LocalTime, Outcome, Resource};
use leasehold_store::{VotedAttempts, admission_queue_of};

use crate::engine::{Sleep, with_deadline};
use crate::error::Error;
use crate::guard::Guard;
use crate::locks::lock::{Lock, WaitMode};

/// The ttl of an admission: as long as a single store waits for a frozen waiter. A client that crashes while admitted delays
/// the others by at most this, also if the lock's ttl is longer.
const ADMISSION_TTL: Duration = Duration::from_secs(3);

/// How long a client that has no admission, because the queue was unavailable, waits at the nodes before it tries the queue
/// again: at first, and at most, after it has doubled each time. Otherwise a queue that was slow for a moment would have no order
/// for as long as these clients wait.
const UNADMITTED_WAIT: Duration = Duration::from_secs(2);
const MAX_UNADMITTED_WAIT: Duration = Duration::from_secs(16);

/// How long after its limit an attempt's last vote ends at the latest. It has tries, each of which waits for silent nodes.
const LAST_VOTE: Duration = Duration::from_millis(4_800);

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
            let try_once = || self.attempt(resource, weight, None, WaitMode::NoWait);
            let Some(deadline) = wait.deadline(self.handle.now()) else { return try_once().await };
            if self.max_waiters == 0 {
                // The nodes would refuse a place, and to poll without one is to wait.
                let full = || self.failed(resource, Outcome::QueueFull, None);
                return try_once().await?.ok_or_else(full).map(Some);
            }
            let is_over = || self.handle.now() >= deadline;
            let attempts = self.handle.store.voted_attempts();
            let is_contended = || attempts.is_some_and(|attempts| attempts.is_contended(resource));
            // A client that has just met contention here does not overtake the admission queue.
            let uses_queue = if is_contended() {
                true
            } else {
                match try_once().await {
                    Ok(Some(guard)) => return Ok(Some(guard)),
                    // The vote is fresh.
                    Ok(None) if is_over() => return Ok(None),
                    Ok(None) => true,
                    Err(error) if is_over() => return Err(error),
                    // Nodes in their restart grace vote soon: wait for them.
                    Err(_) if attempts.is_some_and(VotedAttempts::in_restart_grace) => false,
                    // The votes are split, which a quorum's responses have shown.
                    Err(error) if error.is_unavailable() && is_contended() => true,
                    Err(error) => return Err(error),
                }
            };
            let last_vote = async {
                let voted = with_deadline(&self.handle.session, Some(deadline + LAST_VOTE), try_once()).await;
                voted.unwrap_or_else(|| Err(self.failed(resource, Outcome::TimedOut, None)))
            };
            match self.acquire_after_admission(resource, weight, deadline, uses_queue).await {
                // The queue is at one node, and the last responses of the others may be old. `None` needs a fresh vote.
                Ok(None) => last_vote.await,
                Err(error) if error.is_unavailable() && is_over() => last_vote.await,
                waited => waited,
            }
        })
    }

    /// Waits for admission if the queue is to be used, then at the nodes. `None` once the deadline has passed.
    async fn acquire_after_admission(
        &self,
        resource: &Arc<Resource>,
        weight: u32,
        deadline: LocalTime,
        mut uses_queue: bool,
    ) -> Result<Option<Guard>, Error> {
        let remaining = || WaitMode::until(Some(deadline), self.handle.now());
        let at_nodes = async |admission: Option<Guard>| {
            let mut guard = self.attempt(resource, weight, None, remaining()).await;
            if let Ok(Some(guard)) = &mut guard {
                guard.set_admitted();
            }
            // Admits the next client.
            drop(admission);
            guard
        };
        let Some(queue) = self.admission_lock(resource) else { return at_nodes(None).await };
        let mut pause = UNADMITTED_WAIT;
        let mut waits_already = false;
        while self.handle.now() < deadline {
            if uses_queue {
                match queue.acquire(1, None, remaining()).await {
                    Ok(None) => return Ok(None),
                    Ok(admission) => return at_nodes(admission).await,
                    Err(error) if error.is_unavailable() || waits_already && error.is_queue_full() => {}
                    // The error is to name the lock, and its number of waiters.
                    Err(error) if error.is_queue_full() => {
                        return Err(self.failed(resource, Outcome::QueueFull, None));
                    }
                    Err(error) => return Err(error),
                }
            }
            let waiting = pin!(at_nodes(None));
            match select(waiting, pin!(queue.try_again(&mut pause))).await {
                Either::Left((guard, _)) => return guard,
                // It keeps its places at the nodes.
                Either::Right((Some(admission), waiting)) => {
                    let guard = waiting.await;
                    drop(admission);
                    return guard;
                }
                // It leaves its places at the nodes only for a queue that answers.
                Either::Right((None, _)) => (uses_queue, waits_already) = (true, true),
            }
        }
        Ok(None)
    }

    /// Tries to be admitted after longer and longer pauses, until there is an answer. `None` if others are admitted or wait.
    async fn try_again(&self, pause: &mut Duration) -> Option<Guard> {
        loop {
            let until = self.handle.now() + *pause;
            Sleep::until(&self.handle.session, until).await;
            *pause = MAX_UNADMITTED_WAIT.min(2 * *pause);
            match self.acquire(1, None, WaitMode::NoWait).await {
                Ok(answer) => return answer,
                Err(error) if error.is_unavailable() && self.handle.now() >= until => {}
                // The client is closed, which ended the pause.
                Err(_) => return None,
            }
        }
    }

    /// The lock whose holder is admitted.
    fn admission_lock(&self, resource: &Resource) -> Option<Self> {
        let queue = admission_queue_of(resource)?;
        let mut admission = Self::new(self.handle.clone(), queue.kind, queue.name.as_str(), 1);
        // The admitted client is a waiter too.
        admission.max_waiters = self.max_waiters.saturating_sub(1);
        // No lease may exceed the quorum's `max_ttl`.
        admission.terms.ttl =
            self.handle.capabilities.max_ttl.map_or(ADMISSION_TTL, |longest| longest.min(ADMISSION_TTL));
        // Of the client's settings, a quorum has no replicas.
        admission.terms.replicas = 0;
        admission.metadata = self.metadata.clone();
        Some(admission)
    }
}
