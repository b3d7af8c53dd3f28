//! Where several stores vote: who waits, and who waits for that.

use std::pin::Pin;

use leasehold_core::Resource;

use crate::error::Error;
use crate::guard::Guard;
use crate::lock::{DEFAULT_TTL, Lock, Wait};
use crate::store::queue_of;

impl Lock {
    /// Where several stores vote: at once, and otherwise first in a queue of this store's clients, of whom only the first
    /// waits at all nodes. Two who waited there might stand in two orders, and each be granted a part.
    ///
    /// Turns are a courtesy, and nobody's right depends on them: where that queue can't be had, one waits without.
    pub(crate) fn acquire_in_turn(
        &self,
        weight: u32,
        wait: Wait,
    ) -> Pin<Box<dyn Future<Output = Result<Option<Guard>, Error>> + Send + '_>> {
        Box::pin(async move {
            let resource = self.check(weight)?;
            let deadline = wait.deadline();
            let tried = self.attempt(resource, weight, None, Wait::No).await;
            let turn = match tried {
                Ok(Some(guard)) => return Ok(Some(guard)),
                tried if deadline.is_none() => return tried,
                Ok(None) => self.turn(resource),
                // Those who may vote soon are waited for.
                Err(_) if self.handle.store.is_young() => None,
                Err(error) => return Err(error),
            };
            let turn = match turn {
                None => None,
                Some(turn) => match turn.acquire(1, None, Wait::until(deadline)).await {
                    Ok(None) => return Ok(None),
                    Ok(turn) => turn,
                    Err(error) if error.is_unavailable() => None,
                    Err(error) => return Err(error),
                },
            };
            let guard = self.attempt(resource, weight, None, Wait::until(deadline)).await;
            // Now the next one may wait at the nodes.
            drop(turn);
            guard
        })
    }

    /// The queue of those who wait for this resource, where it has one.
    fn turn(&self, resource: &Resource) -> Option<Self> {
        let queue = queue_of(resource)?;
        let mut turn = Self::new(self.handle.clone(), queue.kind, queue.name.as_str(), 1);
        // The first of those who wait has the turn.
        turn.max_waiters = self.max_waiters.saturating_sub(1);
        // Nothing may be held for longer than the longest that was named.
        let longest = self.handle.store.longest_ttl().unwrap_or(DEFAULT_TTL);
        turn.terms.ttl = longest.min(DEFAULT_TTL);
        turn.about = self.about.clone();
        Some(turn)
    }
}
