//! What every store must do, seen through the public library. One suite, run by every store.

mod barrier;
mod election;
mod latch;
mod once;
mod reentrant;
mod rw;
mod semaphore;
mod set;
mod suite;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Client, Kind, LockView};
use leasehold_servers::Server;

/// A place for leases that lives as long as one test, and that several clients can share.
struct Store {
    url: String,
    /// Dropped before the folder that it is in.
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
                let (server, port) = Server::on_a_free_port(folder.path());
                (format!("redis://127.0.0.1:{port}"), Some(server))
            }
            "redis+unix" => {
                let socket = folder.path().join("socket");
                let server = Server::on_a_socket(folder.path(), &socket);
                (format!("redis+unix://{}", socket.display()), Some(server))
            }
            other => panic!("no test knows how to start a {other}: store"),
        };
        Self { url, _server: server, _folder: folder }
    }

    async fn client(&self) -> Client {
        Client::connect(&self.url).await.expect("the store opens")
    }
}

pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) async fn pair(store: &Store) -> (Client, Client) {
    (store.client().await, store.client().await)
}

/// Looks until it is so.
pub(crate) async fn until(
    client: &Client,
    kind: Kind,
    name: &str,
    is_so: impl Fn(&LockView) -> bool,
) -> LockView {
    let give_up = Instant::now() + SOON;
    loop {
        let view = client.inspect(kind, name).await.expect("the store answers");
        if is_so(&view) {
            return view;
        }
        assert!(Instant::now() < give_up, "it did not become so: {view:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Starts this attempt, and says once it stands in the queue, which nobody leaves meanwhile.
pub(crate) async fn queue<T: Send + 'static>(
    client: &Client,
    kind: Kind,
    name: &str,
    attempt: impl Future<Output = Result<T, leasehold::Error>> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    let before = client.inspect(kind, name).await.unwrap().waiters.len();
    let task = tokio::spawn(async move { attempt.await.expect("it is granted") });
    until(client, kind, name, |view| view.waiters.len() > before).await;
    task
}

/// Runs these tests of a suite on one store.
macro_rules! on_store {
    ($suite:ident $scheme:literal: $($test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let store = $crate::Store::new($scheme);
                let limit = std::time::Duration::from_secs(60);
                tokio::time::timeout(limit, $crate::$suite::$test(store)).await.expect("it ends in a minute");
            }
        )*
    };
}
pub(crate) use on_store;

macro_rules! stores {
    ($($store:ident: $scheme:literal)*) => {
        /// The stores that run the suite.
        const STORES: &[&str] = &[$($scheme),*];
        $(
            mod $store {
                $crate::suite::tests!($scheme);
                $crate::semaphore::tests!($scheme);
                $crate::rw::tests!($scheme);
                $crate::reentrant::tests!($scheme);
                $crate::election::tests!($scheme);
                $crate::latch::tests!($scheme);
                $crate::barrier::tests!($scheme);
                $crate::once::tests!($scheme);
                $crate::set::tests!($scheme);
            }
        )*
    };
}

stores! { memory: "memory" sqlite: "sqlite" redis: "redis" redis_unix: "redis+unix" }

/// The kinds that have a suite, which every store runs.
const KINDS: &[Kind] = &[suite::KIND, semaphore::KIND, rw::KIND, election::KIND, latch::KIND, barrier::KIND];

#[test]
fn every_store_runs_the_suite_of_every_kind() {
    assert_eq!(STORES, leasehold::SCHEMES);
    assert_eq!(KINDS, Kind::ALL);
}
