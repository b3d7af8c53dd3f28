//! States that random histories seldom reach: two of the conditions at once that a shortcut of the scripts leaves to the rules.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Command, Kind, Name, Now, Owner, PushKind, Release, Renew, Reply, Resource, Token,
};
use leasehold_redis_protocol::{decode_push, inbox_of, resource_key};
use leasehold_testkit::{Flavor, Server};

use super::comparison::{
    Comparison, ScriptRunner, TOKENS_PER_MS, compare_each, compare_mutex, set_clock, start, with_scripts,
};
use super::cost::calls_of;
use super::{Step, acquire_or_queue, client_id, release_of, share};

const TTL: Duration = Duration::from_secs(10);

const fn id(client: u128, sequence: u64) -> Acquisition {
    Acquisition { client: client_id(client), sequence }
}

fn changed(command: Command, change: impl FnOnce(&mut Acquire)) -> Command {
    let Command::Acquire(acquire) = command else { panic!("not an attempt: {command:?}") };
    let mut acquire = (*acquire).clone();
    change(&mut acquire);
    Command::from(acquire)
}

/// Waits, and replaces the lease of this sequence number.
fn upgrade(client: u128, sequence: u64, weight: u32, replaces: u64) -> Command {
    changed(acquire_or_queue(client, sequence, 4, weight), |acquire| acquire.replaces = Some(replaces))
}

fn release(client: u128, sequence: u64) -> Command {
    release_of(id(client, sequence))
}

fn retain(client: u128, sequence: u64) -> Command {
    let min_hold = Duration::from_secs(15);
    Command::Release(Release { min_hold, ..Release::now(id(client, sequence)) })
}

fn cancel(client: u128, sequence: u64) -> Command {
    let tombstone = Duration::from_secs(1_000);
    Command::Release(Release { tombstone, ..Release::now(id(client, sequence)) })
}

fn renew(client: u128, sequence: u64, reserve: u32) -> Command {
    Command::Renew(Renew { reserve, ..Renew::to(id(client, sequence), TTL) })
}

fn run(comparison: &mut Comparison<'_, '_>, commands: impl IntoIterator<Item = Command>) {
    for command in commands {
        comparison.step(0, &Step::Do(command));
    }
}

/// The first waiter's client is parked, the second one holds the lock, and a third is behind them if it waits. An attempt was
/// cancelled.
fn park_and_cancel(comparison: &mut Comparison<'_, '_>, has_third: bool) {
    run(comparison, (0..3).map(|client| acquire_or_queue(client, 1, 1, 1)));
    comparison.step(0, &Step::Leave(1));
    run(comparison, [release(0, 1), renew(2, 1, 0)]);
    if has_third {
        run(comparison, [acquire_or_queue(3, 1, 1, 1)]);
    }
    run(comparison, [cancel(3, 9)]);
}

#[test]
fn lock_with_a_parked_client_and_a_cancelled_attempt_is_left_to_the_rules() {
    compare_each([false, true], |comparison, has_third| {
        park_and_cancel(comparison, has_third);
        run(comparison, [if has_third { release(2, 1) } else { acquire_or_queue(3, 1, 1, 1) }]);
        comparison.step(0, &Step::Return(1));
        run(comparison, [acquire_or_queue(1, 1, 1, 1), acquire_or_queue(3, 9, 1, 1), release(3, 1)]);
    });
}

#[test]
fn shared_lock_with_a_waiter_or_a_cancelled_attempt_is_left_to_the_rules() {
    let waiter = || acquire_or_queue(2, 1, 4, 3);
    let cases = [vec![cancel(3, 1)], vec![waiter()], vec![waiter(), cancel(3, 1)]];
    compare_each(cases, |comparison, commands| {
        run(comparison, [share(0, TTL), share(1, TTL)]);
        run(comparison, commands);
        run(comparison, [share(3, TTL), release(1, 1), share(1, TTL)]);
    });
}

