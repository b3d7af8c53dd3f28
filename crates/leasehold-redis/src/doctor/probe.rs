//! Takes a snapshot of one server, over a connection of its own. What the user may not read stays unknown.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use leasehold_redis_protocol::{ConditionalDelete, ScriptVariant};
use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};

use super::super::connect::{self, Dial};
use super::super::deletes::Deletes;
use super::super::error::{explain, is_resp3_unknown};
use super::super::own_connection::OwnConnection;
use super::super::rights::{self, MissingRight};
use super::super::slot_map::{self, SlotRange};
use super::acl_check::{self, Cost, Probe};
use super::foreign_locks::{self, Found};
use super::query::{ask, info_by, median};
use crate::url::Host;

/// The settings that matter to locks. Each is queried by name, because all settings together include secrets.
const SETTINGS: [&str; 12] = [
    "appendonly",
    "appendfsync",
    "save",
    "maxmemory-policy",
    "min-replicas-to-write",
    "min-replicas-max-lag",
    "repl-backlog-ttl",
    "timeout",
    "tcp-keepalive",
    "client-output-buffer-limit",
    "cluster-node-timeout",
    "cluster-require-full-coverage",
];

/// Number of measured round trips, and of clock readings.
const PINGS: usize = 11;
const CLOCK_READINGS: usize = 5;

/// Number of slow log entries that are read.
const SLOW_COMMANDS: usize = 128;

/// A server to probe.
pub(super) struct ProbeTarget {
    pub(super) name: String,
    pub(super) dial: Dial,
    pub(super) user: String,
    /// The connection does not leave this machine.
    pub(super) is_local: bool,
    pub(super) transport: Transport,
    pub(super) failover: FailoverMode,
    /// Its hash slots, if it is a cluster node.
    pub(super) slots: Vec<(u16, u16)>,
    pub(super) variant: ScriptVariant,
    pub(super) is_resp2: bool,
}

/// The transport that the address names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Transport {
    #[default]
    Encrypted,
    Plain,
    PlainWithPassword,
}

/// How a failed master is replaced, as far as the address tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum FailoverMode {
    #[default]
    ByHand,
    Sentinels,
    Cluster,
}

/// A snapshot of a server.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    pub(super) name: String,
    pub(super) user: String,
    pub(super) is_local: bool,
    pub(super) transport: Transport,
    pub(super) failover: FailoverMode,
    /// The reply of INFO; empty if the user may not read it.
    pub(super) info: HashMap<String, String>,
    /// The replies of CONFIG GET; empty if the user may not read them.
    pub(super) settings: HashMap<String, String>,
    /// Median round trip.
    pub(super) round_trip: Duration,
    pub(super) clock: Option<Clock>,
    /// Number of sentinels that watch it.
    pub(super) watchers: u64,
    pub(super) missing_rights: Vec<MissingRight>,
    /// Cost of a lock and its release, or the error. `None` on a replica, and without the rights.
    pub(super) cost: Option<Result<Cost, String>>,
    /// The clock of tokens is missing, although there are locks. Not checked in a cluster, where each slot has its own.
    pub(super) has_lost_clock: bool,
    /// Number of leasehold's scripts in the slow log, and the longest of them.
    pub(super) slow: Option<(usize, Duration)>,
    /// Keys that look like locks of other libraries.
    pub(super) foreign_locks: Found,
    /// A quorum node that abstains after it may have lost leases.
    pub(super) abstains: bool,
    /// A quorum node.
    pub(super) votes: bool,
}

/// Offset of a server's clock from this machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clock {
    pub(super) ahead_micros: i64,
    /// Max error of the offset: half of a round trip.
    pub(super) error: Duration,
}

impl Snapshot {
    /// The value of a setting, if known.
    pub(super) fn setting(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str)
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.info.get(name).or_else(|| self.settings.get(name))?.trim().parse().ok()
    }

    pub(super) fn is(&self, name: &str, value: &str) -> bool {
        self.info.get(name).is_some_and(|found| found == value)
    }

    /// The conditional delete of this version.
    pub(super) fn conditional_delete(&self) -> Option<ConditionalDelete> {
        let line = |name: &str| Some(format!("{name}:{}\n", self.info.get(name)?));
        let versions = ["valkey_version", "redis_version"].into_iter().filter_map(line).collect::<String>();
        ConditionalDelete::of_server(&versions)
    }

    pub(super) fn is_replica(&self) -> bool {
        self.is("role", "slave")
    }
}

/// Takes the snapshot. Fails if the server is unreachable or does not answer.
pub(super) async fn at(mut target: ProbeTarget) -> Result<Snapshot, String> {
    let mut connected = connect(&target.dial, target.is_resp2).await;
    if !target.is_resp2 && connected.as_ref().is_err_and(is_resp3_unknown) {
        target.is_resp2 = true;
        connected = connect(&target.dial, true).await;
    }
    let mut connection = connected.map_err(|error| explain(&error))?;
    let round_trip = round_trip(&mut connection).await?;
    let mut info = info_by(&mut connection, &["INFO"]).await;
    if info.get("cluster_enabled").is_some_and(|enabled| enabled == "1") {
        info.extend(info_by(&mut connection, &["CLUSTER", "INFO"]).await);
    }
    let probe = Probe::new(&target.slots).map_err(|error| error.to_string())?;
    let missing_rights =
        acl_check::missing_rights(&mut connection, target.variant, &probe, target.is_resp2).await?;
    let mut snapshot = Snapshot {
        settings: settings_by(&mut connection).await,
        clock: clock_by(&mut connection).await,
        watchers: ask(&mut connection, &["PUBSUB", "NUMSUB", "__sentinel__:hello"])
            .await
            .map_or(0, |(_, count): (String, u64)| count),
        slow: slow_by(&mut connection).await,
        name: target.name,
        user: target.user,
        is_local: target.is_local,
        transport: target.transport,
        failover: target.failover,
        cost: None,
        has_lost_clock: !target.variant.is_cluster() && acl_check::has_lost_clock(&mut connection).await,
        foreign_locks: foreign_locks::search(&mut connection).await,
        abstains: false,
        votes: false,
        info,
        round_trip,
        missing_rights,
    };
    if !snapshot.is_replica() && !snapshot.missing_rights.iter().any(MissingRight::is_required) {
        let deletes = Deletes::new(snapshot.conditional_delete());
        let cost = acl_check::cost(&mut connection, target.variant, &probe, round_trip, &deletes).await;
        snapshot.cost = Some(cost);
    }
    Ok(snapshot)
}

