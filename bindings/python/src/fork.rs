//! Tells the library of a fork: in the child the calls of this crate's objects fail, and their drop does nothing.

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict as _, PyModule};

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
