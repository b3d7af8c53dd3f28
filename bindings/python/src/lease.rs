//! A started call, and the lease that it may end with, as Python sees them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_binding::{Answer, Failure, Granted, Lease as Held, Operation as Call, Waiting};
use leasehold_store::process::Own;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict as _, PyDict};

use crate::completions::{Completions, queue_of};
use crate::errors::{exits, forked, raised};
use crate::exit::exit;
use crate::time::{duration, limit, optional_duration};

/// Signal handlers of Python run on the main thread only, between two slices of a wait.
const SLICE: Duration = Duration::from_millis(50);
/// Of a thread that runs no signal handlers.
const LONG_SLICE: Duration = Duration::from_secs(3_600);

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Operation {
    call: Own<Arc<Call>>,
}

impl Operation {
    pub(crate) fn new(call: Arc<Call>) -> Self {
        Self { call: Own::new(call) }
    }

    fn call(&self, py: Python<'_>) -> PyResult<&Arc<Call>> {
        self.call.get().ok_or_else(|| forked(py))
    }
}

#[pymethods]
impl Operation {
    #[getter]
    fn key(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.call(py)?.key())
    }

    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.call(py)?.is_done())
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let call = self.call(py)?;
        if call.is_of_queue() {
            return Err(PyRuntimeError::new_err(
                "the operation reports to completions, and cannot be waited for",
            ));
        }
        if call.is_done() {
            return Ok(true);
        }
        let limit = optional_duration(py, timeout)?;
        // A limit beyond the clock's range is none.
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let slice = if handles_signals() { SLICE } else { LONG_SLICE };
        let Some(waiting) = Waiting::begin(exit(), call) else { return Err(raised(py, exits())) };
        let waited = loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let limit = left.map_or(slice, |left| left.min(slice));
            if py.detach(|| call.park(limit)) {
                break Ok(true);
            }
            if exit().has_begun() {
                call.cancel();
                break Err(raised(py, exits()));
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
        self.call(py)?.cancel();
        Ok(())
    }

    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let outcome = self.call(py)?.take();
        let outcome = outcome.ok_or_else(|| {
            PyRuntimeError::new_err("the operation runs, was cancelled, or its result was taken")
        })?;
        object(py, outcome.map_err(|failure| raised(py, failure))?)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Some(call) = self.call.get() {
            call.cancel();
        }
    }
}

/// An answer for Python.
fn object(py: Python<'_>, answer: Answer) -> PyResult<Py<PyAny>> {
    Ok(match answer {
        Answer::Nothing => py.None(),
        Answer::Text(text) => text.into_pyobject(py)?.into_any().unbind(),
        Answer::Loss(reason) => reason.into_pyobject(py)?.into_any().unbind(),
        Answer::Lease(granted) => Lease::new(granted).into_pyobject(py)?.into_any().unbind(),
        Answer::Records(records) => {
            let records: Vec<_> = records.into_iter().map(|record| (record.level, record.message)).collect();
            records.into_pyobject(py)?.unbind()
        }
    })
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

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Lease {
    held: Own<Held>,
}

impl Lease {
    pub(crate) fn new(granted: Granted) -> Self {
        Self { held: Own::new(Held::new(granted)) }
    }

    fn held(&self, py: Python<'_>) -> PyResult<&Held> {
        self.held.get().ok_or_else(|| forked(py))
    }
}

#[pymethods]
impl Lease {
    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<&str> {
        Ok(self.held(py)?.name())
    }

    #[getter]
    fn token(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.held(py)?.token())
    }

    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.held(py)?.tokens().iter().map(|(name, token)| (name, token)).into_py_dict(py)
    }

    fn remaining(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.held(py)?.remaining().as_secs_f64())
    }

    fn loss(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        Ok(self.held(py)?.loss().map(|(reason, _)| reason))
    }

    fn loss_error(&self, py: Python<'_>) -> PyResult<String> {
        let held = self.held(py)?;
        let not_lost = || format!("{:?}: the lease is not lost", held.name());
        Ok(held.loss().map_or_else(not_lost, |(_, message)| message))
    }

    #[staticmethod]
    fn completions() -> PyResult<Completions> {
        Completions::open()
    }

    #[pyo3(signature = (completions=None))]
    fn lost(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        Ok(Operation::new(self.held(py)?.lost(queue_of(completions)?.as_ref())))
    }

    #[pyo3(signature = (completions=None))]
    fn renew(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        Ok(Operation::new(self.held(py)?.renew(queue_of(completions)?.as_ref())))
    }

    #[pyo3(signature = (timeout=None, completions=None))]
    fn release(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let limit = optional_duration(py, timeout)?;
        Ok(Operation::new(self.held(py)?.release(limit, queue_of(completions)?.as_ref())))
    }

    #[pyo3(signature = (completions=None))]
    fn detach(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        started(py, self.held(py)?.detach(queue_of(completions)?.as_ref()))
    }

    #[pyo3(signature = (completions=None))]
    fn downgrade(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        started(py, self.held(py)?.downgrade(queue_of(completions)?.as_ref()))
    }

    #[pyo3(signature = (wait=None, completions=None))]
    fn upgrade(
        &self,
        py: Python<'_>,
        wait: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        started(py, self.held(py)?.upgrade(limit(py, wait)?, queue_of(completions)?.as_ref()))
    }

    fn set_min_hold(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let set = self.held(py)?.set_min_hold(duration(py, seconds)?);
        set.map_err(|failure| raised(py, failure))
    }

    fn abandon(&self) {
        if let Some(held) = self.held.get() {
            held.abandon();
        }
    }
}

fn started(py: Python<'_>, call: Result<Arc<Call>, Failure>) -> PyResult<Operation> {
    call.map(Operation::new).map_err(|failure| raised(py, failure))
}
