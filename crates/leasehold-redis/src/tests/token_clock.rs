//! Tokens where the clock of tokens is ahead of the time, was lost, or is near its end.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Command, Kind, Name, Now, Renew, Reply, Resource, StoreTime, Token, View,
};
use leasehold_redis_protocol::clock_key;

use super::comparison::{
    Comparison, ScriptRunner, TOKENS_PER_MS, compare_mutex, set_clock, start, with_scripts,
};
use super::cost::calls_of;
use super::{Step, acquire_or_queue, client_id, release_of, share};

const TTL: Duration = Duration::from_secs(10);
/// The greatest token.
const MAX_TOKEN: u64 = (1 << 53) - 1;

/// The milliseconds and the sequence number of an id of the clock.
type Id = (u64, u64);

fn lose_clock(runner: &mut ScriptRunner<'_>) {
    redis::cmd("DEL").arg(clock_key(None)).exec(runner.commands).unwrap();
}

fn clock(runner: &mut ScriptRunner<'_>) -> Id {
    let stream: std::collections::HashMap<String, redis::Value> =
        redis::cmd("XINFO").arg("STREAM").arg(clock_key(None)).query(runner.commands).unwrap();
    let id: String = redis::from_redis_value(stream["last-generated-id"].clone()).unwrap();
    let (ms, sequence) = id.split_once('-').unwrap();
    (ms.parse().unwrap(), sequence.parse().unwrap())
}

const fn ms(time: StoreTime) -> u64 {
    time.as_micros() / 1_000
}

/// The ways to a new token.
#[derive(Clone, Copy, Debug)]
enum Path {
    Free,
    FreeAtVoter,
    Shared,
    HandOff,
}

impl Path {
    const ALL: [Self; 4] = [Self::Free, Self::FreeAtVoter, Self::Shared, Self::HandOff];

    /// What comes before the command that draws the token.
    fn preparation(self) -> Vec<Command> {
        match self {
            Self::Free | Self::FreeAtVoter => Vec::new(),
            Self::Shared => vec![share(0, TTL)],
            Self::HandOff => vec![acquire_or_queue(0, 1, 1, 1), acquire_or_queue(1, 1, 1, 1)],
        }
    }

    fn command(self) -> Command {
        match self {
            Self::Free | Self::FreeAtVoter => acquire_or_queue(1, 1, 1, 1),
            Self::Shared => share(1, TTL),
            Self::HandOff => release_of(Acquisition { client: client_id(0), sequence: 1 }),
        }
    }

    /// The commands that the script calls for it.
    const fn calls(self) -> &'static str {
        match self {
            // Only ids of this century are granted in the first lines.
            Self::Free => "hmget, mget, set, xadd",
            Self::FreeAtVoter => "set, xadd",
            Self::Shared => "hset, mget, pexpireat, rename, xadd",
            Self::HandOff => "hdel, hmget 2, hset, mget, publish, pubsub|numsub, xadd",
        }
    }

    fn floor(self) -> Option<Token> {
        Token::new(1).filter(|_| matches!(self, Self::FreeAtVoter))
    }
}

/// More ids may be drawn in a millisecond than it has tokens. The first that is beyond them is the next millisecond's first token, and
/// moves the clock there, so that no other lock is granted that token.
#[test]
fn id_beyond_the_tokens_of_its_millisecond_moves_the_clock() {
    for path in Path::ALL {
        compare_mutex(|comparison| {
            for command in path.preparation() {
                comparison.run(0, &command);
            }
            let ahead = ms(comparison.now.time) + 1_000;
            set_clock(comparison.runner, (ahead, TOKENS_PER_MS - 1));
            comparison.now.floor = path.floor();
            comparison.run(0, &path.command());
            assert_eq!(clock(comparison.runner), (ahead + 1, 0), "{path:?}");
            let last = comparison.view().last_token.map(Token::get);
            assert_eq!(last, Some((ahead + 1) * TOKENS_PER_MS), "{path:?}");
        });
    }
}

