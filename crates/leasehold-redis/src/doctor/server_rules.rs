//! The checks of one server, from a snapshot of it. Pure: no server is asked here.

use leasehold_store::{Check, Component};

use super::super::rights::{MissingRight, Purpose};
use super::foreign_locks;
use super::probe::{FailoverMode, Snapshot, Transport};
use super::time_rules::{check_clock, check_speed, check_token_clock};

/// In percent of what there may be.
const NEARLY_FULL_PERCENT: u64 = 80;

/// Min output buffer in bytes of a client that receives pushes and lists many locks.
const MIN_OUTPUT_BUFFER: u64 = 1 << 20;

pub(super) fn check_server(snapshot: &Snapshot) -> Component {
    let mut component = Component::new(snapshot.name.as_str());
    check_version(snapshot, &mut component);
    check_memory(snapshot, &mut component);
    check_persistence(snapshot, &mut component);
    check_replication(snapshot, &mut component);
    check_connections(snapshot, &mut component);
    check_transport(snapshot, &mut component);
    check_rights(snapshot, &mut component);
    show_release(snapshot, &mut component);
    foreign_locks::show(&snapshot.foreign_locks, &mut component);
    check_speed(snapshot, &mut component);
    check_token_clock(snapshot, &mut component);
    if let Some(clock) = snapshot.clock {
        check_clock(clock, &mut component);
    }
    component
}

/// The line that changes a setting: as a command, or for the file of a server that takes no such command.
pub(super) fn setting_command(snapshot: &Snapshot, setting: &str) -> Option<String> {
    let is_command = !snapshot.settings.is_empty();
    Some(if is_command { format!("CONFIG SET {setting}") } else { setting.to_owned() })
}

fn check_version(snapshot: &Snapshot, component: &mut Component) {
    if snapshot.info.is_empty() {
        let what = "this user lacks the right to run INFO";
        let remedy = format!("ACL SETUSER {} +info", snapshot.user);
        if snapshot.votes {
            let why = "without the run id neither a restart nor a second address of the same server is detected, so the server does not vote";
            component.danger(Check::Info, what, why, Some(remedy));
        } else {
            let why = "its version, role, memory and replicas are unknown";
            component.advice(Check::Info, what, why, Some(remedy));
        }
        return;
    }
    let word = |name: &str| snapshot.info.get(name).map_or("", String::as_str);
    let version = word("redis_version");
    match word("valkey_version") {
        "" => component.fact("version", format_args!("Redis {version}")),
        valkey => component.fact("version", format_args!("Valkey {valkey}, as Redis {version}")),
    }
    let mut numbers = version.split('.').map_while(|part| part.parse::<u32>().ok());
    if let (Some(major), Some(minor)) = (numbers.next(), numbers.next())
        && (major, minor) < (6, 2)
    {
        let why = "leasehold needs Redis 6.2 or later: older ones lack commands that its scripts use";
        component.danger(Check::OldVersion, format!("this is Redis {version}"), why, None);
    }
    if snapshot.settings.is_empty() {
        let why = "its settings for persistence, replicas and idle connections are unknown: check the provider's \
                   settings";
        let remedy = format!("ACL SETUSER {} +config|get", snapshot.user);
        component.advice(Check::Config, "it does not answer CONFIG GET", why, Some(remedy));
    }
}

// --- Persistence -----------------------------------------------------------------------------------

fn check_memory(snapshot: &Snapshot, component: &mut Component) {
    let policy =
        snapshot.setting("maxmemory-policy").or(snapshot.info.get("maxmemory_policy").map(String::as_str));
    let limit = snapshot.number("maxmemory");
    if let Some(limit) = limit {
        let shown = if limit == 0 { "none".to_owned() } else { format!("{} MiB", limit >> 20) };
        component.fact("maxmemory", shown);
    }
    if let Some(policy) = policy {
        component.fact("maxmemory-policy", policy);
        if policy == "noeviction" {
            let why = "a server that is out of memory refuses new locks and evicts none";
            component.fine(Check::Eviction, "maxmemory-policy is noeviction", why);
        } else {
            component.fact("evicted keys", snapshot.number("evicted_keys").unwrap_or(0));
            let why = "a server that reaches its maxmemory evicts keys, and every key of a lock has an expiry: a lock that is \
                       held can be granted to a second client";
            let remedy = setting_command(snapshot, "maxmemory-policy noeviction");
            component.danger(Check::Eviction, format!("maxmemory-policy is {policy}"), why, remedy);
        }
    }
    if let (Some(limit @ 1..), Some(used)) = (limit, snapshot.number("used_memory"))
        && used.saturating_mul(100) / limit >= NEARLY_FULL_PERCENT
    {
        let what = format!("{} % of maxmemory is in use", used.saturating_mul(100) / limit);
        component.advice(
            Check::MemoryUse,
            what,
            "when the memory is full, no lock can be acquired; held locks can still be renewed and released",
            None,
        );
    }
}

