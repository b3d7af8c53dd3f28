//! Errors as exceptions of `leasehold._errors`.

use leasehold_binding::Failure;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

pub(crate) fn raised(py: Python<'_>, failure: Failure) -> PyErr {
    let (class, message, reason) = failure.parts();
    match reason {
        Some(reason) => exception(py, class, (message, reason)),
        None => exception(py, class, (message,)),
    }
}

pub(crate) fn exits() -> Failure {
    Failure::Own("ClientClosed", "the interpreter exits".to_owned())
}

pub(crate) fn forked(py: Python<'_>) -> PyErr {
    let what =
        "this object belongs to the parent process: call leasehold.connect in the child, after the fork";
    exception(py, "ForkedError", (what,))
}

fn exception<'py>(py: Python<'py>, class: &str, arguments: impl pyo3::call::PyCallArgs<'py>) -> PyErr {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = ERRORS.get_or_try_init(py, || py.import("leasehold._errors").map(Bound::unbind));
    let raised = module.and_then(|module| module.bind(py).getattr(class)?.call1(arguments));
    raised.map_or_else(|error| error, PyErr::from_value)
}
