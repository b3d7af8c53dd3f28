//! The companion of a lease is confirmed, released, or lost.

use leasehold_core::LocalTime;

use super::{Entry, Lease, Stage};
use crate::engine::trust_limit::TrustLimit;

impl Entry {
    pub(in crate::engine) fn limit_trust(&mut self, until: LocalTime, now: LocalTime) {
        let Stage::Lease(lease) = &mut self.stage else { return };
        // An answer that comes after the expiry is too late.
        lease.expire_trust(now);
        // A companion that was lost stays lost: another program may have had it.
        if !matches!(lease.trust_limit, TrustLimit::Lost) {
            lease.trust_limit = TrustLimit::Until(until);
            self.companion_error = None;
            self.is_changed = true;
        }
    }

    pub(in crate::engine) fn lift_trust_limit(&mut self, now: LocalTime) {
        let Stage::Lease(lease) = &mut self.stage else { return };
        if lease.trust_limit.loss(now).is_none() {
            lease.trust_limit = TrustLimit::Unlimited;
            self.is_changed = true;
        }
    }

    pub(in crate::engine) fn lose_companion(&mut self) {
        if let Stage::Lease(lease) = &mut self.stage {
            lease.trust_limit = TrustLimit::Lost;
            self.is_changed = true;
        }
    }
}

impl Lease {
    /// Whether its companion was renewed in time is decided by now.
    pub(super) fn expire_trust(&mut self, now: LocalTime) {
        if self.trust_limit.loss(now).is_some() {
            self.trust_limit = TrustLimit::Lost;
        }
    }
}