/// A server that has lost the key of the clock, and nothing else, gives lower ids, or the last one again.
#[test]
fn token_rises_though_the_clock_was_lost() {
    for path in [Path::Shared, Path::HandOff] {
        for ahead in [0, 50] {
            compare_mutex(|comparison| {
                let now = ms(comparison.now.time);
                lose_clock(comparison.runner);
                if ahead > 0 {
                    set_clock(comparison.runner, (now + ahead, 0));
                }
                for command in path.preparation() {
                    comparison.step(0, &Step::Do(command));
                }
                let last = comparison.view().last_token;
                lose_clock(comparison.runner);
                comparison.run(0, &path.command());
                assert!(comparison.view().last_token > last, "{path:?}");
            });
        }
    }
}

#[test]
fn greatest_token_is_granted_like_any_other() {
    with_scripts(|runner| {
        for path in Path::ALL {
            let now = Now { floor: path.floor(), ..Now::same(start()) };
            let resource = resource(&format!("{path:?}"));
            lose_clock(runner);
            for command in path.preparation() {
                runner.run(&resource, &command, now);
            }
            set_clock(runner, (MAX_TOKEN / TOKENS_PER_MS, TOKENS_PER_MS - 2));
            let calls = calls_of(runner, |runner| drop(runner.run(&resource, &path.command(), now)));
            assert_eq!(calls, path.calls(), "{path:?}");
            let Reply::View(view) = runner.run(&resource, &Command::Inspect, now).reply else { panic!() };
            assert_eq!(view.last_token.map(Token::get), Some(MAX_TOKEN), "{path:?}");
        }
    });
}

/// The first lines of `acquire.lua` compare ids as text: an id of more digits may sort before the last one that is a token.
#[test]
fn no_token_is_granted_beyond_the_greatest() {
    with_scripts(|runner| {
        for path in Path::ALL {
            for ms in
                [MAX_TOKEN / TOKENS_PER_MS + 1, 10_000_000_000_000, 17_000_000_000_000, 100_000_000_000_000]
            {
                expect_no_token(runner, path, ms);
            }
        }
    });
}

/// While the clock of tokens is at this millisecond.
fn expect_no_token(runner: &mut ScriptRunner<'_>, path: Path, ms: u64) {
    let now = Now { floor: path.floor(), ..Now::same(start()) };
    let resource = resource(&format!("{path:?} at {ms}"));
    lose_clock(runner);
    for command in path.preparation() {
        runner.run(&resource, &command, now);
    }
    set_clock(runner, (ms, 0));
    let before = view_of(runner, &resource, now);
    let done = runner.value_of(&resource, &path.command(), now);
    let after = view_of(runner, &resource, now);
    if matches!(path, Path::HandOff) {
        // The holder must be able to release. The waiter is not granted.
        done.unwrap();
        assert_eq!((after.holders.len(), after.waiters), (0, before.waiters));
        // It does not look again at once.
        let waiter = runner.run(&resource, &acquire_or_queue(1, 1, 1, 1), now);
        let Reply::Queued(queued) = waiter.reply else { panic!("{waiter:?}") };
        assert!(queued.is_head);
        assert_eq!(queued.repoll_at, waiter.at + Duration::from_secs(1));
    } else {
        let error = done.expect_err("no token is left");
        assert!(error.to_string().contains("CLOCKAHEAD"), "{path:?} at {ms}: {error}");
        assert_eq!(after, before, "{path:?} at {ms}");
    }
}

