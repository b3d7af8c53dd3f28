//! The companion of a lease is confirmed, released, or lost.

use leasehold_core::LocalTime;

use super::Entry;
use crate::engine::trust_limit::TrustLimit;

impl Entry {
    pub(in crate::engine) fn limit_trust(&mut self, until: LocalTime, now: LocalTime) {
        // An answer that comes after the expiry is too late.
        self.expire_trust(now);
        // A companion that was lost stays lost: another program may have had it.
        if !matches!(self.trust_limit, TrustLimit::Lost) {
            self.trust_limit = TrustLimit::Until(until);
            self.companion_error = None;
            self.is_changed = true;
        }
    }

    pub(in crate::engine) fn lift_trust_limit(&mut self, now: LocalTime) {
        if self.trust_limit.loss(now).is_none() {
            self.trust_limit = TrustLimit::Unlimited;
            self.is_changed = true;
        }
    }

    pub(in crate::engine) fn lose_companion(&mut self) {
        self.trust_limit = TrustLimit::Lost;
        self.is_changed = true;
    }

    /// Whether it was renewed in time is decided by now.
    pub(super) fn expire_trust(&mut self, now: LocalTime) {
        if self.trust_limit.loss(now).is_some() {
            self.trust_limit = TrustLimit::Lost;
        }
    }
}
