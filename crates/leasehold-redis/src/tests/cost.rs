//! What the scripts ask of the server: the commands that each of their paths calls.

use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Command, FIRST_REQUESTED, Kind, Name, Now, Release, Renew, Reply, Resource,
};
use leasehold_redis_protocol::{clock_key, resource_key, token_at};
use proptest::strategy::{Strategy, ValueTree as _};
use proptest::test_runner::TestRunner;

use super::comparison::{Comparison, ScriptRunner, compare_mutex, start, wall_clock, with_scripts};
use super::{RESOURCES, Step, acquire_or_queue, client_id, joint_steps, play, play_joint, release_of, steps};

/// The commands that were called since the statistics were reset, with the number of calls of each.
fn called(runner: &mut ScriptRunner<'_>) -> Vec<(String, u64)> {
    let info: String = redis::cmd("INFO").arg("commandstats").query(runner.commands).unwrap();
    let calls = |line: &str| {
        let (command, figures) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((command.to_owned(), figures.split_once(',')?.0.parse().ok()?))
    };
    let mut called: Vec<_> = info.lines().filter_map(calls).collect();
    called.sort();
    called
}

/// Those that a script called, and not the test.
fn called_by_scripts(runner: &mut ScriptRunner<'_>) -> impl Iterator<Item = (String, u64)> {
    // Also not what the clock of the test calls.
    const NOT_COUNTED: [&str; 11] = [
        "config|resetstat",
        "dump",
        "evalsha",
        "exists",
        "info",
        "pexpiretime",
        "pttl",
        "subscribe",
        "type",
        "unsubscribe",
        "xinfo|stream",
    ];
    called(runner).into_iter().filter(|(command, _)| !NOT_COUNTED.contains(&command.as_str()))
}

fn reset_statistics(runner: &mut ScriptRunner<'_>) {
    redis::cmd("CONFIG").arg("RESETSTAT").exec(runner.commands).unwrap();
}

/// What the scripts of a test call.
pub(super) fn calls_of<'c>(
    runner: &mut ScriptRunner<'c>,
    test: impl FnOnce(&mut ScriptRunner<'c>),
) -> String {
    reset_statistics(runner);
    test(runner);
    let calls = called_by_scripts(runner);
    let calls = calls.map(|(command, calls)| if calls == 1 { command } else { format!("{command} {calls}") });
    calls.collect::<Vec<_>>().join(", ")
}

/// Runs the steps on a new resource, 100 ms apart. Each step is a name, a command, and what its script calls.
#[track_caller]
fn check_calls(runner: &mut ScriptRunner<'_>, steps: &[(&str, Command, &str)]) {
    check_calls_above(runner, None, steps);
}

/// The same on a quorum node, whose floor is the token of this time after the command.
#[track_caller]
fn check_calls_above(
    runner: &mut ScriptRunner<'_>,
    floor: Option<Duration>,
    steps: &[(&str, Command, &str)],
) {
    let caller = std::panic::Location::caller();
    let resource =
        Resource { kind: Kind::Mutex, name: Name::new(&format!("line-{}", caller.line())).unwrap() };
    let start = start();
    let mut found = Vec::new();
    for ((name, command, _), number) in steps.iter().zip(0..) {
        let time = start + Duration::from_millis(100) * number;
        let now = Now { floor: floor.and_then(|ahead| token_at(time + ahead)), ..Now::same(time) };
        let mut reply = Reply::NotHeld;
        let calls = calls_of(runner, |runner| reply = runner.run(&resource, command, now).reply);
        let is_done = match reply {
            Reply::Granted(_) | Reply::Queued(_) | Reply::Released | Reply::Renewed { .. } => true,
            Reply::Busy => name.starts_with("busy"),
            _ => false,
        };
        assert!(is_done, "{name}: {reply:?}");
        found.push((*name, calls));
    }
    let expected: Vec<_> = steps.iter().map(|(name, _, calls)| (*name, (*calls).to_owned())).collect();
    assert_eq!(found, expected);
}

