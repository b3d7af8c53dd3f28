//! Attempts for which another client speaks than that of their id.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Kind, Name, Release, ReleaseIf, Reply, Resource,
};
use leasehold_store::histories::{Step, client_id};

use super::comparison::SESSION;
use super::{acquire, permits, release, with_comparison, with_comparison_of};

/// The attempt of another client's id, which waits, from this client.
fn acquire_from(inbox: u128, client: u128, sequence: u64) -> Command {
    acquire_of(client_id(inbox), client, sequence)
}

fn acquire_of(inbox: ClientId, client: u128, sequence: u64) -> Command {
    let Command::Acquire(any) = acquire(client, sequence) else { unreachable!("it is one") };
    Command::from(Acquire { inbox: Some(inbox), metadata: Arc::from("moved"), ..(*any).clone() })
}

fn release_if(inbox: u128, client: u128, sequence: u64) -> Command {
    let acquisition = Acquisition { client: client_id(client), sequence };
    Command::Release(Release {
        only_if: Some(ReleaseIf::SpeaksFor(client_id(inbox))),
        ..Release::now(acquisition)
    })
}

#[test]
fn attempt_that_moves_from_a_client_that_is_gone_to_another_one_is_granted() {
    for kind in [Kind::Mutex, Kind::Semaphore] {
        with_comparison_of(kind, |comparison| {
            comparison.run(0, &acquire(0, 1));
            // The first client has two entries, and both are parked by the release.
            for sequence in 1..3 {
                comparison.run(0, &acquire(1, sequence));
            }
            comparison.run(0, &acquire(2, 1));
            comparison.step(0, &Step::Leave(1));
            assert_eq!(comparison.run(0, &release(0, 1)), Reply::Released);
            let parked = "SELECT count(*) FROM leasehold.waiter WHERE parked";
            assert_eq!(comparison.column(parked), 2);
            assert!(matches!(comparison.run(0, &acquire_from(3, 1, 1)), Reply::Queued(_)));
            assert_eq!(comparison.column(parked), 1);
            // The push goes to the third client, to which the lease belongs then.
            assert_eq!(comparison.run(0, &release(2, 1)), Reply::Released);
            let Reply::View(view) = comparison.run(0, &Command::Inspect) else { panic!("no view") };
            assert_eq!(view.holders.iter().map(|holder| &*holder.metadata).collect::<Vec<_>>(), ["moved"]);
            assert_eq!(comparison.run(0, &release_if(1, 1, 1)), Reply::NotHeld);
            assert_eq!(comparison.run(0, &release_if(3, 1, 1)), Reply::Released);
            assert!(matches!(comparison.run(0, &acquire(1, 2)), Reply::Granted(_)));
        });
    }
}

/// The second attempt passes over the first one, whose client is gone, and both are written by one transaction.
#[test]
fn attempt_whose_client_is_gone_is_parked_by_the_transaction_that_queues_it() {
    with_comparison_of(Kind::Semaphore, |comparison| {
        comparison.run(0, &permits(0, 1, 200, None));
        comparison.step(0, &Step::Leave(2));
        let Command::Acquire(any) = permits(1, 1, 203, None) else { unreachable!("it is one") };
        let waits = Acquire { inbox: Some(client_id(2)), ..(*any).clone() };
        comparison.run_together(0, &[Command::from(waits), permits(3, 1, 1, None)]);
        assert_eq!(comparison.column("SELECT count(*) FROM leasehold.waiter WHERE parked"), 1);
    });
}

/// A shared lease is in another table than the only one of a lock.
#[test]
fn only_the_client_of_the_first_answer_releases_a_lease_on_condition() {
    for kind in [Kind::Mutex, Kind::Semaphore] {
        with_comparison_of(kind, |comparison| {
            let from = |inbox, sequence| {
                let held = match kind {
                    Kind::Semaphore => permits(0, sequence, 1, None),
                    _ => acquire(0, sequence),
                };
                let Command::Acquire(any) = held else { unreachable!("it is one") };
                Command::from(Acquire { inbox: Some(client_id(inbox)), ..(*any).clone() })
            };
            let sequences = if kind == Kind::Semaphore { 1..4 } else { 1..2 };
            for sequence in sequences.clone() {
                assert!(matches!(comparison.run(0, &from(1, sequence)), Reply::Granted(_)));
                assert_eq!(comparison.run(0, &release_if(2, 0, sequence)), Reply::NotHeld);
                assert_eq!(comparison.run(0, &release_if(1, 0, sequence)), Reply::Released);
            }
            for sequence in sequences.map(|sequence| sequence + 10) {
                for inbox in [1, 2, 1] {
                    assert!(matches!(comparison.run(0, &from(inbox, sequence)), Reply::Granted(_)));
                }
                for inbox in [1, 2] {
                    assert_eq!(comparison.run(0, &release_if(inbox, 0, sequence)), Reply::NotHeld);
                }
                assert_eq!(comparison.run(0, &release(0, sequence)), Reply::Released);
            }
        });
    }
}

