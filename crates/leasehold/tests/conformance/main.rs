//! The promises of every store, tested through the public library. All stores share the suites.

mod barrier;
mod detach;
mod election;
mod handoff;
mod latch;
mod lease;
mod mutex;
mod once;
mod reentrant;
mod rw;
mod semaphore;
mod set;

use std::cell::Cell;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use leasehold::{Client, Kind, LockInfo};
use leasehold_testkit::{
    Certificates, Cluster, Flavor, PgBouncer, Postgres, Sentinels, Server, retry_if_slow,
};

/// The store of one test, shared by several clients.
struct Store {
    url: String,
    backend: Arc<Backend>,
}

/// The servers and files of a store, which live as long as it is used.
struct Backend {
    url: String,
    /// Nothing can be pushed there: clients look for what concerns them.
    is_polled: bool,
    servers: Servers,
    _certificates: Option<Certificates>,
    _folder: tempfile::TempDir,
}

enum Servers {
    None,
    One(Box<Server>),
    Voting(Vec<Server>),
    Sentinels(Box<Sentinels>),
    Cluster(Box<Cluster>),
}

impl Backend {
    fn new(what: &str) -> Arc<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let of = |flavor| Server::builder().flavor(flavor);
        let on = |server: Server| (server.url(), Servers::One(Box::new(server)));
        let mut certificates = None;
        let (url, servers) = match what {
            "memory" => {
                (format!("memory:conformance-{}", COUNT.fetch_add(1, Ordering::Relaxed)), Servers::None)
            }
            "sqlite" => (format!("sqlite:{}", folder.path().join("locks.db").display()), Servers::None),
            "redis" => on(Server::on_port()),
            "redis, protocol 2" => {
                let server = Server::on_port();
                (format!("{}?protocol=2", server.url()), Servers::One(Box::new(server)))
            }
            "redis 6.2" => on(of(Flavor::Redis62).start()),
            "redis 8.6" => on(of(Flavor::Redis86).start()),
            "valkey 9" => on(of(Flavor::Valkey9).start()),
            "redis+unix" => on(Server::on_socket()),
            "rediss" => {
                let files = Certificates::new();
                let authority = &files.authority;
                let server = Server::builder().tls(&files.server, authority).start();
                let url = format!("{}?ca={}", server.url(), authority.display());
                certificates = Some(files);
                (url, Servers::One(Box::new(server)))
            }
            "redlock" => {
                let servers: Vec<Server> = (0..3).map(|_| Server::on_socket()).collect();
                let urls: Vec<String> = servers.iter().map(Server::socket_url).collect();
                // On a busy machine a node may need longer than the default timeout.
                (format!("redlock:{} ?node_timeout_ms=5000", urls.join(" ")), Servers::Voting(servers))
            }
            "redis-sentinel" => {
                let sentinels = Sentinels::start();
                (sentinels.url(Sentinels::SERVICE), Servers::Sentinels(Box::new(sentinels)))
            }
            "redis-cluster" => {
                let cluster = Cluster::start();
                (cluster.url(), Servers::Cluster(Box::new(cluster)))
            }
            "redis-cluster 6.2" => {
                let cluster = Cluster::of(&of(Flavor::Redis62));
                (cluster.url(), Servers::Cluster(Box::new(cluster)))
            }
            "postgres" => (format!("{}?schema={}", postgres().url(), schema()), Servers::None),
            // By its other name, on the socket, and without waiting for the disk.
            "postgresql" => {
                let url = postgres().socket_url();
                (format!("{url}?schema={}&synchronous_commit=off", schema()), Servers::None)
            }
            "postgres, pgbouncer" => (format!("{}?schema={}", pgbouncer().url(), schema()), Servers::None),
            "postgres, pgbouncer and listen" => {
                let listen = postgres().url();
                (format!("{}?schema={}&listen={listen}", pgbouncer().url(), schema()), Servers::None)
            }
            other => panic!("no test knows how to start a {other}: store"),
        };
        let is_polled = what == "postgres, pgbouncer";
        Arc::new(Self { url, is_polled, servers, _certificates: certificates, _folder: folder })
    }

    /// Removes the locks of the last test.
    fn clear(&self) {
        match &self.servers {
            Servers::None => {}
            Servers::One(server) => drop(server.run(&["FLUSHALL"])),
            Servers::Voting(servers) => servers.iter().for_each(|server| drop(server.run(&["FLUSHALL"]))),
            Servers::Sentinels(sentinels) => drop(sentinels.master().run(&["FLUSHALL"])),
            Servers::Cluster(cluster) => {
                for node in &cluster.nodes[..3] {
                    node.run(&["FLUSHALL"]);
                }
            }
        }
    }
}

/// One server for all tests of this process, which have schemas of their own. It starts slowly.
fn postgres() -> &'static Postgres {
    POSTGRES.get_or_init(Postgres::on_port)
}

static POSTGRES: OnceLock<Postgres> = OnceLock::new();

