//! The native half of the Python package `leasehold`: what `leasehold-binding` offers, as Python sees it. `leasehold/_backend.py` is the contract.

#![allow(missing_docs, reason = "`_native.pyi` and `_backend.py` document what Python sees")]

mod backend;
mod completions;
mod descriptor;
mod errors;
mod exit;
mod fork;
mod lease;
mod lock;
mod log;
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
    use crate::lease::{Lease, Operation};
    #[pymodule_export]
    use crate::lock::Lock;
    #[pymodule_export]
    use crate::log::records;
    #[pymodule_export]
    use crate::testing::TestStore;

    use super::{Bound, PyModule, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::fork::register(module)?;
        leasehold_binding::capture();
        leasehold_binding::learn_wakers();
        Ok(())
    }
}
