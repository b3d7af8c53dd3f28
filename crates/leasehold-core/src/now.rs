//! What a store's clocks say.

use crate::time::StoreTime;
use crate::token::Token;

/// What the store's clocks say at the moment of one command.
///
/// On Redis both are the server's `TIME`. The embedded stores run their leases on the boot clock,
/// which no administrator can step, and their tokens on the wall clock, which outlives a reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// The clock of expiries.
    pub time: StoreTime,
    /// The clock of tokens: microseconds since 1970.
    pub wall: StoreTime,
    /// Where several stores vote: what the others may have given. No token below it is given, and a renewal raises the
    /// lease's own and the last one to it.
    pub floor: Option<Token>,
}

impl Now {
    /// A store that has one clock for both.
    #[must_use]
    pub const fn same(time: StoreTime) -> Self {
        Self { time, wall: time, floor: None }
    }
}
