//! Tests each rule with a server state that it reports.

use std::time::Duration;

use leasehold_store::Severity;

use super::super::super::rights::{MissingRight, Purpose};
use super::*;
use crate::doctor::acl_check::{Cost, Source};
use crate::doctor::probe::Clock;

/// A server as it should be.
fn sound() -> Snapshot {
    let mut snapshot = Snapshot {
        name: "server h:6379".to_owned(),
        user: "locks".to_owned(),
        round_trip: Duration::from_micros(200),
        clock: Some(Clock { ahead_micros: 1_000, error: Duration::from_micros(100) }),
        cost: Some(Ok(Cost {
            pair: Duration::from_micros(20),
            source: Source::Server,
            token_lead: Duration::ZERO,
        })),
        slow: Some((0, Duration::ZERO)),
        ..Snapshot::default()
    };
    for line in [
        "redis_version:7.0.15",
        "role:master",
        "connected_slaves:1",
        "aof_enabled:1",
        "rdb_last_bgsave_status:ok",
        "aof_last_write_status:ok",
        "maxmemory:1000",
        "used_memory:100",
        "connected_clients:3",
        "maxclients:10000",
    ] {
        inform(&mut snapshot, line);
    }
    for (name, value) in [
        ("maxmemory-policy", "noeviction"),
        ("appendonly", "yes"),
        ("appendfsync", "always"),
        ("save", ""),
        ("min-replicas-to-write", "1"),
        ("min-replicas-max-lag", "10"),
        ("timeout", "0"),
        ("tcp-keepalive", "300"),
        ("client-output-buffer-limit", "normal 0 0 0 slave 1 2 3 pubsub 33554432 8388608 60"),
    ] {
        set(&mut snapshot, name, value);
    }
    snapshot
}

fn inform(snapshot: &mut Snapshot, line: &str) {
    let (name, value) = line.split_once(':').unwrap();
    snapshot.info.insert(name.to_owned(), value.to_owned());
}

fn set(snapshot: &mut Snapshot, name: &str, value: &str) {
    snapshot.settings.insert(name.to_owned(), value.to_owned());
}

/// What is not fine after this change.
fn problems(change: impl FnOnce(&mut Snapshot)) -> Vec<(Severity, String, Option<String>)> {
    let mut snapshot = sound();
    change(&mut snapshot);
    let findings = check_server(&snapshot).findings.into_iter();
    let problems = findings.filter(|finding| finding.severity != Severity::Fine);
    problems.map(|finding| (finding.severity, finding.what, finding.remedy)).collect()
}

/// This change is a danger or worth an advice, and nothing else is; what is to be set instead.
#[track_caller]
fn finds(severity: Severity, what: &str, change: impl FnOnce(&mut Snapshot)) -> String {
    let found = problems(change);
    let [(found_severity, found_what, remedy)] = &found[..] else { panic!("{found:?}") };
    assert_eq!((*found_severity, found_what.as_str()), (severity, what));
    remedy.clone().unwrap_or_default()
}

#[test]
fn well_configured_server_has_no_trouble() {
    assert_eq!(problems(|_| ()), []);
}

#[test]
fn evicting_server_is_dangerous() {
    let remedy = finds(Severity::Danger, "maxmemory-policy is volatile-ttl", |snapshot| {
        set(snapshot, "maxmemory-policy", "volatile-ttl");
    });
    assert_eq!(remedy, "CONFIG SET maxmemory-policy noeviction");
}

#[test]
fn nearly_full_memory_is_reported() {
    finds(Severity::Advice, "90 % of maxmemory is in use", |snapshot| inform(snapshot, "used_memory:900"));
    assert_eq!(problems(|snapshot| inform(snapshot, "maxmemory:0")), [], "there is no limit");
}

#[test]
fn server_without_persistence_is_dangerous() {
    let remedy =
        finds(Severity::Danger, "nothing is written to disk", |snapshot| inform(snapshot, "aof_enabled:0"));
    assert_eq!(remedy, "CONFIG SET appendonly yes");
    finds(Severity::Danger, "only snapshots are written to disk", |snapshot| {
        inform(snapshot, "aof_enabled:0");
        set(snapshot, "save", "3600 1");
    });
    finds(
        Severity::Advice,
        "the operating system decides when the append-only file is written to disk",
        |snapshot| {
            set(snapshot, "appendfsync", "no");
        },
    );
    finds(Severity::Danger, "its last write to disk failed", |snapshot| {
        inform(snapshot, "aof_last_write_status:err");
    });
    assert_eq!(problems(|snapshot| set(snapshot, "appendfsync", "everysec")), []);
}

