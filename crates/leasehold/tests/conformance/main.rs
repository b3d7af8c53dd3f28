//! What every store must do, seen through the public library. One suite, run by every store.

mod suite;

use std::sync::atomic::{AtomicU64, Ordering};

use leasehold::Client;

/// A place for leases that lives as long as one test, and that several clients can share.
struct Store {
    url: String,
    /// Kept so that it goes when the test is over.
    _folder: tempfile::TempDir,
}

impl Store {
    fn new(scheme: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let url = match scheme {
            "memory" => format!("memory:conformance-{}", COUNT.fetch_add(1, Ordering::Relaxed)),
            "sqlite" => format!("sqlite:{}", folder.path().join("locks.db").display()),
            other => panic!("no test knows how to start a {other}: store"),
        };
        Self { url, _folder: folder }
    }

    async fn client(&self) -> Client {
        Client::connect(&self.url).await.expect("the store opens")
    }
}

macro_rules! stores {
    ($($store:ident)*) => {
        /// The stores that run the suite.
        const STORES: &[&str] = &[$(stringify!($store)),*];
        $(suite::tests!($store);)*
    };
}

stores! { memory sqlite }

#[test]
fn every_store_runs_this_suite() {
    assert_eq!(STORES, leasehold::SCHEMES);
}
