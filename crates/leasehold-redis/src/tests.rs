//! The scripts against the model, command by command, on a real server.

mod comparison;
mod cost;
mod each;
mod failing_writes;
mod foreign_values;
mod limits;
mod rare_states;
mod restart_guard;
mod stored_values;
mod token_clock;

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Command, Kind, Name, PushKind, Release, Renew, Reply, Resource, WaitFor,
};
use leasehold_redis_protocol::{
    BatchKind, Channels, Expectation, ScriptVariant, VoteArgs, clock_key, decode_answer, decode_push,
    inbox_of, slot_of,
};
use leasehold_store::histories::{
    CLIENTS, Joint, RESOURCES, Step, client_id, joint_steps, release_of, steps,
};
use leasehold_testkit::{Flavor, extent};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};
use redis::ConnectionLike as _;

use super::send::script::{self, Naming};
use comparison::{Comparison, compare_mutex, with_scripts, with_scripts_on};

/// Whether several such commands can be one script call, each for itself.
fn may_share_a_call(command: &Command) -> bool {
    matches!(BatchKind::of(command), Some(BatchKind::Attempts | BatchKind::Releases))
}

/// Compares random histories. Each uses new resources, on one server.
fn compare_histories<H: std::fmt::Debug>(
    histories: &impl Strategy<Value = H>,
    resources: usize,
    play: impl Fn(&mut Comparison<'_, '_>, &H),
) {
    let cases = extent(200, 2_000, 50_000);
    compare_histories_on(Flavor::Redis7, cases, histories, resources, play);
}

/// As `compare_histories`. Returns how many leases were released without a script.
fn compare_histories_on<H: std::fmt::Debug>(
    flavor: Flavor,
    cases: u32,
    histories: &impl Strategy<Value = H>,
    resources: usize,
    play: impl Fn(&mut Comparison<'_, '_>, &H),
) -> usize {
    let mut deleted = 0;
    with_scripts_on(flavor, |runner| {
        let runner = std::cell::RefCell::new(runner);
        let count = std::cell::Cell::new(0_u64);
        // A history of several resources inspects each of them, so it takes that many times longer.
        let cases = cases / u32::try_from(resources).unwrap_or(1);
        let config = Config { cases, failure_persistence: None, ..Config::default() };
        let result = TestRunner::new(config).run(histories, |history| {
            count.set(count.get() + 1);
            let resource = |number| {
                let name = format!("a{{b}}c-{}-{number}", count.get());
                Resource { kind: Kind::Mutex, name: Name::new(&name).unwrap() }
            };
            let resources: Vec<_> = (0..resources).map(resource).collect();
            let mut runner = runner.borrow_mut();
            // No tokens are reserved while their clock is ahead of the time, as the histories before leave it.
            if count.get().is_multiple_of(2) {
                redis::cmd("DEL").arg(clock_key(None)).exec(runner.commands).unwrap();
            }
            let mut comparison = Comparison::new(&mut runner, &resources);
            play(&mut comparison, &history);
            comparison.end();
            Ok(())
        });
        if let Err(error) = result {
            panic!("{error}");
        }
        deleted = runner.borrow().deleted;
    });
    deleted
}

fn play(comparison: &mut Comparison<'_, '_>, steps: &[Step]) {
    steps.iter().for_each(|step| comparison.step(0, step));
}

fn play_joint(comparison: &mut Comparison<'_, '_>, steps: &[Joint]) {
    for step in steps {
        match step {
            Joint::At(at, step) => comparison.step(*at, step),
            Joint::Together(attempts) => comparison.run_all(attempts),
            Joint::Renewals(renewals) => comparison.renew_all(renewals),
        }
    }
}

#[test]
fn scripts_match_the_model() {
    compare_histories(&steps(1), 1, |comparison, steps| play(comparison, steps));
}

/// With a single owner of each lock, and with several.
#[test]
fn scripts_for_a_proxy_match_the_model_under_its_rules() {
    for capacity in [1, 4] {
        let cases = extent(200, 2_000, 20_000);
        compare_histories_on(Flavor::Redis7, cases, &steps(capacity), 1, |comparison, steps| {
            comparison.runner.is_restricted = true;
            play(comparison, steps);
        });
    }
}

