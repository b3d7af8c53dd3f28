//! The promises of `acquire_all`: several resources in one step.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{CommandContext, Table, apply, apply_all};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Now, Push, Release, Reply, StoreTime, View, WaitFor,
};
use proptest::prelude::*;

const NOW: StoreTime = StoreTime::from_micros(1_700_000_000_000_000);

fn attempt(client: u128, sequence: u64) -> Acquire {
    Acquire::exclusive(Acquisition { client: ClientId::new(client), sequence }, Duration::from_secs(10))
}

/// Several resources, and the pushes about them.
struct World {
    tables: Vec<Table>,
    now: StoreTime,
    pushes: Vec<Push>,
}

impl World {
    fn of(count: usize) -> Self {
        Self { tables: vec![Table::new(); count], now: NOW, pushes: Vec::new() }
    }

    fn run(&mut self, at: usize, command: &Command) -> Reply {
        let context = CommandContext {
            now: Now::same(self.now),
            is_reachable: &mut |_| true,
            pushes: &mut self.pushes,
        };
        let Ok(Answer { reply, .. }) = apply(&mut self.tables[at], context, command);
        reply
    }

    fn take(&mut self, at: usize, acquire: Acquire) -> Reply {
        self.run(at, &acquire.into())
    }

    fn queue(&mut self, at: usize, acquire: Acquire) -> Reply {
        let wait = Some(WaitFor { entry_ttl: Duration::from_secs(30), max_queue: 10 });
        self.take(at, Acquire { wait, ..acquire })
    }

    fn end_lease(&mut self, at: usize, acquire: &Acquire, tombstone: Duration) -> Reply {
        let (acquisition, min_hold) = (acquire.acquisition, Duration::ZERO);
        self.run(at, &Command::Release(Release { min_hold, tombstone, ..Release::now(acquisition) }))
    }

    fn acquire_all(&mut self, acquire: &Acquire) -> Vec<Reply> {
        let acquire = Arc::new(acquire.clone());
        let mut steps: Vec<_> = self.tables.iter_mut().map(|table| (table, &acquire)).collect();
        let context = CommandContext {
            now: Now::same(self.now),
            is_reachable: &mut |_| true,
            pushes: &mut self.pushes,
        };
        let Ok(answers) = apply_all(context, &mut steps);
        answers.into_iter().map(|answer| answer.reply).collect()
    }

    fn view(&mut self, at: usize) -> View {
        let Reply::View(view) = self.run(at, &Command::Inspect) else { panic!("no view") };
        view
    }

    fn holds(&mut self, acquire: &Acquire) -> Vec<bool> {
        let count = self.tables.len();
        let is_held = |view: View| view.holders.iter().any(|held| held.acquisition == acquire.acquisition);
        (0..count).map(|at| is_held(self.view(at))).collect()
    }
}

fn is_granted(reply: &Reply) -> bool {
    matches!(reply, Reply::Granted(_))
}

#[test]
fn free_resources_are_granted_together_and_a_repeat_is_idempotent() {
    let mut world = World::of(3);
    let ours = attempt(1, 1);
    let first = world.acquire_all(&ours);
    assert!(first.iter().all(is_granted), "{first:?}");
    assert_eq!(world.acquire_all(&ours), first);
    assert_eq!(world.acquire_all(&attempt(2, 1)), [Reply::Busy, Reply::Busy, Reply::Busy]);
}

#[test]
fn tokens_rise_from_each_resource_to_the_next() {
    let mut world = World::of(3);
    let ahead = Acquire { reserve: 9, ..attempt(2, 1) };
    assert!(is_granted(&world.take(1, ahead.clone())));
    world.end_lease(1, &ahead, Duration::ZERO);
    let token = |reply: &Reply| match reply {
        Reply::Granted(grant) => grant.tokens.first.get() - NOW.as_micros(),
        other => panic!("{other:?}"),
    };
    let tokens: Vec<_> = world.acquire_all(&attempt(1, 1)).iter().map(token).collect();
    assert_eq!(tokens, [0, 10, 11]);
}

#[test]
fn first_busy_resource_rolls_back_all_without_pushes() {
    for taken in 0..3 {
        let mut world = World::of(3);
        assert!(is_granted(&world.take(taken, attempt(2, 1))));
        assert_eq!(world.acquire_all(&attempt(1, 1)), [Reply::Busy, Reply::Busy, Reply::Busy]);
        assert_eq!(world.holds(&attempt(1, 1)), [false; 3]);
        assert!(world.view(taken).waiters.is_empty() && world.pushes.is_empty());
    }
}

#[test]
fn acquire_all_does_not_overtake_waiters() {
    let mut world = World::of(2);
    let (holder, waiter) = (attempt(2, 1), attempt(3, 1));
    assert!(is_granted(&world.take(1, holder.clone())));
    assert!(matches!(world.queue(1, waiter.clone()), Reply::Queued(_)));
    world.end_lease(1, &holder, Duration::ZERO);
    assert_eq!(world.acquire_all(&attempt(1, 1)), [Reply::Busy, Reply::Busy]);
    assert_eq!(world.holds(&waiter), [false, true]);
}

#[test]
fn repeat_after_a_partial_release_acquires_nothing() {
    let mut world = World::of(3);
    let ours = attempt(1, 1);
    world.acquire_all(&ours);
    world.end_lease(1, &ours, Duration::from_secs(60));
    let replies = world.acquire_all(&ours);
    assert!(is_granted(&replies[0]), "{replies:?}");
    assert_eq!(replies[1..], [Reply::Cancelled, Reply::Busy]);
    assert_eq!(world.holds(&ours), [true, false, true]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_are_granted_or_none_is(
        commands in proptest::collection::vec((0..3_usize, 0..3_u128, 0..3_u64, 0..4_u8, 0..4_000_u64), 0..30),
    ) {
        let mut world = World::of(3);
        for (number, (at, client, sequence, what, pass)) in (100..).zip(commands) {
            world.now = world.now + Duration::from_millis(pass);
            let one = attempt(client, sequence);
            match what {
                0 => drop(world.take(at, one)),
                1 => drop(world.queue(at, one)),
                2 => drop(world.end_lease(at, &one, Duration::from_millis(pass))),
                _ => drop(world.acquire_all(&one)),
            }
            let ours = attempt(9, number);
            let replies = world.acquire_all(&ours);
            let count = replies.iter().filter(|reply| is_granted(reply)).count();
            let held = world.holds(&ours);
            prop_assert!(count == 0 || count == 3, "{:?}", replies);
            prop_assert_eq!(held, [count == 3; 3]);
            (0..3).for_each(|at| drop(world.end_lease(at, &ours, Duration::ZERO)));
        }
    }
}
