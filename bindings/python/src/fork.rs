//! What a fork does to the objects of this crate: in the child their calls fail, and their drop does nothing, because another thread of the parent
//! may have held their mutexes, and their sockets are the parent's.

use leasehold_store::process::Process;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict as _, PyModule};

/// A value whose drop is left out in a forked child.
pub(crate) struct Forkable<T> {
    value: Option<T>,
    home: Process,
}

impl<T> Forkable<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), home: Process::current() }
    }

    /// None in a forked child.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.home.is_current())
    }
}

impl<T> Drop for Forkable<T> {
    fn drop(&mut self) {
        if !self.home.is_current() {
            std::mem::forget(self.value.take());
        }
    }
}

#[pyfunction]
fn in_child() {
    leasehold::forked();
}

/// Python calls [`in_child`] in each child, before any other code there.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let hooks = [("after_in_child", wrap_pyfunction!(in_child, module)?)].into_py_dict(py)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}