fn release(client: u128, sequence: u64) -> Command {
    release_of(Acquisition { client: client_id(client), sequence })
}

fn tried(client: u128, sequence: u64, capacity: u32, weight: u32) -> Command {
    let acquisition = Acquisition { client: client_id(client), sequence };
    Command::from(Acquire { capacity, weight, ..Acquire::exclusive(acquisition, Duration::from_secs(10)) })
}

fn claim(client: u128) -> Command {
    let acquisition = Acquisition { client: client_id(client), sequence: 1 };
    Command::Renew(Renew::to(acquisition, Duration::from_secs(10)))
}

#[test]
fn plain_lock_calls_few_commands() {
    with_scripts(|runner| {
        let acquisition = Acquisition { client: client_id(0), sequence: 1 };
        let renew = Renew::to(acquisition, Duration::from_secs(10));
        check_calls(
            runner,
            &[
                ("grant", tried(0, 1, 1, 1), "set, xadd"),
                ("busy", tried(1, 1, 1, 1), "mget, set, xadd"),
                ("renewal", Command::Renew(renew), "mget, pexpireat"),
                ("release", release(0, 1), "del, mget"),
            ],
        );
    });
}

/// A request is granted and released as any other attempt, with one command more for its tombstone.
#[test]
fn request_calls_few_commands() {
    with_scripts(|runner| {
        let request = |client, sequence| {
            let Command::Acquire(any) = acquire_or_queue(client, sequence, 1, 1) else {
                unreachable!("it is one")
            };
            let acquisition = Acquisition { sequence: FIRST_REQUESTED + sequence, ..any.acquisition };
            Command::from(Acquire { acquisition, inbox: Some(acquisition.client), ..Acquire::clone(&any) })
        };
        let end = |client, sequence| {
            let acquisition = Acquisition { client: client_id(client), sequence: FIRST_REQUESTED + sequence };
            let tombstone = Duration::from_secs(60);
            Command::Release(Release { tombstone, ..Release::now(acquisition) })
        };
        check_calls(
            runner,
            &[
                ("grant", request(0, 1), "set, xadd"),
                ("release", end(0, 1), "del, mget, set"),
                ("grant again", request(0, 2), "set, xadd"),
                ("first waiter", request(1, 2), "hset, mget, pexpireat, rename, set, xadd"),
                ("second waiter", request(2, 2), "hmget, hset, mget, set, xadd"),
                ("to the first", end(0, 2), "hdel, hmget 2, hset, mget, publish 2, pubsub|numsub, set, xadd"),
                ("to the second", end(1, 2), "hdel, hmget 2, hset, mget, publish, pubsub|numsub, set, xadd"),
                ("end", end(2, 2), "del, hmget, mget, set"),
            ],
        );
    });
}

#[test]
fn plain_locks_that_share_a_call_share_commands() {
    with_scripts(|runner| {
        let resource = |name| Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() };
        let resources = ["a", "b", "c"].map(resource);
        let now = Now::same(start());
        for (commands, expected) in [
            ([1, 2, 3].map(|sequence| tried(0, sequence, 1, 1)), "set 3, xadd 2"),
            ([1, 2, 3].map(|sequence| release(0, sequence)), "del, mget"),
        ] {
            let calls: Vec<_> = resources.iter().zip(&commands).collect();
            let called = calls_of(runner, |runner| drop(runner.run_each(&calls, now)));
            assert_eq!(called, expected);
        }
        let entries: u64 = redis::cmd("XLEN").arg(clock_key(None)).query(runner.commands).unwrap();
        assert_eq!(entries, 0, "the clock has a last id only");
    });
}