/// A sentinel's view of its master.
#[derive(Clone, Debug, Default)]
pub(super) struct SentinelView {
    pub(super) master: String,
    pub(super) quorum: u32,
    pub(super) other_sentinels: u32,
    /// Why no failover could be authorized at present.
    pub(super) objection: Option<String>,
}

pub(super) async fn at_sentinel(sentinel: &Dial, service: &str) -> Result<SentinelView, String> {
    let said = |error: RedisError| explain(&error);
    let mut connection = connect(sentinel, false).await.map_err(said)?;
    let master: HashMap<String, String> =
        ask(&mut connection, &["SENTINEL", "MASTER", service]).await.map_err(said)?;
    let objection: Result<String, _> = ask(&mut connection, &["SENTINEL", "CKQUORUM", service]).await;
    let word = |name: &str| master.get(name).cloned().unwrap_or_default();
    let number = |name: &str| word(name).parse().unwrap_or(0);
    Ok(SentinelView {
        master: format!("{}:{}", word("ip"), word("port")),
        quorum: number("quorum"),
        other_sentinels: number("num-other-sentinels"),
        objection: objection
            .err()
            .filter(|error| error.code() == Some("NOQUORUM"))
            .map(|error| explain(&error)),
    })
}

/// A node's view of the slot map.
pub(super) async fn query_slots(node: &Dial, host: &Host) -> Result<Vec<SlotRange>, String> {
    let mut connection = connect(node, false).await.map_err(|error| explain(&error))?;
    slot_map::query(&mut connection, host).await
}

async fn connect(dial: &Dial, is_resp2: bool) -> Result<OwnConnection, RedisError> {
    dial.open(is_resp2, &connect::config()).await
}

async fn settings_by(connection: &mut MultiplexedConnection) -> HashMap<String, String> {
    let mut questions = redis::pipe();
    questions.ignore_errors();
    for name in SETTINGS {
        questions.cmd("CONFIG").arg("GET").arg(name);
    }
    let answers: Result<Vec<Result<Value, RedisError>>, _> = questions.query_async(connection).await;
    let answers = answers.unwrap_or_default().into_iter().flatten();
    answers
        .filter_map(|answer| redis::from_redis_value::<HashMap<String, String>>(answer).ok())
        .flatten()
        .collect()
}

pub(super) async fn round_trip(connection: &mut MultiplexedConnection) -> Result<Duration, String> {
    let mut spans = Vec::with_capacity(PINGS);
    for _ in 0..PINGS {
        let began = Instant::now();
        let answer = ask::<Value>(connection, &["PING"]).await;
        // A refusal takes as long as an answer.
        if let Some(error) = answer.err().filter(|error| error.code().is_none()) {
            return Err(explain(&error));
        }
        spans.push(began.elapsed());
    }
    Ok(median(&mut spans))
}

/// The reading with the shortest way is the most exact one.
async fn clock_by(connection: &mut MultiplexedConnection) -> Option<Clock> {
    let mut best: Option<Clock> = None;
    for _ in 0..CLOCK_READINGS {
        let (sent, began) = (SystemTime::now(), Instant::now());
        let (seconds, micros): (i64, i64) = ask(connection, &["TIME"]).await.ok()?;
        let error = began.elapsed() / 2;
        let here = (sent + error).duration_since(UNIX_EPOCH).ok()?;
        let here = i64::try_from(here.as_micros()).ok()?;
        let clock = Clock { ahead_micros: seconds * 1_000_000 + micros - here, error };
        if best.is_none_or(|best| error < best.error) {
            best = Some(clock);
        }
    }
    best
}

/// Each entry has its number, when, how long in microseconds, and the words of the command.
async fn slow_by(connection: &mut MultiplexedConnection) -> Option<(usize, Duration)> {
    let count = SLOW_COMMANDS.to_string();
    let entries: Vec<Vec<Value>> = ask(connection, &["SLOWLOG", "GET", &count]).await.ok()?;
    let spans = entries.iter().filter_map(|entry| {
        let (Value::Int(micros), words) = (entry.get(2)?, entry.get(3)?) else { return None };
        let words: Vec<Vec<u8>> = redis::from_redis_value_ref(words).ok()?;
        let words: Vec<_> = words.iter().map(|word| String::from_utf8_lossy(word)).collect();
        let is_script = words.first()?.to_uppercase().starts_with("EVAL");
        let key = words.iter().find(|word| word.starts_with("leasehold:"))?;
        // Without the commands of the check itself, and those of a new connection.
        let is_check =
            key.contains(acl_check::NAME) || words.get(1).is_some_and(|text| rights::is_probe(text));
        (is_script && !is_check).then(|| Duration::from_micros(u64::try_from(*micros).unwrap_or(0)))
    });
    let spans: Vec<Duration> = spans.collect();
    Some((spans.len(), spans.iter().max().copied().unwrap_or_default()))
}