/// A released lease that is retained is not given to the waiter by a second release.
#[test]
fn second_release_does_not_end_the_retention() {
    compare_each([None, Some(Owner::new("o"))], |comparison, owner| {
        let holder = changed(acquire_or_queue(0, 1, 1, 1), |acquire| acquire.owner = owner);
        run(comparison, [holder, acquire_or_queue(1, 1, 1, 1), retain(0, 1)]);
        assert_eq!(comparison.run(0, &release(0, 1)), Reply::NotHeld);
        assert!(comparison.view().holders[0].retained);
    });
}

/// The client has renewed nothing, but released in time.
#[test]
fn end_of_a_retention_parks_no_client() {
    compare_mutex(|comparison| {
        run(comparison, [acquire_or_queue(0, 1, 1, 1), acquire_or_queue(1, 1, 1, 1)]);
        run(comparison, [acquire_or_queue(1, 2, 1, 1), acquire_or_queue(2, 1, 1, 1)]);
        run(comparison, [release(0, 1), retain(1, 1)]);
        comparison.pass(Duration::from_secs(15));
        assert_eq!(comparison.view().holders[0].acquisition, id(1, 2));
    });
}

/// Its place is the first of all, which no other waiter has.
#[test]
fn waiting_upgrade_learns_when_to_look_again() {
    // The other lease is retained for longer than it was held.
    compare_mutex(|comparison| {
        run(comparison, [acquire_or_queue(0, 1, 4, 3), acquire_or_queue(1, 1, 4, 1), upgrade(0, 2, 4, 1)]);
        run(comparison, [retain(1, 1)]);
    });
    // It was skipped meanwhile, and is the head again.
    compare_mutex(|comparison| {
        run(comparison, [acquire_or_queue(0, 1, 4, 3), acquire_or_queue(1, 1, 4, 1), upgrade(0, 2, 4, 1)]);
        comparison.step(0, &Step::Leave(0));
        run(comparison, [release(1, 1), acquire_or_queue(2, 1, 4, 1)]);
        comparison.step(0, &Step::Return(0));
        run(comparison, [renew(0, 1, 0)]);
    });
}

/// The lease was granted in the same step, so the client was not told of it.
#[test]
fn grant_that_is_replaced_at_once_is_not_pushed() {
    compare_mutex(|comparison| {
        run(
            comparison,
            [acquire_or_queue(1, 1, 4, 4), acquire_or_queue(0, 1, 4, 4), acquire_or_queue(2, 1, 4, 1)],
        );
        comparison.pass(TTL);
        let reply = comparison.run(0, &upgrade(0, 2, 2, 1));
        assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
        comparison.inspect(0);
    });
}

/// A subscription to a pattern does not make a client reachable. It hears what subscribers at replicas and at other nodes of a cluster
/// hear, where a client may still be that follows a server that was the master.
#[test]
fn no_grant_is_published_to_a_client_that_is_not_subscribed() {
    let server = Server::builder().flavor(Flavor::Redis7).on_socket().start();
    let (mut commands, mut inboxes, mut listener) = (server.admin(), server.admin(), server.admin());
    let mut messages = listener.as_pubsub();
    messages.psubscribe("*").unwrap();
    let mut runner = ScriptRunner::new(&mut commands, &mut inboxes);
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
    let mut comparison = Comparison::new(&mut runner, &[resource]);
    run(&mut comparison, (0..3).map(|client| acquire_or_queue(client, 1, 1, 1)));
    comparison.step(0, &Step::Leave(1));
    run(&mut comparison, [release(0, 1)]);
    redis::cmd("PUBLISH").arg("end").arg("").exec(comparison.runner.commands).unwrap();
    let mut granted = Vec::new();
    loop {
        let message = messages.get_message().unwrap();
        if message.get_channel_name() == "end" {
            break;
        }
        let client =
            (0..3).map(client_id).find(|client| inbox_of(*client, None) == message.get_channel_name());
        let push = decode_push(client.unwrap(), message.get_payload_bytes()).unwrap();
        if matches!(push.kind, PushKind::Granted(..)) {
            granted.push(push.acquisition);
        }
    }
    assert_eq!(granted, [id(2, 1)]);
}

