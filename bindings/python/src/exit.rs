//! The end of the interpreter. A thread that comes back to Python after it would be ended through frames of Rust, so every wait ends before.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold_binding::Exit;
use leasehold_store::process::PerProcess;
use pyo3::prelude::*;

static EXIT: PerProcess<OnceLock<Arc<Exit>>> = PerProcess::of_first(OnceLock::new());

/// That of this process.
pub(crate) fn exit() -> &'static Arc<Exit> {
    EXIT.get_or_default().get_or_init(Arc::default)
}

/// Wakes every wait, closes all clients, and waits at most `timeout` seconds for that.
#[pyfunction]
pub(crate) fn shut_down(py: Python<'_>, timeout: f64) {
    let limit = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::ZERO);
    py.detach(|| exit().run(limit));
}