#[test]
fn conditional_deletes_match_the_model() {
    let deleted = |flavor, cases| {
        compare_histories_on(flavor, cases, &steps(1), 1, |comparison, steps| play(comparison, steps))
    };
    let cases = extent(200, 1_000, 10_000);
    // About 5 releases in 100 histories need no script. By chance, one run may have few of them.
    let is_enough = |released| released > cases as usize / 100;
    assert!((0..5).any(|_| is_enough(deleted(Flavor::Valkey9, cases))), "releases need no script");
    assert_eq!(deleted(Flavor::Redis7, 1), 0);
}

#[test]
fn full_memory_refuses_a_command_as_a_whole() {
    for is_restricted in [false, true] {
        let refused = std::cell::Cell::new(0);
        let cases = extent(200, 1_500, 15_000);
        compare_histories_on(Flavor::Redis7, cases, &steps(4), 1, |comparison, steps| {
            comparison.runner.is_restricted = is_restricted;
            let is_command = |step: &Step| matches!(step, Step::Do(_));
            let Some(last) = steps.iter().rposition(is_command) else { return };
            play(comparison, &steps[..last]);
            if let Step::Do(command) = &steps[last] {
                refused.set(refused.get() + usize::from(comparison.run_with_full_memory(command)));
            }
        });
        assert!(refused.get() > 10, "{} commands were refused", refused.get());
    }
}

#[test]
fn scripts_match_the_model_for_shared_locks() {
    compare_histories(&steps(4), 1, |comparison, steps| play(comparison, steps));
}

#[test]
fn scripts_match_the_model_for_acquire_all() {
    compare_histories(&joint_steps(1), RESOURCES, |comparison, steps| play_joint(comparison, steps));
}

#[test]
fn scripts_match_the_model_for_shared_acquire_all() {
    compare_histories(&joint_steps(4), RESOURCES, |comparison, steps| play_joint(comparison, steps));
}

/// Acquires, or queues.
fn acquire_or_queue(client: u128, sequence: u64, capacity: u32, weight: u32) -> Command {
    let acquisition = Acquisition { client: client_id(client), sequence };
    Command::from(Acquire {
        capacity,
        weight,
        wait: Some(WaitFor { entry_ttl: Duration::from_secs(1_000), max_queue: 100_000 }),
        ..Acquire::exclusive(acquisition, Duration::from_secs(10))
    })
}

#[test]
fn release_grants_to_as_many_readers_as_the_model() {
    const READERS: u128 = 70;
    with_scripts(|runner| {
        (CLIENTS..=READERS).for_each(|client| runner.subscribe(client_id(client)));
        for readers in (1..=3).chain(62..=READERS) {
            let resource = Resource { kind: Kind::ReadWrite, name: Name::new(&readers.to_string()).unwrap() };
            let mut comparison = Comparison::new(runner, &[resource]);
            comparison.run(0, &acquire_or_queue(0, 1, 1_000, 1_000));
            (1..=readers).for_each(|client| drop(comparison.run(0, &acquire_or_queue(client, 1, 1_000, 1))));
            let writer = Acquisition { client: client_id(0), sequence: 1 };
            assert_eq!(comparison.run(0, &release_of(writer)), Reply::Released);
            comparison.inspect(0);
            comparison.end();
        }
    });
}

