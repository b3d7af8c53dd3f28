//! The user's rights, and the cost of a lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Kind, Name, Release, Reply, Resource, StoreTime, Token,
};
use leasehold_redis_protocol::{
    RESOURCE_PATTERN, ScriptVariant, clock_key, inbox_of, resource_key, slot_of, token_time,
};
use leasehold_store::{Call, OpenError, StoreError};
use redis::Value;
use redis::aio::MultiplexedConnection;

use super::super::deletes::Deletes;
use super::super::error::explain;
use super::super::own_connection::OwnConnection;
use super::super::rights::{MissingRight, Purpose, RIGHTS};
use super::super::send::pipeline::{self, CallOptions, Mode, Role};
use super::query::{ask, command, info_by, median};
use crate::wire::Wire;

/// Name prefix of the locks that the check acquires.
pub(super) const NAME: &str = "leasehold-doctor";

/// Number of locks and releases that are measured.
const ROUNDS: u32 = 20;

/// A lock and a client with unique names.
pub(super) struct Probe {
    resource: Arc<Resource>,
    client: ClientId,
    key: String,
}

impl Probe {
    /// A lock whose keys are in one of these slots.
    pub(super) fn new(slots: &[(u16, u16)]) -> Result<Self, OpenError> {
        let mut random = [0; 16];
        getrandom::fill(&mut random)
            .map_err(|error| OpenError::unavailable(format!("the system gave no random numbers: {error}")))?;
        let client = ClientId::new(u128::from_be_bytes(random));
        let mut number = 0_u32;
        loop {
            let name = Name::new(&format!("{NAME}:{client}:{number}"))?;
            let resource = Resource { kind: Kind::Mutex, name };
            let slot = slot_of(&resource);
            if slots.is_empty() || slots.iter().any(|(first, last)| (*first..=*last).contains(&slot)) {
                let key = resource_key(&resource);
                return Ok(Self { resource: Arc::new(resource), client, key });
            }
            number += 1;
        }
    }
}

/// Tries each right. Any reply of the server other than NOPERM means that the user has it.
pub(super) async fn missing_rights(
    connection: &mut MultiplexedConnection,
    variant: ScriptVariant,
    probe: &Probe,
    is_resp2: bool,
) -> Result<Vec<MissingRight>, String> {
    let channel = inbox_of(probe.client, variant.is_cluster().then(|| slot_of(&probe.resource)));
    let mut missing_rights = Vec::new();
    let mut is_sharded = variant.is_cluster();
    for right in &RIGHTS {
        let is_needed = match right.purpose {
            Purpose::Locks
            | Purpose::Connection
            | Purpose::Replicas
            | Purpose::Listing
            | Purpose::Deletes => true,
            Purpose::Cluster => variant.is_cluster(),
            Purpose::Sharded => is_sharded,
        };
        if !is_needed {
            continue;
        }
        let is_subscribing = right.probe_command.contains("SUBSCRIBE");
        if is_subscribing && is_resp2 {
            // A subscribed connection could run no further command. The store's own connection has subscribed already.
            continue;
        }
        let words = right.words(&probe.key, &channel);
        let answer = connection.send_packed_command(&command(&words)).await.and_then(Value::extract_error);
        let Err(error) = answer else { continue };
        if error.is_unrecoverable_error() || error.is_timeout() {
            return Err(explain(&error));
        }
        if right.purpose == Purpose::Sharded && error.to_string().contains("unknown command") {
            is_sharded = false;
        }
        if let Some(rule) = right.missing_rule(&error.to_string()) {
            let lack = MissingRight { rule, purpose: right.purpose };
            if !missing_rights.iter().any(|known: &MissingRight| known.rule == lack.rule) {
                missing_rights.push(lack);
            }
        }
    }
    Ok(missing_rights)
}

/// The cost of a lock and its release together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) pair: Duration,
    pub(super) source: Source,
    /// How far the clock of tokens is ahead of the server's.
    pub(super) token_lead: Duration,
}

/// How it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The server's own count, while no other client ran scripts.
    Server,
    /// The time of the round trips, minus that of the same number of PINGs.
    RoundTrips,
}

pub(super) async fn cost(
    connection: &mut OwnConnection,
    variant: ScriptVariant,
    probe: &Probe,
    ping: Duration,
    deletes: &Deletes,
) -> Result<Cost, String> {
    // The first time the server may not know the scripts yet.
    let token = lock_and_release(connection, variant, probe, 0, deletes).await?;
    let token_lead = lead_of(connection, token).await?;
    let before = commands_run(connection).await;
    let mut spans = Vec::new();
    for round in 1..=ROUNDS {
        let began = Instant::now();
        lock_and_release(connection, variant, probe, round, deletes).await?;
        spans.push(began.elapsed());
    }
    let after = commands_run(connection).await;
    if let (Some((calls, micros)), Some((calls_after, micros_after))) = (before, after)
        && calls_after.checked_sub(calls) == Some(u64::from(2 * ROUNDS))
    {
        let pair = Duration::from_micros(micros_after.saturating_sub(micros)) / ROUNDS;
        return Ok(Cost { pair, source: Source::Server, token_lead });
    }
    let pair = median(&mut spans).saturating_sub(2 * ping);
    Ok(Cost { pair, source: Source::RoundTrips, token_lead })
}

