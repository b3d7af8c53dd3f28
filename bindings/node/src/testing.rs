//! Stores of tests, whose clock the test moves, as JavaScript sees them.

use leasehold_binding::{Failure, TestStore as Store};
use napi_derive::napi;

use crate::answer::Failed;
use crate::time::{duration, milliseconds};

#[napi]
pub struct TestStore {
    store: Store,
}

#[napi]
impl TestStore {
    #[napi(constructor)]
    #[allow(clippy::new_without_default, reason = "JavaScript's constructor")]
    pub fn new() -> Self {
        Self { store: Store::create() }
    }

    #[napi(getter)]
    pub fn address(&self) -> &str {
        self.store.address()
    }

    #[napi]
    pub fn advance(&self, by: f64) -> Option<Failed> {
        failed(duration(by).map(|by| self.store.store().advance(by)))
    }

    #[napi]
    pub fn suspend(&self, by: f64) -> Option<Failed> {
        failed(duration(by).map(|by| self.store.store().suspend(by)))
    }

    #[napi]
    pub fn set_reachable(&self, is_reachable: bool) {
        self.store.store().set_reachable(is_reachable);
    }

    #[napi]
    pub fn elapsed(&self) -> f64 {
        milliseconds(self.store.store().elapsed())
    }
}

fn failed(result: Result<(), Failure>) -> Option<Failed> {
    result.err().map(Failed::from)
}