#[test]
fn clock_step_back_extends_no_lease() {
    compare_mutex(|comparison| {
        let id = |client, sequence| Acquisition { client: client_id(client), sequence };
        let renew = |acquisition| Command::Renew(Renew::to(acquisition, Duration::from_secs(10)));
        let release = |acquisition, at_least_s| {
            let min_hold = Duration::from_secs(at_least_s);
            Command::Release(Release { min_hold, ..Release::now(acquisition) })
        };
        let retained_until = |comparison: &mut Comparison<'_, '_>| match comparison.run(0, &Command::Inspect)
        {
            Reply::View(view) => view.holders.first().map(|holder| holder.expires_at),
            other => panic!("{other:?}"),
        };

        // Contended and released without a minimum hold: the waiter is granted.
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        comparison.run(0, &acquire_or_queue(1, 1, 1, 1));
        comparison.step(0, &Step::SetBack(600_000));
        assert_eq!(comparison.run(0, &release_of(id(0, 1))), Reply::Released);
        assert!(matches!(comparison.run(0, &renew(id(1, 1))), Reply::Renewed { .. }));
        // Renewed after the clock was set back again, without and with a waiter.
        comparison.step(0, &Step::SetBack(600_000));
        assert!(matches!(comparison.run(0, &renew(id(1, 1))), Reply::Renewed { .. }));
        comparison.run(0, &acquire_or_queue(2, 1, 1, 1));
        comparison.step(0, &Step::SetBack(600_000));
        assert!(matches!(comparison.run(0, &renew(id(1, 1))), Reply::Renewed { .. }));
        assert_eq!(comparison.run(0, &release_of(id(1, 1))), Reply::Released);
        // If the grant lies in the future, the minimum hold counts from the release.
        comparison.step(0, &Step::SetBack(600_000));
        assert_eq!(comparison.run(0, &release(id(2, 1), 20)), Reply::Released);
        assert_eq!(retained_until(comparison), Some(comparison.now.time + Duration::from_secs(20)));
        comparison.step(0, &Step::Pass(20_000));
        assert_eq!(retained_until(comparison), None);
        // A repeated attempt gets no more than its ttl.
        comparison.run(0, &acquire_or_queue(3, 1, 1, 1));
        comparison.step(0, &Step::SetBack(600_000));
        let Reply::Granted(grant) = comparison.run(0, &acquire_or_queue(3, 1, 1, 1)) else {
            panic!("the attempt holds the lock")
        };
        assert_eq!(grant.valid_for, Duration::from_secs(10));
    });
}

/// The header of a shared lock can have the first lease in it. When that one is given back, the last lease is in a row.
#[test]
fn repeat_of_the_last_shared_attempt_is_granted_once() {
    compare_mutex(|comparison| {
        let acquire = |client| {
            let acquisition = Acquisition { client: client_id(client), sequence: 1 };
            let shared = Acquire { capacity: 4, ..Acquire::exclusive(acquisition, Duration::from_secs(10)) };
            Command::from(Acquire { weight: 1, ..shared })
        };
        for command in [acquire(0), acquire(1)] {
            assert!(matches!(comparison.run(0, &command), Reply::Granted(_)));
        }
        let first = Acquisition { client: client_id(0), sequence: 1 };
        assert_eq!(comparison.run(0, &release_of(first)), Reply::Released);
        assert!(matches!(comparison.run(0, &acquire(1)), Reply::Granted(_)));
        let Reply::View(view) = comparison.run(0, &Command::Inspect) else { panic!("no view") };
        assert_eq!((view.holders.len(), view.in_use), (1, 1));
    });
}

/// The id that an attempt drew in vain is another attempt's token, and only one attempt's.
#[test]
fn repeat_of_a_set_grants_each_lock_another_token() {
    with_scripts(|runner| {
        let resource = |name| Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() };
        let mut comparison = Comparison::new(runner, &["a", "b", "c"].map(resource));
        let attempts: Vec<_> = (1..=3)
            .map(|sequence| Acquisition { client: client_id(0), sequence })
            .map(|acquisition| Arc::new(Acquire::exclusive(acquisition, Duration::from_secs(10))))
            .collect();
        comparison.run_all(&attempts);
        for at in [1, 2] {
            assert_eq!(comparison.run(at, &release_of(attempts[at].acquisition)), Reply::Released);
        }
        comparison.run_all(&attempts);
        comparison.end();
    });
}

fn share(client: u128, ttl: Duration) -> Command {
    let acquisition = Acquisition { client: client_id(client), sequence: 1 };
    Command::from(Acquire { capacity: 4, weight: 1, ..Acquire::exclusive(acquisition, ttl) })
}

/// A share may not outlive its key, which stays for an hour after the lease that set its expiry.
#[test]
fn key_of_a_shared_lock_outlives_its_longest_lease() {
    for ms in [10_000, 3_609_000, 3_609_001, 3_610_000, 3_610_500, 3_611_001, 3 * 3_600_000] {
        compare_mutex(|comparison| {
            for (client, ms) in [(0, 10_000), (1, 10_000), (2, ms), (3, 10_000)] {
                let granted = comparison.run(0, &share(client, Duration::from_millis(ms)));
                assert!(matches!(granted, Reply::Granted(_)));
                // It compares the key's expiry with the end of every lease.
                comparison.inspect(0);
            }
        });
    }
}

