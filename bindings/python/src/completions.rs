//! The operations of one event loop that have ended, as Python sees them.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::queue::Queue;

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Completions {
    queue: Arc<Queue>,
}

#[pymethods]
impl Completions {
    #[new]
    pub(crate) fn open() -> PyResult<Self> {
        Ok(Self { queue: Queue::open()? })
    }

    fn fileno(&self) -> PyResult<i32> {
        self.queue.descriptor().ok_or_else(closed)
    }

    #[getter]
    fn is_ready(&self) -> bool {
        self.queue.is_ready()
    }

    fn take(&self) -> Vec<u64> {
        self.queue.take()
    }

    fn close(&self) {
        self.queue.close();
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("the completions are closed")
}

/// The queue of these completions, if there are any.
pub(crate) fn queue_of(completions: Option<&Bound<'_, Completions>>) -> PyResult<Option<Arc<Queue>>> {
    let queue = completions.map(|completions| completions.get().queue.clone());
    if queue.as_ref().is_some_and(|queue| queue.descriptor().is_none()) { Err(closed()) } else { Ok(queue) }
}
