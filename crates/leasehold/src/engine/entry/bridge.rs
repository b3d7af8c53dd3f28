//! The second leg of a bridged lease is confirmed, or lost.

use leasehold_core::LocalTime;

use super::Entry;
use crate::engine::second_leg::SecondLeg;

impl Entry {
    pub(in crate::engine) fn trust_bridge(&mut self, until: LocalTime, now: LocalTime) {
        // An answer that comes after the expiry is too late.
        self.expire_bridge(now);
        // A leg that was lost stays lost: another program may have had the lock.
        if !matches!(self.second_leg, SecondLeg::Lost) {
            self.second_leg = SecondLeg::TrustedUntil(until);
            self.leg_error = None;
            self.is_changed = true;
        }
    }

    pub(in crate::engine) fn release_bridge(&mut self, now: LocalTime) {
        if self.second_leg.loss(now).is_none() {
            self.second_leg = SecondLeg::Absent;
            self.is_changed = true;
        }
    }

    pub(in crate::engine) fn lose_bridge(&mut self) {
        self.second_leg = SecondLeg::Lost;
        self.is_changed = true;
    }

    /// The leg has expired by now.
    pub(super) fn expire_bridge(&mut self, now: LocalTime) {
        if self.second_leg.loss(now).is_some() {
            self.second_leg = SecondLeg::Lost;
        }
    }
}