/// A lease that ends now has ended.
#[test]
fn share_that_expires_now_makes_room() {
    for waiting in [0, 1_999, 2_000] {
        compare_mutex(|comparison| {
            for client in 0..4 {
                comparison.run(0, &share(client, Duration::from_secs(if client == 1 { 2 } else { 9 })));
            }
            comparison.step(0, &Step::Pass(waiting));
            let reply = comparison.run(0, &share(4, Duration::from_secs(9)));
            assert_eq!(matches!(reply, Reply::Granted(_)), waiting == 2_000, "{reply:?}");
            comparison.inspect(0);
        });
    }
}

/// The holder has tokens for its own tasks, and must not use them in front of another client that waits.
#[test]
fn holder_with_reserved_tokens_is_told_of_the_first_waiter() {
    compare_mutex(|comparison| {
        comparison.run(0, &acquire_or_queue(0, 1, 1, 1));
        let Command::Acquire(second) = acquire_or_queue(1, 1, 1, 1) else { panic!("not an attempt") };
        comparison.run(0, &Command::from(Acquire { reserve: 5, ..(*second).clone() }));
        // Granted, and not yet claimed by a renewal: with and without another waiter.
        comparison.run(0, &release_of(Acquisition { client: client_id(0), sequence: 1 }));
        for client in [2, 3] {
            // It compares the pushes.
            assert!(matches!(comparison.run(0, &acquire_or_queue(client, 1, 1, 1)), Reply::Queued(_)));
        }
        let Reply::View(view) = comparison.run(0, &Command::Inspect) else { panic!("no view") };
        let last = view.last_token.map(leasehold_core::Token::get);
        assert_eq!(last, Some(view.holders[0].token.get() + 5), "tokens were reserved");
    });
}

#[test]
fn every_script_variant_reaches_the_waiters_inbox() {
    let server = leasehold_testkit::Server::on_socket();
    let (mut commands, mut inbox) = (server.admin(), server.admin());
    inbox.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (holder, waiter) = (client_id(1), client_id(2));
    let cluster = ScriptVariant::Cluster;
    let variants = [
        (ScriptVariant::Server, "SUBSCRIBE"),
        (cluster(Channels::Plain), "SUBSCRIBE"),
        (cluster(Channels::Sharded), "SSUBSCRIBE"),
    ];
    for (number, (variant, subscribe)) in (0..).zip(variants) {
        let resource = Resource { kind: Kind::Mutex, name: Name::new(&format!("a{number}")).unwrap() };
        let channel = inbox_of(waiter, variant.is_cluster().then(|| slot_of(&resource)));
        let subscribe = redis::cmd(subscribe).arg(&channel).get_packed_command();
        inbox.send_packed_command(&subscribe).unwrap();
        inbox.recv_response().unwrap();
        let mut run = |command: &Command| {
            let call = variant.encode(&resource, command, VoteArgs::default(), Expectation::default());
            let call = script::command(&call, Naming::Text);
            let value = commands.req_command(&call).unwrap_or_else(|error| panic!("{variant:?}: {error}"));
            decode_answer(command, &value).unwrap().reply
        };
        let acquire = |client| {
            Command::from(Acquire {
                wait: Some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 6 }),
                ..Acquire::exclusive(Acquisition { client, sequence: 1 }, Duration::from_secs(10))
            })
        };
        assert!(matches!(run(&acquire(holder)), Reply::Granted(_)));
        assert!(matches!(run(&acquire(waiter)), Reply::Queued(_)));
        let acquisition = Acquisition { client: holder, sequence: 1 };
        assert_eq!(run(&release_of(acquisition)), Reply::Released);
        let message = inbox.recv_response().unwrap();
        let redis::Value::Array(message) = message else { panic!("{message:?}") };
        let [_, redis::Value::BulkString(on), redis::Value::BulkString(pushed)] = &message[..] else {
            panic!("{message:?}")
        };
        assert_eq!(on, channel.as_bytes());
        let push = decode_push(waiter, pushed).unwrap();
        assert!(matches!(push.kind, PushKind::Granted(..)) && push.inbox == waiter, "{variant:?}: {push:?}");
    }
}
