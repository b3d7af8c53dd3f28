//! The tests of the kit.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Acquire, Acquisition, ClientId, Command, Kind, PushKind, Reply, WaitFor};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};

use super::comparison::{Comparison, Observed, fail, until};
use super::{Place, Run, Test};
use crate::Call;
use crate::histories::{CLIENTS, Joint, RESOURCES, client_id, joint_steps, release_of, steps};

/// All tests. Their names say what a store does that passes them.
pub const TESTS: &[Test] = &[
    Test { name: "mutex_answers_as_the_model", run: Run::Often(mutex_answers_as_the_model) },
    Test { name: "shared_lock_answers_as_the_model", run: Run::Often(shared_lock_answers_as_the_model) },
    Test {
        name: "several_mutexes_answer_as_the_model",
        run: Run::Often(several_mutexes_answer_as_the_model),
    },
    Test {
        name: "several_shared_locks_answer_as_the_model",
        run: Run::Often(several_shared_locks_answer_as_the_model),
    },
    Test { name: "grant_is_pushed", run: Run::Once(grant_is_pushed) },
    Test {
        name: "waiter_of_a_client_that_is_gone_is_passed_over",
        run: Run::Once(waiter_of_a_client_that_is_gone_is_passed_over),
    },
    Test { name: "what_is_in_use_is_listed", run: Run::Once(what_is_in_use_is_listed) },
    Test {
        name: "attempts_at_the_same_time_follow_each_other",
        run: Run::Once(attempts_at_the_same_time_follow_each_other),
    },
    Test { name: "lost_connection_is_told", run: Run::Cut(lost_connection_is_told) },
];

fn mutex_answers_as_the_model(place: &dyn Fn() -> Place, histories: u32) -> bool {
    compare(place, histories, Kind::Mutex, 1, steps(1).prop_map(of_one))
}

fn shared_lock_answers_as_the_model(place: &dyn Fn() -> Place, histories: u32) -> bool {
    compare(place, histories, Kind::Semaphore, 1, steps(4).prop_map(of_one))
}

fn several_mutexes_answer_as_the_model(place: &dyn Fn() -> Place, histories: u32) -> bool {
    compare(place, histories, Kind::Mutex, RESOURCES, joint_steps(1))
}

fn several_shared_locks_answer_as_the_model(place: &dyn Fn() -> Place, histories: u32) -> bool {
    compare(place, histories, Kind::ReadWrite, RESOURCES, joint_steps(4))
}

fn of_one(steps: Vec<crate::histories::Step>) -> Vec<Joint> {
    steps.into_iter().map(|step| Joint::At(0, step)).collect()
}

/// Each history has an empty store. Returns whether the store supports the kind of lock.
fn compare(
    place: &dyn Fn() -> Place,
    histories: u32,
    kind: Kind,
    resources: usize,
    any: impl Strategy<Value = Vec<Joint>>,
) -> bool {
    // The histories have named owners, too.
    if !place().factory.capabilities().supports(kind, true) {
        return false;
    }
    let config =
        Config { cases: histories, failure_persistence: None, max_shrink_time: 20_000, ..Config::default() };
    let played = TestRunner::new(config)
        .run(&any, |history| Comparison::new(place(), kind, resources)?.play(&history));
    if let Err(error) = played {
        panic!("{error}");
    }
    true
}

fn or_panic(observed: Observed) {
    if let Err(error) = observed {
        panic!("{error}");
    }
}

fn attempt(client: ClientId, sequence: u64) -> Acquire {
    let acquisition = Acquisition { client, sequence };
    Acquire::exclusive(acquisition, Duration::from_secs(10))
}

fn waiting(client: ClientId, sequence: u64) -> Command {
    let wait = Some(WaitFor { entry_ttl: Duration::from_secs(80), max_queue: 6 });
    Command::from(Acquire { wait, ..attempt(client, sequence) })
}

/// The clients of the kit hold a mutex and wait for it in this order.
fn queue(comparison: &mut Comparison) -> Observed {
    (0..CLIENTS).try_for_each(|client| comparison.run(0, &waiting(client_id(client), 1)))
}

fn has_grant(comparison: &Comparison, client: ClientId) -> bool {
    comparison.member(client).is_some_and(|member| {
        member.inbox.pushes().iter().any(|push| matches!(push.kind, PushKind::Granted(..)))
    })
}