#[test]
fn server_without_config_is_checked_by_info() {
    let found = problems(|snapshot| {
        snapshot.settings.clear();
        inform(snapshot, "maxmemory_policy:allkeys-lru");
        inform(snapshot, "aof_enabled:0");
    });
    let remedies: Vec<Option<&str>> = found.iter().map(|(.., remedy)| remedy.as_deref()).collect();
    let lines = ["ACL SETUSER locks +config|get", "maxmemory-policy noeviction", "appendonly yes"];
    assert_eq!(remedies[..3], lines.map(Some));
    assert_eq!(found[3..], [(Severity::Advice, "min-replicas-to-write is unknown".to_owned(), None)]);
    let found = problems(|snapshot| {
        snapshot.settings.clear();
        snapshot.info.clear();
    });
    assert_eq!(found[0].2.as_deref(), Some("ACL SETUSER locks +info"));
    assert_eq!(found.len(), 1, "what can't be seen is not made up: {found:?}");
}

#[test]
fn voter_without_info_is_dangerous() {
    let found = problems(|snapshot| {
        snapshot.info.clear();
        snapshot.votes = true;
    });
    let what = "this user lacks the right to run INFO".to_owned();
    let remedy = Some("ACL SETUSER locks +info".to_owned());
    assert_eq!(found[0], (Severity::Danger, what, remedy));
}

#[test]
fn clock_of_tokens_of_a_voter_follows_the_other_nodes() {
    let lead = |seen: &mut Snapshot, hours: u64| {
        let (pair, source) = (Duration::from_micros(20), Source::Server);
        seen.cost = Some(Ok(Cost { pair, source, token_lead: Duration::from_secs(hours * 3_600) }));
    };
    finds(Severity::Advice, "the clock of tokens is 3600.0 s ahead of the server's", |seen| lead(seen, 1));
    finds(Severity::Danger, "the clock of tokens is 360000.0 s ahead of the server's", |seen| {
        lead(seen, 100);
    });
    // Up to 16 h its votes count.
    finds(Severity::Advice, "the clock of tokens is 54000.0 s ahead of the server's", |seen| {
        lead(seen, 15);
        seen.votes = true;
    });
    finds(Severity::Danger, "the clock of tokens is 61200.0 s ahead of the server's", |seen| {
        lead(seen, 17);
        seen.votes = true;
    });
}

#[test]
fn old_server_is_dangerous() {
    finds(Severity::Danger, "this is Redis 6.0.16", |snapshot| inform(snapshot, "redis_version:6.0.16"));
    assert_eq!(problems(|snapshot| inform(snapshot, "redis_version:6.2.0")), []);
    assert_eq!(problems(|snapshot| inform(snapshot, "redis_version:10.0.0")), []);
}

#[test]
fn replica_is_dangerous() {
    finds(Severity::Danger, "this server is a replica", |snapshot| inform(snapshot, "role:slave"));
    let follows = |snapshot: &mut Snapshot| {
        inform(snapshot, "role:slave");
        inform(snapshot, "master_link_status:up");
        snapshot.failover = FailoverMode::Sentinels;
    };
    assert_eq!(problems(follows), []);
    finds(Severity::Advice, "this replica has lost its master", |snapshot| {
        follows(snapshot);
        inform(snapshot, "master_link_status:down");
    });
    finds(Severity::Danger, "min-replicas-to-write is 0", |snapshot| {
        follows(snapshot);
        set(snapshot, "min-replicas-to-write", "0");
    });
    finds(Severity::Advice, "it has no replica", |snapshot| {
        inform(snapshot, "connected_slaves:0");
        inform(snapshot, "min_slaves_good_slaves:1");
        snapshot.failover = FailoverMode::Sentinels;
    });
}