/// The clock gives no token for the waiter then.
#[test]
fn lease_that_is_waited_for_is_released_while_memory_is_full() {
    with_scripts(|runner| {
        let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
        let mut comparison = Comparison::new(runner, std::slice::from_ref(&resource));
        run(&mut comparison, (0..2).map(|client| acquire_or_queue(client, 1, 1, 1)));
        assert!(!comparison.run_with_full_memory(&release(0, 1)), "a release needs no memory");
        let now = comparison.now;
        let Reply::View(view) = runner.run(&resource, &Command::Inspect, now).reply else { panic!() };
        assert!(view.holders.iter().all(|holder| holder.acquisition != id(0, 1)), "{view:?}");
    });
}

/// In a batch, a repeat leaves the id that its first lines have drawn to the next attempt, which may be none for the first lines.
#[test]
fn attempt_behind_a_repeat_in_a_batch_has_its_owner_and_reserve() {
    for (owner, reserve) in [(None, 1), (Some(Owner::new("x")), 0)] {
        with_scripts(|runner| {
            let resources =
                ["a", "b"].map(|name| Resource { kind: Kind::Semaphore, name: Name::new(name).unwrap() });
            let mut comparison = Comparison::new(runner, &resources);
            let attempt = |client, sequence, owner: &Option<Owner>, reserve| {
                let plain = Acquire::exclusive(id(client, sequence), TTL);
                Arc::new(Acquire { capacity: 4, owner: owner.clone(), reserve, ..plain })
            };
            let repeated = attempt(0, 1, &None, 0);
            comparison.run_all(&[repeated.clone(), attempt(0, 2, &None, 0)]);
            // With an owner, the second of these holds what the first one has.
            for sequence in 1..=2 {
                comparison.run_all(&[repeated.clone(), attempt(1, sequence, &owner, reserve)]);
            }
        });
    }
}

/// The client has two waiters and is not subscribed, but this command shows that it is alive.
#[test]
fn repeated_attempt_is_granted_before_other_waiters_of_its_client() {
    compare_mutex(|comparison| {
        run(comparison, [acquire_or_queue(0, 1, 1, 1), acquire_or_queue(1, 1, 1, 1)]);
        run(comparison, [acquire_or_queue(1, 2, 1, 1), acquire_or_queue(2, 1, 1, 1)]);
        comparison.step(0, &Step::Leave(1));
        comparison.pass(TTL);
        let reply = comparison.run(0, &acquire_or_queue(1, 2, 1, 1));
        assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
        comparison.inspect(0);
    });
}

#[test]
fn repeated_attempt_is_not_granted_before_an_earlier_waiter() {
    compare_mutex(|comparison| {
        run(comparison, (0..3).map(|client| acquire_or_queue(client, 1, 1, 1)));
        run(comparison, [acquire_or_queue(1, 2, 1, 1)]);
        comparison.step(0, &Step::Leave(1));
        comparison.pass(TTL);
        let reply = comparison.run(0, &acquire_or_queue(1, 2, 1, 1));
        assert!(matches!(reply, Reply::Queued(_)), "{reply:?}");
        assert_eq!(comparison.view().holders[0].acquisition, id(2, 1));
    });
}

/// The waiter is granted the lock when the lease ends, and only then the lock is taken away.
#[test]
fn forced_release_also_ends_what_is_granted_in_its_step() {
    compare_mutex(|comparison| {
        run(comparison, (0..3).map(|client| acquire_or_queue(client, 1, 1, 1)));
        comparison.pass(TTL);
        let Reply::Forced(holders) = comparison.run(0, &Command::ForceRelease) else { panic!("not forced") };
        assert_eq!(holders[0].acquisition, id(1, 1));
        comparison.inspect(0);
    });
}

/// Lua sorts holders of one owner, which have one token, and waiters.
#[test]
fn any_number_of_holders_and_waiters_is_in_order() {
    let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]];
    let cases = orders.into_iter().flat_map(|order| (1..4).map(move |rounds| (order, rounds)));
    compare_each(cases, |comparison, (order, rounds)| {
        for (from, owner) in [(10, Some(Owner::new("o"))), (20, None)] {
            for (sequence, client) in (0..rounds).flat_map(|round| order.map(|client| (round, client))) {
                let attempt = acquire_or_queue(client, from - sequence, 1, 1);
                comparison.run(0, &changed(attempt, |acquire| acquire.owner.clone_from(&owner)));
            }
        }
        comparison.inspect(0);
        comparison.run(0, &Command::ForceRelease);
        comparison.inspect(0);
    });
}