#[test]
fn plain_lock_of_a_quorum_node_calls_few_commands() {
    with_scripts(|runner| {
        // First while the clock of tokens is not ahead.
        check_calls_above(
            runner,
            Some(Duration::ZERO),
            &[
                ("grant at its clock", tried(0, 1, 1, 1), "set, xadd"),
                ("release", release(0, 1), "del, mget"),
            ],
        );
        check_calls_above(
            runner,
            Some(Duration::from_millis(2)),
            &[
                ("grant above its clock", tried(0, 1, 1, 1), "set, xadd 2"),
                ("busy", tried(1, 1, 1, 1), "mget"),
                ("release", release(0, 1), "del, mget"),
            ],
        );
    });
}

/// The first lines grant the tokens 0 to 999 of a millisecond, and the rules those behind them.
#[test]
fn plain_lock_of_a_busy_millisecond_calls_few_commands() {
    with_scripts(|runner| {
        let ahead = wall_clock() + Duration::from_secs(3_600_000 + 60);
        let id = format!("{}-998", ahead.as_millis());
        let clock = clock_key(None);
        let added =
            redis::cmd("XADD").arg(clock).arg("MAXLEN").arg(0).arg(id).arg("t").arg("").exec(runner.commands);
        added.unwrap();
        check_calls(
            runner,
            &[
                ("token 999", tried(0, 1, 1, 1), "set, xadd"),
                ("release", release(0, 1), "del, mget"),
                ("token 1000", tried(0, 2, 1, 1), "hmget, mget, set, xadd"),
                ("its release", release(0, 2), "del, mget"),
            ],
        );
    });
}

#[test]
fn queue_of_an_exclusive_lock_calls_few_commands() {
    with_scripts(|runner| {
        for weight in [1, 2] {
            let acquire = |client, sequence| acquire_or_queue(client, sequence, weight, weight);
            check_calls(
                runner,
                &[
                    ("holder", acquire(0, 1), "set, xadd"),
                    ("first waiter", acquire(1, 1), "hset, mget, pexpireat, rename, set, xadd"),
                    ("second waiter", acquire(2, 1), "hmget, hset, mget, set, xadd"),
                    ("third waiter", acquire(3, 1), "hmget, hset, mget, set, xadd"),
                    ("the third one again", acquire(3, 1), "hmget 2, hset, mget, set, xadd"),
                    ("busy", tried(4, 1, weight, weight), "hmget, mget, set, xadd"),
                    (
                        "to the first",
                        release(0, 1),
                        "hdel, hmget 2, hset, mget, publish 2, pubsub|numsub, xadd",
                    ),
                    (
                        "to the second",
                        release(1, 1),
                        "hdel, hmget 2, hset, mget, publish 2, pubsub|numsub, xadd",
                    ),
                    ("claim", claim(2), "hmget, hset, mget"),
                    ("to the last", release(2, 1), "hdel, hmget 2, hset, mget, publish, pubsub|numsub, xadd"),
                    ("first waiter again", acquire(0, 2), "hmget, hset, mget, set, xadd"),
                    ("second of one client", acquire(0, 3), "hmget, hset, mget, set, xadd"),
                    (
                        "to a client with two waiters",
                        release(3, 1),
                        "hdel, hmget 2, hset, mget, publish 2, pubsub|numsub, xadd",
                    ),
                    (
                        "to a client's last waiter",
                        release(0, 2),
                        "hdel, hmget 2, hset, mget, publish, pubsub|numsub, xadd",
                    ),
                    ("end", release(0, 3), "del, hmget, mget"),
                ],
            );
        }
    });
}

