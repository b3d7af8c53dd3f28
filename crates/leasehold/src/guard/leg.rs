//! The lock of another library that a lease is bridged to.

#[cfg(feature = "redis")]
use std::sync::Arc;

#[cfg(feature = "redis")]
use leasehold_core::{LocalTime, Loss};

use super::Guard;
#[cfg(feature = "redis")]
use crate::bridge::{Leg, LegEnd};
#[cfg(feature = "redis")]
use crate::engine::with_deadline;
use crate::error::Error;
#[cfg(feature = "redis")]
use crate::error::ErrorKind;
#[cfg(feature = "redis")]
use crate::handle::Handle;

impl Guard {
    #[cfg(feature = "redis")]
    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    /// The guard also holds the lock of another library, and releases it first.
    #[cfg(feature = "redis")]
    pub(crate) fn set_leg(&mut self, leg: Arc<Leg>) {
        debug_assert!(self.local_queue.is_none(), "a lease with a leg is not handed off");
        self.leg = Some(leg);
    }

    /// A bridged lease can't be detached: no other client knows its leg.
    #[cfg(feature = "redis")]
    pub(crate) fn check_detachable(&self) -> Result<(), Error> {
        match self.leg {
            None => Ok(()),
            Some(_) => {
                let what = "a lease that is bridged to the lock of another library can't be detached";
                Err(self.handle.error(ErrorKind::Invalid, &self.resource, what))
            }
        }
    }

    #[cfg(not(feature = "redis"))]
    pub(crate) fn check_detachable(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Renews the leg, if there is one.
    #[cfg(feature = "redis")]
    pub(super) async fn renew_leg(&self) -> Result<(), Error> {
        let Some(leg) = &self.leg else { return Ok(()) };
        match Box::pin(leg.renew()).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.lost_error(Loss::Bridge)),
            Err(error) => Err(self.handle.store_error(&self.resource, &error)),
        }
    }

    #[cfg(not(feature = "redis"))]
    pub(super) async fn renew_leg(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Releases the leg before the lease.
    #[cfg(feature = "redis")]
    pub(super) async fn release_leg(&mut self, deadline: Option<LocalTime>) -> Result<(), Error> {
        // If this future is dropped, the guard still has the leg.
        let Some(leg) = self.leg.clone() else { return Ok(()) };
        let ended = with_deadline(&self.handle.session, deadline, leg.release()).await;
        self.leg = None;
        match ended {
            Some(LegEnd::Released) => Ok(()),
            Some(LegEnd::NotHeld) => Err(self.lost_error(Loss::Bridge)),
            Some(LegEnd::Unconfirmed) | None => {
                let what =
                    "the release of the bridged lock is not confirmed; it is retried in the background";
                Err(self.handle.unavailable(&self.resource, what))
            }
        }
    }
}