/// The others have left, and the lease is still in the row of the table.
#[test]
fn waiting_attempt_that_just_fits_is_granted() {
    compare_mutex(|comparison| {
        run(comparison, [share(0, TTL), share(1, TTL)]);
        comparison.run(0, &release(0, 1));
        // A voter's lease goes to the free place in the header. It has the last token.
        comparison.now.floor = Token::new(1);
        comparison.run(0, &share(2, TTL));
        comparison.now.floor = None;
        comparison.run(0, &release(1, 1));
        let reply = comparison.run(0, &acquire_or_queue(3, 1, 4, 3));
        assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
    });
}

/// It compares the pushes.
#[test]
fn hand_off_is_pushed_to_the_new_holder_and_to_the_new_head() {
    compare_mutex(|comparison| {
        run(comparison, (0..4).map(|client| acquire_or_queue(client, 1, 1, 1)));
        for client in 0..4 {
            assert_eq!(comparison.run(0, &release(client, 1)), Reply::Released);
        }
    });
}

/// The first waiter's client is found absent when this attempt of it goes to the end of the queue.
#[test]
fn new_waiter_of_a_parked_client_is_parked() {
    compare_mutex(|comparison| {
        run(comparison, (0..3).map(|client| acquire_or_queue(client, 1, 1, 1)));
        comparison.step(0, &Step::Leave(1));
        comparison.pass(TTL);
        run(comparison, [acquire_or_queue(1, 2, 1, 1), release(2, 1)]);
        // Both are skipped.
        let reply = comparison.run(0, &acquire_or_queue(3, 1, 1, 1));
        assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
        comparison.step(0, &Step::Return(1));
        run(comparison, [acquire_or_queue(1, 1, 1, 1), release(3, 1), release(1, 1), release(1, 2)]);
    });
}

/// The last release of an owner decides.
#[test]
fn lease_of_an_owner_that_still_holds_the_lock_is_not_retained() {
    compare_mutex(|comparison| {
        for sequence in 1..3 {
            let attempt = acquire_or_queue(0, sequence, 1, 1);
            comparison.run(0, &changed(attempt, |acquire| acquire.owner = Some(Owner::new("o"))));
        }
        for (sequence, is_retained) in [(1, false), (2, true)] {
            run(comparison, [retain(0, sequence)]);
            let view = comparison.view();
            assert_eq!((view.holders.len(), view.holders[0].retained), (1, is_retained));
        }
    });
}

/// No row was stored before.
#[test]
fn retained_lease_of_an_uncontended_lock_is_stored() {
    compare_mutex(|comparison| {
        run(comparison, [acquire_or_queue(0, 1, 1, 1), retain(0, 1)]);
        assert!(comparison.view().holders[0].retained);
    });
}

#[test]
fn one_token_is_reserved_for_the_waiter_that_asked_for_one() {
    compare_mutex(|comparison| {
        let waiter = changed(acquire_or_queue(1, 1, 1, 1), |acquire| acquire.reserve = 1);
        run(comparison, [acquire_or_queue(0, 1, 1, 1), waiter]);
        comparison.run(0, &release(0, 1));
        let view = comparison.view();
        assert_eq!(view.last_token.map(|last| last.get() - view.holders[0].token.get()), Some(1));
        // Its holder is told of the first waiter, by the rules; not of the second.
        run(comparison, [acquire_or_queue(2, 1, 1, 1)]);
        let (now, resource) = (comparison.now, comparison.resource());
        comparison.runner.expecting = None;
        let calls = calls_of(comparison.runner, |runner| {
            runner.run(&resource, &acquire_or_queue(3, 1, 1, 1), now);
        });
        assert_eq!(calls, "hmget, hset, mget, set, xadd");
    });
}

fn resource(name: &str) -> Resource {
    Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() }
}