/// A client that expects contention looks at the table at once; where there is none, this costs one command.
#[test]
fn expected_contention_saves_commands() {
    with_scripts(|runner| {
        let acquire = |client, sequence| acquire_or_queue(client, sequence, 1, 1);
        check_calls(
            runner,
            &[("holder", acquire(0, 1), "set, xadd"), ("release", release(0, 1), "del, mget")],
        );
        // Each third call expects it.
        runner.expecting = Some(0);
        check_calls(
            runner,
            &[
                ("holder", acquire(0, 1), "set, xadd"),
                ("first waiter", acquire(1, 1), "hset, mget, pexpireat, rename, set, xadd"),
                ("second waiter, as expected", acquire(2, 1), "hmget, hset"),
                ("third waiter", acquire(3, 1), "hmget, hset, mget, set, xadd"),
                ("fourth waiter", acquire(4, 1), "hmget, hset, mget, set, xadd"),
                (
                    "release, as expected",
                    release(0, 1),
                    "hdel, hmget 2, hset, publish 2, pubsub|numsub, xadd",
                ),
            ],
        );
        runner.expecting = Some(2);
        check_calls(
            runner,
            &[
                ("holder of a free lock, not as expected", acquire(0, 1), "hmget, set, xadd"),
                ("renewal", claim(0), "mget, pexpireat"),
            ],
        );
        runner.expecting = Some(1);
        check_calls(
            runner,
            &[
                ("holder", acquire(0, 1), "set, xadd"),
                ("release of a plain lease, not as expected", release(0, 1), "del, hmget, mget"),
            ],
        );
    });
}

#[test]
fn shared_lock_calls_few_commands() {
    with_scripts(|runner| {
        let acquire = |client, weight| tried(client, 1, 4, weight);
        check_calls(
            runner,
            &[
                ("alone", acquire(0, 1), "set, xadd"),
                ("second", acquire(1, 1), "hset, mget, pexpireat, rename, set, xadd"),
                ("third fills the lock", acquire(2, 2), "hmget, hset, mget, set, xadd"),
                ("the header's leaves", release(0, 1), "hmget, hset, mget"),
                ("another joins", acquire(3, 1), "hmget, hset, mget, set, xadd"),
                ("a further one leaves", release(2, 1), "hdel, hmget 3, hset, mget"),
                ("renewal", claim(1), "hmget 2, hset, mget"),
                ("one of two leaves", release(1, 1), "hdel, hmget 3, hset, mget"),
                ("another joins one", acquire(4, 3), "hmget, hset, mget, set, xadd"),
                ("leaves", release(4, 1), "hdel, hmget 3, hset, mget"),
                ("end", release(3, 1), "del, hmget, mget"),
            ],
        );
        check_calls(
            runner,
            &[
                ("alone", acquire(0, 1), "set, xadd"),
                ("second fills the lock", acquire(1, 3), "hset, mget, pexpireat, rename, set, xadd"),
                ("a further one leaves", release(1, 1), "hdel, hmget 3, hset, mget"),
                ("end", release(0, 1), "del, hmget, mget"),
            ],
        );
    });
}

/// What the scripts call in random histories, which are always the same.
fn calls_of_histories<H: std::fmt::Debug>(
    histories: &impl Strategy<Value = H>,
    resources: usize,
    play: impl Fn(&mut Comparison<'_, '_>, &H),
) -> Vec<String> {
    const HISTORIES: usize = 80;
    let mut calls = Vec::new();
    with_scripts(|runner| {
        reset_statistics(runner);
        let mut random = TestRunner::deterministic();
        for number in 0..HISTORIES {
            let resource = |at| {
                let name = Name::new(&format!("{number}-{at}")).unwrap();
                Resource { kind: Kind::Mutex, name }
            };
            let resources: Vec<_> = (0..resources).map(resource).collect();
            // The ids of a history must not depend on when those before it ran.
            redis::cmd("DEL").arg(clock_key(None)).exec(runner.commands).unwrap();
            let mut comparison = Comparison::new(runner, &resources);
            play(&mut comparison, &histories.new_tree(&mut random).unwrap().current());
            comparison.end();
        }
        calls = called_by_scripts(runner).map(|(command, calls)| format!("{command} {calls}")).collect();
    });
    calls
}

