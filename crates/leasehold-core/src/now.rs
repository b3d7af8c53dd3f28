//! The readings of a store's clocks.

use crate::time::StoreTime;
use crate::token::Token;

/// The store's clocks when it runs a command.
///
/// On Redis tokens have a clock of their own, the ids of a stream. The embedded stores use the boot clock for leases, because
/// it cannot be set, and the wall clock for tokens, because it continues after a reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Time for expiries.
    pub time: StoreTime,
    /// Time for tokens, in microseconds since 1970.
    pub wall: StoreTime,
    /// On a quorum node: a lower bound for new tokens, because other nodes may have granted tokens below it. A renewal
    /// raises the token of the lease and the last token to this bound.
    pub floor: Option<Token>,
    /// Whether grants may reserve tokens for local hand-offs. Redis does not while its clock of tokens, which all locks of a
    /// server share, is ahead of the time.
    pub may_reserve: bool,
}

impl Now {
    /// The time of a store with one clock for both.
    #[must_use]
    pub const fn same(time: StoreTime) -> Self {
        Self { time, wall: time, floor: None, may_reserve: true }
    }
}
