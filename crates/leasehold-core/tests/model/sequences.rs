//! Single command sequences.

use leasehold_core::{Refusal, ReleaseIf};

use super::*;

#[test]
fn release_grants_to_the_head_for_a_claim_window_and_notifies_the_next() {
    let mut world = World::new();
    for client in 0..3 {
        world.run(&acquire(id(client, 0), 1, 1, true));
    }
    assert_eq!(world.run(&release(id(0, 0))), Reply::Released);
    let [granted, next] = &world.pushes[..] else { panic!("{:?}", world.pushes) };
    assert!(matches!(granted.kind, PushKind::Granted(grant, _) if grant.valid_for == Duration::from_secs(3)));
    assert_eq!(granted.inbox, ClientId::new(1));
    assert!(matches!(next.kind, PushKind::Next(head) if head.repoll_at == START + Duration::from_secs(3)));
    assert_eq!(next.inbox, ClientId::new(2));
}

#[test]
fn contention_is_pushed_once_and_reported_by_each_renewal() {
    let mut world = World::new();
    let Command::Acquire(plain) = acquire(id(0, 0), 1, 1, true) else { unreachable!() };
    world.run(&Command::from(Acquire { reserve: 8, ..Acquire::clone(&plain) }));
    assert!(matches!(world.run(&renew(id(0, 0))), Reply::Renewed { contended: false, .. }));
    world.run(&acquire(id(1, 0), 1, 1, true));
    assert!(
        matches!(world.pushes[..], [Push { acquisition, kind: PushKind::Contended, .. }] if acquisition == id(0, 0))
    );
    world.pushes.clear();
    world.run(&acquire(id(2, 0), 1, 1, true));
    assert!(world.pushes.is_empty(), "the holder knows already: {:?}", world.pushes);
    assert!(matches!(world.run(&renew(id(0, 0))), Reply::Renewed { contended: true, .. }));
    world.run(&release(id(0, 0)));
    world.run(&release(id(1, 0)));
    world.pushes.clear();
    world.run(&acquire(id(1, 1), 1, 1, true));
    assert!(world.pushes.is_empty(), "a lease without reserved tokens is not handed off: {:?}", world.pushes);
}

#[test]
fn frozen_client_delays_the_queue_by_one_claim_window() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, true));
    for sequence in 0..5 {
        world.run(&acquire(id(1, sequence), 1, 1, true));
    }
    world.run(&acquire(id(2, 0), 1, 1, true));
    world.run(&release(id(0, 0)));
    world.pass(Duration::from_secs(3));
    let Reply::Granted(_) = world.run(&acquire(id(2, 0), 1, 1, true)) else { panic!("{:?}", world.view()) };
    // Reachable again, all of its remaining entries return to the head.
    world.run(&acquire(id(1, 1), 1, 1, true));
    assert!(world.view().waiters.iter().all(|waiter| !waiter.skipped));
}

#[test]
fn entry_of_the_queue_ends_exactly_at_its_deadline() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, true));
    world.run(&acquire(id(1, 0), 1, 1, true));
    for _ in 0..4 {
        assert_eq!(world.view().waiters.len(), 1);
        world.pass(ENTRY_TTL / 4);
        assert!(matches!(world.run(&renew(id(0, 0))), Reply::Renewed { .. }));
    }
    assert!(world.view().waiters.is_empty(), "{:?}", world.view());
}

#[test]
fn absent_waiter_keeps_its_place_and_delays_no_other() {
    let mut world = World::new();
    for client in 0..3 {
        world.run(&acquire(id(client, 0), 1, 1, true));
    }
    world.absent.push(ClientId::new(1));
    world.run(&release(id(0, 0)));
    assert_eq!(world.view().holders[0].acquisition, id(2, 0));
    world.run(&acquire(id(3, 0), 1, 1, true));
    world.absent.clear();
    world.run(&acquire(id(1, 0), 1, 1, true));
    world.run(&release(id(2, 0)));
    assert_eq!(world.view().holders[0].acquisition, id(1, 0), "client 1 kept its position before client 3");
}

