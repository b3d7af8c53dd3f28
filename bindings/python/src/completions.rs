//! The operations of one event loop that have ended, as Python sees them.

use std::os::fd::RawFd;
use std::sync::Arc;

use leasehold_binding::Queue;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::descriptor::Descriptor;

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Completions {
    queue: Arc<Queue>,
    /// The queue's, while it is open.
    descriptor: RawFd,
}

#[pymethods]
impl Completions {
    #[new]
    pub(crate) fn open() -> PyResult<Self> {
        let descriptor = Descriptor::new()?;
        Ok(Self { descriptor: descriptor.readable(), queue: Queue::new(Box::new(descriptor)) })
    }

    fn fileno(&self) -> PyResult<i32> {
        if self.queue.is_open() { Ok(self.descriptor) } else { Err(closed()) }
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
    if queue.as_ref().is_some_and(|queue| !queue.is_open()) { Err(closed()) } else { Ok(queue) }
}
