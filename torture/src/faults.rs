//! The one table of faults: to which stores each applies, what it does, and what the guarantees exempt.

use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A fault. The controller injects one at a time, and then lets everything heal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// None: the time before the first fault.
    #[value(skip)]
    None,
    /// SIGSTOP of a worker process, and later SIGCONT.
    WorkerStop,
    /// SIGKILL of a worker process. Another one replaces it.
    WorkerKill,
    /// SIGSTOP of a server, and later SIGCONT.
    ServerStop,
    /// SIGKILL of a server (SIGQUIT of PostgreSQL, which has the same effect), and a restart with its files.
    ServerKill,
    /// SIGKILL of a server, and a restart without its files.
    ServerEmpty,
    /// CLIENT KILL of all connections, or `pg_terminate_backend`.
    ClientKill,
    /// Another user without a right to leasehold's keys or tables publishes forged and repeated messages to all clients.
    Stranger,
    /// SCRIPT FLUSH.
    ScriptFlush,
    /// FLUSHALL.
    FlushAll,
    /// A slow network in both directions.
    NetDelay,
    /// All connections are cut, and new ones are refused for a while.
    NetCut,
    /// Requests or replies disappear, and later the connections are cut.
    NetBlackHole,
    /// The server's clock is set forward.
    ClockForward,
    /// The server's clock is set back.
    ClockBack,
    /// A planned failover, by Sentinel or in a cluster.
    Failover,
    /// SIGKILL of a master: its replica takes over. The old master comes back as a replica.
    MasterKill,
    /// SIGSTOP of a master until its replica has taken over, then SIGCONT.
    MasterFreeze,
    /// The lock's hash slot moves to another master.
    SlotMigration,
    /// SIGKILL of one of the servers of `leasehold serve`, and a restart.
    ServeKill,
    /// SIGTERM of one of them, and a restart.
    ServeTerm,
    /// SIGSTOP of one of them, every other time while it has a renewal, and later SIGCONT.
    ServeStop,
    /// All connections between callers and these servers are cut, a few times.
    ServeCut,
    /// Half of the answers to `acquire` are lost for a while, together with their connections.
    AcquireUnanswered,
    /// Half of the answers to `release` are lost for a while, together with their connections.
    ReleaseUnanswered,
}

/// A store under torture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// One process with several clients.
    Memory,
    /// A file that several processes share.
    Sqlite,
    /// The system's Redis 7, behind the testkit's proxy.
    Redis,
    /// Redis 6.2, behind the testkit's proxy.
    #[value(name = "redis-6.2")]
    #[serde(rename = "redis-6.2")]
    Redis62,
    /// Valkey 9, behind the testkit's proxy.
    Valkey,
    /// A master with two replicas and three Sentinels.
    Sentinel,
    /// Three masters with a replica each.
    Cluster,
    /// Five independent servers.
    Redlock,
    /// The system's PostgreSQL, behind the testkit's proxy.
    Postgres,
    /// One node of etcd, behind the testkit's proxy: only for its own lock.
    Etcd,
}

