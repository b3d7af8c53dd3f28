//! The promises that are checked.

use std::fmt;

use crate::plan::Micros;

/// A promise that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Promise {
    /// No two trusted holders.
    OneHolder,
    /// Tokens rise in the order of the grants.
    TokensRise,
    /// A fenced resource accepts no stale write.
    Fenced,
    /// First come, first served.
    Fifo,
    /// A lost lease is reported before another can hold it.
    LossReported,
    /// Nothing is left behind.
    NothingLeft,
    /// Commands per acquisition are within the stated figure.
    FewCommands,
    /// Timers fire when something is due.
    NoTimerStorm,
    /// After the faults, each waiter is granted within the bound.
    Liveness,
    /// On a healthy network, a lease that is renewed lasts as long as its guard.
    Kept,
    /// After the faults, no operation fails.
    NoError,
    /// An attempt finds the lock not free only if the server says so.
    Refused,
    /// An attempt that is refused for good asks no more.
    DenialEnds,
    /// `lock_timeout` and `close` end in time.
    InTime,
    /// A command that arrives after its attempt was given up acquires nothing.
    NoGhost,
    /// A minimum hold keeps the lock from others until it is over.
    Retained,
    /// Work starts at most once per period.
    OncePer,
    /// A latch opens when all have counted, and a round of a barrier has all of its parties.
    Gathered,
    /// A slow or silent minority of a quorum's nodes at most halves the rate of a contended lock.
    Rate,
    /// Two runs of one seed are the same.
    Repeatable,
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneHolder => "no two trusted holders",
            Self::TokensRise => "tokens rise in grant order",
            Self::Fenced => "a fenced resource accepts no stale write",
            Self::Fifo => "first come, first served",
            Self::LossReported => "a lost lease is reported before another can hold it",
            Self::NothingLeft => "nothing is left behind",
            Self::FewCommands => "commands per acquisition",
            Self::NoTimerStorm => "no timer storm",
            Self::Liveness => "each waiter is granted within the bound",
            Self::Kept => "a renewed lease lasts on a healthy network",
            Self::NoError => "no error on a healthy network",
            Self::Refused => "only the server refuses an attempt",
            Self::DenialEnds => "a refusal that stays ends the attempt",
            Self::InTime => "limits are kept",
            Self::NoGhost => "a late command acquires nothing",
            Self::Retained => "a minimum hold is kept",
            Self::OncePer => "work starts at most once per period",
            Self::Gathered => "who waits for others continues with all of them",
            Self::Rate => "a slow minority is not felt",
            Self::Repeatable => "a run can be repeated",
        })
    }
}

/// A broken promise and what was seen.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Which.
    pub promise: Promise,
    /// What was seen.
    pub what: String,
    /// When.
    pub at: Micros,
}