/// A writer behind a reader, or a large request where less is free.
#[test]
fn absent_waiter_that_does_not_fit_delays_no_attempt_that_does() {
    for is_queued in [true, false] {
        let mut world = World::new();
        world.run(&acquire(id(0, 0), 9, 1, false));
        let writer = acquire(id(1, 0), 9, 9, true);
        assert!(matches!(world.run(&writer), Reply::Queued(_)));
        let reader = acquire(id(2, 0), 9, 1, is_queued);
        if is_queued {
            assert!(matches!(world.run(&reader), Reply::Queued(_)), "behind the writer");
        }
        world.absent.push(ClientId::new(1));
        assert!(matches!(world.run(&reader), Reply::Granted(_)));
        // It kept its place.
        world.absent.clear();
        assert!(matches!(world.run(&writer), Reply::Queued(_)));
        assert_eq!(world.run(&acquire(id(3, 0), 9, 1, false)), Reply::Busy);
    }
}

#[test]
fn unreachable_waiter_that_asks_is_answered() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, true));
    world.run(&acquire(id(1, 0), 1, 1, true));
    world.absent.push(ClientId::new(1));
    world.run(&release(id(0, 0)));
    assert!(matches!(world.run(&acquire(id(1, 0), 1, 1, true)), Reply::Granted(_)));
}

#[test]
fn acquire_after_its_release_is_cancelled() {
    let mut world = World::new();
    let cancel = Command::Release(Release { tombstone: Duration::from_secs(60), ..Release::now(id(0, 0)) });
    assert_eq!(world.run(&cancel), Reply::NotHeld);
    assert_eq!(world.run(&acquire(id(0, 0), 1, 1, true)), Reply::Cancelled);
    assert!(world.view().holders.is_empty());
}

#[test]
fn downgrade_admits_waiters_and_keeps_the_token() {
    let mut world = World::new();
    let (write, read) = (id(0, 0), id(0, 1));
    let Reply::Granted(grant) = world.run(&acquire(write, 9, 9, false)) else { panic!() };
    for client in 1..4 {
        world.run(&acquire(id(client, 0), 9, 1, true));
    }
    let Reply::Granted(after) = world.run(&replace(write, read, 9, 1, false)) else { panic!() };
    assert_eq!(after.tokens.first, grant.tokens.first);
    assert_eq!((world.view().in_use, world.view().holders.len()), (4, 4));
    assert_eq!(world.run(&renew(write)), Reply::NotHeld);
    assert!(
        matches!(world.run(&replace(write, read, 9, 1, false)), Reply::Granted(_)),
        "a repeat is granted"
    );
}

#[test]
fn upgrade_goes_first_and_gets_a_new_token() {
    let mut world = World::new();
    let (read, upgradable, write) = (id(0, 0), id(1, 0), id(1, 1));
    world.run(&acquire(read, 9, 1, false));
    let Reply::Granted(grant) = world.run(&acquire(upgradable, 9, 5, false)) else { panic!() };
    world.run(&acquire(id(2, 0), 9, 9, true));
    assert!(
        matches!(world.run(&replace(upgradable, write, 9, 9, true)), Reply::Queued(queued) if queued.is_head)
    );
    assert_eq!(world.view().waiters[0].acquisition, write);
    world.pushes.clear();
    world.run(&release(read));
    let [pushed, next] = &world.pushes[..] else { panic!("{:?}", world.pushes) };
    assert!(pushed.acquisition == write && next.acquisition == id(2, 0));
    assert!(matches!(pushed.kind, PushKind::Granted(new, _) if new.tokens.first > grant.tokens.first));
    assert_eq!(world.view().holders.len(), 1);
}

#[test]
fn replacing_a_lost_lease_is_refused() {
    let mut world = World::new();
    let (read, upgradable, write) = (id(0, 0), id(1, 0), id(1, 1));
    assert_eq!(world.run(&replace(upgradable, write, 9, 9, true)), Reply::Refused(Refusal::NotHeld));
    world.run(&acquire(read, 9, 1, false));
    world.run(&acquire(upgradable, 9, 5, false));
    world.run(&replace(upgradable, write, 9, 9, true));
    world.pushes.clear();
    world.run(&Command::ForceRelease);
    let is_revoked =
        world.pushes.iter().any(|push| push.acquisition == write && push.kind == PushKind::Revoked);
    assert!(is_revoked && world.view().holders.is_empty() && world.view().waiters.is_empty());
    assert_eq!(world.run(&replace(upgradable, write, 9, 9, true)), Reply::Refused(Refusal::NotHeld));
}

#[test]
fn two_light_holders_cannot_deadlock_by_upgrading() {
    let mut world = World::new();
    for client in 0..2 {
        world.run(&acquire(id(client, 0), 9, 1, false));
    }
    let refused = Reply::Refused(Refusal::HeavierReentry { held: 1 });
    assert_eq!(world.run(&replace(id(0, 0), id(0, 1), 9, 9, true)), refused);
    assert_eq!(world.run(&replace(id(0, 0), id(0, 1), 9, 9, false)), Reply::Busy);
    assert_eq!(world.view().holders.len(), 2);
}

