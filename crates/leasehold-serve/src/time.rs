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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_lease_counts_from_the_arrival_and_is_a_hundredth_shorter() {
        let arrived = Instant::now();
        for (trusted_for, expires_in) in [(30_000, 29_700), (100, 99), (0, 0)] {
            assert_eq!(expires_in_ms(arrived + Duration::from_millis(trusted_for), arrived), expires_in);
        }
        assert_eq!(expires_in_ms(arrived, arrived + Duration::from_secs(1)), 0, "it is over");
    }
}
