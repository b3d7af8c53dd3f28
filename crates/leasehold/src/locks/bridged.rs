//! A lock that is bridged to the lock of another library.

use std::sync::Arc;

use leasehold_core::Resource;

use super::lock::{Lock, WaitMode};
use crate::bridge::{Foreign, take_leg};
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;

impl Lock {
    pub(crate) fn set_bridge(&mut self, foreign: Foreign) {
        self.bridge = Some(Arc::new(foreign));
        // Each turn takes the foreign lock and releases it: the other programs would wait for all turns of a local queue.
        self.hand_off = None;
    }

    /// Whether the options and the store allow a bridge, if there is one.
    pub(super) fn check_bridge(&self, resource: &Resource) -> Result<(), Error> {
        if self.bridge.is_none() {
            return Ok(());
        }
        let what = if !self.handle.capabilities.has_foreign_keys {
            "a bridge needs a store on the Redis server that has the keys of the other library"
        } else if !self.terms.renews {
            "a bridged lock is always renewed, because the other library's lock is first taken for 3 s only"
        } else if !self.min_hold.is_zero() {
            "a bridged lock can't have a minimum hold, because the other library's lock is released at once"
        } else {
            return Ok(());
        };
        Err(self.handle.error(ErrorKind::Invalid, resource, what))
    }

    /// Acquires the own lease, and then the foreign lock.
    pub(super) async fn acquire_bridged(
        &self,
        resource: &Arc<Resource>,
        foreign: &Foreign,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        let deadline = wait.deadline(self.handle.now());
        let Some(guard) = self.attempt(resource, 1, None, wait).await? else { return Ok(None) };
        take_leg(guard, foreign, self.terms.ttl, deadline).await
    }
}