fn grant_is_pushed(place: Place) {
    let observe = || -> Observed {
        let mut comparison = Comparison::new(place, Kind::Mutex, 1)?;
        queue(&mut comparison)?;
        comparison.run(0, &release_of(Acquisition { client: client_id(0), sequence: 1 }))?;
        until("the waiter was not told of its grant", || has_grant(&comparison, client_id(1)).then_some(()))?;
        comparison.compare_pushes(&"a release")
    };
    or_panic(observe());
}

fn waiter_of_a_client_that_is_gone_is_passed_over(place: Place) {
    let observe = || -> Observed {
        let mut comparison = Comparison::new(place, Kind::Mutex, 1)?;
        queue(&mut comparison)?;
        comparison.leave(client_id(1))?;
        comparison.run(0, &release_of(Acquisition { client: client_id(0), sequence: 1 }))?;
        until("the lock was not granted to a client that is there", || {
            has_grant(&comparison, client_id(2)).then_some(())
        })?;
        // A client that is there again is told, as others are.
        comparison.join(client_id(1))?;
        comparison.run(0, &waiting(client_id(1), 1))?;
        comparison.run(0, &release_of(Acquisition { client: client_id(2), sequence: 1 }))?;
        comparison.compare_pushes(&"a return")
    };
    or_panic(observe());
}

fn what_is_in_use_is_listed(place: Place) {
    let observe = || -> Observed {
        let mut comparison = Comparison::new(place, Kind::Mutex, RESOURCES)?;
        comparison.compare_lists()?;
        for at in 0..RESOURCES {
            comparison.run(at, &Command::from(attempt(client_id(0), 1)))?;
            comparison.compare_lists()?;
        }
        comparison.run(1, &release_of(Acquisition { client: client_id(0), sequence: 1 }))?;
        comparison.compare_lists()
    };
    or_panic(observe());
}

/// How often all clients try at the same time.
const ROUNDS: u64 = 60;

fn attempts_at_the_same_time_follow_each_other(place: Place) {
    let observe = || -> Observed {
        let comparison = Comparison::new(place, Kind::Mutex, 1)?;
        let resource = comparison.resource(0);
        for round in 0..ROUNDS {
            let calls = (0..CLIENTS).filter_map(|client| {
                let member = comparison.member(client_id(client))?;
                let command = Command::from(attempt(client_id(client), round));
                let (store, resource) = (member.store.clone(), Arc::clone(&resource));
                Some((
                    client,
                    comparison.runtime.spawn(async move { store.call(Call { resource, command }, 0).await }),
                ))
            });
            let mut holders = Vec::new();
            for (client, call) in calls.collect::<Vec<_>>() {
                match comparison.wait(Box::pin(call))? {
                    Ok(Ok(answer)) if matches!(answer.reply, Reply::Granted(_)) => holders.push(client),
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => return fail(format!("an attempt fails: {}", error.message)),
                    Err(error) => return fail(format!("an attempt panics: {error}")),
                }
            }
            let [holder] = holders[..] else {
                return fail(format!("{} clients hold a free mutex after all tried at once", holders.len()));
            };
            let release = release_of(Acquisition { client: client_id(holder), sequence: round });
            let store = comparison.member(client_id(holder)).map(|member| member.store.clone());
            if let Some(store) = store {
                let released = comparison.wait(store.call(Call::new(resource.clone(), release), 0))?;
                if !matches!(&released, Ok(answer) if answer.reply == Reply::Released) {
                    return fail(format!("the release of the holder has the answer {released:?}"));
                }
            }
        }
        Ok(())
    };
    or_panic(observe());
}

fn lost_connection_is_told(place: Place) {
    let observe = || -> Observed {
        let comparison = Comparison::new(place, Kind::Mutex, 1)?;
        if let Some(cut) = &comparison.place.cut {
            cut();
        }
        for client in 0..CLIENTS {
            let inbox = comparison.member(client_id(client)).map(|member| member.inbox.clone());
            until("a client was not told that its connection was lost", || {
                inbox.as_ref().is_none_or(|inbox| inbox.is_reconnected()).then_some(())
            })?;
        }
        Ok(())
    };
    or_panic(observe());
}
