//! The promises of every store, tested through the public library: the suites of `leasehold-conformance` on all stores.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold::Kind;
use leasehold_conformance::{Effort, Place, SUITES, Suite, Test};
use leasehold_testkit::{
    Certificates, Cluster, Flavor, PgBouncer, Postgres, RuledProxy, Rules, Sentinels, Server, extent,
    positions, retry_if_slow,
};
use libtest_mimic::{Arguments, Failed, Trial};

/// The servers and files of a store, which live as long as it is used.
struct Backend {
    url: String,
    /// Many calls at once take it long.
    is_slow: bool,
    /// How long a holder may need to learn that another client waits, where nothing can be pushed.
    push_delay: Duration,
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
    Ruled(Box<RuledProxy>),
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
            "redis, serverless" => ruled(Rules::serverless(), ""),
            "redis, cluster proxy" => ruled(Rules::cluster_proxy(), "?proxy=yes"),
            "redis, unkind proxy" => {
                let rules = Rules {
                    forgets_scripts: true,
                    other_run_ids: true,
                    counts_no_subscribers: true,
                    ..Rules::cluster_proxy()
                };
                ruled(rules, "")
            }
            "redis, proxy without messages" => {
                ruled(Rules { loses_messages: true, ..Rules::cluster_proxy() }, "")
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
            other => {
                let position = positions().into_iter().find(|(name, _)| *name == other);
                let (_, rules) =
                    position.unwrap_or_else(|| panic!("no test knows how to start a {other}: store"));
                ruled(rules, "?proxy=yes")
            }
        };
        let push_delay = match what {
            "postgres, pgbouncer" => Duration::from_secs(1),
            // Until the holder needs more tokens, after a thousand grants of 2 ms.
            _ if what.ends_with(" messages") => Duration::from_secs(3),
            _ => Duration::ZERO,
        };
        // Where scripts are forgotten, each call has the text of its own.
        let is_slow = url.starts_with("postgres:") || what.ends_with("forgotten scripts");
        Arc::new(Self { url, is_slow, push_delay, servers, _certificates: certificates, _folder: folder })
    }

    /// After all tests: a server whose address says that it restricts scripts has refused none.
    fn check(&self) {
        if let Servers::Ruled(proxy) = &self.servers
            && self.url.contains("proxy=yes")
        {
            assert_eq!(proxy.scripts_refused(), [""; 0]);
        }
    }

    /// How often it has failed calls so far, as a proxy does that closes old connections.
    fn failures(&self) -> usize {
        if let Servers::Ruled(proxy) = &self.servers { proxy.connections_expired() } else { 0 }
    }

    /// Removes the locks of the last test.
    fn clear(&self) {
        match &self.servers {
            Servers::None => {}
            Servers::One(server) => drop(server.run(&["FLUSHALL"])),
            Servers::Ruled(proxy) => {
                // What the last test has not awaited would come after it.
                proxy.cut();
                proxy.server().run(&["FLUSHALL"]);
            }
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

/// A server behind a proxy with these rules, and its address with these parameters.
fn ruled(rules: Rules, parameters: &str) -> (String, Servers) {
    let proxy = RuledProxy::start(rules);
    (format!("{}{parameters}", proxy.url()), Servers::Ruled(Box::new(proxy)))
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

/// The store of one test.
fn place(backend: &Arc<Backend>) -> Place {
    let mut place = Place::new(backend.url.as_str()).keeping(backend.clone());
    place.push_delay = backend.push_delay;
    place.is_quorum = matches!(backend.servers, Servers::Voting(_));
    place.is_slow = backend.is_slow;
    place.effort = extent(Effort::Usual, Effort::Night, Effort::Release);
    place
}

/// How a store runs the tests.
#[derive(Clone, Copy)]
enum How {
    /// Each on a store of its own.
    Each,
    /// One after the other on one store, which takes seconds to start.
    Together,
}

use How::{Each, Together};

const ALL: &[&str] = &[
    "mutex",
    "lease",
    "detach",
    "handoff",
    "semaphore",
    "rw",
    "reentrant",
    "request",
    "election",
    "latch",
    "barrier",
    "once",
    "set",
];

/// What differs from another store in its connections and pushes only runs the suites that need most of these.
const FEW: &[&str] = &["mutex", "handoff", "set"];

/// Each call has the text of its script, so that thousands of calls take long.
const UNKIND: &[&str] = &["lease", "handoff", "semaphore", "rw", "set"];

/// What it runs here, the store, and the suites.
const STORES: &[(&str, How, &str, &[&str])] = &[
    ("memory", Each, "memory", ALL),
    ("sqlite", Each, "sqlite", ALL),
    ("redis", Each, "redis", ALL),
    ("redis_resp2", Each, "redis, protocol 2", ALL),
    ("redis_6_2", Each, "redis 6.2", ALL),
    ("valkey_9", Each, "valkey 9", ALL),
    ("redis_8_6", Each, "redis 8.6", FEW),
    ("redis_tls", Each, "rediss", FEW),
    ("redis_unix", Each, "redis+unix", FEW),
    ("sentinel", Together, "redis-sentinel", ALL),
    ("cluster", Together, "redis-cluster", ALL),
    ("cluster_6_2", Together, "redis-cluster 6.2", FEW),
    ("serverless", Together, "redis, serverless", FEW),
    ("cluster_proxy", Together, "redis, cluster proxy", FEW),
    ("unkind_proxy", Together, "redis, unkind proxy", UNKIND),
    ("proxy_without_messages", Together, "redis, proxy without messages", &["mutex"]),
    ("redlock", Each, "redlock", &["mutex", "lease", "detach", "request", "election", "once", "set"]),
    ("postgres", Each, "postgres", ALL),
    ("postgres_socket", Each, "postgresql", FEW),
    ("pgbouncer", Each, "postgres, pgbouncer", ALL),
    ("pgbouncer_listen", Each, "postgres, pgbouncer and listen", FEW),
];

fn main() {
    let mut trials = vec![
        Trial::test("every_scheme_and_every_kind_has_a_suite", every_scheme_and_every_kind_has_a_suite),
        Trial::test("kinds_without_a_suite_are_unsupported", kinds_without_a_suite_are_unsupported),
    ];
    let stores = match std::env::var("LEASEHOLD_POSITIONS") {
        // In the lane of all servers: these suites, or all, behind proxies.
        Ok(wanted) => {
            let is_wanted =
                |suite: &&'static str| wanted == "all" || wanted.split(',').any(|name| name == *suite);
            assert!(
                wanted == "all" || wanted.split(',').all(|name| ALL.contains(&name)),
                "{wanted}: no such suite"
            );
            let suites: &[&str] = ALL.iter().copied().filter(is_wanted).collect::<Vec<_>>().leak();
            let names = positions().into_iter().map(|(name, _)| &*name.leak());
            names.map(|name| (name, Together, name, suites)).collect()
        }
        Err(_) => STORES.to_vec(),
    };
    for (module, how, what, names) in stores {
        let suites = SUITES.iter().filter(|suite| names.contains(&suite.name));
        match how {
            Each => trials.extend(suites.flat_map(|suite| on_own_store(module, what, suite))),
            Together => {
                let suites: Vec<&Suite> = suites.collect();
                trials.push(Trial::test(format!("{module}::every_suite"), move || {
                    let backend = Backend::new(what);
                    for (suite, test) in
                        suites.iter().flat_map(|suite| suite.tests.iter().map(move |test| (suite, test)))
                    {
                        eprintln!("{}::{} on {what}", suite.name, test.name);
                        run(test, &|| backend.failures(), &|| {
                            backend.clear();
                            place(&backend)
                        });
                    }
                    backend.check();
                    Ok(())
                }));
            }
        }
    }
    let mut arguments = Arguments::from_args();
    // As the standard harness does.
    let threads = std::env::var("RUST_TEST_THREADS").ok().and_then(|threads| threads.parse().ok());
    arguments.test_threads = arguments.test_threads.or(threads);
    libtest_mimic::run(&arguments, trials).exit();
}

/// The tests of a suite, each on a store of its own.
fn on_own_store(module: &str, what: &'static str, suite: &'static Suite) -> impl Iterator<Item = Trial> {
    let name = format!("{module}::{}", suite.name);
    suite.tests.iter().map(move |test| {
        Trial::test(format!("{name}::{}", test.name), move || {
            run(test, &slow_statements, &|| place(&Backend::new(what)));
            Ok(())
        })
    })
}

/// Runs a test, and panics if it fails. It repeats a failed one if the machine paused for longer than the deadlines of the tests allow, or if
/// there were more failures of the store meanwhile, such as statements that PostgreSQL has ended.
fn run(test: &Test, failures: &dyn Fn() -> usize, place: &(dyn Fn() -> Place + Sync)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(retry_if_slow(Duration::from_millis(250), failures, async || {
        // A runtime must not be made in this one.
        std::thread::scope(|scope| {
            let attempt = scope.spawn(|| leasehold_conformance::run(test, place()));
            attempt.join().unwrap_or_else(|_| Err("the test could not be run".to_owned()))
        })
    }));
}

fn every_scheme_and_every_kind_has_a_suite() -> Result<(), Failed> {
    for scheme in leasehold::SCHEMES {
        assert!(STORES.iter().any(|(_, _, what, _)| what == scheme), "{scheme} runs no suite");
    }
    assert_eq!(ALL, SUITES.iter().map(|suite| suite.name).collect::<Vec<_>>());
    let kinds: Vec<Kind> = SUITES.iter().filter_map(|suite| suite.kind).collect();
    assert_eq!(kinds, Kind::ALL);
    Ok(())
}

/// Redlock supports no kind whose suite it does not run.
fn kinds_without_a_suite_are_unsupported() -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let backend = Backend::new("redlock");
        let client = leasehold::Client::connect(&backend.url).await?;
        assert!(client.semaphore("a", 2).try_acquire(1).await.unwrap_err().is_unsupported());
        assert!(client.rw_lock("a").try_read().await.unwrap_err().is_unsupported());
        assert!(client.reentrant_mutex("a", "me").try_lock().await.unwrap_err().is_unsupported());
        assert!(client.latch("a", 2).count_down().await.unwrap_err().is_unsupported());
        assert!(client.barrier("a", 2).wait().await.unwrap_err().is_unsupported());
        Ok(())
    })
}
