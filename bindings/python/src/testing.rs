//! Stores of tests, whose clock the test moves, as Python sees them.

use leasehold_binding::TestStore as Store;
use leasehold_store::process::Own;
use pyo3::prelude::*;

use crate::errors;
use crate::time::duration;

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct TestStore {
    store: Own<Store>,
}

impl TestStore {
    fn store(&self, py: Python<'_>) -> PyResult<&Store> {
        self.store.get().ok_or_else(|| errors::forked(py))
    }
}

#[pymethods]
impl TestStore {
    #[new]
    fn create() -> Self {
        Self { store: Own::new(Store::create()) }
    }

    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<&str> {
        Ok(self.store(py)?.address())
    }

    /// Without the GIL, since another thread may be moving the clock.
    fn advance(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let (by, store) = (duration(py, seconds)?, self.store(py)?);
        py.detach(|| store.store().advance(by));
        Ok(())
    }

    fn suspend(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let (by, store) = (duration(py, seconds)?, self.store(py)?);
        py.detach(|| store.store().suspend(by));
        Ok(())
    }

    fn set_reachable(&self, py: Python<'_>, is_reachable: bool) -> PyResult<()> {
        let store = self.store(py)?;
        py.detach(|| store.store().set_reachable(is_reachable));
        Ok(())
    }

    fn elapsed(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.store(py)?.store().elapsed().as_secs_f64())
    }
}
