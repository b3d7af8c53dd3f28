//! Leases that a client forgets, and leases that it takes over.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, ClientId, Grant, LeaseMachine, LeaseTerms, LocalTime, Loss,
    Outcome, Reply, Resource, Token, TokenRange, drift_margin,
};

use super::{Entry, Lease, MinHold, Stage};
use crate::engine::leases::{AttachedLease, DetachedLease};
use crate::engine::releasing::ReleaseOutcome;

impl Entry {
    /// Ends the entry of a held lease without a release.
    pub(in crate::engine) fn detach(&mut self, now: LocalTime) -> Result<DetachedLease, Loss> {
        let trusted_until = now + self.remaining(now)?;
        let Stage::Lease(lease) = &self.stage else { return Err(Loss::Closed) };
        let (acquisition, tombstone) = (lease.machine.acquisition(), lease.tombstone);
        let MinHold { length: min_hold, ends_at_close, .. } = self.min_hold;
        let LeaseTerms { ttl, min_lifetime, .. } = self.terms;
        let outlasts_ttl = min_lifetime > ttl;
        let is_repeat = lease.is_repeat;
        let detached = DetachedLease {
            acquisition,
            ttl,
            min_hold,
            ends_at_close,
            tombstone,
            outlasts_ttl,
            is_repeat,
            trusted_until,
        };
        self.is_referenced = false;
        self.logged.end_failure();
        self.end(ReleaseOutcome::Released);
        Ok(detached)
    }

    /// The lease is no longer borrowed: its end is a release.
    pub(in crate::engine) fn own(&mut self) {
        if let Stage::Lease(lease) = &mut self.stage {
            lease.is_borrowed = false;
        }
    }

    /// The attempt that the store knows as the holder of the lease.
    pub(in crate::engine) fn acquisition(&self) -> Option<Acquisition> {
        match &self.stage {
            Stage::Lease(lease) => Some(lease.machine.acquisition()),
            _ => None,
        }
    }

    /// Whether it is, or has been, this attempt.
    pub(in crate::engine) fn is_attempt(&self, acquisition: Acquisition) -> bool {
        match &self.stage {
            Stage::Attempt(machine) => machine.acquisition() == acquisition,
            Stage::Releasing(releasing) => releasing.release().acquisition == acquisition,
            _ => self.acquisition() == Some(acquisition),
        }
    }

    /// The entry of a lease whose holder was not told of it.
    pub(in crate::engine) fn returned(
        resource: Arc<Resource>,
        lease: DetachedLease,
        token: Token,
        client: ClientId,
        now: LocalTime,
    ) -> Self {
        let acquisition = lease.acquisition;
        let attached = AttachedLease {
            detached: DetachedLease { min_hold: Duration::ZERO, ..lease },
            owner: None,
            tokens: TokenRange { first: token, last: token },
            replicas: 0,
            is_borrowed: false,
        };
        let mut entry = Self::attached(resource, attached, now, lease.ttl);
        entry.is_referenced = false;
        entry.name_attempt(acquisition, client);
        entry
    }

    /// The store has answered that it does not have the lease. An attempt whose grant has not been heard of asks again.
    pub(in crate::engine) fn lose(&mut self, now: LocalTime) {
        self.end_attempt(now);
        match &mut self.stage {
            Stage::Attempt(machine) => machine.handle_released(now),
            Stage::Lease(lease) => {
                lease.machine.handle_reply(now, now, &Reply::NotHeld);
                self.handle_not_held(now);
            }
            Stage::Suspended(_) | Stage::Releasing(_) | Stage::Ended { .. } => {}
        }
    }

    /// A lease that the store had for another `valid_for`, when it answered a request that was sent at `asked_at`.
    pub(in crate::engine) fn attached(
        resource: Arc<Resource>,
        lease: AttachedLease,
        asked_at: LocalTime,
        valid_for: Duration,
    ) -> Self {
        let AttachedLease {
            detached: DetachedLease { acquisition, ttl, min_hold, ends_at_close, tombstone, .. },
            owner,
            tokens,
            replicas,
            is_borrowed,
        } = lease;
        // A lease that must last longer than its ttl, such as that of a period, is not shortened by a renewal.
        let terms = LeaseTerms { ttl, renews: true, max_hold: None, min_lifetime: valid_for, replicas };
        // A store's clock that was set back leaves more than was asked for, and may be set forward again.
        let trusted_for = valid_for.min(ttl.max(min_hold));
        let trusted_until = asked_at + trusted_for.saturating_sub(drift_margin(trusted_for));
        let machine = AcquireMachine::new(Acquire::exclusive(acquisition, ttl), None, asked_at);
        let kept = MinHold { length: min_hold, ends_at_close, is_continued: false };
        let mut entry = Self::new(resource, owner, terms, kept, machine);
        let grant = Grant { tokens, valid_for: trusted_for, is_plain: false };
        entry.outcome = Some(Outcome::Granted { grant, since: asked_at, trusted_until });
        let mut machine = LeaseMachine::new(acquisition, terms, asked_at, trusted_for, trusted_until, false)
            .with_longest_trust(ttl.max(min_hold));
        if acquisition.is_requested() {
            machine = machine.of_request(tokens.first);
        }
        entry.stage = Stage::Lease(Lease {
            tombstone,
            tombstone_once_answered: tombstone,
            is_borrowed,
            ..Lease::new(machine)
        });
        entry
    }
}