/// How many statements PostgreSQL has ended because they took too long. They take milliseconds, unless the server has no time.
fn slow_statements() -> usize {
    const LIMITS: [&str; 3] = ["statement timeout", "lock timeout", "idle-in-transaction timeout"];
    let log = POSTGRES.get().map_or_else(String::new, Postgres::log);
    LIMITS.iter().map(|limit| log.matches(&format!("due to {limit}")).count()).sum()
}

fn pgbouncer() -> &'static PgBouncer {
    static POOLER: OnceLock<PgBouncer> = OnceLock::new();
    POOLER.get_or_init(|| PgBouncer::start(postgres()))
}

fn schema() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("locks_{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

impl Store {
    fn new(what: &str) -> Self {
        Self::at(Backend::new(what))
    }

    fn at(backend: Arc<Backend>) -> Self {
        Self { url: backend.url.clone(), backend }
    }

    async fn client(&self) -> Client {
        let mut opened = Client::connect(&self.url).await;
        // On a busy machine a server may take longer than the time limit.
        for _ in 0..2 {
            if opened.as_ref().is_err_and(leasehold::Error::is_unavailable) {
                opened = Client::connect(&self.url).await;
            }
        }
        opened.expect("the store opens")
    }

    /// How long a holder may need to learn that another client waits, beyond the time of a push. docs/postgres.md has the bound.
    fn push_delay(&self) -> Duration {
        Duration::from_secs(u64::from(self.backend.is_polled))
    }

    fn is_quorum(&self) -> bool {
        matches!(self.backend.servers, Servers::Voting(_))
    }

    /// Asserts the condition; over a quorum, waits for it, since a node may be late.
    async fn eventually(&self, is_so: impl AsyncFn() -> bool) {
        if self.is_quorum() {
            leasehold_testkit::until(is_so).await;
        } else {
            assert!(is_so().await, "the condition does not hold");
        }
    }
}

/// Limit of a wait that must end. It is below 25 s, after which a waiter re-polls, so that a lost push is found.
pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) async fn pair(store: &Store) -> (Client, Client) {
    (store.client().await, store.client().await)
}

/// Inspects the lock until the condition holds.
pub(crate) async fn until(
    client: &Client,
    kind: Kind,
    name: &str,
    is_so: impl Fn(&LockInfo) -> bool,
) -> LockInfo {
    until_seen(async || client.inspect(kind, name).await, is_so).await
}

/// Inspects with `look` until the condition holds.
pub(crate) async fn until_seen(
    look: impl AsyncFn() -> Result<LockInfo, leasehold::Error>,
    is_so: impl Fn(&LockInfo) -> bool,
) -> LockInfo {
    let began = Instant::now();
    loop {
        let asked = Instant::now();
        let seen = look().await;
        let late = began.elapsed() > LIMIT / 2;
        match seen {
            Ok(view) if is_so(&view) => return view,
            Ok(view) if late => panic!(
                "the condition does not hold after half of the test's time, with {} holders and {} waiters: {:.4000}",
                view.holders.len(),
                view.waiters.len(),
                format!("{view:?}")
            ),
            // A busy machine.
            Err(error) if late || !error.is_unavailable() => panic!("the store does not answer: {error}"),
            // At most half of the time is spent on looking, because a look at many waiters is work.
            Ok(_) | Err(_) => tokio::time::sleep(asked.elapsed().max(Duration::from_millis(2))).await,
        }
    }
}

/// Starts an attempt, and returns once it is queued.
pub(crate) async fn queue<T: Send + 'static>(
    client: &Client,
    kind: Kind,
    name: &str,
    attempt: impl Future<Output = Result<T, leasehold::Error>> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    queue_seen(async || client.inspect(kind, name).await, attempt).await
}

/// Starts an attempt, and returns once `look` reports it in the queue.
pub(crate) async fn queue_seen<T: Send + 'static>(
    look: impl AsyncFn() -> Result<LockInfo, leasehold::Error>,
    attempt: impl Future<Output = Result<T, leasehold::Error>> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    // The time that a waiter has waited distinguishes it from earlier ones, to the precision of the clocks. A count does not
    // suffice: a quorum may report a waiter for a moment after its grant.
    const TICK: Duration = Duration::from_millis(2);
    let asked = Cell::new(Instant::now());
    let look = async || {
        asked.set(Instant::now());
        look().await
    };
    let youngest = |view: &LockInfo| view.waiters.iter().map(|waiter| waiter.waiting_for).min();
    // So long before the new one that they differ by more than a look takes.
    let is_apart =
        |view: &LockInfo| youngest(view).is_none_or(|waited| waited > 2 * TICK + 4 * asked.get().elapsed());
    let earlier = youngest(&until_seen(&look, is_apart).await);
    let began = Instant::now();
    let task = tokio::spawn(async move { attempt.await.expect("the attempt is granted") });
    // An earlier waiter has waited for as long as it had before, and since.
    let is_new = |waited: Duration| match earlier {
        Some(earlier) => waited + TICK < earlier + asked.get().duration_since(began),
        None => waited < began.elapsed() + TICK,
    };
    until_seen(&look, |view| view.waiters.iter().any(|waiter| is_new(waiter.waiting_for))).await;
    task
}

