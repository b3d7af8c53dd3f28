//! Times as answers have them.

use std::time::{Duration, Instant};

/// Whole milliseconds.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// For how long a lease is the caller's, counted from when it sent its request, which was not after `arrived`. The caller's clock may run a
/// hundredth slower.
pub(crate) fn expires_in_ms(trusted_until: Instant, arrived: Instant) -> u64 {
    millis(trusted_until.saturating_duration_since(arrived) / 100 * 99)
}
