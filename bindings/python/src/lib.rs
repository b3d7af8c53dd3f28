//! The native half of the Python package `leasehold`: a small executor for the futures of the library.
//!
//! A call is an operation, which holds a future. Python threads poll it: the one that starts it, the one that waits for it, or
//! the thread of an event loop that takes completions. A waker only pushes to a queue and writes to a descriptor, so no thread of the library
//! touches Python. `leasehold/_backend.py` is the contract.
//!
//! What this crate does not do: it has no thread, no runtime, and no lock of its own.

#![allow(missing_docs, reason = "`_native.pyi` and `_backend.py` document what Python sees")]

mod backend;
mod completions;
mod core;
mod errors;
mod exit;
mod fork;
mod lease;
mod lock;
mod log;
mod opened;
mod operation;
mod queue;
mod testing;
mod time;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::backend::{Backend, open};
    #[pymodule_export]
    use crate::completions::Completions;
    #[pymodule_export]
    use crate::exit::shut_down;
    #[pymodule_export]
    use crate::lease::Lease;
    #[pymodule_export]
    use crate::lock::Lock;
    #[pymodule_export]
    use crate::log::records;
    #[pymodule_export]
    use crate::operation::Operation;
    #[pymodule_export]
    use crate::testing::TestStore;

    use super::{Bound, PyModule, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::fork::register(module)?;
        crate::log::capture();
        crate::core::learn_wakers();
        Ok(())
    }
}
