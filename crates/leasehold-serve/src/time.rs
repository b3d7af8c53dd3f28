//! Times as answers have them.

use std::time::{Duration, Instant};

/// Whole milliseconds.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// For how long a lease is the caller's, counted from when it sent its request, which was not after `arrived`. `valid_for`: for how much longer this
/// server trusts the lease. The caller's clock may run a hundredth slower.
pub(crate) fn expires_in_ms(valid_for: Duration, arrived: Instant) -> u64 {
    millis((arrived.elapsed() + valid_for) / 100 * 99)
}