fn now() -> Now {
    Now::same(start())
}

/// Some of its bytes would be a pattern of Lua.
#[test]
fn renewals_of_any_client_are_answered_together() {
    with_scripts(|runner| {
        let (a, b) = (resource("a"), resource("b"));
        for client in 0..50 {
            for resource in [&a, &b] {
                runner.run(resource, &Command::ForceRelease, now());
                runner.run(resource, &acquire_or_queue(client, 1, 1, 1), now());
            }
            let renewals = [(&a, renew(client, 1, 0)), (&b, renew(client, 1, 0))];
            let answers = runner.renew_all(&renewals, now());
            assert!(answers.iter().all(Option::is_some), "client {client}");
        }
    });
}

/// The reply is the error, and the locks that were free are free again.
#[test]
fn error_in_a_batch_releases_what_the_batch_acquired() {
    with_scripts(|runner| {
        let names = ["a", "b", "c"].map(resource);
        let attempt = Arc::new(Acquire::exclusive(id(1, 1), TTL));
        let attempts: Vec<_> = names.iter().map(|name| (name, &attempt)).collect();
        let free = |runner: &mut ScriptRunner<'_>| {
            for name in &names {
                redis::cmd("DEL").arg(resource_key(name)).exec(runner.commands).unwrap();
            }
        };
        let key = resource_key(&names[1]);
        for (command, expected) in [
            // An error of the scripts, and one of the server.
            (["ZADD", &key, "0", "theirs"], "WRONGTYPE"),
            (["HSET", &key, "field", "theirs"], "WRONGTYPE"),
        ] {
            free(runner);
            redis::cmd(command[0]).arg(&command[1..]).exec(runner.commands).unwrap();
            let error = runner.value_of_all(&attempts, now()).expect_err("not a lock");
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(runner.key_type(&names[0]), "none");
            assert_eq!(runner.key_type(&names[2]), "none");
        }
        // The reply of an attempt for which the clock has no token.
        free(runner);
        let last = (1 << 53) / TOKENS_PER_MS - 1;
        set_clock(runner, (last, TOKENS_PER_MS - 2));
        let error = runner.value_of_all(&attempts, now()).expect_err("one token is left");
        assert!(error.to_string().contains("CLOCKAHEAD"), "{error}");
        assert!(names.iter().all(|name| runner.key_type(name) == "none"));
    });
}

/// To release, also by force, and to renew always works. Everything else is refused, and changes nothing.
#[test]
fn full_memory_refuses_only_what_needs_memory() {
    with_scripts(|runner| {
        let waiter = || acquire_or_queue(1, 1, 1, 1);
        let cases = [
            (vec![], waiter(), true),
            (vec![acquire_or_queue(0, 1, 1, 1)], waiter(), true),
            (vec![acquire_or_queue(0, 1, 1, 1), waiter()], acquire_or_queue(2, 1, 1, 1), true),
            (vec![share(0, TTL)], share(1, TTL), true),
            (vec![share(0, TTL), share(2, TTL)], share(1, TTL), true),
            (vec![acquire_or_queue(0, 1, 1, 1)], cancel(1, 1), false),
            (vec![acquire_or_queue(0, 1, 1, 1)], renew(0, 1, 0), false),
            (vec![acquire_or_queue(0, 1, 1, 1)], renew(0, 1, 1), false),
            (vec![acquire_or_queue(0, 1, 1, 1), waiter()], renew(0, 1, 1), false),
            (vec![acquire_or_queue(0, 1, 1, 1), waiter()], release(0, 1), false),
            (vec![acquire_or_queue(0, 1, 1, 1), waiter()], retain(0, 1), false),
            (vec![acquire_or_queue(0, 1, 1, 1), waiter()], Command::ForceRelease, false),
            (vec![share(0, TTL), share(1, TTL), share(2, TTL)], release(0, 1), false),
            (vec![share(0, TTL), share(1, TTL), share(2, TTL)], release(2, 1), false),
        ];
        for (number, (before, command, is_refused)) in cases.into_iter().enumerate() {
            let resource = resource(&format!("m{number}"));
            for command in before {
                runner.run(&resource, &command, now());
            }
            match runner.value_with_full_memory(&resource, &command, now(), true) {
                Ok(_) => assert!(!is_refused, "{number}: {command:?}"),
                Err(error) => {
                    // The text of the server, which begins with the error's code.
                    let text =
                        [error.code().unwrap_or_default(), error.detail().unwrap_or_default()].join(" ");
                    let is_oom = text.trim_start_matches("ERR ").starts_with("OOM ");
                    assert!(is_refused && is_oom, "{number}: {text}");
                }
            }
        }
    });
}

