//! One master, two replicas, and three sentinels that monitor them.
//!
//! Sentinels run with production intervals, except for `down-after-milliseconds`: after a planned failover, a demoted master learns of its
//! demotion only some ten seconds later.

use std::collections::HashMap;

use redis::RedisResult;

use crate::builder::Builder;
use crate::server::Server;
use crate::wait::{wait_for, wait_until};

const REPLICAS: usize = 2;
const SENTINELS: usize = 3;

/// After this time without a response a master counts as down. Sentinels poll once per second and count from their first contact, so
/// a much lower value would make them replace a master that they have just discovered.
const DOWN_AFTER_MS: &str = "2000";

/// Timeout of each step of a failover, after which the failover restarts.
const FAILOVER_TIMEOUT_MS: &str = "2000";

/// A master, its replicas and their sentinels, killed when this value is dropped.
pub struct Sentinels {
    /// The servers. [`Sentinels::master`] returns the master.
    pub servers: Vec<Server>,
    /// The sentinels.
    pub sentinels: Vec<Server>,
}

impl Sentinels {
    /// The master's name at the sentinels.
    pub const SERVICE: &str = "locks";

    /// Starts all of them with the default program and settings.
    #[must_use]
    pub fn start() -> Self {
        Self::of(&Server::builder(), &Server::builder())
    }

    /// Starts servers and sentinels with these options, and waits until every sentinel knows all others.
    #[must_use]
    pub fn of(server: &Builder, sentinel: &Builder) -> Self {
        let mut servers = vec![replicable(server).start()];
        let master = servers[0].port().to_string();
        for _ in 0..REPLICAS {
            let replica = replicable(server).setting("replicaof", &format!("127.0.0.1 {master}"));
            servers.push(replica.start());
        }
        // Sentinels that find all replicas at their start need not wait for their next poll.
        wait_until("the replicas follow their master", || is_followed(&servers[0], REPLICAS));
        let mut sentinel = sentinel.clone().sentinel();
        for (name, value) in [
            ("monitor", format!("127.0.0.1 {master} {}", SENTINELS / 2 + 1)),
            ("down-after-milliseconds", DOWN_AFTER_MS.to_owned()),
            ("failover-timeout", FAILOVER_TIMEOUT_MS.to_owned()),
        ] {
            sentinel = sentinel.setting(&format!("sentinel {name} {}", Self::SERVICE), &value);
        }
        if let Some(password) = &server.password {
            sentinel = sentinel.setting(&format!("sentinel auth-pass {}", Self::SERVICE), password);
        }
        let sentinels: Vec<Server> = (0..SENTINELS).map(|_| sentinel.clone().start()).collect();
        for sentinel in &sentinels {
            // After a stall of the machine a sentinel does nothing for 30 s by default. Redis 6.2 has no such setting.
            let _ = sentinel.query::<()>(&["SENTINEL", "DEBUG", "TILT-PERIOD", "1000"]);
        }
        let all = Self { servers, sentinels };
        wait_until("the sentinels know each other and the servers", || {
            all.sentinels.iter().all(|sentinel| knows_all(sentinel).unwrap_or(false))
        });
        all
    }

