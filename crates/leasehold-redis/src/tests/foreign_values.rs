//! Keys that another program uses. The scripts leave them alone.

use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Command, Kind, Name, Now, Queued, Release, Renew, Reply, Resource, StoreTime,
    WaitFor,
};
use leasehold_redis_protocol::resource_key;

use super::client_id;
use super::comparison::{ScriptRunner, start, with_scripts};

const TTL: Duration = Duration::from_secs(10);
const ACQUISITION: Acquisition = Acquisition { client: client_id(1), sequence: 1 };

fn resource() -> Resource {
    Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() }
}

fn now() -> Now {
    Now::same(start())
}

fn set(runner: &mut ScriptRunner<'_>, value: &[u8], expires_at: Option<StoreTime>) {
    let mut set = redis::cmd("SET");
    set.arg(resource_key(&resource())).arg(value);
    if let Some(time) = expires_at {
        set.arg("PXAT").arg(time.as_micros() / 1_000);
    }
    set.exec(runner.commands).unwrap();
}

fn value(runner: &mut ScriptRunner<'_>) -> Vec<u8> {
    redis::cmd("GET").arg(resource_key(&resource())).query(runner.commands).unwrap()
}

fn wait() -> Command {
    Command::from(Acquire {
        wait: Some(WaitFor { entry_ttl: TTL, max_queue: 6 }),
        ..Acquire::exclusive(ACQUISITION, TTL)
    })
}

fn release(tombstone: Duration) -> Command {
    Command::Release(Release { tombstone, ..Release::now(ACQUISITION) })
}

#[test]
fn commands_leave_a_foreign_value_alone() {
    with_scripts(|runner| {
        let now = now();
        let soon = now.time + Duration::from_millis(500);
        // Also a value that resembles a lease, without an acquisition before the mark.
        for value_of_another in [b"theirs".as_slice(), b"theirs leasehold:4@1-1"] {
            for expires_at in [None, Some(soon), Some(now.time + TTL)] {
                set(runner, value_of_another, expires_at);
                let repoll_at = expires_at.map_or(now.time + Duration::from_secs(1), |time| {
                    time.min(now.time + Duration::from_secs(1))
                });
                for (command, reply) in [
                    (Command::from(Acquire::exclusive(ACQUISITION, TTL)), Reply::Busy),
                    (wait(), Reply::Queued(Queued { is_head: true, repoll_at })),
                    (Command::Renew(Renew::to(ACQUISITION, TTL)), Reply::NotHeld),
                    (release(Duration::ZERO), Reply::NotHeld),
                    // The tombstone has no place.
                    (release(Duration::from_micros(1)), Reply::Foreign { expires_at }),
                    (Command::Inspect, Reply::Foreign { expires_at }),
                    (Command::ForceRelease, Reply::Foreign { expires_at }),
                ] {
                    assert_eq!(runner.run(&resource(), &command, now).reply, reply, "{command:?}");
                    assert_eq!(value(runner), value_of_another, "{command:?}");
                }
            }
        }
    });
}

/// An attempt that does not wait needs not know whose value it is, if the value is as long as the first bytes of a lease, and has no
/// flag of a shared lock among them. A value without an expiry may be a lease that has lost it.
#[test]
fn first_lines_answer_an_attempt_that_does_not_wait() {
    const BUSY: i64 = 3;
    const FOREIGN: i64 = 13;
    let at = |byte: u8, length: usize| [&[b'x'; 24][..], &[byte], &[b'x'; 9]].concat()[..length].to_vec();
    with_scripts(|runner| {
        let now = now();
        let attempt = Command::from(Acquire::exclusive(ACQUISITION, TTL));
        for (value, ttl_ms, expected) in [
            (at(0, 34), Some(10_000), BUSY),
            (at(0, 25), Some(10_000), BUSY),
            (at(0, 24), Some(10_000), FOREIGN),
            (at(7, 25), Some(10_000), BUSY),
            (at(8, 25), Some(10_000), FOREIGN),
            (at(0, 25), Some(1), BUSY),
            (at(0, 25), None, FOREIGN),
        ] {
            set(runner, &value, ttl_ms.map(|ms| now.time + Duration::from_millis(ms)));
            let reply = runner.value_of(&resource(), &attempt, now).unwrap();
            let redis::Value::Array(reply) = reply else { panic!("{reply:?}") };
            assert_eq!(reply[1], redis::Value::Int(expected), "{value:?} for {ttl_ms:?}");
        }
        // One that may not be answered by them: its flags or its weight need the rules.
        set(runner, &at(0, 25), Some(now.time + TTL));
        for attempt in [
            wait(),
            Command::from(Acquire { capacity: 2, ..Acquire::exclusive(ACQUISITION, TTL) }),
            Command::from(Acquire { reserve: 1, ..Acquire::exclusive(ACQUISITION, TTL) }),
        ] {
            let reply = runner.value_of(&resource(), &attempt, now).unwrap();
            let redis::Value::Array(reply) = reply else { panic!("{reply:?}") };
            assert_eq!(reply[1], redis::Value::Int(FOREIGN), "{attempt:?}");
        }
    });
}

#[test]
fn hash_of_another_program_is_an_error() {
    with_scripts(|runner| {
        let key = resource_key(&resource());
        // Without a field that could be a header, and with one that is too short.
        for field in ["theirs", "h"] {
            redis::cmd("DEL").arg(&key).exec(runner.commands).unwrap();
            redis::cmd("HSET").arg(&key).arg(field).arg("value").exec(runner.commands).unwrap();
            for command in [
                Command::from(Acquire::exclusive(ACQUISITION, TTL)),
                wait(),
                Command::Renew(Renew::to(ACQUISITION, TTL)),
                release(Duration::ZERO),
                Command::Inspect,
                Command::ForceRelease,
            ] {
                let error = runner.value_of(&resource(), &command, now()).expect_err("not a lock");
                let expected = "WRONGTYPE the key has a hash of another program";
                let detail = error.detail().unwrap_or_default();
                assert!(detail.starts_with(expected), "{command:?}: {error}");
                let left: Vec<String> = redis::cmd("HGETALL").arg(&key).query(runner.commands).unwrap();
                assert_eq!(left, [field, "value"]);
            }
        }
    });
}

/// The server's own error.
#[test]
fn sorted_set_of_another_program_is_an_error() {
    with_scripts(|runner| {
        redis::cmd("ZADD").arg(resource_key(&resource())).arg(0).arg("theirs").exec(runner.commands).unwrap();
        for command in [Command::from(Acquire::exclusive(ACQUISITION, TTL)), wait(), release(Duration::ZERO)]
        {
            let error = runner.value_of(&resource(), &command, now()).expect_err("not a lock");
            assert_eq!(error.code(), Some("WRONGTYPE"), "{command:?}: {error}");
        }
    });
}