/// The clock is shared, so a lock takes tokens for later only if the first is at most 100 ms ahead of the time, to the microsecond.
#[test]
fn tokens_are_reserved_up_to_the_maximum_lead() {
    with_scripts(|runner| {
        // Of the 1,000 microseconds of the last millisecond an eighth has passed, and so have an eighth of its tokens.
        let now = Now::same(start() + Duration::from_micros(125));
        let lead = 100;
        for (sequence, reserved) in [(TOKENS_PER_MS / 8, 5), (TOKENS_PER_MS / 8 + 1, 0)] {
            for is_waiter in [false, true] {
                let resource = resource(&format!("{sequence}-{is_waiter}"));
                let Command::Acquire(acquire) = acquire_or_queue(1, 1, 1, 1) else { panic!() };
                let acquire = Command::from(Acquire { reserve: 5, ..(*acquire).clone() });
                lose_clock(runner);
                if is_waiter {
                    runner.run(&resource, &acquire_or_queue(0, 1, 1, 1), now);
                    runner.run(&resource, &acquire, now);
                }
                set_clock(runner, (ms(now.time) + lead, sequence - 1));
                let holder = Acquisition { client: client_id(0), sequence: 1 };
                runner.run(&resource, &if is_waiter { release_of(holder) } else { acquire }, now);
                let view = view_of(runner, &resource, now);
                let token = view.holders[0].token.get();
                assert_eq!(token, (ms(now.time) + lead) * TOKENS_PER_MS + sequence);
                let last = view.last_token.map(Token::get);
                assert_eq!(last, Some(token + reserved), "{sequence}, {is_waiter}");
            }
        }
    });
}

/// The comparison moves on to where the model and the script agree about the tokens of a batch.
#[test]
fn batch_at_the_maximum_lead_matches_the_model() {
    with_scripts(|runner| {
        for before in 0..8 {
            let resources = ["first", "second"].map(|name| resource(&format!("{name}-{before}")));
            let mut comparison = Comparison::new(runner, &resources);
            lose_clock(comparison.runner);
            set_clock(comparison.runner, (ms(comparison.now.time) + 99, TOKENS_PER_MS - 1 - before));
            let Command::Acquire(acquire) = acquire_or_queue(1, 1, 1, 1) else { panic!() };
            let attempt = |sequence| {
                let acquisition = Acquisition { sequence, ..acquire.acquisition };
                Arc::new(Acquire { acquisition, reserve: 2, wait: None, ..(*acquire).clone() })
            };
            comparison.run_all(&[attempt(1), attempt(2)]);
        }
    });
}

/// The clock may give exactly the floor, and need not be moved there.
#[test]
fn voter_grants_its_clocks_next_id_if_that_is_the_floor() {
    compare_mutex(|comparison| {
        lose_clock(comparison.runner);
        let now = ms(comparison.now.time);
        comparison.now.floor = Token::new(now * TOKENS_PER_MS);
        comparison.run(0, &Path::FreeAtVoter.command());
        assert_eq!(comparison.view().holders[0].token.get(), now * TOKENS_PER_MS);
        assert_eq!(clock(comparison.runner), (now, 0));
    });
}

/// The clock may give exactly the floor, which is then the lease's token, and the clock need not be moved.
#[test]
fn renewal_raises_the_token_to_the_clocks_next_id() {
    compare_mutex(|comparison| {
        comparison.now.floor = Token::new(1);
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        comparison.step(0, &Step::Pass(10));
        let floor = Token::new(ms(comparison.now.time) * TOKENS_PER_MS);
        comparison.now.floor = floor;
        let acquisition = Acquisition { client: client_id(0), sequence: 1 };
        for reserve in [0, 1] {
            let renew = Command::Renew(Renew { reserve, ..Renew::to(acquisition, TTL) });
            assert!(matches!(comparison.run(0, &renew), Reply::Renewed { .. }));
            assert_eq!(Some(comparison.view().holders[0].token), floor);
        }
    });
}

fn resource(name: &str) -> Resource {
    Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() }
}

fn view_of(runner: &mut ScriptRunner<'_>, resource: &Resource, now: Now) -> View {
    match runner.run(resource, &Command::Inspect, now).reply {
        Reply::View(view) => view,
        other => panic!("{other:?}"),
    }
}
