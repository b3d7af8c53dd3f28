//! Attempts that a caller has named: they outlive the task that makes them, because the caller may repeat them here or at another client.

use std::time::Duration;

use leasehold_core::{Acquisition, ClientId, LocalTime, Release, ReleaseIf, TOMBSTONE_TTL};

use super::suspended::{REPEAT_WINDOW, Suspended};
use super::{Entry, Stage};
use crate::engine::ids::UncountedId;
use crate::engine::releasing::ReleaseOutcome;

impl Entry {
    /// The attempt has an id that this client may not have counted.
    pub(in crate::engine) fn name_attempt(&mut self, attempt: Acquisition, client: ClientId) {
        self.uncounted = UncountedId::of(attempt);
        self.requested_by = attempt.is_requested().then_some(client);
    }

    /// The task that made the request is gone. What the store has for it stays for a while.
    pub(in crate::engine) fn suspend(&mut self, now: LocalTime) {
        self.end_attempt(now);
        match &mut self.stage {
            Stage::Attempt(machine) => {
                machine.handle_cancel();
                self.end_attempt(now);
            }
            // Its caller may have been told of it by another answer.
            Stage::Lease(lease) if lease.is_repeat => self.end(ReleaseOutcome::Released),
            Stage::Lease(lease) => {
                let acquisition = lease.machine.acquisition();
                self.suspend_lease(acquisition, now);
            }
            Stage::Suspended(_) | Stage::Releasing(_) | Stage::Ended { .. } => {}
        }
    }

    /// As [`Self::suspend`], for a lease whose holder has left it, or was not told of it.
    pub(in crate::engine) fn suspend_lease(&mut self, acquisition: Acquisition, now: LocalTime) {
        let lasts = self.terms.ttl.max(self.terms.min_lifetime);
        let release = Release { min_hold: self.min_hold.length, ..Release::now(acquisition) };
        match self.requested_by {
            Some(inbox) => self.suspend_until_release(release, inbox, lasts, now),
            None => self.abandon(now),
        }
    }

    pub(super) fn suspend_until_release(
        &mut self,
        release: Release,
        inbox: ClientId,
        lasts: Duration,
        now: LocalTime,
    ) {
        let release =
            Release { only_if: Some(ReleaseIf::SpeaksFor(inbox)), tombstone: TOMBSTONE_TTL, ..release };
        self.stage = Stage::Suspended(Suspended { release, lasts, until: now + REPEAT_WINDOW });
        self.logged.end_failure();
        self.is_changed = true;
    }

    /// The caller repeats its request. Returns whether a new attempt may begin: not if the release was begun.
    pub(in crate::engine) fn end_suspension(&mut self) -> bool {
        let is_suspended = matches!(self.stage, Stage::Suspended(_));
        if is_suspended {
            self.end(ReleaseOutcome::Released);
        }
        is_suspended
    }

    /// The client is closed: a caller may repeat its request at another one, so that nothing is released of which another client has told.
    /// Returns whether this is an attempt of a request.
    pub(super) fn close_request(&mut self, now: LocalTime) -> bool {
        self.end_attempt(now);
        let Some(inbox) = self.requested_by else { return false };
        match &self.stage {
            Stage::Lease(lease) if !lease.is_repeat => {
                self.abandon(now);
                if let Stage::Releasing(releasing) = &mut self.stage {
                    releasing.release_if(inbox);
                }
            }
            Stage::Lease(_) | Stage::Attempt(_) | Stage::Suspended(_) => self.end(ReleaseOutcome::Released),
            // Its holder has ordered the release, or it is conditional.
            Stage::Releasing(_) => return false,
            Stage::Ended { .. } => {}
        }
        true
    }
}
