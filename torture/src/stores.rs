//! The servers under torture, and the faults that are done to them.

mod database;
mod etcd;
mod injection;
mod nodes;
mod notifier;
mod replicated;
mod stranger;

use std::path::Path;
use std::time::Duration;

use leasehold_testkit::{Builder, Cluster, Flavor, Sentinels, Server};
use tempfile::TempDir;

use crate::faults::{Fault, StoreKind};
use database::Database;
use etcd::Etcd;
use nodes::Nodes;

pub(crate) use injection::{Done, Injection};

/// The lock library that replaces the clock of a server.
const FAKETIME: &str = "/usr/lib/*/faketime/libfaketime.so.1";

/// Number of servers of a quorum.
const QUORUM: usize = 5;

/// The servers of one run, ended when this value is dropped.
pub struct Stores {
    kind: StoreKind,
    servers: Servers,
    folder: TempDir,
}

enum Servers {
    Embedded,
    Nodes(Nodes),
    Sentinels(Sentinels),
    Cluster(Cluster),
    Database(Box<Database>),
    Etcd(Etcd),
}

impl Stores {
    /// Starts the servers of a store.
    ///
    /// # Errors
    ///
    /// libfaketime is missing, or the folder cannot be created.
    pub fn start(kind: StoreKind, faults: &[Fault]) -> Result<Self, String> {
        let folder =
            tempfile::Builder::new().prefix("torture-").tempdir().map_err(|error| error.to_string())?;
        let has_clock = faults.iter().any(|fault| fault.moves_clock());
        let server = Server::builder().flavor(flavor(kind)).setting("appendonly", "yes");
        let servers = match kind {
            StoreKind::Memory | StoreKind::Sqlite => Servers::Embedded,
            StoreKind::Redis | StoreKind::Redis62 | StoreKind::Valkey => {
                let clock = has_clock.then(|| folder.path().join("clock"));
                Servers::Nodes(Nodes::start(&with_clock(server, clock.as_deref())?, 1, clock))
            }
            StoreKind::Redlock => Servers::Nodes(Nodes::start(&server, QUORUM, None)),
            StoreKind::Sentinel => Servers::Sentinels(Sentinels::start()),
            StoreKind::Cluster => Servers::Cluster(Cluster::start()),
            StoreKind::Postgres => Servers::Database(Box::new(Database::start())),
            StoreKind::Etcd => Servers::Etcd(Etcd::start()?),
        };
        Ok(Self { kind, servers, folder })
    }

    /// The folder of the run.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The address of this store for the library that it is for: leasehold, but for etcd.
    #[must_use]
    pub fn url(&self, ttl: Duration) -> String {
        match &self.servers {
            Servers::Embedded if self.kind == StoreKind::Memory => "memory:torture".to_owned(),
            Servers::Embedded => format!("sqlite:{}", self.folder.path().join("locks.db").display()),
            Servers::Nodes(nodes) => match nodes.urls().as_slice() {
                [url] => url.clone(),
                urls => {
                    let hosts: Vec<&str> =
                        urls.iter().map(|url| url.trim_start_matches("redis://")).collect();
                    format!("redlock://{}?max_ttl_ms={}", hosts.join(","), ttl.as_millis())
                }
            },
            Servers::Sentinels(sentinels) => sentinels.url(Sentinels::SERVICE),
            Servers::Cluster(cluster) => cluster.url(),
            Servers::Database(database) => database.url(),
            Servers::Etcd(etcd) => etcd.url(),
        }
    }

    /// The servers' addresses for libraries that know single servers, and quorums of them.
    #[must_use]
    pub fn urls(&self, ttl: Duration) -> Vec<String> {
        match &self.servers {
            Servers::Nodes(nodes) => nodes.urls(),
            _ => vec![self.url(ttl)],
        }
    }

    /// Number of keys on the servers. None: unknown.
    #[must_use]
    pub fn keys(&self) -> Option<u64> {
        match &self.servers {
            Servers::Nodes(nodes) => Some(nodes.keys()),
            _ => None,
        }
    }

    /// Injects a fault of the servers or the network, and returns when everything works again.
    pub(crate) fn inject(&mut self, injection: &mut Injection<'_>) -> Done {
        match &mut self.servers {
            Servers::Embedded => unreachable!("the table has no such fault for an embedded store"),
            Servers::Nodes(nodes) => nodes.inject(injection),
            Servers::Sentinels(sentinels) => replicated::inject_sentinels(sentinels, injection),
            Servers::Cluster(cluster) => replicated::inject_cluster(cluster, injection),
            Servers::Database(database) => database.inject(injection),
            Servers::Etcd(etcd) => etcd.inject(injection),
        }
    }
}

fn flavor(kind: StoreKind) -> Flavor {
    match kind {
        StoreKind::Redis62 => Flavor::Redis62,
        StoreKind::Valkey => Flavor::Valkey9,
        _ => Flavor::Redis7,
    }
}

/// The clock of the process is this file's offset. Its timers stay on the real monotonic clock.
fn with_clock(server: Builder, clock: Option<&Path>) -> Result<Builder, String> {
    let Some(clock) = clock else { return Ok(server) };
    std::fs::write(clock, "+0\n").map_err(|error| error.to_string())?;
    let library = faketime().ok_or_else(|| {
        format!(
            "{FAKETIME} is missing: sudo apt-get install faketime; or leave out clock-forward and clock-back"
        )
    })?;
    Ok(server
        .environment("LD_PRELOAD", &library)
        .environment("FAKETIME_TIMESTAMP_FILE", &clock.display().to_string())
        .environment("FAKETIME_CACHE_DURATION", "1")
        .environment("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .environment("DONT_FAKE_MONOTONIC", "1"))
}

fn faketime() -> Option<String> {
    let folders = std::fs::read_dir("/usr/lib").ok()?.flatten();
    let mut paths = folders.map(|folder| folder.path().join("faketime/libfaketime.so.1"));
    Some(paths.find(|path| path.exists())?.display().to_string())
}
