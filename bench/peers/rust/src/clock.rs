//! The clock that all processes of the machine share.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The monotonic clock, in nanoseconds.
#[must_use]
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// How long it is until then; nothing if that is over.
#[must_use]
pub fn until(ns: u64) -> Duration {
    Duration::from_nanos(ns.saturating_sub(now_ns()))
}
