//! Stores of tests, whose clock the test moves, as Python sees them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use leasehold::testing::TestStore as Store;
use leasehold_store::process::{Own, PerProcess};
use pyo3::prelude::*;

use crate::errors;
use crate::time::duration;

/// Of their addresses.
pub(crate) const SCHEME: &str = "test";

#[derive(Default)]
struct Stores {
    numbers: AtomicU64,
    /// By their addresses, for as long as Python has them.
    open: Mutex<HashMap<String, Store>>,
}

impl Stores {
    fn open(&self) -> MutexGuard<'_, HashMap<String, Store>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static STORES: PerProcess<OnceLock<Stores>> = PerProcess::of_first(OnceLock::new());

fn stores() -> &'static Stores {
    STORES.get_or_default().get_or_init(Stores::default)
}

/// The store of this process with this address.
pub(crate) fn find(address: &str) -> Option<Store> {
    stores().open().get(address).cloned()
}

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct TestStore {
    store: Own<(String, Store)>,
}

impl TestStore {
    fn store(&self, py: Python<'_>) -> PyResult<&(String, Store)> {
        self.store.get().ok_or_else(|| errors::forked(py))
    }
}

#[pymethods]
impl TestStore {
    #[new]
    fn create() -> Self {
        let stores = stores();
        let number = stores.numbers.fetch_add(1, Ordering::Relaxed);
        let (address, store) = (format!("{SCHEME}:{number}"), Store::new());
        stores.open().insert(address.clone(), store.clone());
        Self { store: Own::new((address, store)) }
    }

    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<&str> {
        Ok(&self.store(py)?.0)
    }

    /// Without the GIL, since another thread may be moving the clock.
    fn advance(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let (by, (_, store)) = (duration(py, seconds)?, self.store(py)?);
        py.detach(|| store.advance(by));
        Ok(())
    }

    fn suspend(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let (by, (_, store)) = (duration(py, seconds)?, self.store(py)?);
        py.detach(|| store.suspend(by));
        Ok(())
    }

    fn set_reachable(&self, py: Python<'_>, is_reachable: bool) -> PyResult<()> {
        let (_, store) = self.store(py)?;
        py.detach(|| store.set_reachable(is_reachable));
        Ok(())
    }

    fn elapsed(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.store(py)?.1.elapsed().as_secs_f64())
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        if let Some((address, _)) = self.store.get() {
            stores().open().remove(address);
        }
    }
}
