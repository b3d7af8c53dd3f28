//! What was seen of one server, and what that means for locks. Pure: no server is asked here.

use super::acl_check::MissingRight;
use super::probe::{FailoverMode, Snapshot, Transport};
use super::time_rules::{check_clock, check_speed};
use crate::diagnostics::{Check, Component};

/// In percent of what there may be.
const NEARLY_FULL_PERCENT: u64 = 80;

/// Min output buffer in bytes of a client that receives pushes and lists many locks.
const MIN_OUTPUT_BUFFER: u64 = 1 << 20;

pub(super) fn check_server(seen: &Snapshot) -> Component {
    let mut component = Component::new(seen.name.as_str());
    check_version(seen, &mut component);
    check_memory(seen, &mut component);
    check_persistence(seen, &mut component);
    check_replication(seen, &mut component);
    check_connections(seen, &mut component);
    check_transport(seen, &mut component);
    check_rights(seen, &mut component);
    check_speed(seen, &mut component);
    if let Some(clock) = seen.clock {
        check_clock(clock, &mut component);
    }
    component
}

/// The line that changes a setting: as a command, or for the file of a server that takes no such command.
pub(super) fn setting_command(seen: &Snapshot, setting: &str) -> Option<String> {
    let is_command = !seen.settings.is_empty();
    Some(if is_command { format!("CONFIG SET {setting}") } else { setting.to_owned() })
}

fn check_version(seen: &Snapshot, component: &mut Component) {
    if seen.info.is_empty() {
        let what = "this user may not ask for INFO";
        let remedy = format!("ACL SETUSER {} +info", seen.user);
        if seen.votes {
            let why = "without its run id a restart goes unnoticed, and so does a second address of the same server: it does not vote";
            component.danger(Check::Info, what, why, Some(remedy));
        } else {
            let why = "its version, role, memory and replicas could not be seen";
            component.advice(Check::Info, what, why, Some(remedy));
        }
        return;
    }
    let word = |name: &str| seen.info.get(name).map_or("", String::as_str);
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
    if seen.settings.is_empty() {
        let why = "how it writes to disk, waits for replicas and closes connections could not be read: check the \
                   provider's settings";
        let remedy = format!("ACL SETUSER {} +config|get", seen.user);
        component.advice(Check::Config, "it does not answer CONFIG GET", why, Some(remedy));
    }
}

// --- What is kept ----------------------------------------------------------------------------------

fn check_memory(seen: &Snapshot, component: &mut Component) {
    let policy = seen.setting("maxmemory-policy").or(seen.info.get("maxmemory_policy").map(String::as_str));
    let limit = seen.number("maxmemory");
    if let Some(limit) = limit {
        let shown = if limit == 0 { "none".to_owned() } else { format!("{} MiB", limit >> 20) };
        component.fact("maxmemory", shown);
    }
    if let Some(policy) = policy {
        component.fact("maxmemory-policy", policy);
        if policy == "noeviction" {
            let why = "a server that is short of memory refuses new locks, and throws none away";
            component.fine(Check::Eviction, "maxmemory-policy is noeviction", why);
        } else {
            component.fact("keys thrown away", seen.number("evicted_keys").unwrap_or(0));
            let why = "a server that reaches its maxmemory throws keys away, and all of a lock's keys have an expiry: a lock \
                       that is held can be given to the next one";
            let remedy = setting_command(seen, "maxmemory-policy noeviction");
            component.danger(Check::Eviction, format!("maxmemory-policy is {policy}"), why, remedy);
        }
    }
    if let (Some(limit @ 1..), Some(used)) = (limit, seen.number("used_memory"))
        && used.saturating_mul(100) / limit >= NEARLY_FULL_PERCENT
    {
        let what = format!("{} % of maxmemory are in use", used.saturating_mul(100) / limit);
        component.advice(
            Check::MemoryUse,
            what,
            "when it is full, no lock can be taken; those that are held can be renewed",
            None,
        );
    }
}