/// A test of a suite. Its future is boxed, so that what runs it is compiled once, and not for each test on each store.
type Test = fn(Store) -> Pin<Box<dyn Future<Output = ()>>>;

/// Runs the tests of a suite: `each` on a store of its own, or `together` on one store, one after the other, if the store takes
/// seconds to start.
macro_rules! on_store {
    (each $suite:ident $what:literal: $($test:ident)*) => {
        $(
            #[test]
            fn $test() {
                $crate::run_alone($what, |store| Box::pin($crate::$suite::$test(store)));
            }
        )*
    };
    (together $suite:ident $what:literal: $($test:ident)*) => {
        async fn $suite(backend: &std::sync::Arc<$crate::Backend>) {
            $(
                eprintln!("{} on {}", stringify!($test), $what);
                $crate::run_next(backend, |store| Box::pin($crate::$suite::$test(store))).await;
            )*
        }
    };
}
pub(crate) use on_store;

/// Runs a test on a store of its own.
fn run_alone(what: &str, test: Test) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(run(async || test(Store::new(what)).await));
}

/// Runs a test after others on the same store.
async fn run_next(backend: &Arc<Backend>, test: Test) {
    run(async || {
        backend.clear();
        test(Store::at(backend.clone())).await;
    })
    .await;
}

/// Runs a test. It repeats a failed one if the machine, or PostgreSQL, paused for longer than the deadlines of the tests allow.
async fn run(attempt: impl AsyncFn()) {
    retry_if_slow(Duration::from_millis(250), slow_statements, async || {
        let ended = tokio::time::timeout(LIMIT, attempt()).await;
        ended.map_err(|_| format!("the test did not end within {LIMIT:?}"))
    })
    .await;
}

/// Time limit of one test, for a debug build on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// All suites, or the given ones.
macro_rules! suites {
    ($how:ident $what:literal) => {
        suites!($how $what: mutex lease detach handoff semaphore rw reentrant election latch barrier once set);
    };
    (each $what:literal: $($suite:ident)*) => {
        $($crate::$suite::tests!(each $what);)*
    };
    (together $what:literal: $($suite:ident)*) => {
        $($crate::$suite::tests!(together $what);)*

        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn every_suite() {
            let backend = $crate::Backend::new($what);
            $($suite(&backend).await;)*
        }
    };
}

macro_rules! stores {
    ($($store:ident: $how:ident $what:literal $(($($suite:ident)*))?;)*) => {
        /// The stores that run the suites.
        const STORES: &[&str] = &[$($what),*];
        $(
            mod $store {
                suites!($how $what $(: $($suite)*)?);
            }
        )*
    };
}

// What differs from another store in its connections and pushes only runs the suites that need most of these.
stores! {
    memory: each "memory";
    sqlite: each "sqlite";
    redis: each "redis";
    redis_resp2: each "redis, protocol 2";
    redis_6_2: each "redis 6.2";
    valkey_9: each "valkey 9";
    redis_8_6: each "redis 8.6" (mutex handoff set);
    redis_tls: each "rediss" (mutex handoff set);
    redis_unix: each "redis+unix" (mutex handoff set);
    sentinel: together "redis-sentinel";
    cluster: together "redis-cluster";
    cluster_6_2: together "redis-cluster 6.2" (mutex handoff set);
    redlock: each "redlock" (mutex lease detach election once set);
    postgres: each "postgres";
    postgres_socket: each "postgresql" (mutex handoff set);
    pgbouncer: each "postgres, pgbouncer";
    pgbouncer_listen: each "postgres, pgbouncer and listen" (mutex handoff set);
}

/// The kinds that have a suite.
const KINDS: &[Kind] = &[mutex::KIND, semaphore::KIND, rw::KIND, election::KIND, latch::KIND, barrier::KIND];

#[test]
fn every_scheme_and_every_kind_has_a_suite() {
    for scheme in leasehold::SCHEMES {
        assert!(STORES.contains(scheme), "{scheme} runs no suite");
    }
    assert_eq!(KINDS, Kind::ALL);
}

/// Redlock supports no kind whose suite it does not run.
#[tokio::test]
async fn kinds_without_a_suite_are_unsupported() {
    let store = Store::new("redlock");
    let client = store.client().await;
    assert!(client.semaphore("a", 2).try_acquire(1).await.unwrap_err().is_unsupported());
    assert!(client.rw_lock("a").try_read().await.unwrap_err().is_unsupported());
    assert!(client.reentrant_mutex("a", "me").try_lock().await.unwrap_err().is_unsupported());
    assert!(client.latch("a", 2).count_down().await.unwrap_err().is_unsupported());
    assert!(client.barrier("a", 2).wait().await.unwrap_err().is_unsupported());
}