/// Waiters behind the head have left, so that the next one is some or many places behind it.
#[test]
fn lease_goes_to_the_waiter_behind_those_that_left() {
    compare_each([1, 2, 50, 51, 52, 200], |comparison, leaving| {
        run(comparison, [acquire_or_queue(0, 1, 1, 1), acquire_or_queue(1, 1, 1, 1)]);
        run(comparison, (1..=leaving).map(|sequence| acquire_or_queue(2, sequence, 1, 1)));
        run(comparison, [acquire_or_queue(3, 1, 1, 1)]);
        run(comparison, (1..=leaving).map(|sequence| release(2, sequence)));
        run(comparison, [release(0, 1), release(1, 1), release(3, 1)]);
        assert!(comparison.view().holders.is_empty());
    });
}

fn waiter(number: u128) -> Command {
    acquire_or_queue(1_000 + number, 1, 1, 1)
}

/// A step of more changes than one command can have is made in parts.
#[test]
fn thousands_of_clients_that_do_not_listen_are_passed_over_at_once() {
    with_scripts(|runner| {
        let resource = resource("a");
        runner.run(&resource, &acquire_or_queue(0, 1, 1, 1), now());
        (0..5_000).for_each(|number| drop(runner.run(&resource, &waiter(number), now())));
        runner.run(&resource, &acquire_or_queue(1, 1, 1, 1), now());
        assert_eq!(runner.run(&resource, &release(0, 1), now()).reply, Reply::Released);
        let Reply::View(view) = runner.run(&resource, &Command::Inspect, now()).reply else { panic!() };
        assert_eq!(view.holders[0].acquisition, id(1, 1));
        assert_eq!(view.waiters.iter().filter(|waiter| waiter.skipped).count(), 5_000);
        // All of them have ended.
        let later = Now::same(now().time + Duration::from_secs(100_000));
        assert!(matches!(
            runner.run(&resource, &acquire_or_queue(2, 1, 1, 1), later).reply,
            Reply::Granted(_)
        ));
        assert_eq!(runner.run(&resource, &release(2, 1), later).reply, Reply::Released);
        assert_eq!(runner.key_type(&resource), "none");
    });
}

/// Each client has a place before and one behind those of all others.
#[test]
fn second_waiters_of_thousands_of_clients_are_passed_over_at_once() {
    with_scripts(|runner| {
        let resource = resource("a");
        runner.run(&resource, &acquire_or_queue(0, 1, 1, 1), now());
        for sequence in 1..3 {
            for client in 0..5_000 {
                runner.run(&resource, &acquire_or_queue(1_000 + client, sequence, 1, 1), now());
            }
        }
        runner.run(&resource, &acquire_or_queue(1, 1, 1, 1), now());
        assert_eq!(runner.run(&resource, &release(0, 1), now()).reply, Reply::Released);
        let Reply::View(view) = runner.run(&resource, &Command::Inspect, now()).reply else { panic!() };
        assert_eq!((view.holders[0].acquisition, view.waiters.len()), (id(1, 1), 10_000));
    });
}

/// A client that has the lease renews it meanwhile.
#[test]
fn waiters_that_end_by_thousands_end_no_lease() {
    with_scripts(|runner| {
        let resource = resource("a");
        let hour = Duration::from_secs(3_600);
        let holder = changed(acquire_or_queue(0, 1, 1, 1), |acquire| acquire.ttl = 1_000 * hour);
        runner.run(&resource, &holder, now());
        (0..5_000).for_each(|number| drop(runner.run(&resource, &waiter(number), now())));
        let later = Now::same(now().time + 100 * hour);
        let renewal = Command::Renew(Renew::to(id(0, 1), 1_000 * hour));
        assert!(matches!(
            runner.run(&resource, &renewal, later).reply,
            Reply::Renewed { contended: false, .. }
        ));
        assert_eq!(runner.run(&resource, &release(0, 1), later).reply, Reply::Released);
        assert_eq!(runner.key_type(&resource), "none");
    });
}

