//! Bugs that the checks must find.

use std::fmt;

use crate::checks::Promise;

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
}

impl Planted {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::OneVoteLess,
        Self::RestartGuardIgnored,
        Self::TokenNotStored,
        Self::RenewalsForgotten,
        Self::SlowClients,
        Self::ReleaseForgotten,
        Self::PushesLost,
        Self::RenewalsRefused,
    ];

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
        }
    }
}

impl fmt::Display for Planted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