#[test]
fn expired_lease_cannot_be_renewed() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, false));
    world.pass(TTL);
    assert_eq!(world.run(&renew(id(0, 0))), Reply::NotHeld);
}

#[test]
fn release_with_min_hold_retains_the_lock_and_notifies_the_head() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, false));
    world.run(&acquire(id(1, 0), 1, 1, true));
    world.pass(Duration::from_secs(1));
    let keep = Release { min_hold: Duration::from_secs(25), ..Release::now(id(0, 0)) };
    assert_eq!(world.run(&Command::Release(keep)), Reply::Released);
    assert!(matches!(world.pushes[..], [Push { kind: PushKind::Next(head), .. }]
        if head.repoll_at == START + Duration::from_secs(25)));
    assert_eq!(world.run(&renew(id(0, 0))), Reply::NotHeld);
    world.pass(Duration::from_secs(23));
    assert!(matches!(world.run(&acquire(id(1, 0), 1, 1, true)), Reply::Queued(_)));
    world.pass(Duration::from_secs(1));
    assert!(matches!(world.run(&acquire(id(1, 0), 1, 1, true)), Reply::Granted(_)));
}

#[test]
fn command_from_an_unreachable_client_unparks_its_entries() {
    let mut world = World::new();
    let (holder, early, held, late) = (id(2, 5), id(0, 4), id(0, 1), id(0, 0));
    assert!(matches!(world.run(&acquire(holder, 3, 3, false)), Reply::Granted(_)));
    assert!(matches!(world.run(&acquire(early, 3, 1, true)), Reply::Queued(_)));
    world.absent.push(ClientId::new(0));
    world.run(&release(holder));
    assert!(world.view().waiters[0].skipped);
    // The client receives the answer to its own request, so it can be granted.
    assert!(matches!(world.run(&acquire(held, 3, 3, false)), Reply::Granted(_)));
    for _ in 0..2 {
        assert!(matches!(world.run(&acquire(late, 3, 1, true)), Reply::Queued(_)));
        let view = world.view();
        assert!(!view.waiters[0].skipped, "no waiter fits, so reachability was not checked");
        assert_eq!((view.waiters[0].acquisition, view.waiters[1].acquisition), (early, late));
    }
}

/// The attempt, as this client makes it.
fn from_client(inbox: u128, attempt: Acquisition) -> Command {
    let Command::Acquire(any) = acquire(attempt, 1, 1, true) else { unreachable!("it is one") };
    Command::from(Acquire { inbox: Some(ClientId::new(inbox)), ..Acquire::clone(&any) })
}

fn release_if(inbox: u128, attempt: Acquisition) -> Command {
    Command::Release(Release {
        only_if: Some(ReleaseIf::SpeaksFor(ClientId::new(inbox))),
        ..Release::now(attempt)
    })
}

/// The command of a client that the caller has left comes late, and the client then releases what it takes for its own.
#[test]
fn lease_that_two_clients_have_told_of_is_released_by_none_of_them_on_condition() {
    let attempt = id(9, 0);
    for late in [1, 2] {
        let mut world = World::new();
        let Reply::Granted(grant) = world.run(&from_client(2, attempt)) else { panic!("it is free") };
        let Reply::Granted(repeated) = world.run(&from_client(late, attempt)) else {
            panic!("it is a repeat")
        };
        assert!(repeated.valid_for < grant.valid_for, "a repeat is marked");
        for inbox in [1, 2] {
            assert_eq!(world.run(&release_if(inbox, attempt)), Reply::NotHeld, "client {inbox}");
        }
        assert!(matches!(world.run(&renew(attempt)), Reply::Renewed { .. }));
        assert_eq!(world.run(&release(attempt)), Reply::Released);
    }
}

#[test]
fn grant_from_the_queue_belongs_to_the_client_that_first_asks_for_it() {
    for asks in [1, 2] {
        let (mut world, attempt) = (World::new(), id(9, 0));
        world.run(&acquire(id(0, 0), 1, 1, true));
        world.run(&from_client(1, attempt));
        world.run(&release(id(0, 0)));
        world.pushes.clear();
        let Reply::Granted(grant) = world.run(&from_client(asks, attempt)) else { panic!("it was granted") };
        let Command::Acquire(command) = from_client(asks, attempt) else { unreachable!("it is one") };
        assert_eq!(grant.valid_for, command.ttl, "it is claimed, and no repeat");
        assert_eq!(world.run(&release_if(3 - asks, attempt)), Reply::NotHeld);
        assert_eq!(world.run(&release_if(asks, attempt)), Reply::Released);
    }
}