fn check_persistence(seen: &Snapshot, component: &mut Component) {
    let is_broken = |name: &str| seen.info.get(name).is_some_and(|status| status != "ok");
    if is_broken("rdb_last_bgsave_status") || is_broken("aof_last_write_status") {
        let why = "a server that can't write to its disk refuses locks, unless it is told not to";
        component.danger(Check::DiskWrite, "its last write to disk failed", why, None);
    }
    let Some(has_log) = seen.number("aof_enabled") else { return };
    if has_log == 1 {
        return check_aof(seen, component);
    }
    if seen.abstains {
        component.fact("persistence", "none that a vote relies on");
        component.fine(
            Check::Persistence,
            "a restart may forget leases",
            "after one it does not vote for as long as the longest ttl, and the others go on",
        );
        return;
    }
    let cost = "a restart restores the leases of the last snapshot, or none: the holder of a lost lease still works \
                when the next client gets the lock, until its next renewal fails. Their tokens tell them apart, since tokens follow \
                the clock and go on rising. Write every change to a log; or keep a server that has crashed down for as \
                long as the longest ttl, 10 s by default";
    let remedy = setting_command(seen, "appendonly yes");
    match seen.setting("save") {
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

fn check_aof(seen: &Snapshot, component: &mut Component) {
    let poll_intervals = seen.setting("appendfsync");
    component.fact(
        "persistence",
        format_args!("append-only file (appendfsync {})", poll_intervals.unwrap_or("unknown")),
    );
    match poll_intervals {
        Some("always") => component.fine(Check::Fsync, "every change is on disk before it counts", "a restart forgets no lease"),
        Some("no") => component.advice(Check::Fsync,
            "the append-only file is written to disk when the system likes",
            "a power cut can forget the leases of half a minute, and give their locks to others; their tokens tell them \
             apart",
            setting_command(seen, "appendfsync everysec"),
        ),
        _ => component.fine(Check::Fsync,
            "changes go to an append-only file",
            "a restart forgets no lease. A power cut may forget those of the last second or two, unless appendfsync is \
             always; tokens tell their holders apart",
        ),
    }
}

// --- Other servers -----------------------------------------------------------------------------------

const ASYNCHRONOUS: &str = "Replication is asynchronous: a replica that becomes the master may not know a lease that was \
                            granted just before, and gives the lock to another holder. Only their tokens tell them apart";

fn check_replication(seen: &Snapshot, component: &mut Component) {
    let word = |name: &str| seen.info.get(name).map_or("?", String::as_str);
    let least = seen.number("min-replicas-to-write");
    if let Some(least) = least {
        let lag = seen.setting("min-replicas-max-lag").unwrap_or("?");
        component.fact("min-replicas-to-write", format_args!("{least} (min-replicas-max-lag {lag})"));
    }
    if seen.is_replica() {
        component.fact("role", format_args!("replica of {}:{}", word("master_host"), word("master_port")));
        check_replica(seen, least, component);
    } else if let Some(replicas) = seen.number("connected_slaves") {
        component.fact("role", format_args!("master, {replicas} replicas"));
        check_master(seen, replicas, least, component);
    }
}

fn check_replica(seen: &Snapshot, least: Option<u64>, component: &mut Component) {
    if seen.failover == FailoverMode::ByHand {
        let why = "a replica can't be written, so no lock can be taken here: name the master in the address";
        component.danger(Check::Replica, "this server is a replica", why, None);
        return;
    }
    if !seen.is("master_link_status", "up") {
        let why = "what its master has granted since then is lost if it becomes the master";
        component.advice(Check::ReplicaLink, "this replica has lost its master", why, None);
    }
    if least == Some(0) {
        accepts_writes_alone(seen, component);
    }
}

fn check_master(seen: &Snapshot, replicas: u64, least: Option<u64>, component: &mut Component) {
    if seen.watchers > 0 && seen.failover == FailoverMode::ByHand {
        let what =
            format!("{} sentinels watch this server, and the address does not name them", seen.watchers);
        let why = "when they make another server the master, this client stays here, and the others do not";
        let address = "redis-sentinel://HOST:26379,HOST:26379,HOST:26379/SERVICE";
        component.danger(Check::UnnamedSentinels, what, why, Some(address.to_owned()));
    }
    if replicas == 0 && seen.failover == FailoverMode::Sentinels {
        component.advice(
            Check::NoReplica,
            "it has no replica",
            "when it fails, none takes its place, and no lock can be had",
            None,
        );
    }
    let is_replaced = seen.failover != FailoverMode::ByHand || seen.watchers > 0;
    match least {
        Some(0) if is_replaced => accepts_writes_alone(seen, component),
        Some(0) if replicas > 0 => {
            let what = "it has replicas, and min-replicas-to-write is 0";
            let why =
                format!("{ASYNCHRONOUS}. Should a replica ever be made the master, stop this server first");
            component.advice(Check::MinReplicas, what, why, setting_command(seen, "min-replicas-to-write 1"));
        }
        Some(0) => {}
        Some(least) if seen.number("min_slaves_good_slaves").unwrap_or(replicas) < least => {
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
            component.advice(
                Check::MinReplicas,
                "min-replicas-to-write could not be seen",
                ASYNCHRONOUS,
                None,
            );
        }
        None => {}
    }
}

/// For a server that is a master, or may become one.
fn accepts_writes_alone(seen: &Snapshot, component: &mut Component) {
    let why = format!(
        "a master that is cut off from the others goes on granting locks, also after another one was made the master. With \
         one replica that it has to reach it stops within min-replicas-max-lag seconds. {ASYNCHRONOUS}"
    );
    component.danger(
        Check::MinReplicas,
        "min-replicas-to-write is 0",
        why,
        setting_command(seen, "min-replicas-to-write 1"),
    );
}

// --- The way there -----------------------------------------------------------------------------------

fn check_connections(seen: &Snapshot, component: &mut Component) {
    if let (Some(clients), Some(most @ 1..)) = (seen.number("connected_clients"), seen.number("maxclients")) {
        component.fact("clients", format_args!("{clients} of {most}"));
        if clients.saturating_mul(100) / most >= NEARLY_FULL_PERCENT {
            let why = "at the limit the server refuses every client that connects or reconnects";
            component.advice(
                Check::MaxClients,
                format!("{clients} of {most} clients are connected"),
                why,
                setting_command(seen, "maxclients 10000"),
            );
        }
    }
    if let Some(seconds @ 1..) = seen.number("timeout") {
        let why = "connections are made again, but the command that finds its connection closed may fail";
        let what = format!("connections that are idle for {seconds} s are closed");
        component.advice(Check::IdleTimeout, what, why, setting_command(seen, "timeout 0"));
    }
    if seen.number("tcp-keepalive") == Some(0) {
        let why = "a client whose machine is gone counts as there: each time that it is next in a queue, the others wait \
                   for 3 s";
        component.advice(
            Check::TcpKeepalive,
            "tcp-keepalive is 0",
            why,
            setting_command(seen, "tcp-keepalive 60"),
        );
    }
    if let Some(bytes) = seen.setting("client-output-buffer-limit").and_then(pubsub_limit)
        && (1..MIN_OUTPUT_BUFFER).contains(&bytes)
    {
        let why = "clients hear of their grants and get long lists over one connection, which is closed at that limit";
        let what = format!("client-output-buffer-limit allows subscribers {bytes} bytes");
        component.advice(
            Check::OutputBuffer,
            what,
            why,
            setting_command(seen, "client-output-buffer-limit \"pubsub 32mb 8mb 60\""),
        );
    }
}

/// The hard limit among `normal 0 0 0 slave 1 2 3 pubsub 4 5 6`.
fn pubsub_limit(setting: &str) -> Option<u64> {
    setting.split(' ').skip_while(|word| *word != "pubsub").nth(1)?.parse().ok()
}

fn check_transport(seen: &Snapshot, component: &mut Component) {
    if seen.is_local {
        return;
    }
    match seen.transport {
        Transport::Encrypted => {
            component.fine(
                Check::Encryption,
                "the connection is encrypted",
                "others on the network can neither read nor change it",
            );
        }
        Transport::PlainWithPassword => component.advice(
            Check::Encryption,
            "the password goes over the network in the clear",
            "everyone who reads it can take every lock away",
            Some("rediss://USER:PASSWORD@HOST (for several hosts: ?tls=true)".to_owned()),
        ),
        Transport::Plain => component.advice(
            Check::Encryption,
            "the server asks for no password, and nothing is encrypted",
            "everyone who reaches the server can take every lock away",
            Some(
                "ACL SETUSER with the rule in docs/operations.md, and rediss://USER:PASSWORD@HOST".to_owned(),
            ),
        ),
    }
}

fn check_rights(seen: &Snapshot, component: &mut Component) {
    let rules = |hinders: bool| {
        let of_kind = seen.missing_rights.iter().filter(move |lack| lack.is_required() == hinders);
        of_kind.map(|lack: &MissingRight| lack.rule).collect::<Vec<_>>().join(" ")
    };
    let remedy = |rules: &str| Some(format!("ACL SETUSER {} {rules}", seen.user));
    let (locks, others) = (rules(true), rules(false));
    if !locks.is_empty() {
        let why = "some locks fail, perhaps only once they are contended";
        component.danger(
            Check::Rights,
            format!("the user {:?} lacks rights: {locks}", seen.user),
            why,
            remedy(&locks),
        );
    }
    if !others.is_empty() {
        let why = "leasehold ls needs +scan, and locks that ask for replicas need +wait";
        component.advice(
            Check::OptionalRights,
            format!("the user {:?} lacks rights: {others}", seen.user),
            why,
            remedy(&others),
        );
    }
    if seen.missing_rights.is_empty() {
        component.fine(
            Check::Rights,
            format!("the user {:?} has every right that is needed", seen.user),
            "each command was tried, without any effect",
        );
    }
}

#[cfg(test)]
mod tests;