/// The first answer that tells of it claims it: no other client may have told of it.
#[test]
fn grant_from_the_queue_belongs_to_the_client_that_asks_for_it_first() {
    for asked_by in [2, 3] {
        with_comparison(|comparison| {
            comparison.run(0, &acquire(0, 1));
            comparison.run(0, &acquire_from(2, 1, 1));
            assert_eq!(comparison.run(0, &release(0, 1)), Reply::Released);
            let Reply::Granted(grant) = comparison.run(0, &acquire_from(asked_by, 1, 1)) else {
                panic!("no grant")
            };
            assert_eq!(grant.valid_for, Duration::from_secs(10));
            assert_eq!(comparison.run(0, &release_if(5 - asked_by, 1, 1)), Reply::NotHeld);
            assert_eq!(comparison.run(0, &release_if(asked_by, 1, 1)), Reply::Released);
        });
    }
}

/// The entry says no longer that its client has to look for its pushes.
#[test]
fn waiter_that_moves_from_a_client_that_polls_is_notified() {
    with_comparison(|comparison| {
        comparison.run(0, &acquire(0, 1));
        comparison.run(0, &acquire(1, 1));
        comparison.sql("UPDATE leasehold.waiter SET polls = true");
        // The client that it moves from finds that among its pushes.
        comparison.run_posting(0, &acquire_from(2, 1, 1), 1);
        // This push is compared with the model's.
        assert_eq!(comparison.run(0, &release(0, 1)), Reply::Released);
        assert_eq!(comparison.column("SELECT count(*) FROM leasehold.mail"), 1);
    });
}

/// A client that listens again says so of the attempts that it speaks for, of whatever id they are.
#[test]
fn repeat_from_a_client_that_listens_is_stored_as_such() {
    with_comparison(|comparison| {
        let polls = "SELECT count(*) FROM leasehold.waiter WHERE polls";
        comparison.run(0, &acquire(0, 1));
        comparison.run(0, &acquire_of(SESSION, 1, 1));
        comparison.sql("UPDATE leasehold.waiter SET polls = true");
        assert_eq!(comparison.column(polls), 1);
        comparison.run(0, &acquire_of(SESSION, 1, 1));
        assert_eq!(comparison.column(polls), 0);
    });
}

#[test]
fn attempt_from_another_client_takes_one_more_round_trip_when_it_moves_and_none_when_it_is_repeated() {
    with_comparison(|comparison| {
        comparison.run(0, &acquire(0, 1));
        comparison.run(0, &acquire(1, 1));
        let mut round_trips =
            |command: &Command| comparison.cost(|comparison| drop(comparison.run(0, command))).1;
        let usual = [round_trips(&acquire(2, 1)), round_trips(&acquire(2, 1))];
        // In the queue behind the first client, whose lease is not granted to another one meanwhile.
        assert_eq!([round_trips(&acquire_from(3, 4, 1)), round_trips(&acquire_from(3, 4, 1))], usual);
        assert_eq!(round_trips(&acquire_from(2, 4, 1)), usual[1] + 1);
        assert_eq!(round_trips(&release_if(2, 4, 1)), usual[1]);
    });
}

#[test]
fn stored_inbox_that_names_no_client_is_an_error() {
    with_comparison(|comparison| {
        let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
        comparison.run(0, &acquire(0, 1));
        comparison.run(0, &acquire(1, 1));
        for table in ["waiter", "resource"] {
            comparison.sql(&format!("UPDATE leasehold.{table} SET inbox = 'short'"));
            let refused = comparison.call(&resource, &acquire(1, 1)).unwrap_err();
            assert!(refused.message.contains("inbox"), "{}", refused.message);
            comparison.sql(&format!("UPDATE leasehold.{table} SET inbox = NULL"));
        }
        assert!(matches!(comparison.run(0, &acquire(1, 1)), Reply::Queued(_)));
    });
}
