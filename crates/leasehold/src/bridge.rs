//! Bridges: a lock that is shared with programs that use another lock library on the same Redis server, or on
//! several that vote.
//!
//! A bridged lock has two legs. The *own leg* is leasehold's lock, with its queue, its pushes and its fencing tokens. Only the
//! holder of the own leg takes the *foreign leg*, which is the lock of the other library: a key, in the form which that library
//! writes. So the programs with leasehold keep their order among themselves, and contend with the other programs as one. Both
//! legs are renewed, and the loss of one is the loss of the lock. The foreign leg is released first.
//!
//! Fencing tokens order the programs with leasehold only, because the other library gives none. With Redisson's fenced lock they come from
//! its counter, and order both.
//!
//! The foreign leg may be a lock on several servers whose programs vote (`servers.rs`, `leasehold-redis/src/foreign_voters.rs`).
//!
//! What is not here: Redisson's fair lock and its semaphores (`text.rs` says why).

mod commands;
mod foreign;
mod holders;
mod keeper;
mod leg;
mod libraries;
mod redisson;
mod servers;
mod take;
mod text;
mod yielding;

#[cfg(feature = "_simulation")]
pub(crate) use self::commands::{RELEASE_VALUE, RENEW_VALUE};
pub use self::foreign::Foreign;
pub(crate) use self::keeper::Bridges;
pub(crate) use self::leg::{Leg, LegEnd, OwnLease};
pub(crate) use self::take::is_no_lock;

/// Why a bridged lock has no minimum hold.
pub(crate) const NO_MIN_HOLD: &str =
    "a bridged lock can't have a minimum hold, because the other library's lock is released at once";