impl StoreKind {
    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// What the guarantees say about two holders after a fault.
#[derive(Clone, Copy, Debug)]
pub struct Exemption {
    /// Overlaps count as exempt from the fault until this long after it has healed.
    pub window: fn(Duration) -> Duration,
    /// The sentence of `docs/guarantees.md`.
    pub sentence: &'static str,
    /// Whether two servers grant at once, so that a holder may begin after another one with a higher token has left.
    pub is_split: bool,
}

/// A delay that the guarantees add to the bound of a takeover.
#[derive(Clone, Copy, Debug)]
pub struct Delay {
    /// So long.
    pub of: Duration,
    /// The sentence of `docs/guarantees.md`.
    pub sentence: &'static str,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The fault.
    pub fault: Fault,
    /// The stores to which it applies.
    pub stores: &'static [StoreKind],
    /// What exempts two holders, if anything does.
    pub exemption: Option<Exemption>,
    /// What makes a takeover later, if anything does.
    pub delay: Option<Delay>,
}

use StoreKind::{Cluster, Etcd, Memory, Postgres, Redis, Redis62, Redlock, Sentinel, Sqlite, Valkey};

const ALL: &[StoreKind] =
    &[Memory, Sqlite, Redis, Redis62, Valkey, Sentinel, Cluster, Redlock, Postgres, Etcd];
/// Of `memory:` all clients and the store are in one process.
const PROCESSES: &[StoreKind] = &[Sqlite, Redis, Redis62, Valkey, Sentinel, Cluster, Redlock, Postgres, Etcd];
const SINGLE: &[StoreKind] = &[Redis, Redis62, Valkey, Postgres, Etcd];
const REDIS: &[StoreKind] = &[Redis, Redis62, Valkey];
const SERVERS: &[StoreKind] = &[Redis, Redis62, Valkey, Sentinel, Cluster, Redlock];
const REPLICATED: &[StoreKind] = &[Sentinel, Cluster];

/// Those that `leasehold serve` is tortured on.
const SERVED: &[StoreKind] = &[Sqlite, Redis, Redis62, Valkey, Sentinel, Cluster, Postgres];

/// libfaketime does not start with Debian's Redis 7, whose allocator reads the clock before libfaketime is ready. It does not reach the clock
/// of the Redis 6.2 of `scripts/test install`.
const CLOCKED: &[StoreKind] = &[Valkey];

/// The largest step of a server's clock.
pub const CLOCK_STEP: Duration = Duration::from_secs(3);

/// A client with no lease pauses up to this long between its attempts to reconnect.
pub const RECONNECT_LIMIT: Duration = Duration::from_secs(5);

const RECONNECT: Option<Delay> = Some(Delay {
    of: RECONNECT_LIMIT,
    sentence: "When the server is reachable again, the client reconnects within a quarter of the shortest ttl that it holds, 0.5 s \
               at least (5 s if it holds nothing).",
});

const FLUSHED: Exemption = Exemption {
    window: next_renewal,
    sentence: "The lease is gone at once, and another client may acquire the lock; tokens keep rising. … Without that notification …, \
               the next renewal reports the loss, at a third of the ttl.",
    is_split: false,
};

const EMPTY: Exemption = Exemption {
    window: reconnected,
    sentence: "The loss is reported when the client has reconnected. Another client may acquire the lock before.",
    is_split: false,
};

const FAILED_OVER: Exemption = Exemption {
    window: whole_ttl,
    sentence: "Replication is asynchronous. After a failover one lock can have two holders, and only their tokens distinguish them.",
    is_split: true,
};

const STEPPED: Exemption = Exemption {
    window: next_renewal,
    sentence: "If the clock is set forward, or if the clock of a promoted replica is ahead, leases expire early. Their holders detect \
               this at the next renewal.",
    is_split: false,
};

/// What the guarantees say of tokens after a loss of all data.
pub const TOKENS_REPEAT: &str = "If a store loses everything and the wall clock is set back by more than the time since the last grant, a token may repeat.";

/// A renewal each third of the ttl, and a second for its answer.
fn next_renewal(ttl: Duration) -> Duration {
    ttl / 3 + Duration::from_secs(1)
}

fn reconnected(ttl: Duration) -> Duration {
    (ttl / 4).max(Duration::from_millis(500)) + Duration::from_secs(1)
}

fn whole_ttl(ttl: Duration) -> Duration {
    ttl
}

const fn rule(fault: Fault, stores: &'static [StoreKind]) -> Rule {
    Rule { fault, stores, exemption: None, delay: None }
}

/// Every fault, with the stores to which it applies.
pub const TABLE: &[Rule] = &[
    rule(Fault::None, ALL),
    rule(Fault::WorkerStop, ALL),
    rule(Fault::WorkerKill, PROCESSES),
    Rule { delay: RECONNECT, ..rule(Fault::ServerStop, SINGLE) },
    Rule { delay: RECONNECT, ..rule(Fault::ServerKill, SINGLE) },
    Rule { exemption: Some(EMPTY), delay: RECONNECT, ..rule(Fault::ServerEmpty, REDIS) },
    Rule {
        delay: RECONNECT,
        ..rule(Fault::ClientKill, &[Redis, Redis62, Valkey, Sentinel, Cluster, Postgres])
    },
    rule(Fault::Stranger, &[Redis, Redis62, Valkey, Cluster, Redlock, Postgres]),
    rule(Fault::ScriptFlush, SERVERS),
    Rule { exemption: Some(FLUSHED), ..rule(Fault::FlushAll, REDIS) },
    rule(Fault::NetDelay, SINGLE),
    Rule { delay: RECONNECT, ..rule(Fault::NetCut, SINGLE) },
    Rule { delay: RECONNECT, ..rule(Fault::NetBlackHole, SINGLE) },
    // Of five nodes one fails: any minority may, so no takeover is later. A node that has lost its data abstains for `max_ttl`, so no
    // second holder is exempt.
    rule(Fault::ServerStop, &[Redlock]),
    rule(Fault::ServerKill, &[Redlock]),
    rule(Fault::ServerEmpty, &[Redlock]),
    rule(Fault::ClientKill, &[Redlock]),
    rule(Fault::FlushAll, &[Redlock]),
    rule(Fault::NetDelay, &[Redlock]),
    rule(Fault::NetCut, &[Redlock]),
    rule(Fault::NetBlackHole, &[Redlock]),
    Rule { exemption: Some(STEPPED), ..rule(Fault::ClockForward, CLOCKED) },
    Rule {
        delay: Some(Delay {
            of: CLOCK_STEP,
            sentence: "If a server's clock is set back by d … These may last up to d longer: the lease of a dead holder …",
        }),
        ..rule(Fault::ClockBack, CLOCKED)
    },
    Rule { exemption: Some(FAILED_OVER), delay: RECONNECT, ..rule(Fault::Failover, REPLICATED) },
    Rule { exemption: Some(FAILED_OVER), delay: RECONNECT, ..rule(Fault::MasterKill, REPLICATED) },
    Rule { exemption: Some(FAILED_OVER), delay: RECONNECT, ..rule(Fault::MasterFreeze, REPLICATED) },
    Rule { delay: RECONNECT, ..rule(Fault::SlotMigration, &[Cluster]) },
    // Nothing is exempt, and no takeover is later: the callers go on at another server.
    rule(Fault::ServeKill, SERVED),
    rule(Fault::ServeTerm, SERVED),
    rule(Fault::ServeStop, SERVED),
    rule(Fault::ServeCut, SERVED),
    rule(Fault::AcquireUnanswered, SERVED),
    rule(Fault::ReleaseUnanswered, SERVED),
];

impl Fault {
    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(|| "none".to_owned(), |value| value.get_name().to_owned())
    }