pub(super) async fn lock_and_release(
    connection: &OwnConnection,
    variant: ScriptVariant,
    probe: &Probe,
    round: u32,
    deletes: &Deletes,
) -> Result<Token, String> {
    let acquisition = Acquisition { client: probe.client, sequence: u64::from(round) };
    let acquire = Arc::new(Acquire::exclusive(acquisition, Duration::from_secs(1)));
    let run = async |command: Command| {
        let call = Call::new(probe.resource.clone(), command);
        let options = CallOptions { deletes, ..CallOptions::of(Role::of(variant), Mode::Each) };
        match pipeline::run(Wire::Limited(connection.clone()), options, &[&call]).await.pop() {
            Some(Ok(answer)) => Ok(answer.reply),
            Some(Err(error)) => Err(StoreError::from(error).message),
            None => Err("it gave no answer".to_owned()),
        }
    };
    let unexpected = |reply: Reply| format!("it answered {reply:?}");
    let token = match run(Command::Acquire(acquire.clone())).await? {
        Reply::Granted(grant) => grant.tokens.first,
        reply => return Err(unexpected(reply)),
    };
    let release = Release { as_granted: Some((acquire, token)), ..Release::now(acquisition) };
    match run(Command::Release(release)).await? {
        Reply::Released => Ok(token),
        reply => Err(unexpected(reply)),
    }
}

/// How far this token, which was just granted, is ahead of the server's time.
async fn lead_of(connection: &mut MultiplexedConnection, token: Token) -> Result<Duration, String> {
    let time: Result<(u64, u64), _> = ask(connection, &["TIME"]).await;
    let (seconds, micros) = time.map_err(|error| explain(&error))?;
    let now = StoreTime::from_micros(seconds * 1_000_000 + micros);
    Ok(token_time(token).since(now))
}

/// Whether the clock of tokens is missing, although there are locks.
pub(super) async fn has_lost_clock(connection: &mut MultiplexedConnection) -> bool {
    let clock: Result<u64, _> = ask(connection, &["EXISTS", &clock_key(None)]).await;
    if !matches!(clock, Ok(0)) {
        return false;
    }
    // One page is enough to find some of many locks.
    let page: Result<(u64, Vec<String>), _> =
        ask(connection, &["SCAN", "0", "MATCH", RESOURCE_PATTERN, "COUNT", "1000"]).await;
    page.is_ok_and(|(_, keys)| !keys.is_empty())
}

/// Number of script calls and conditional deletes, and their total time in microseconds.
async fn commands_run(connection: &mut MultiplexedConnection) -> Option<(u64, u64)> {
    let stats = info_by(connection, &["INFO", "commandstats"]).await;
    let of = |command| -> Option<(u64, u64)> {
        let stats = stats.get(command)?;
        let number = |name: &str| stats.split(',').find_map(|part| part.strip_prefix(name)?.parse().ok());
        Some((number("calls=")?, number("usec=")?))
    };
    let scripts = of("cmdstat_evalsha")?;
    let deletes = of("cmdstat_delifeq").or_else(|| of("cmdstat_delex")).unwrap_or_default();
    Some((scripts.0 + deletes.0, scripts.1 + deletes.1))
}

#[cfg(test)]
mod tests {
    use leasehold_redis_protocol::{Channels, Script};

    use super::super::super::rights::{CHANNELS, KEYS};
    use super::*;

    /// The lines of docs/operations.md that name rights.
    const DOCUMENT: &str = include_str!("../../../leasehold/guide/operations.md");

    #[test]
    fn document_names_exactly_the_required_rights() {
        let mut named: Vec<&str> = DOCUMENT
            .lines()
            .filter(|line| line.starts_with("ACL SETUSER locks"))
            .flat_map(|line| line.split(' '))
            .filter(|word| word.starts_with('+') && !OTHERS.contains(word))
            .collect();
        named.sort_unstable();
        named.dedup();
        let mut rules: Vec<&str> = RIGHTS.iter().map(|right| right.rule).collect();
        rules.sort_unstable();
        assert_eq!(named, rules);
        assert!(DOCUMENT.contains(KEYS) && DOCUMENT.contains(CHANNELS));
    }

    /// Rights that not every client needs: those of a shared connection, and those without which `doctor` reports less.
    const OTHERS: [&str; 12] = [
        "+hlen",
        "+strlen",
        "+hkeys",
        "+getrange",
        "+select",
        "+role",
        "+info",
        "+config|get",
        "+slowlog|get",
        "+ping",
        "+cluster|info",
        "+client|info",
    ];

    #[test]
    fn every_script_command_is_among_the_rights() {
        for script in Script::ALL {
            let texts = [ScriptVariant::Voter, ScriptVariant::Cluster(Channels::Sharded)];
            let text = texts.map(|variant| variant.text(script)).concat();
            // Some calls go through a function of the scripts' own.
            let text = text.replace("write('", "call('");
            let called = text.split("call('").skip(1).filter_map(|rest| rest.split('\'').next());
            // A voter without the right to INFO is not connected to at all.
            for command in called.filter(|command| !["PUBSUB", "INFO"].contains(command)) {
                let rule = format!("+{}", command.to_lowercase());
                assert!(RIGHTS.iter().any(|right| right.rule == rule), "{command}");
            }
        }
    }

    #[test]
    fn probe_keys_are_in_the_requested_slot() {
        let probe = Probe::new(&[(5, 5), (9_000, 9_400)]).unwrap();
        let slot = slot_of(&probe.resource);
        assert!(slot == 5 || (9_000..=9_400).contains(&slot));
        assert!(probe.key.starts_with("leasehold:4:{mutex:leasehold-doctor:"));
    }
}