fn check_persistence(snapshot: &Snapshot, component: &mut Component) {
    let is_broken = |name: &str| snapshot.info.get(name).is_some_and(|status| status != "ok");
    if is_broken("rdb_last_bgsave_status") || is_broken("aof_last_write_status") {
        let why = "a server that cannot write to its disk refuses locks; after a failed snapshot only while stop-writes-on-bgsave-error is yes";
        component.danger(Check::DiskWrite, "its last write to disk failed", why, None);
    }
    let Some(has_log) = snapshot.number("aof_enabled") else { return };
    if has_log == 1 {
        return check_aof(snapshot, component);
    }
    if snapshot.abstains {
        component.fact("persistence", "not needed for voting");
        component.fine(
            Check::Persistence,
            "a restart may lose leases",
            "after a restart the node does not vote for the maximum ttl; the other nodes continue",
        );
        return;
    }
    let cost = "a restart restores the leases of the last snapshot, or none: the holder of a lost lease still works \
                when the next client gets the lock, until its next renewal fails. Fencing tokens still rise, because they follow \
                the clock. Enable the append-only file, or keep a crashed server down for the longest ttl (10 s by \
                default)";
    let remedy = setting_command(snapshot, "appendonly yes");
    match snapshot.setting("save") {
        Some("") => {
            component.fact("persistence", "none");
            component.danger(Check::Persistence, "nothing is written to disk", cost, remedy);
        }
        Some(save) => {
            component.fact("persistence", format_args!("snapshots ({save})"));
            component.danger(Check::Persistence, "only snapshots are written to disk", cost, remedy);
        }
        None => {
            component.fact("persistence", "no append-only file");
            component.danger(Check::Persistence, "no append-only file is written to disk", cost, remedy);
        }
    }
}

fn check_aof(snapshot: &Snapshot, component: &mut Component) {
    let fsync = snapshot.setting("appendfsync");
    component
        .fact("persistence", format_args!("append-only file (appendfsync {})", fsync.unwrap_or("unknown")));
    match fsync {
        Some("always") => component.fine(Check::Fsync, "every change is on disk before it is confirmed", "a restart loses no lease"),
        Some("no") => component.advice(Check::Fsync,
            "the operating system decides when the append-only file is written to disk",
            "a power failure can lose the leases of the last 30 s, and their locks are granted again; fencing tokens \
             distinguish the holders",
            setting_command(snapshot, "appendfsync everysec"),
        ),
        _ => component.fine(Check::Fsync,
            "changes go to an append-only file",
            "a restart loses no lease. A power failure may lose those of the last two seconds, unless appendfsync is \
             always; fencing tokens distinguish the holders",
        ),
    }
}

// --- Other servers -----------------------------------------------------------------------------------

const ASYNCHRONOUS: &str = "Replication is asynchronous: a replica that becomes the master may lack a lease that was \
                            granted just before, and grants the lock to a second holder. Only fencing tokens distinguish \
                            the two";

fn check_replication(snapshot: &Snapshot, component: &mut Component) {
    let word = |name: &str| snapshot.info.get(name).map_or("?", String::as_str);
    let least = snapshot.number("min-replicas-to-write");
    if let Some(least) = least {
        let lag = snapshot.setting("min-replicas-max-lag").unwrap_or("?");
        component.fact("min-replicas-to-write", format_args!("{least} (min-replicas-max-lag {lag})"));
    }
    if snapshot.is_replica() {
        component.fact("role", format_args!("replica of {}:{}", word("master_host"), word("master_port")));
        check_replica(snapshot, least, component);
    } else if let Some(replicas) = snapshot.number("connected_slaves") {
        component.fact("role", format_args!("master, {replicas} replicas"));
        check_master(snapshot, replicas, least, component);
    }
}

