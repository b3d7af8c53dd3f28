//! A repeated `Acquire` that arrives after the store has ended the lease of its attempt: the store may grant it, although no task knows
//! of that, and the guard of the lost lease may stay for long.

use std::time::Duration;

use leasehold_core::{Command, Grant, LocalTime, Outcome, Release, ReleaseIf, Reply, TOMBSTONE_TTL};

use super::{Entry, Lease, Stage};

/// The pause before a late release that failed is repeated.
const RETRY: Duration = Duration::from_secs(1);

impl Entry {
    /// The store has granted the attempt. With a higher token than that of the lease, it had ended the lease before: the lease is lost,
    /// and the new one is released at once, because no task has worked under it. Over a quorum a second round of an attempt whose
    /// future was not polled for 15 s may have a higher token although the lease lasts: it is given up then, too.
    pub(super) fn handle_regrant(&mut self, now: LocalTime, grant: Grant) {
        let own = match self.outcome {
            Some(Outcome::Granted { grant, .. }) => grant.tokens.first,
            _ => return,
        };
        if let Stage::Lease(lease) = &mut self.stage
            && own < grant.tokens.first
        {
            lease.machine.handle_reply(now, now, &Reply::NotHeld);
            lease.tombstone = TOMBSTONE_TTL;
            self.handle_not_held(now);
        }
    }

    /// The store does not have the lease any more. An `Acquire` of its attempt that may still be on its way is to be refused, or its
    /// grant released. The minimum hold was that of the lease and keeps no such grant.
    pub(super) fn handle_not_held(&mut self, now: LocalTime) {
        let Stage::Lease(lease) = &mut self.stage else { return };
        self.min_hold.length = Duration::ZERO;
        // No `Acquire` of this client is on its way for the request of an attached lease: a late one has a caller, who repeats it.
        let is_of_another = lease.machine.acquisition().is_requested() && self.requested_by.is_none();
        if !lease.tombstone.is_zero() && !lease.is_borrowed && !is_of_another {
            lease.late_release_at = Some(now);
        }
    }

    /// How long a release of the lease is to refuse an `Acquire` of its attempt that may still be on its way. That also holds for a
    /// release that comes before the one in progress.
    pub(in crate::engine) fn tombstone(&self) -> Duration {
        match &self.stage {
            Stage::Lease(lease) => lease.tombstone,
            Stage::Releasing(releasing) => releasing.release().tombstone,
            _ => Duration::ZERO,
        }
    }

    /// The release of what a late `Acquire` was or may be granted, once.
    pub(super) fn poll_late_release(&mut self, now: LocalTime) -> Option<Command> {
        let Stage::Lease(lease) = &mut self.stage else { return None };
        lease.late_release_at.take_if(|at| *at <= now)?;
        let release = Release::now(lease.machine.acquisition());
        // Another client may have told the caller of a request of what the late `Acquire` was granted.
        Some(Command::Release(Release {
            tombstone: lease.tombstone,
            only_if: self.requested_by.map(ReleaseIf::SpeaksFor),
            ..release
        }))
    }
}

impl Lease {
    /// A late release failed.
    pub(super) fn repeat_late_release(&mut self, now: LocalTime) {
        self.late_release_at = Some(now + RETRY);
    }
}