/// A try elsewhere takes what was pushed to a client that waits.
#[test]
fn client_whose_grant_another_one_takes_is_told() {
    let (mut world, attempt) = (World::new(), id(9, 0));
    world.run(&acquire(id(0, 0), 1, 1, true));
    world.run(&from_client(1, attempt));
    world.run(&release(id(0, 0)));
    world.pushes.clear();
    let Command::Acquire(any) = from_client(2, attempt) else { unreachable!("it is one") };
    let tried = Command::from(Acquire { wait: None, ..Acquire::clone(&any) });
    assert!(matches!(world.run(&tried), Reply::Granted(_)));
    let is_notice = |push: &Push| push.inbox == ClientId::new(1) && push.kind == PushKind::Revoked;
    assert_eq!(world.pushes.iter().filter(|push| is_notice(push)).count(), 1, "{:?}", world.pushes);
    world.pushes.clear();
    world.run(&tried);
    assert_eq!(world.pushes, [], "it is told once");
}

/// The lease of a request has ended, and a late repeat was granted.
#[test]
fn renewal_and_release_of_one_lease_leave_the_next_one_of_its_attempt_alone() {
    let (mut world, attempt) = (World::new(), id(9, 0));
    let grant = |world: &mut World<_>| match world.run(&from_client(1, attempt)) {
        Reply::Granted(grant) => grant.tokens.first,
        other => panic!("it is free: {other:?}"),
    };
    let renewal = |token| Command::Renew(Renew { token: Some(token), ..Renew::to(attempt, TTL) });
    let end = |token| {
        let (only_if, tombstone) = (Some(ReleaseIf::HasToken(token)), TTL);
        Command::Release(Release { only_if, tombstone, ..Release::now(attempt) })
    };
    let first = grant(&mut world);
    assert!(matches!(world.run(&renewal(first)), Reply::Renewed { .. }));
    world.pass(TTL);
    assert_eq!(world.run(&renewal(first)), Reply::NotHeld);
    let second = grant(&mut world);
    assert!(second > first);
    assert_eq!(world.run(&renewal(first)), Reply::NotHeld);
    assert_eq!(world.run(&end(first)), Reply::NotHeld);
    // It has left no tombstone either.
    assert_eq!(grant(&mut world), second);
    assert!(matches!(world.run(&renewal(second)), Reply::Renewed { .. }));
    assert_eq!(world.run(&end(second)), Reply::Released);
    assert_eq!(world.run(&from_client(1, attempt)), Reply::Cancelled);
}

#[test]
fn client_that_a_waiter_moves_from_is_told_and_can_take_it_back() {
    let (mut world, attempt) = (World::new(), id(9, 0));
    world.run(&acquire(id(0, 0), 1, 1, true));
    world.run(&from_client(1, attempt));
    world.pushes.clear();
    world.run(&from_client(2, attempt));
    let is_notice = |push: &Push| push.inbox == ClientId::new(1) && push.kind == PushKind::Revoked;
    assert!(world.pushes.iter().any(is_notice), "{:?}", world.pushes);
    world.run(&from_client(1, attempt));
    assert_eq!(world.run(&release_if(2, attempt)), Reply::NotHeld);
    assert_eq!(world.run(&release(id(0, 0))), Reply::Released);
    let granted = |push: &Push| push.inbox == ClientId::new(1) && matches!(push.kind, PushKind::Granted(..));
    assert!(world.pushes.iter().any(granted), "{:?}", world.pushes);
}

/// The step that grants it has a message for the client before, too.
#[test]
fn grant_that_the_answer_reports_is_not_pushed_to_a_waiter_that_has_moved() {
    let (mut world, attempt) = (World::new(), id(9, 0));
    world.run(&acquire(id(0, 0), 1, 1, true));
    world.run(&from_client(1, attempt));
    world.pushes.clear();
    // The lease of the holder has expired, and no command has granted anything since.
    world.pass(Duration::from_secs(10));
    assert!(matches!(world.run(&from_client(2, attempt)), Reply::Granted(_)));
    let granted = |push: &Push| matches!(push.kind, PushKind::Granted(..));
    assert!(!world.pushes.iter().any(granted), "{:?}", world.pushes);
}