    /// Its row for a store. None: it does not apply.
    #[must_use]
    pub fn rule(self, store: StoreKind) -> Option<&'static Rule> {
        TABLE.iter().find(|rule| rule.fault == self && rule.stores.contains(&store))
    }

    /// All that apply to a store, those of the servers of `leasehold serve` too.
    pub fn all(store: StoreKind) -> impl Iterator<Item = Self> {
        let rules = TABLE.iter().filter(move |rule| rule.stores.contains(&store));
        rules.map(|rule| rule.fault).filter(|fault| *fault != Self::None)
    }

    /// Whether it is done to the servers of `leasehold serve`, or to the connections with them.
    #[must_use]
    pub fn is_of_serve(self) -> bool {
        matches!(
            self,
            Self::ServeKill
                | Self::ServeTerm
                | Self::ServeStop
                | Self::ServeCut
                | Self::AcquireUnanswered
                | Self::ReleaseUnanswered
        )
    }

    /// Whether a server loses its data.
    #[must_use]
    pub fn loses_data(self) -> bool {
        matches!(self, Self::ServerEmpty | Self::FlushAll)
    }

    /// Whether a call may fail or a lock may be lost by it. A stranger has no such means, flushed scripts are sent again, a slow network is far
    /// faster than any limit, and callers of `leasehold serve` go on at another server. One that is stopped within a transaction keeps the file of SQLite
    /// locked, and the rows of a lock in PostgreSQL for 1 s with each of its connections.
    #[must_use]
    pub fn disturbs_calls(self, store: StoreKind) -> bool {
        match self {
            Self::ServeStop => matches!(store, Sqlite | Postgres),
            Self::Stranger | Self::ScriptFlush | Self::NetDelay => false,
            fault => !fault.is_of_serve(),
        }
    }

    /// Whether it needs a server whose clock can be set.
    #[must_use]
    pub fn moves_clock(self) -> bool {
        matches!(self, Self::ClockForward | Self::ClockBack)
    }
}

/// The documented bound of a takeover, with no frozen client before the first live one: the claim window of 3 s and 2 s.
#[must_use]
pub fn bound(fault: Fault, store: StoreKind, ttl: Duration) -> Duration {
    ttl + Duration::from_secs(5) + delay(fault, store)
}

/// What the guarantees add to the bound after a fault.
#[must_use]
pub fn delay(fault: Fault, store: StoreKind) -> Duration {
    let delay = fault.rule(store).and_then(|rule| rule.delay);
    delay.map_or(Duration::ZERO, |delay| delay.of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_has_one_row_for_a_store_and_some_store() {
        for fault in Fault::value_variants() {
            assert!(TABLE.iter().any(|rule| rule.fault == *fault), "{fault:?}");
            for store in StoreKind::value_variants() {
                let rows = TABLE.iter().filter(|rule| rule.fault == *fault && rule.stores.contains(store));
                assert!(rows.count() <= 1, "{fault:?} on {store:?}");
            }
        }
    }

    /// A quotation may leave out parts, marked by an ellipsis.
    #[test]
    fn quoted_sentences_are_in_the_guarantees() {
        let page = include_str!("../../docs/guarantees.md");
        let text = page.replace('*', "").split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
        let exemptions = TABLE.iter().filter_map(|rule| rule.exemption).map(|exemption| exemption.sentence);
        let delays = TABLE.iter().filter_map(|rule| rule.delay).map(|delay| delay.sentence);
        for sentence in exemptions.chain(delays).chain([TOKENS_REPEAT]) {
            for part in sentence.split('…') {
                let part = part.trim_matches([' ', ',', '.']).to_lowercase();
                assert!(text.contains(&part), "not in docs/guarantees.md: {part}");
            }
        }
    }
}
