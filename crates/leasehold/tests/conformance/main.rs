//! What every store must do, seen through the public library. One suite, run by every store.

mod suite;

use std::sync::atomic::{AtomicU64, Ordering};

use leasehold::Client;
use leasehold_servers::Server;

/// A place for leases that lives as long as one test, and that several clients can share.
struct Store {
    url: String,
    _server: Option<Server>,
    _folder: tempfile::TempDir,
}

impl Store {
    fn new(scheme: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (url, server) = match scheme {
            "memory" => (format!("memory:conformance-{}", COUNT.fetch_add(1, Ordering::Relaxed)), None),
            "sqlite" => (format!("sqlite:{}", folder.path().join("locks.db").display()), None),
            "redis" => {
                let server = Server::on_port();
                (server.url(), Some(server))
            }
            "redis+unix" => {
                let server = Server::on_socket();
                (server.url(), Some(server))
            }
            other => panic!("no test knows how to start a {other}: store"),
        };
        Self { url, _server: server, _folder: folder }
    }

    async fn client(&self) -> Client {
        Client::connect(&self.url).await.expect("the store opens")
    }
}

macro_rules! stores {
    ($($store:ident: $scheme:literal)*) => {
        /// The stores that run the suite.
        const STORES: &[&str] = &[$($scheme),*];
        $(suite::tests!($store, $scheme);)*
    };
}

stores! { memory: "memory" sqlite: "sqlite" redis: "redis" redis_unix: "redis+unix" }

#[test]
fn every_store_runs_this_suite() {
    assert_eq!(STORES, leasehold::SCHEMES);
}
