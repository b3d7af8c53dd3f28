//! The second leg of a bridged lease: the lock of another library.

use leasehold_core::{LocalTime, Loss};

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
        self.expiry().unwrap_or(LocalTime::NEVER)
    }

    /// When a timer must look at the leg.
    pub(super) fn expiry(self) -> Option<LocalTime> {
        match self {
            Self::TrustedUntil(until) => Some(until),
            Self::Absent | Self::Lost => None,
        }
    }
}
