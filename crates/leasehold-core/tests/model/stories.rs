//! Single stories.

use leasehold_core::{PushKind, Refusal};

use super::*;

#[test]
fn a_release_grants_to_the_head_for_a_claim_window_and_tells_the_next_that_it_is_next() {
    let mut world = World::new();
    for client in 0..3 {
        world.run(&acquire(id(client, 0), 1, 1, true));
    }
    assert_eq!(world.run(&release(id(0, 0))), Reply::Released);
    let [granted, next] = &world.pushes[..] else { panic!("{:?}", world.pushes) };
    assert!(matches!(granted.kind, PushKind::Granted(grant) if grant.valid_for == Duration::from_secs(3)));
    assert_eq!(granted.to(), ClientId::new(1));
    assert!(matches!(next.kind, PushKind::Next(head) if head.repoll_at == START + Duration::from_secs(3)));
    assert_eq!(next.to(), ClientId::new(2));
}

#[test]
fn a_holder_with_tokens_set_aside_is_told_once_that_it_is_wanted_and_by_each_renewal() {
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
    assert!(world.pushes.is_empty(), "it knows: {:?}", world.pushes);
    assert!(matches!(world.run(&renew(id(0, 0))), Reply::Renewed { contended: true, .. }));
    world.run(&release(id(0, 0)));
    world.run(&release(id(1, 0)));
    world.pushes.clear();
    world.run(&acquire(id(1, 1), 1, 1, true));
    assert!(world.pushes.is_empty(), "without tokens nothing is handed on: {:?}", world.pushes);
}

#[test]
fn a_frozen_client_costs_the_queue_one_claim_window_however_many_entries_it_has() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, true));
    for sequence in 0..5 {
        world.run(&acquire(id(1, sequence), 1, 1, true));
    }
    world.run(&acquire(id(2, 0), 1, 1, true));
    world.run(&release(id(0, 0)));
    world.pass(Duration::from_secs(3));
    let Reply::Granted(_) = world.run(&acquire(id(2, 0), 1, 1, true)) else { panic!("{:?}", world.view()) };
    // Heard from again, it is the head with all that it has left.
    world.run(&acquire(id(1, 1), 1, 1, true));
    assert!(world.view().waiters.iter().all(|waiter| !waiter.skipped));
}

#[test]
fn an_absent_waiter_keeps_its_place_and_delays_nobody() {
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
    assert_eq!(world.view().holders[0].acquisition, id(1, 0), "it kept its place before client 3");
}

#[test]
fn a_waiter_that_asks_is_answered_although_no_push_would_reach_it() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, true));
    world.run(&acquire(id(1, 0), 1, 1, true));
    world.absent.push(ClientId::new(1));
    world.run(&release(id(0, 0)));
    assert!(matches!(world.run(&acquire(id(1, 0), 1, 1, true)), Reply::Granted(_)));
}

#[test]
fn a_delayed_acquire_that_arrives_after_its_release_takes_nothing() {
    let mut world = World::new();
    let cancel = Command::Release(Release {
        acquisition: id(0, 0),
        min_hold: Duration::ZERO,
        tombstone: Duration::from_secs(60),
    });
    assert_eq!(world.run(&cancel), Reply::NotHeld);
    assert_eq!(world.run(&acquire(id(0, 0), 1, 1, true)), Reply::Cancelled);
    assert!(world.view().holders.is_empty());
}

#[test]
fn a_holder_that_takes_less_lets_those_behind_it_in_and_keeps_its_token() {
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
    assert!(matches!(world.run(&replace(write, read, 9, 1, false)), Reply::Granted(_)), "it may be repeated");
}

#[test]
fn a_holder_that_waits_for_more_stands_before_everybody_and_gets_a_new_token() {
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
    assert!(matches!(pushed.kind, PushKind::Granted(new) if new.tokens.first > grant.tokens.first));
    assert_eq!(world.view().holders.len(), 1);
}

#[test]
fn what_is_to_take_the_place_of_a_lease_that_is_gone_is_refused() {
    let mut world = World::new();
    let (read, upgradable, write) = (id(0, 0), id(1, 0), id(1, 1));
    assert_eq!(world.run(&replace(upgradable, write, 9, 9, true)), Reply::Refused(Refusal::NotHeld));
    world.run(&acquire(read, 9, 1, false));
    world.run(&acquire(upgradable, 9, 5, false));
    world.run(&replace(upgradable, write, 9, 9, true));
    world.pushes.clear();
    world.run(&Command::ForceRelease);
    let told = world.pushes.iter().any(|push| push.acquisition == write && push.kind == PushKind::Revoked);
    assert!(told && world.view().holders.is_empty() && world.view().waiters.is_empty());
    assert_eq!(world.run(&replace(upgradable, write, 9, 9, true)), Reply::Refused(Refusal::NotHeld));
}

#[test]
fn two_that_hold_a_little_can_t_wait_for_each_other_to_take_more() {
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
fn an_expired_lease_can_t_be_renewed_although_nobody_took_it() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, false));
    world.pass(TTL);
    assert_eq!(world.run(&renew(id(0, 0))), Reply::NotHeld);
}

#[test]
fn a_release_with_a_least_time_keeps_everybody_out_until_then_and_tells_the_head() {
    let mut world = World::new();
    world.run(&acquire(id(0, 0), 1, 1, false));
    world.run(&acquire(id(1, 0), 1, 1, true));
    world.pass(Duration::from_secs(1));
    let keep =
        Release { acquisition: id(0, 0), min_hold: Duration::from_secs(25), tombstone: Duration::ZERO };
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
fn a_word_from_a_client_that_can_t_be_pushed_to_brings_its_entries_back_though_they_may_be_passed_over_again()
{
    let mut world = World::new();
    let (holder, early, held, late) = (id(2, 5), id(0, 4), id(0, 1), id(0, 0));
    assert!(matches!(world.run(&acquire(holder, 3, 3, false)), Reply::Granted(_)));
    assert!(matches!(world.run(&acquire(early, 3, 1, true)), Reply::Queued(_)));
    world.absent.push(ClientId::new(0));
    world.run(&release(holder));
    assert!(world.view().waiters[0].skipped);
    // Its own answer reaches it, so what it asks for now it gets.
    assert!(matches!(world.run(&acquire(held, 3, 3, false)), Reply::Granted(_)));
    for _ in 0..2 {
        assert!(matches!(world.run(&acquire(late, 3, 1, true)), Reply::Queued(_)));
        let view = world.view();
        assert!(!view.waiters[0].skipped, "nothing fits yet, so nobody asked whether it is there");
        assert_eq!((view.waiters[0].acquisition, view.waiters[1].acquisition), (early, late));
    }
}
