//! What a store's clocks say.

use crate::time::StoreTime;
use crate::token::Token;

/// The store's clocks when it runs a command.
///
/// On Redis both are the server's `TIME`. The embedded stores use the boot clock for leases, because it cannot be set, and the
/// wall clock for tokens, because it continues after a reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// For expiries.
    pub time: StoreTime,
    /// For tokens: microseconds since 1970.
    pub wall: StoreTime,
    /// On a quorum node: what the other nodes may have granted. No token below it is granted, and a renewal raises the lease's
    /// token and the last token to it.
    pub floor: Option<Token>,
}

impl Now {
    /// The time of a store with one clock for both.
    #[must_use]
    pub const fn same(time: StoreTime) -> Self {
        Self { time, wall: time, floor: None }
    }
}
