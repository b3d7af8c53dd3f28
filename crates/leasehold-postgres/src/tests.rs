//! The store against the model, command by command, on a real server whose clock is a table.

mod comparison;
mod inbox;
mod search_path;
mod visible;

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Failure, Kind, Name, Owner, Push, Release, Renew, Reply,
    Resource, WaitFor,
};
use leasehold_store::Inbox;
use leasehold_store::histories::{Joint, RESOURCES, Step, client_id, joint_steps, release_of, steps};
use leasehold_testkit::extent;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};

use super::conn::settings;
use super::dialer::Dialer;
use super::pool::{Class, Pool};
use super::query::{Query, WINDOW};
use super::server::Server;
use super::sql::Sql;
use crate::url::PostgresUrl;
use comparison::{Comparison, Harness};

/// Ignores all pushes.
struct NoInbox;

impl Inbox for NoInbox {
    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}

    fn deliver(&self, _: Push) {}
}

/// For connections that lead to one server.
fn any_server() -> Arc<Server> {
    Arc::new(Server::new(Weak::<NoInbox>::new()))
}

/// How often a history is played in which a time limit ended a command.
const ATTEMPTS: u32 = 5;

/// Compares random histories. Each uses new resources, on one server.
fn compare_histories<H: std::fmt::Debug>(
    kind: Kind,
    histories: &impl Strategy<Value = H>,
    resources: usize,
    play: impl Fn(&mut Comparison<'_>, &H),
) {
    let cases = extent(30_u32, 240, 5_000);
    let harness = RefCell::new(Harness::new());
    let count = Cell::new(0_u64);
    let config = Config {
        cases: cases / u32::try_from(resources).unwrap_or(1),
        failure_persistence: None,
        max_shrink_iters: 300,
        ..Config::default()
    };
    let once = |history: &H| {
        count.set(count.get() + 1);
        let resource = |number| {
            let name = Name::new(&format!("ä'b-{}-{number}", count.get())).unwrap();
            Resource { kind, name }
        };
        let resources: Vec<_> = (0..resources).map(resource).collect();
        let mut harness = harness.borrow_mut();
        play(&mut Comparison::new(&mut harness, &resources), history);
    };
    let result = TestRunner::new(config).run(histories, |history| {
        for attempt in 1.. {
            match catch_unwind(AssertUnwindSafe(|| once(&history))) {
                Ok(()) => break,
                Err(_) if harness.borrow().was_too_slow() && attempt < ATTEMPTS => {}
                Err(panic) => resume_unwind(panic),
            }
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

fn play(comparison: &mut Comparison<'_>, steps: &[Step]) {
    steps.iter().for_each(|step| comparison.step(0, step));
}

fn play_joint(comparison: &mut Comparison<'_>, steps: &[Joint]) {
    for step in steps {
        match step {
            Joint::At(at, step) => comparison.step(*at, step),
            Joint::Together(attempts) => comparison.run_all(attempts),
            Joint::Renewals(renewals) => comparison.renew_all(renewals),
        }
    }
}

#[test]
fn tables_match_the_model() {
    compare_histories(Kind::Mutex, &steps(1), 1, |comparison, steps| play(comparison, steps));
}

#[test]
fn tables_match_the_model_for_shared_locks() {
    compare_histories(Kind::Semaphore, &steps(4), 1, |comparison, steps| play(comparison, steps));
}

#[test]
fn tables_match_the_model_for_acquire_all() {
    compare_histories(Kind::Mutex, &joint_steps(1), RESOURCES, |comparison, steps| {
        play_joint(comparison, steps);
    });
}

#[test]
fn tables_match_the_model_for_shared_acquire_all() {
    compare_histories(Kind::ReadWrite, &joint_steps(4), RESOURCES, |comparison, steps| {
        play_joint(comparison, steps);
    });
}

/// Plays the history with the attempts, the releases and the renewals that follow each other in batches.
fn play_together(comparison: &mut Comparison<'_>, steps: &[Step]) {
    let kind = |step: &Step| match step {
        Step::Do(Command::Acquire(_)) => 1,
        Step::Do(Command::Release(_)) => 2,
        Step::Do(Command::Renew(_)) => 3,
        _ => 0,
    };
    for run in steps.chunk_by(|one, next| kind(one) > 0 && kind(one) == kind(next)) {
        let commands = run.iter().map_while(|step| match step {
            Step::Do(command) => Some(command.clone()),
            _ => None,
        });
        match run {
            [step] => comparison.step(0, step),
            _ => {
                comparison.run_together(0, &commands.collect::<Vec<_>>());
                comparison.run(0, &Command::Inspect);
            }
        }
    }
}

#[test]
fn tables_match_the_model_for_commands_that_come_together() {
    compare_histories(Kind::Mutex, &steps(1), 1, |comparison, steps| play_together(comparison, steps));
    compare_histories(Kind::Semaphore, &steps(4), 1, |comparison, steps| play_together(comparison, steps));
}

#[test]
fn attempts_that_come_together_share_transactions() {
    with_comparison(|comparison| {
        comparison.run(0, &acquire(0, 1));
        let attempts: Vec<_> = (1..=64).map(|sequence| acquire(1, sequence)).collect();
        comparison.run_together(0, &attempts);
        assert_eq!(comparison.column("SELECT count(*) FROM leasehold.waiter"), 64);
        let rows = "SELECT count(DISTINCT xmin::text) FROM leasehold.waiter";
        assert_eq!(comparison.column(rows), 4);
    });
}

/// More than a transaction may look up one by one.
const MANY: u64 = 150;

/// An attempt for permits of a semaphore, which waits.
fn permits(client: u128, sequence: u64, weight: u32, owner: Option<String>) -> Command {
    let Command::Acquire(any) = acquire(client, sequence) else { unreachable!("it is one") };
    let owner = owner.map(|owner| Owner::new(&owner));
    Command::from(Acquire { capacity: 203, weight, owner, ..(*any).clone() })
}

fn release(client: u128, sequence: u64) -> Command {
    release_of(Acquisition { client: client_id(client), sequence })
}

#[test]
fn release_that_grants_to_many_waiters_takes_few_flights() {
    for has_owners in [false, true] {
        with_comparison_of(Kind::Semaphore, |comparison| {
            comparison.run(0, &permits(0, 1, 200, None));
            for sequence in 1..4 {
                comparison.run(0, &permits(1, sequence, 1, None));
            }
            for sequence in 10..10 + MANY {
                let owner = has_owners.then(|| format!("owner {sequence}"));
                comparison.run(0, &permits(2, sequence, 1, owner));
            }
            let (_, round_trips) = comparison.cost(|comparison| {
                assert_eq!(comparison.run(0, &release(0, 1)), Reply::Released);
            });
            // Most are those of the changes.
            assert!(round_trips < 40, "{round_trips}");
            comparison.run(0, &Command::Inspect);
        });
    }
}

/// The leases of many waiters end together, and the next attempt is queued behind other waiters, which are counted.
#[test]
fn attempt_after_many_grants_takes_few_flights() {
    with_comparison_of(Kind::Semaphore, |comparison| {
        comparison.run(0, &permits(0, 1, 203, None));
        for client in 0..u128::from(MANY) {
            comparison.run(0, &permits(10 + client, 1, 1, None));
        }
        comparison.run(0, &permits(1, 1, 203, None));
        comparison.step(0, &Step::Pass(11_000));
        // The clients need not listen: they poll for pushes, as behind a pooler.
        comparison.sql("UPDATE leasehold.waiter SET polls = true");
        let (_, round_trips) = comparison.cost(|comparison| {
            assert!(matches!(comparison.run_unnotified(0, &permits(2, 1, 1, None)), Reply::Queued(_)));
        });
        assert!(round_trips < 60, "{round_trips}");
        // None of them claims its lease, and all are parked together.
        comparison.step(0, &Step::Pass(4_000));
        let (_, round_trips) = comparison.cost(|comparison| {
            let granted = comparison.run(0, &permits(1, 1, 203, None));
            assert!(matches!(granted, Reply::Granted(_)), "{granted:?}");
        });
        assert!(round_trips < 60, "{round_trips}");
    });
}

/// As those of a latch whose counts are forgotten.
#[test]
fn expiry_of_the_leases_of_many_owners_takes_few_flights() {
    with_comparison_of(Kind::Semaphore, |comparison| {
        for client in 0..u128::from(MANY) {
            comparison.run(0, &permits(client, 1, 1, Some(format!("owner {client}"))));
        }
        comparison.step(0, &Step::Pass(11_000));
        let (_, round_trips) = comparison.cost(|comparison| {
            let granted = comparison.run(0, &permits(0, 2, 203, None));
            assert!(matches!(granted, Reply::Granted(_)), "{granted:?}");
        });
        assert!(round_trips < 60, "{round_trips}");
    });
}

#[test]
fn release_passes_over_many_clients_that_are_gone_in_few_flights() {
    with_comparison(|comparison| {
        comparison.run(0, &acquire(0, 1));
        for client in 10..10 + u128::from(MANY) {
            comparison.run(0, &acquire(client, 1));
            comparison.step(0, &Step::Leave(client));
        }
        comparison.run(0, &acquire(1, 1));
        let (_, round_trips) = comparison.cost(|comparison| {
            assert_eq!(comparison.run(0, &release(0, 1)), Reply::Released);
        });
        assert!(round_trips < 40, "{round_trips}");
        assert!(matches!(comparison.run(0, &acquire(1, 1)), Reply::Granted(_)));
    });
}

/// The first attempt ends what has expired, and is refused. Nothing is left, so the queue begins anew, while the old entries are still
/// in the table.
#[test]
fn queue_that_begins_anew_within_a_transaction_keeps_its_entries() {
    with_comparison_of(Kind::Semaphore, |comparison| {
        for client in 0..4 {
            comparison.run(0, &permits(client, 1, 203, None));
        }
        comparison.step(0, &Step::Pass(2 * 3_600_000));
        let attempts = [permits(3, 2, 204, None), permits(1, 2, 203, None), permits(0, 2, 203, None)];
        comparison.run_together(0, &attempts);
        let Reply::View(view) = comparison.run(0, &Command::Inspect) else { panic!("no view") };
        assert_eq!(view.waiters.len(), 1);
    });
}

#[test]
fn waiter_whose_entry_has_expired_is_queued_again() {
    with_comparison(|comparison| {
        let hold =
            Acquire::exclusive(Acquisition { client: client_id(0), sequence: 1 }, Duration::from_secs(3_600));
        comparison.run(0, &Command::from(hold));
        comparison.run(0, &acquire(1, 1));
        comparison.step(0, &Step::Pass(61_000));
        assert!(matches!(comparison.run(0, &acquire(1, 1)), Reply::Queued(_)));
    });
}

#[test]
fn renewals_of_one_semaphore_share_transactions() {
    with_comparison_of(Kind::Semaphore, |comparison| {
        let renewal = |sequence| {
            let acquisition = Acquisition { client: client_id(0), sequence };
            Command::Renew(Renew::to(acquisition, Duration::from_secs(10)))
        };
        for sequence in 0..64 {
            comparison.run(0, &permits(0, sequence, 1, None));
        }
        comparison.step(0, &Step::Pass(5_000));
        let renewals: Vec<_> = (0..64).map(renewal).collect();
        let (_, round_trips) = comparison.cost(|comparison| comparison.run_together(0, &renewals));
        // Four transactions, each of which sends its changes in two parts at most.
        assert!(round_trips <= 12, "{round_trips}");
        comparison.run(0, &Command::Inspect);
    });
}

fn acquire(client: u128, sequence: u64) -> Command {
    let acquisition = Acquisition { client: client_id(client), sequence };
    Command::from(Acquire {
        wait: Some(WaitFor { entry_ttl: Duration::from_secs(60), max_queue: 100_000 }),
        ..Acquire::exclusive(acquisition, Duration::from_secs(10))
    })
}

fn with_comparison(test: impl FnOnce(&mut Comparison<'_>)) {
    with_comparison_of(Kind::Mutex, test);
}

fn with_comparison_of(kind: Kind, test: impl FnOnce(&mut Comparison<'_>)) {
    let resource = Resource { kind, name: Name::new("a").unwrap() };
    test(&mut Comparison::new(&mut Harness::new(), &[resource]));
}

#[test]
#[should_panic(expected = "after")]
fn tables_that_forget_a_row_fail_the_check() {
    let mut harness = Harness::new();
    harness.forget_waiters();
    let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
    let mut comparison = Comparison::new(&mut harness, &[resource]);
    (0..3).for_each(|client| comparison.step(0, &Step::Do(acquire(client, 1))));
}

#[test]
fn tokens_rise_when_the_clock_is_set_back_and_after_the_row_was_swept() {
    let held = |sequence| Acquisition { client: client_id(0), sequence };
    with_comparison(|comparison| {
        let mut last = 0;
        let hour = 3_600_000;
        for (number, pass) in [0, 0, 2 * hour, 0, 5 * hour].into_iter().enumerate() {
            let sequence = u64::try_from(number).unwrap();
            comparison.step(0, &Step::Pass(pass));
            comparison.sweep_rows();
            let Reply::Granted(grant) = comparison.run(0, &acquire(0, sequence)) else {
                panic!("it is free")
            };
            assert!(grant.tokens.first.get() > last, "{grant:?} after {last}");
            last = grant.tokens.last.get();
            let acquisition = Acquisition { client: client_id(0), sequence };
            assert_eq!(comparison.run(0, &release_of(acquisition)), Reply::Released);
            comparison.step(0, &Step::SetBack(hour / 2));
        }
        // A lock that was held for longer than its token is remembered.
        let long =
            Acquire { ttl: Duration::from_secs(3 * 3_600), ..Acquire::exclusive(held(9), Duration::ZERO) };
        let Reply::Granted(grant) = comparison.run(0, &Command::from(long)) else { panic!("it is free") };
        comparison.step(0, &Step::Pass(2 * hour));
        assert_eq!(comparison.run(0, &release_of(held(9))), Reply::Released);
        comparison.step(0, &Step::SetBack(5 * hour / 2));
        comparison.sweep_rows();
        let Reply::Granted(next) = comparison.run(0, &acquire(0, 10)) else { panic!("it is free") };
        assert!(next.tokens.first > grant.tokens.last, "{next:?} after {grant:?}");
    });
}

#[test]
fn unused_rows_are_swept_and_used_ones_are_kept() {
    with_comparison(|comparison| {
        comparison.run(0, &acquire(0, 1));
        let acquisition = Acquisition { client: client_id(0), sequence: 1 };
        let release = Release { tombstone: Duration::from_secs(60), ..Release::now(acquisition) };
        assert_eq!(comparison.run(0, &Command::Release(release)), Reply::Released);
        assert_eq!(comparison.count_rows(), 2);
        comparison.step(0, &Step::Pass(3_610_000));
        comparison.sweep_rows();
        // The tombstone has gone, and the row is looked at again once its token need not be kept.
        assert_eq!(comparison.count_rows(), 1);
        comparison.step(0, &Step::Pass(3_700_000));
        comparison.sweep_rows();
        assert_eq!(comparison.count_rows(), 0);
        comparison.run(0, &acquire(0, 2));
        comparison.step(0, &Step::Pass(5_000));
        comparison.sweep_rows();
        assert_eq!(comparison.count_rows(), 1);
    });
}

#[test]
fn sweep_goes_on_while_there_is_more_and_passes_over_rows_that_it_cannot_have() {
    let mut harness = Harness::new();
    let resources = ["a", "b"].map(|name| Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() });
    let mut comparison = Comparison::new(&mut harness, &resources);
    (0..2).for_each(|at| drop(comparison.run(at, &acquire(0, at as u64))));
    let leased = |comparison: &Comparison<'_>, name: &str| {
        let sql = format!("SELECT count(*) FROM leasehold.resource WHERE name = '{name}' AND leases > 0");
        comparison.column(&sql)
    };
    comparison.sql(
        "UPDATE leasehold.clock SET now = now + 7200000000;
        INSERT INTO leasehold.resource (name, kind, visit, remember_until)
            SELECT 'old ' || n, 'mutex', 1, 1 FROM generate_series(1, 1700) AS n;
        INSERT INTO leasehold.resource (name, kind, visit, leases, next_expiry) VALUES ('c', 'of a newer version', 0, 1, 0);
        INSERT INTO leasehold.mail (client, message, at) VALUES ('x', '', 0)",
    );
    let kept = comparison.keep_row("a");
    comparison.sweep_in_store();
    assert_eq!(leased(&comparison, "a"), 1);
    assert_eq!(comparison.column("SELECT count(*) FROM leasehold.resource WHERE name LIKE 'old %'"), 0);
    assert_eq!(leased(&comparison, "b"), 0);
    assert_eq!(leased(&comparison, "c"), 1);
    assert_eq!(comparison.column("SELECT count(*) FROM leasehold.mail"), 0);
    drop(kept);
    comparison.sweep_in_store();
    assert_eq!(leased(&comparison, "a"), 0);
}

#[test]
fn rows_that_contradict_each_other_fail_their_lock_only() {
    let mut harness = Harness::new();
    let resources = ["a", "b"].map(|name| Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() });
    let mut comparison = Comparison::new(&mut harness, &resources);
    (0..2).for_each(|at| drop(comparison.run(at, &acquire(0, at as u64))));
    comparison.sql("UPDATE leasehold.resource SET in_use = 255, visit = 0 WHERE name = 'a'");
    comparison.sql("UPDATE leasehold.clock SET now = now + 7200000000");
    // Until its next visit it is passed over, and the other is swept.
    comparison.sweep_in_store();
    let leased =
        |name: &str| format!("SELECT count(*) FROM leasehold.resource WHERE name = '{name}' AND leases > 0");
    assert_eq!((comparison.column(&leased("a")), comparison.column(&leased("b"))), (1, 0));
    let release = Command::Release(Release::now(Acquisition { client: client_id(0), sequence: 0 }));
    for command in [&release, &acquire(1, 9)] {
        let refused = comparison.call(&resources[0], command).unwrap_err();
        assert!(
            refused.message.contains("contradict each other") && refused.failure.is_refusal(),
            "{refused:?}"
        );
    }
    assert!(matches!(comparison.call(&resources[1], &acquire(1, 8)).unwrap().reply, Reply::Granted(_)));
    assert_eq!(comparison.list(), resources);
}

#[test]
fn set_of_many_new_locks_is_acquired_at_once() {
    let mut harness = Harness::new();
    let resource =
        |number| Resource { kind: Kind::Mutex, name: Name::new(&format!("new {number}")).unwrap() };
    let resources: Vec<_> = (0..150).map(resource).collect();
    let attempt = |sequence| Acquire {
        wait: None,
        ..Acquire::exclusive(Acquisition { client: client_id(0), sequence }, Duration::from_secs(10))
    };
    let attempts: Vec<_> = (0..150).map(|sequence| Arc::new(attempt(sequence))).collect();
    Comparison::new(&mut harness, &resources).run_all(&attempts);
}

#[test]
fn transactions_that_look_for_the_same_absent_client_do_not_take_each_other_for_it() {
    let harness = Harness::new();
    assert_eq!(harness.look_twice(ClientId::new(77 << 64)), [false, false]);
    assert_eq!(harness.look_twice(client_id(0)), [true, true]);
}

#[test]
fn commands_of_a_queue_take_as_many_flights_with_a_thousand_waiters_as_with_one() {
    with_comparison(|comparison| {
        comparison.run(0, &acquire(0, 1));
        let mut costs = Vec::new();
        for number in 2..1_003 {
            let next = acquire(u128::from(number % 4), number);
            let cost = comparison.cost(|comparison| drop(comparison.run(0, &next)));
            costs.push(cost);
        }
        // The first attempt also learns that the lock is contended.
        assert!(costs[1..].iter().all(|cost| *cost == costs[1]), "{costs:?}");
        let cost_of_many = comparison.cost(|comparison| {
            assert_eq!(comparison.run(0, &release(0, 1)), Reply::Released);
        });
        for number in 2..1_001 {
            comparison.run(0, &release(u128::from(number % 4), number));
        }
        let cost_of_few = comparison.cost(|comparison| {
            assert_eq!(comparison.run(0, &release(1, 1_001)), Reply::Released);
        });
        assert_eq!(cost_of_many, cost_of_few);
    });
}

#[tokio::test]
async fn attempt_that_waits_for_its_turn_in_vain_asks_again_while_others_get_answers() {
    let url = PostgresUrl::of("postgres://a@localhost/b");
    let pool = Pool::new(Dialer::new(&url).unwrap(), settings("on"), false, 1, any_server());
    let soon = || Instant::now() + Duration::from_millis(10);
    let _in_use = pool.permit(Class::Attempt, soon()).await.unwrap();
    let refused = async || pool.permit(Class::Attempt, soon()).await.err().map(|error| error.failure);
    assert_eq!(refused().await, Some(Failure::NotSent));
    pool.note_answer();
    assert_eq!(refused().await, Some(Failure::Busy));
    // A renewal has a connection of its own, and others wait for none of each other's.
    let _renewal = pool.permit(Class::RenewOne, soon()).await.unwrap();
    assert!(pool.permit(Class::RenewOne, soon()).await.is_err());
    for class in [Class::RenewBatch, Class::ReadPushes] {
        pool.permit(class, soon()).await.unwrap();
    }
    // While a renewal does not get an answer, others go on.
    let _renewals = pool.permit(Class::RenewBatch, soon()).await.unwrap();
    pool.permit(Class::RenewBatch, soon()).await.unwrap();
}

#[test]
fn full_queue_of_notifications_does_not_fail_a_release() {
    with_comparison(|comparison| {
        comparison.run(0, &acquire(0, 1));
        comparison.run(0, &acquire(1, 1));
        comparison.fail_next_notification();
        let release = release_of(Acquisition { client: client_id(0), sequence: 1 });
        assert_eq!(comparison.run_unnotified(0, &release), Reply::Released);
        // It looks again, and has it.
        assert!(matches!(comparison.run(0, &acquire(1, 1)), Reply::Granted(_)));
    });
}

#[test]
fn no_command_reads_a_whole_table_however_small_it_was_when_it_was_planned() {
    let harness = Harness::new();
    let sql = Sql::new("leasehold", None);
    let acquisition = Acquisition { client: client_id(0), sequence: 1 };
    let queries = [
        Query::Lease(acquisition),
        Query::Expiring(WINDOW),
        Query::Waiter(acquisition),
        Query::Ready(WINDOW),
        Query::Deadlines(WINDOW),
        Query::OfClient(client_id(0), WINDOW),
        Query::CountOf(client_id(0)),
        Query::ReadyClients,
        Query::Tombstone(acquisition),
    ];
    let commands =
        [&sql.acquire, &sql.release, &sql.renew, &sql.lock, &sql.peek, &sql.put_resource, &sql.remove_waiter];
    let commands = commands.into_iter().chain(queries.iter().map(|query| sql.of(query)));
    for statement in commands.chain([&sql.due, &sql.sweep]) {
        let plan = harness.plan(statement.as_str());
        assert!(!plan.contains("Seq Scan"), "{statement:?}\n{plan}");
    }
    // A list reads all rows in their own order: by an index each of a million would be a read of its own.
    assert!(harness.plan(sql.list.as_str()).contains("Seq Scan"));
    // The check sees one.
    assert!(harness.plan("SELECT metadata FROM leasehold.clock, leasehold.resource").contains("Seq Scan"));
}
