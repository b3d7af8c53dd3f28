//! Errors of the library as exceptions of `leasehold._errors`.

use leasehold::{Error, ErrorKind, Loss};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

/// Why an operation failed.
pub(crate) enum Failure {
    Library(Error),
    Lost(String, Loss),
    /// The class of the exception, and its message.
    Own(&'static str, String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl Failure {
    pub(crate) fn closed() -> Self {
        Self::Own("ClientClosed", "the client was closed".to_owned())
    }

    pub(crate) fn exits() -> Self {
        Self::Own("ClientClosed", "the interpreter exits".to_owned())
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Own("InvalidInput", what.into())
    }

    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Own("Unsupported", what.into())
    }

    pub(crate) fn into_exception(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Own(class, message) => exception(py, class, (message,)),
            Self::Lost(message, loss) => exception(py, "LeaseLost", (message, reason(loss))),
            Self::Library(error) => {
                let class = match error.kind() {
                    _ if error.is_refused() => "Refused",
                    ErrorKind::Invalid => "InvalidInput",
                    ErrorKind::Unsupported => "Unsupported",
                    ErrorKind::Unavailable => "Unavailable",
                    ErrorKind::Lost => "LeaseLost",
                    ErrorKind::Timeout => "Timeout",
                    ErrorKind::QueueFull => "QueueFull",
                    ErrorKind::Closed => "ClientClosed",
                    ErrorKind::Forked => "ForkedError",
                    _ => "Error",
                };
                exception(py, class, (format!("{error:#}"),))
            }
        }
    }
}

/// The reason of `LeaseLost`.
pub(crate) fn reason(loss: Loss) -> &'static str {
    match loss {
        Loss::Expired => "expired",
        Loss::MaxHold => "max_hold",
        Loss::Closed => "closed",
        Loss::Bridge => "bridge",
        _ => "gone",
    }
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
