//! The second leg of a bridged lease.

use leasehold_core::{LocalTime, Loss};

use super::Entry;

/// What the entry of a lease knows of its second leg.
#[derive(Clone, Copy)]
pub(super) enum SecondLeg {
    /// There is none, or it was not taken yet.
    Absent,
    TrustedUntil(LocalTime),
    Lost,
}

impl SecondLeg {
    /// Whether the lease is lost because of this leg.
    pub(super) fn loss(self, now: LocalTime) -> Option<Loss> {
        match self {
            Self::Absent => None,
            Self::TrustedUntil(until) => (until <= now).then_some(Loss::Bridge),
            Self::Lost => Some(Loss::Bridge),
        }
    }

    /// When the leg ends without a renewal.
    pub(super) fn deadline(self) -> LocalTime {
        match self {
            Self::TrustedUntil(until) => until,
            Self::Absent | Self::Lost => LocalTime::NEVER,
        }
    }
}

impl Entry {
    pub(in crate::engine) fn trust_bridge(&mut self, until: LocalTime) {
        // A leg that was lost stays lost: another program may have had the lock.
        if !matches!(self.second_leg, SecondLeg::Lost) {
            self.second_leg = SecondLeg::TrustedUntil(until);
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