#[test]
fn thousands_of_tombstones_end_at_once() {
    with_scripts(|runner| {
        let resource = resource("a");
        runner.run(&resource, &acquire_or_queue(0, 1, 1, 1), now());
        (0..5_000).for_each(|number| drop(runner.run(&resource, &cancel(1, number), now())));
        runner.run(&resource, &renew(0, 1, 0), now());
        let later = Now::same(now().time + TTL / 2);
        assert!(matches!(runner.run(&resource, &renew(0, 1, 0), later).reply, Reply::Renewed { .. }));
        let much_later = Now::same(now().time + Duration::from_secs(2_000));
        let reply = runner.run(&resource, &acquire_or_queue(2, 1, 1, 1), much_later).reply;
        assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
        assert_eq!(runner.run(&resource, &release(2, 1), much_later).reply, Reply::Released);
        assert_eq!(runner.key_type(&resource), "none");
    });
}

#[test]
fn thousands_of_holders_are_revoked_at_once() {
    with_scripts(|runner| {
        let resource = resource("a");
        let holder = |number: u128| acquire_or_queue(1_000 + number, 1, 10_000, 1);
        (0..3_000).for_each(|number| drop(runner.run(&resource, &holder(number), now())));
        runner.run(&resource, &acquire_or_queue(1, 1, 10_000, 10_000), now());
        let reply = runner.run(&resource, &Command::ForceRelease, now()).reply;
        assert!(matches!(reply, Reply::Forced(holders) if holders.len() == 3_000));
        let Reply::View(view) = runner.run(&resource, &Command::Inspect, now()).reply else { panic!() };
        assert_eq!(view.holders.iter().map(|holder| holder.acquisition).collect::<Vec<_>>(), [id(1, 1)]);
    });
}

/// Otherwise the shortcuts would be left for as long as the queue is never empty.
#[test]
fn client_whose_waiters_are_gone_is_not_parked() {
    with_scripts(|runner| {
        let resource = resource("a");
        let parked = |runner: &mut ScriptRunner<'_>| -> usize {
            let fields: Vec<Vec<u8>> =
                redis::cmd("HKEYS").arg(resource_key(&resource)).query(runner.commands).unwrap();
            fields.iter().filter(|field| field[0] == b'p').count()
        };
        runner.run(&resource, &acquire_or_queue(0, 1, 1, 1), now());
        runner.run(&resource, &waiter(1), now());
        runner.run(&resource, &acquire_or_queue(1, 1, 1, 1), now());
        runner.run(&resource, &acquire_or_queue(2, 1, 1, 1), now());
        runner.run(&resource, &release(0, 1), now());
        assert_eq!(parked(runner), 1, "it does not listen");
        runner.run(&resource, &release(1_001, 1), now());
        assert_eq!(parked(runner), 0, "its only waiter has left");
        // The granted lease of client 1 is not claimed.
        let later = Now::same(now().time + Duration::from_secs(4));
        runner.run(&resource, &acquire_or_queue(3, 1, 1, 1), later);
        assert_eq!(parked(runner), 0, "it has no other waiter");
    });
}

/// Of leases that are equally heavy, and of which one is retained.
#[test]
fn owner_reenters_by_the_lease_with_the_greatest_acquisition() {
    for (first, second) in [(0, 1), (1, 0)] {
        compare_mutex(|comparison| {
            let own = |client, sequence| {
                let attempt = acquire_or_queue(client, sequence, 3, 1);
                changed(attempt, |acquire| acquire.owner = Some(Owner::new("o")))
            };
            run(
                comparison,
                [own(first, 1), retain(first, 1), own(second, 1), renew(second, 1, 0), own(2, 1)],
            );
        });
    }
}