/// More commands for the same answers fail no other test. A change of the scripts or of the histories may need other numbers
/// here; smaller ones are better.
#[test]
fn histories_call_as_many_commands_as_before() {
    let found = [
        calls_of_histories(&steps(1), 1, |comparison, steps| play(comparison, steps)),
        calls_of_histories(&steps(4), 1, |comparison, steps| play(comparison, steps)),
        calls_of_histories(&joint_steps(4), RESOURCES, |comparison, steps| play_joint(comparison, steps)),
    ];
    let expected = [
        "del 227, hdel 459, hgetall 2233, hmget 13887, hset 1428, mget 5260, pexpireat 201, publish 565, \
         pubsub|numsub 183, rename 118, set 469, xadd 744",
        "del 236, hdel 500, hgetall 2093, hmget 16264, hset 1560, mget 5250, pexpireat 212, publish 624, \
         pubsub|numsub 627, rename 131, set 491, xadd 1054",
        "del 372, hdel 295, hgetall 1181, hmget 8985, hset 973, mget 6688, pexpireat 250, publish 354, \
         pubsub|numsub 119, rename 199, set 904, xadd 966",
    ];
    assert_eq!(found.map(|calls| calls.join(", ")), expected);
}

#[test]
fn parking_a_client_has_constant_cost() {
    compare_mutex(|comparison| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        for sequence in 0..1_000 {
            comparison.run(0, &acquire_or_queue(1, sequence, 1, 1));
        }
        comparison.run(0, &acquire_or_queue(2, 1, 1, 1));
        comparison.step(0, &Step::Leave(1));
        let called = |comparison: &mut Comparison<'_, '_>| -> u64 {
            let info: String =
                redis::cmd("INFO").arg("commandstats").query(comparison.runner.commands).unwrap();
            let calls = |line: &str| line.split_once("calls=")?.1.split_once(',')?.0.parse::<u64>().ok();
            info.lines().filter_map(calls).sum()
        };
        let cost = |comparison: &mut Comparison<'_, '_>, command: &Command| {
            let before = called(comparison);
            let reply = comparison.run(0, command);
            (reply, called(comparison) - before)
        };
        let first = Acquisition { client: client_id(0), sequence: 1 };
        let (released, to_park) = cost(comparison, &release_of(first));
        assert_eq!(released, Reply::Released);
        comparison.step(0, &Step::Return(1));
        let (queued, to_return) = cost(comparison, &acquire_or_queue(1, 0, 1, 1));
        assert!(matches!(queued, Reply::Queued(queued) if queued.is_head));
        assert!(to_park < 60 && to_return < 60, "commands in the script: {to_park}, then {to_return}");
        comparison.inspect(0);
    });
}

#[test]
fn expiry_of_a_contended_lock_is_moved_once_an_hour() {
    with_scripts(|runner| {
        let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
        let start = start();
        let ttl = Duration::from_secs(3_000);
        let holder = Acquisition { client: client_id(0), sequence: 1 };
        let acquire = Command::from(Acquire::exclusive(holder, ttl));
        assert!(matches!(runner.run(&resource, &acquire, Now::same(start)).reply, Reply::Granted(_)));
        // In seconds after the end of the lease.
        let mut margin_after_poll = |seconds: u64| {
            let now = Now::same(start + Duration::from_secs(seconds));
            let renew = Command::Renew(Renew::to(holder, ttl));
            assert!(matches!(runner.run(&resource, &renew, now).reply, Reply::Renewed { .. }));
            let reply = runner.run(&resource, &acquire_or_queue(1, 1, 1, 1), now).reply;
            assert!(matches!(reply, Reply::Queued(_)), "{reply:?}");
            let key = resource_key(&resource);
            let expiry: u64 = redis::cmd("PEXPIRETIME").arg(key).query(runner.commands).unwrap();
            expiry / 1_000 - now.time.as_micros() / 1_000_000 - ttl.as_secs()
        };
        for seconds in [0, 900, 1_800, 2_700] {
            assert_eq!(margin_after_poll(seconds), 3_600 - seconds, "moved without need");
        }
        assert_eq!(margin_after_poll(3_600), 3_600, "not moved in time");
    });
}
