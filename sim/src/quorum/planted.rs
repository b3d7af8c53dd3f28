//! Bugs that the checks must find.

use std::fmt;

use crate::checks::{Promise, Violation};

/// A bug in a simulated node, network or machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A quorum is counted as one less: one refusal reaches the client as a grant.
    OneVoteLess,
    /// A node that has lost its data votes at once.
    RestartGuardIgnored,
    /// A node confirms a token of another node, and does not store it.
    TokenNotStored,
    /// The nodes confirm renewals, and do not extend the lease.
    RenewalsForgotten,
    /// The clients' clocks are 4 % slow.
    SlowClients,
    /// A node confirms some releases, and keeps the lease.
    ReleaseForgotten,
    /// A node never grants to a waiter, and publishes nothing.
    PushesLost,
    /// The nodes refuse renewals.
    RenewalsRefused,
    /// The resource accepts any token.
    Unfenced,
    /// Timers fire late.
    LateTimers,
    /// Timers fire so late that timed waits do not end in time.
    LateTimeouts,
    /// The nodes fail some attempts although they are healthy.
    SpuriousErrors,
}

impl Planted {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::OneVoteLess,
        Self::RestartGuardIgnored,
        Self::TokenNotStored,
        Self::RenewalsForgotten,
        Self::SlowClients,
        Self::ReleaseForgotten,
        Self::PushesLost,
        Self::RenewalsRefused,
        Self::Unfenced,
        Self::LateTimers,
        Self::LateTimeouts,
        Self::SpuriousErrors,
    ];

    /// Whether this violation is the one that the bug must cause.
    #[must_use]
    pub fn explains(self, violation: &Violation) -> bool {
        violation.promise == self.breaks()
    }

    /// The check that must find it.
    #[must_use]
    pub const fn breaks(self) -> Promise {
        match self {
            Self::OneVoteLess | Self::RestartGuardIgnored | Self::RenewalsForgotten | Self::SlowClients => {
                Promise::OneHolder
            }
            Self::TokenNotStored => Promise::TokensRise,
            Self::ReleaseForgotten => Promise::NothingLeft,
            Self::PushesLost => Promise::Liveness,
            Self::RenewalsRefused => Promise::Kept,
            Self::Unfenced => Promise::Fenced,
            Self::LateTimers => Promise::LossReported,
            Self::LateTimeouts => Promise::InTime,
            Self::SpuriousErrors => Promise::NoError,
        }
    }
}

impl fmt::Display for Planted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
