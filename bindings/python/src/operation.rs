//! A started call, as Python sees it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_store::process::Own;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::core::Core;
use crate::errors::Failure;
use crate::exit::{self, Waiting};
use crate::time::duration;

/// Signal handlers of Python run on the main thread only, between two slices of a wait.
const SLICE: Duration = Duration::from_millis(50);
/// Of a thread that runs no signal handlers.
const LONG_SLICE: Duration = Duration::from_secs(3_600);

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Operation {
    core: Own<Arc<Core>>,
}

impl Operation {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core: Own::new(core) }
    }

    fn core(&self, py: Python<'_>) -> PyResult<&Arc<Core>> {
        self.core.get().ok_or_else(|| crate::errors::forked(py))
    }
}

#[pymethods]
impl Operation {
    #[getter]
    fn key(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.core(py)?.key)
    }

    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.core(py)?.is_done())
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let core = self.core(py)?;
        if core.is_of_queue() {
            return Err(PyRuntimeError::new_err(
                "the operation reports to completions, and cannot be waited for",
            ));
        }
        if core.is_done() {
            return Ok(true);
        }
        let limit = timeout.map(|limit| duration(py, limit)).transpose()?;
        // A limit beyond the clock's range is none.
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let slice = if handles_signals() { SLICE } else { LONG_SLICE };
        let Some(waiting) = Waiting::begin(core) else { return Err(Failure::exits().into_exception(py)) };
        let waited = loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let limit = left.map_or(slice, |left| left.min(slice));
            if py.detach(|| core.park(limit)) {
                break Ok(true);
            }
            if exit::is_exiting() {
                core.cancel();
                break Err(Failure::exits().into_exception(py));
            }
            if let Err(interrupt) = py.check_signals() {
                break Err(interrupt);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                break Ok(false);
            }
        };
        drop(waiting);
        waited
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.core(py)?.cancel();
        Ok(())
    }

    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let outcome = self.core(py)?.take();
        let outcome = outcome.ok_or_else(|| {
            PyRuntimeError::new_err("the operation runs, was cancelled, or its result was taken")
        })?;
        outcome.map_err(|failure| failure.into_exception(py))?.into_object(py)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Some(core) = self.core.get() {
            core.cancel();
        }
    }
}

/// Whether this is the main thread, which runs the handlers of signals.
#[cfg(target_os = "linux")]
fn handles_signals() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

#[cfg(not(target_os = "linux"))]
fn handles_signals() -> bool {
    true
}
