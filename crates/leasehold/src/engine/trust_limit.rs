//! Until when a lease may be trusted whatever its store says.

use leasehold_core::{LocalTime, Loss};

/// A lease that has a companion, as a bridged one has the lock of another library, is lost with it.
#[derive(Clone, Copy)]
pub(super) enum TrustLimit {
    /// There is no companion, or it was not taken yet.
    Unlimited,
    /// By the companion's last confirmation.
    Until(LocalTime),
    /// The companion is lost.
    Lost,
}

impl TrustLimit {
    /// Whether the lease is lost because of its companion.
    pub(super) fn loss(self, now: LocalTime) -> Option<Loss> {
        match self {
            Self::Unlimited => None,
            Self::Until(until) => (until <= now).then_some(Loss::Bridge),
            Self::Lost => Some(Loss::Bridge),
        }
    }

    /// When the companion ends without a renewal.
    pub(super) fn deadline(self) -> LocalTime {
        self.expiry().unwrap_or(LocalTime::NEVER)
    }

    /// When a timer must look at it.
    pub(super) fn expiry(self) -> Option<LocalTime> {
        match self {
            Self::Until(until) => Some(until),
            Self::Unlimited | Self::Lost => None,
        }
    }
}