fn check_replica(snapshot: &Snapshot, least: Option<u64>, component: &mut Component) {
    if snapshot.failover == FailoverMode::ByHand {
        let why = "a replica is read-only, so no lock can be acquired here: use the master's address";
        component.danger(Check::Replica, "this server is a replica", why, None);
        return;
    }
    if !snapshot.is("master_link_status", "up") {
        let why = "if it becomes the master, the leases that its old master has granted since then are lost";
        component.advice(Check::ReplicaLink, "this replica has lost its master", why, None);
    }
    if least == Some(0) {
        accepts_writes_without_replicas(snapshot, component);
    }
}

fn check_master(snapshot: &Snapshot, replicas: u64, least: Option<u64>, component: &mut Component) {
    if snapshot.watchers > 0 && snapshot.failover == FailoverMode::ByHand {
        let what =
            format!("{} sentinels watch this server, and the address does not name them", snapshot.watchers);
        let why = "when they promote another server, this client stays at the old master while other clients follow";
        let address = "redis-sentinel://HOST:26379,HOST:26379,HOST:26379/SERVICE";
        component.danger(Check::UnnamedSentinels, what, why, Some(address.to_owned()));
    }
    if replicas == 0 && snapshot.failover == FailoverMode::Sentinels {
        component.advice(
            Check::NoReplica,
            "it has no replica",
            "when it fails, no server replaces it, and no lock can be acquired",
            None,
        );
    }
    let is_replaced = snapshot.failover != FailoverMode::ByHand || snapshot.watchers > 0;
    match least {
        Some(0) if is_replaced => accepts_writes_without_replicas(snapshot, component),
        Some(0) if replicas > 0 => {
            let what = "it has replicas, and min-replicas-to-write is 0";
            let why = format!("{ASYNCHRONOUS}. Before a replica is promoted, stop this server");
            component.advice(
                Check::MinReplicas,
                what,
                why,
                setting_command(snapshot, "min-replicas-to-write 1"),
            );
        }
        Some(0) => {}
        Some(least) if snapshot.number("min_slaves_good_slaves").unwrap_or(replicas) < least => {
            let why =
                "the server refuses every write, and with it every lock, until more replicas have caught up";
            component.danger(
                Check::TooFewReplicas,
                format!("fewer replicas follow than min-replicas-to-write, {least}"),
                why,
                None,
            );
        }
        Some(_) => component.fine(
            Check::MinReplicas,
            "a master without its replicas stops granting locks",
            ASYNCHRONOUS,
        ),
        None if replicas > 0 || is_replaced => {
            component.advice(Check::MinReplicas, "min-replicas-to-write is unknown", ASYNCHRONOUS, None);
        }
        None => {}
    }
}

/// For a server that is a master, or may become one.
fn accepts_writes_without_replicas(snapshot: &Snapshot, component: &mut Component) {
    let why = format!(
        "a master that is cut off from the others continues to grant locks, even after another server was promoted. If \
         it must reach one replica, it stops within min-replicas-max-lag seconds. {ASYNCHRONOUS}"
    );
    component.danger(
        Check::MinReplicas,
        "min-replicas-to-write is 0",
        why,
        setting_command(snapshot, "min-replicas-to-write 1"),
    );
}

// --- Connections -------------------------------------------------------------------------------------

