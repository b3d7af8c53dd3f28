//! Seconds of Python as durations.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::errors::Failure;

/// How long a call may wait, from its start on.
#[derive(Clone, Copy)]
pub(crate) struct Limit {
    started: Instant,
    wait: Duration,
}

impl Limit {
    pub(crate) fn new(py: Python<'_>, wait: Option<f64>) -> PyResult<Self> {
        let wait = wait.map_or(Ok(Duration::MAX), |wait| duration(py, wait))?;
        Ok(Self { started: Instant::now(), wait })
    }

    pub(crate) fn left(self) -> Duration {
        if self.wait == Duration::MAX { self.wait } else { self.wait.saturating_sub(self.started.elapsed()) }
    }
}

/// Seconds of Python.
pub(crate) fn duration(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Failure::invalid(format!("{seconds:?} is no number of seconds")).into_exception(py))
}
