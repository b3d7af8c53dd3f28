//! Milliseconds of JavaScript as durations.

use std::time::Duration;

use leasehold_binding::{Failure, Limit};

/// Milliseconds of JavaScript, which may have fractions.
pub(crate) fn duration(milliseconds: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(milliseconds / 1_000.0)
        .map_err(|_| Failure::invalid(format!("{milliseconds} is no number of milliseconds")))
}

pub(crate) fn optional_duration(milliseconds: Option<f64>) -> Result<Option<Duration>, Failure> {
    milliseconds.map(duration).transpose()
}

/// How long a call that starts now may wait.
pub(crate) fn limit(wait: Option<f64>) -> Result<Limit, Failure> {
    optional_duration(wait).map(Limit::new)
}

pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}