    /// The URL of this service for clients, with passwords and TLS: `redis-sentinel://host:port,host:port,host:port/service`.
    #[must_use]
    pub fn url(&self, service: &str) -> String {
        let hosts: Vec<String> =
            self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port())).collect();
        let password = self.sentinels[0].password().map(|password| format!("sentinel_password={password}"));
        let tls = self.sentinels[0].has_tls().then(|| "tls=true".to_owned());
        let parameters: Vec<String> = tls.into_iter().chain(password).collect();
        let mark = if parameters.is_empty() { "" } else { "?" };
        let login = self.servers[0].login();
        format!("redis-sentinel://{login}{}/{service}{mark}{}", hosts.join(","), parameters.join("&"))
    }

    /// The server that all sentinels name as the master. Waits until they agree.
    #[must_use]
    pub fn master(&self) -> &Server {
        &self.servers[self.master_number()]
    }

    /// The master's index in `servers`.
    #[must_use]
    pub fn master_number(&self) -> usize {
        wait_for(|| self.agreed_master()).expect("the sentinels do not agree on a master")
    }

    /// Starts a planned failover, waits until all sentinels agree on the new master, and returns its index.
    ///
    /// The old master remains a master for some seconds.
    pub fn fail_over(&self) -> usize {
        let old = self.master_number();
        let sentinel = self.sentinel();
        let begin = || {
            // The sentinel refuses while a failover is in progress. It may give one up, and does not try again by itself.
            if master_of(sentinel).is_ok_and(|port| port == self.servers[old].port()) {
                let _ = sentinel.query::<()>(&["SENTINEL", "FAILOVER", Self::SERVICE]);
            }
        };
        wait_for(|| {
            begin();
            self.other_master(old)
        })
        .expect("no other server becomes the master")
    }

    /// Kills the master, waits until another server is the master, and returns its index.
    pub fn kill_master(&mut self) -> usize {
        let old = self.master_number();
        self.servers[old].stop();
        self.await_failover(old)
    }

    /// Freezes the master, waits until another server is the master, and returns its index. Once resumed, the old one acts as a
    /// master for some seconds.
    pub fn freeze_master(&self) -> usize {
        let old = self.master_number();
        self.servers[old].signal("STOP");
        self.await_failover(old)
    }

    /// Waits until another server than this one is the master, and returns its index.
    pub fn await_failover(&self, old: usize) -> usize {
        wait_for(|| self.other_master(old)).expect("no other server becomes the master")
    }

    fn other_master(&self, old: usize) -> Option<usize> {
        self.agreed_master().filter(|number| *number != old && is_master(&self.servers[*number]))
    }

    fn agreed_master(&self) -> Option<usize> {
        let running = self.sentinels.iter().filter(|sentinel| sentinel.is_up());
        let named: Vec<u16> = running.map(master_of).collect::<RedisResult<_>>().ok()?;
        let first = *named.first()?;
        let number = self.servers.iter().position(|server| server.port() == first);
        number.filter(|_| named.iter().all(|port| *port == first))
    }

    /// A running sentinel.
    fn sentinel(&self) -> &Server {
        self.sentinels.iter().find(|sentinel| sentinel.is_up()).expect("a sentinel runs")
    }
}

/// A server that starts to replicate at once and does not wait for more replicas.
pub(crate) fn replicable(server: &Builder) -> Builder {
    server.clone().setting("repl-diskless-sync", "yes").setting("repl-diskless-sync-delay", "0")
}

/// Whether this many replicas are in sync with the server.
pub(crate) fn is_followed(server: &Server, replicas: usize) -> bool {
    let info: RedisResult<redis::InfoDict> = server.query(&["INFO", "replication"]);
    info.is_ok_and(|info| {
        let online = |number: &usize| {
            let state = info.get::<String>(&format!("slave{number}"));
            state.is_some_and(|state| state.contains("state=online"))
        };
        (0..replicas).filter(online).count() == replicas
    })
}

/// The port of the master that this sentinel names.
fn master_of(sentinel: &Server) -> RedisResult<u16> {
    let address = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Sentinels::SERVICE];
    sentinel.query(&address).map(|(_, port): (String, u16)| port)
}

fn is_master(server: &Server) -> bool {
    let info: RedisResult<redis::InfoDict> = server.query(&["INFO", "replication"]);
    info.is_ok_and(|info| info.get::<String>("role").as_deref() == Some("master"))
}

fn knows_all(sentinel: &Server) -> RedisResult<bool> {
    let master: HashMap<String, String> = sentinel.query(&["SENTINEL", "MASTER", Sentinels::SERVICE])?;
    let is = |name: &str, value: &str| master.get(name).is_some_and(|found| found == value);
    Ok(is("flags", "master")
        && is("num-slaves", &REPLICAS.to_string())
        && is("num-other-sentinels", &(SENTINELS - 1).to_string()))
}