fn check_connections(snapshot: &Snapshot, component: &mut Component) {
    if let (Some(clients), Some(most @ 1..)) =
        (snapshot.number("connected_clients"), snapshot.number("maxclients"))
    {
        component.fact("clients", format_args!("{clients} of {most}"));
        if clients.saturating_mul(100) / most >= NEARLY_FULL_PERCENT {
            let why = "at the limit the server refuses every client that connects or reconnects";
            component.advice(
                Check::MaxClients,
                format!("{clients} of {most} clients are connected"),
                why,
                setting_command(snapshot, "maxclients 10000"),
            );
        }
    }
    if let Some(seconds @ 1..) = snapshot.number("timeout") {
        let why = "clients reconnect, but a command that is sent over a closed connection may fail";
        let what = format!("idle connections are closed after {seconds} s");
        component.advice(Check::IdleTimeout, what, why, setting_command(snapshot, "timeout 0"));
    }
    if snapshot.number("tcp-keepalive") == Some(0) {
        let why = "a client whose machine has failed still counts as connected: each time that it is first in a queue, the \
                   other waiters are delayed by 3 s";
        component.advice(
            Check::TcpKeepalive,
            "tcp-keepalive is 0",
            why,
            setting_command(snapshot, "tcp-keepalive 60"),
        );
    }
    if let Some(bytes) = snapshot.setting("client-output-buffer-limit").and_then(pubsub_limit)
        && (1..MIN_OUTPUT_BUFFER).contains(&bytes)
    {
        let why = "grants and long lists use one connection, which the server closes at that limit";
        let what = format!("client-output-buffer-limit allows subscribers {bytes} bytes");
        component.advice(
            Check::OutputBuffer,
            what,
            why,
            setting_command(snapshot, "client-output-buffer-limit \"pubsub 32mb 8mb 60\""),
        );
    }
}

/// The hard limit among `normal 0 0 0 slave 1 2 3 pubsub 4 5 6`.
fn pubsub_limit(setting: &str) -> Option<u64> {
    setting.split(' ').skip_while(|word| *word != "pubsub").nth(1)?.parse().ok()
}

fn check_transport(snapshot: &Snapshot, component: &mut Component) {
    if snapshot.is_local {
        return;
    }
    match snapshot.transport {
        Transport::Encrypted => {
            component.fine(
                Check::Encryption,
                "the connection is encrypted",
                "other hosts on the network can neither read nor change the traffic",
            );
        }
        Transport::PlainWithPassword => component.advice(
            Check::Encryption,
            "the password is sent unencrypted",
            "a reader of the traffic can release every lock",
            Some("rediss://USER:PASSWORD@HOST (for several hosts: ?tls=true)".to_owned()),
        ),
        Transport::Plain => component.advice(
            Check::Encryption,
            "the server asks for no password, and nothing is encrypted",
            "every host that reaches the server can release every lock",
            Some(
                "ACL SETUSER with the rule in docs/operations.md, and rediss://USER:PASSWORD@HOST".to_owned(),
            ),
        ),
    }
}

fn check_rights(snapshot: &Snapshot, component: &mut Component) {
    let rules = |hinders: bool| {
        let of_kind = snapshot.missing_rights.iter().filter(move |lack| lack.is_required() == hinders);
        of_kind.map(|lack: &MissingRight| lack.rule).collect::<Vec<_>>().join(" ")
    };
    let remedy = |rules: &str| Some(format!("ACL SETUSER {} {rules}", snapshot.user));
    let (locks, others) = (rules(true), rules(false));
    if !locks.is_empty() {
        let why = "some commands fail, perhaps only when a lock is contended";
        component.danger(
            Check::Rights,
            format!("the user {:?} lacks rights: {locks}", snapshot.user),
            why,
            remedy(&locks),
        );
    }
    if !others.is_empty() {
        let why = "`leasehold ls` needs +scan, locks with replicas(n) need +wait, and a release without +delifeq or +delex \
                   needs a script";
        component.advice(
            Check::OptionalRights,
            format!("the user {:?} lacks rights: {others}", snapshot.user),
            why,
            remedy(&others),
        );
    }
    if snapshot.missing_rights.is_empty() {
        component.fine(
            Check::Rights,
            format!("the user {:?} has every right that is needed", snapshot.user),
            "each command was tested without side effects",
        );
    }
}

/// How the release of an uncontended lock reaches this server.
fn show_release(snapshot: &Snapshot, component: &mut Component) {
    let by = match snapshot.conditional_delete() {
        Some(delete) if !snapshot.missing_rights.iter().any(|lack| lack.purpose == Purpose::Deletes) => {
            format!("{}, without a script", delete.name())
        }
        Some(delete) => format!("a script: the user may not run {}", delete.name()),
        None if snapshot.info.is_empty() => "a script: INFO does not report the version".to_owned(),
        None => "a script: DELIFEQ needs Valkey 9, and DELEX Redis 8.4".to_owned(),
    };
    component.fact("release", by);
}

#[cfg(test)]
mod tests;
