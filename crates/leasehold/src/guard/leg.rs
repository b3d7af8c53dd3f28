//! The lock of another library that a lease is bridged to.

use std::sync::Arc;

use leasehold_core::{LocalTime, Loss};

use super::Guard;
use crate::bridge::{Leg, LegEnd};
use crate::engine::with_deadline;
use crate::error::Error;
use crate::error::ErrorKind;
use crate::handle::Handle;

impl Guard {
    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    /// The guard also holds the lock of another library, and releases it first.
    pub(crate) fn set_leg(&mut self, leg: Arc<Leg>) {
        debug_assert!(self.local_queue.is_none(), "a lease with a leg is not handed off");
        self.leg = Some(leg);
    }

    /// A bridged lease can't be detached: no other client knows its leg.
    pub(crate) fn check_detachable(&self) -> Result<(), Error> {
        match self.leg {
            None => Ok(()),
            Some(_) => {
                let what = "a lease that is bridged to the lock of another library can't be detached";
                Err(self.handle.error(ErrorKind::Invalid, &self.resource, what))
            }
        }
    }

    /// Renews the leg, if there is one.
    pub(super) async fn renew_leg(&self) -> Result<(), Error> {
        let Some(leg) = &self.leg else { return Ok(()) };
        match Box::pin(leg.renew()).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.lost_error(Loss::Bridge)),
            Err(error) => Err(self.handle.store_error(&self.resource, &error)),
        }
    }

    /// Releases the leg before the lease.
    pub(super) async fn release_leg(&mut self, deadline: Option<LocalTime>) -> Result<(), Error> {
        // If this future is dropped, the guard still has the leg.
        let Some(leg) = self.leg.clone() else { return Ok(()) };
        let ended = with_deadline(&self.handle.session, deadline, leg.release()).await;
        self.leg = None;
        match ended {
            Some(LegEnd::Released) => Ok(()),
            Some(LegEnd::NotHeld) => Err(self.lost_error(Loss::Bridge)),
            Some(LegEnd::Refused(error)) => Err(self.handle.store_error(&self.resource, &error)),
            Some(LegEnd::Unconfirmed) | None => {
                let what =
                    "the release of the bridged lock is not confirmed; it is retried in the background";
                Err(self.handle.unavailable(&self.resource, what))
            }
        }
    }
}