#[test]
fn isolated_master_that_accepts_writes_is_dangerous() {
    let zero_min_replicas = |snapshot: &mut Snapshot| {
        inform(snapshot, "connected_slaves:2");
        set(snapshot, "min-replicas-to-write", "0");
    };
    finds(Severity::Advice, "it has replicas, and min-replicas-to-write is 0", zero_min_replicas);
    let remedy = finds(Severity::Danger, "min-replicas-to-write is 0", |snapshot| {
        zero_min_replicas(snapshot);
        snapshot.failover = FailoverMode::Cluster;
    });
    assert_eq!(remedy, "CONFIG SET min-replicas-to-write 1");
    finds(Severity::Danger, "fewer replicas follow than min-replicas-to-write, 1", |snapshot| {
        inform(snapshot, "min_slaves_good_slaves:0");
        snapshot.failover = FailoverMode::Sentinels;
    });
    let no_replica = |snapshot: &mut Snapshot| inform(snapshot, "connected_slaves:0");
    finds(Severity::Danger, "fewer replicas follow than min-replicas-to-write, 1", no_replica);
    let zero_min_replicas = |snapshot: &mut Snapshot| {
        no_replica(snapshot);
        set(snapshot, "min-replicas-to-write", "0");
    };
    assert_eq!(problems(zero_min_replicas), [], "no replica could replace it");
}

#[test]
fn unnamed_sentinels_are_dangerous() {
    let what = "3 sentinels watch this server, and the address does not name them";
    finds(Severity::Danger, what, |snapshot| snapshot.watchers = 3);
    assert_eq!(
        problems(|snapshot| {
            snapshot.watchers = 3;
            snapshot.failover = FailoverMode::Sentinels;
        }),
        []
    );
}

#[test]
fn idle_timeout_and_missing_keepalive_are_reported() {
    let remedy = finds(Severity::Advice, "idle connections are closed after 300 s", |snapshot| {
        set(snapshot, "timeout", "300");
    });
    assert_eq!(remedy, "CONFIG SET timeout 0");
    finds(Severity::Advice, "tcp-keepalive is 0", |snapshot| set(snapshot, "tcp-keepalive", "0"));
    finds(Severity::Advice, "client-output-buffer-limit allows subscribers 1000 bytes", |snapshot| {
        set(snapshot, "client-output-buffer-limit", "normal 0 0 0 slave 1 2 3 pubsub 1000 10 60");
    });
    finds(Severity::Advice, "8000 of 10000 clients are connected", |snapshot| {
        inform(snapshot, "connected_clients:8000");
    });
}

#[test]
fn plain_password_is_reported_unless_local() {
    let plain = |snapshot: &mut Snapshot| snapshot.transport = Transport::PlainWithPassword;
    finds(Severity::Advice, "the password is sent unencrypted", plain);
    finds(Severity::Advice, "the server asks for no password, and nothing is encrypted", |snapshot| {
        snapshot.transport = Transport::Plain;
    });
    assert_eq!(
        problems(|snapshot| {
            plain(snapshot);
            snapshot.is_local = true;
        }),
        []
    );
}

#[test]
fn missing_required_rights_are_dangerous() {
    let remedy = finds(Severity::Danger, "the user \"locks\" lacks rights: +hset", |snapshot| {
        snapshot.missing_rights = vec![MissingRight { rule: "+hset", purpose: Purpose::Locks }];
    });
    assert_eq!(remedy, "ACL SETUSER locks +hset");
    finds(Severity::Advice, "the user \"locks\" lacks rights: +scan", |snapshot| {
        snapshot.missing_rights = vec![MissingRight { rule: "+scan", purpose: Purpose::Listing }];
    });
}

#[test]
fn slow_or_refusing_server_is_reported() {
    finds(Severity::Advice, "a round trip takes 300.0 ms", |snapshot| {
        snapshot.round_trip = Duration::from_millis(300);
    });
    finds(Severity::Advice, "a lock and its release take it 2.0 ms", |snapshot| {
        let (pair, source) = (Duration::from_millis(2), Source::RoundTrips);
        snapshot.cost = Some(Ok(Cost { pair, source, token_lead: Duration::ZERO }));
    });
    finds(Severity::Danger, "the test lock could not be acquired and released", |snapshot| {
        snapshot.cost = Some(Err("the server's memory is full".to_owned()));
    });
    let what = "2 of the slowest commands are leasehold's, the longest took 30.0 ms";
    finds(Severity::Advice, what, |snapshot| snapshot.slow = Some((2, Duration::from_millis(30))));
}

#[test]
fn wrong_clock_is_dangerous_and_a_slow_network_is_not() {
    let clock = |ahead_micros, error_ms| {
        move |snapshot: &mut Snapshot| {
            snapshot.clock = Some(Clock { ahead_micros, error: Duration::from_millis(error_ms) });
        }
    };
    finds(Severity::Danger, "its clock is 2.5 s behind this machine's", clock(-2_500_000, 1));
    finds(Severity::Danger, "its clock is 600.0 ms ahead of this machine's", clock(600_000, 50));
    assert_eq!(problems(clock(600_000, 150)), [], "it may as well be the way there");
}
