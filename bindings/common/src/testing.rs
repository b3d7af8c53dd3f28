//! Stores of tests, whose clock the test moves.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use leasehold::testing::TestStore as Store;
use leasehold_store::process::PerProcess;

/// Of their addresses.
pub(crate) const SCHEME: &str = "test";

#[derive(Default)]
struct Stores {
    numbers: AtomicU64,
    /// By their addresses, for as long as the language has them.
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

/// A store that clients of this process open by its address, while this value lives.
pub struct TestStore {
    address: String,
    store: Store,
}

impl TestStore {
    /// An empty store with an address of its own.
    #[must_use]
    pub fn create() -> Self {
        let stores = stores();
        let number = stores.numbers.fetch_add(1, Ordering::Relaxed);
        let (address, store) = (format!("{SCHEME}:{number}"), Store::new());
        stores.open().insert(address.clone(), store.clone());
        Self { address, store }
    }

    /// For [`Client::open`](crate::Client::open).
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Its clock, and its connection.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        stores().open().remove(&self.address);
    }
}
