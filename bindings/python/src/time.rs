//! Seconds of Python as durations.

use std::time::Duration;

use leasehold_binding::{Failure, Limit};
use pyo3::prelude::*;

use crate::errors::raised;

/// Seconds of Python.
pub(crate) fn duration(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| raised(py, Failure::invalid(format!("{seconds:?} is no number of seconds"))))
}

pub(crate) fn optional_duration(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds.map(|seconds| duration(py, seconds)).transpose()
}

/// How long a call that starts now may wait.
pub(crate) fn limit(py: Python<'_>, wait: Option<f64>) -> PyResult<Limit> {
    optional_duration(py, wait).map(Limit::new)
}
