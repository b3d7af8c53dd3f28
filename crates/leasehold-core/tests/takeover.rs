//! How soon a lock goes on after its holder and any of those who wait are gone: attempts against the model, in virtual time.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_core::model::{CLAIM_WINDOW, Table, Turn, apply};
use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, ClientId, Command, LocalTime, Now, Outcome, Patience, Push, Renew,
    Reply, StoreTime, WaitFor,
};
use proptest::prelude::*;

const START: u64 = 1_700_000_000_000_000;
const HOLDER: u128 = 1_000_000;

/// What becomes of a waiter when the holder dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    /// It is gone, and its connection too.
    Dead,
    /// It could be pushed to, but does nothing any more.
    Frozen,
    Live,
}

/// One lock, its waiters in the order of the queue, and one clock for all.
struct World {
    table: Table,
    now: u64,
    waiters: BTreeMap<u128, (Fate, AcquireMachine)>,
    commands: u64,
}

impl World {
    fn new() -> Self {
        Self { table: Table::new(), now: START, waiters: BTreeMap::new(), commands: 0 }
    }

    fn run(&mut self, command: &Command) -> leasehold_core::Answer {
        let mut pushes = Vec::new();
        let waiters = &self.waiters;
        let mut is_there =
            |client: ClientId| waiters.get(&client.get()).is_none_or(|(fate, _)| *fate != Fate::Dead);
        let now = Now::same(StoreTime::from_micros(self.now));
        let turn = Turn { now, is_there: &mut is_there, pushes: &mut pushes };
        let Ok(answer) = apply(&mut self.table, turn, command);
        self.commands += 1;
        for push in pushes {
            self.deliver(&push);
        }
        answer
    }

    fn deliver(&mut self, push: &Push) {
        let now = LocalTime::from_micros(self.now);
        if let Some((Fate::Live, machine)) = self.waiters.get_mut(&push.to().get()) {
            machine.handle_push(now, push);
        }
    }

    fn hold(&mut self, ttl: Duration) {
        let granted = self.run(&Command::from(Acquire::exclusive(holder(), ttl)));
        assert!(matches!(granted.reply, Reply::Granted(_)));
    }

    fn enqueue(&mut self, client: u128, ttl: Duration, look_again: Duration) {
        let acquisition = Acquisition { client: ClientId::new(client), sequence: 1 };
        let wait = Some(WaitFor { entry_ttl: Duration::from_secs(80), max_queue: 1_000 });
        let command = Acquire { wait, ..Acquire::exclusive(acquisition, ttl) };
        let patience = Patience { deadline: LocalTime::NEVER, look_again, confirms_pushes: false };
        let machine = AcquireMachine::new(command, Some(patience), LocalTime::from_micros(self.now));
        self.waiters.insert(client, (Fate::Live, machine));
        self.ask(client);
    }

    /// Sends what this waiter has to send, if it has.
    fn ask(&mut self, client: u128) {
        let now = LocalTime::from_micros(self.now);
        let Some((Fate::Live, machine)) = self.waiters.get_mut(&client) else { return };
        let Some(command) = machine.poll_transmit(now) else { return };
        let answer = self.run(&command);
        if let Some((_, machine)) = self.waiters.get_mut(&client) {
            machine.handle_answer(now, now, &answer);
        }
    }

    /// Runs until this time, or until a live waiter has the lock.
    fn run_until(&mut self, end: u64) -> Option<u128> {
        loop {
            let live = self.waiters.iter().filter(|(_, (fate, _))| *fate == Fate::Live);
            let mut next = None;
            for (client, (_, machine)) in live {
                if let Some(Outcome::Granted { .. }) = machine.poll_outcome() {
                    return Some(*client);
                }
                let due = machine.poll_timeout().map_or(u64::MAX, LocalTime::as_micros);
                next = next.min(Some((due, *client))).or(Some((due, *client)));
            }
            let Some((due, client)) = next.filter(|(due, _)| *due <= end) else {
                self.now = end;
                return None;
            };
            self.now = self.now.max(due);
            self.ask(client);
        }
    }

    /// The holder renews at a third of its ttl, for this long, and everybody else waits.
    fn hold_for(&mut self, span: Duration, ttl: Duration) {
        let end = self.now + micros(span);
        while self.now < end {
            let next = (self.now + micros(ttl / 3)).min(end);
            assert_eq!(self.run_until(next), None, "a held lock was granted");
            let renewed = self.run(&Command::Renew(Renew { acquisition: holder(), ttl, reserve: 0 }));
            assert!(matches!(renewed.reply, Reply::Renewed { .. }));
        }
    }
}

fn holder() -> Acquisition {
    Acquisition { client: ClientId::new(HOLDER), sequence: 1 }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap()
}

/// What is promised, from the holder's last sign of life: docs/guarantees.md.
fn bound(ttl: Duration, fates: &[Fate]) -> Duration {
    let before = fates.iter().take_while(|fate| **fate != Fate::Live);
    let frozen = before.filter(|fate| **fate == Fate::Frozen).count();
    ttl + (CLAIM_WINDOW + Duration::from_secs(2)) * u32::try_from(1 + frozen).unwrap()
}

/// How long it takes until a live waiter has the lock.
fn takeover(fates: &[Fate], spread: u32, ttl: Duration, held: Duration, look_again: Duration) -> Duration {
    let mut world = World::new();
    world.hold(ttl);
    for place in 0..u32::try_from(fates.len()).unwrap() {
        // In the order of the queue, and each with low bits of its own.
        let client = (u128::from(place) << 32) + u128::from(spread.rotate_left(5 * place));
        world.enqueue(client, ttl, look_again);
        world.run_until(world.now + 20_000);
        world.run(&Command::Renew(Renew { acquisition: holder(), ttl, reserve: 0 }));
    }
    world.hold_for(held, ttl);
    for ((fate, _), next) in world.waiters.values_mut().zip(fates) {
        *fate = *next;
    }
    let died_at = world.now;
    let limit = died_at + micros(Duration::from_secs(600));
    world.run_until(limit).expect("the lock was never granted again");
    Duration::from_micros(world.now - died_at)
}

fn fates(longest: usize) -> impl Strategy<Value = Vec<Fate>> {
    let gone = prop_oneof![3 => Just(Fate::Dead), 1 => Just(Fate::Frozen)];
    let any = prop_oneof![4 => Just(Fate::Dead), 1 => Just(Fate::Frozen), 1 => Just(Fate::Live)];
    let tail = proptest::collection::vec(any, 0..4);
    (proptest::collection::vec(gone, 0..longest), tail).prop_map(|(mut fates, tail)| {
        fates.push(Fate::Live);
        fates.extend(tail);
        fates
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn first_live_waiter_is_granted_within_the_bound(
        fates in fates(30),
        spread in any::<u32>(),
        ttl_ms in prop_oneof![100..5_000_u64, 5_000..60_000_u64],
        held_ms in 0..90_000_u64,
        look_again in prop_oneof![Just(Duration::from_secs(25)), Just(Duration::from_secs(2))],
    ) {
        let ttl = Duration::from_millis(ttl_ms);
        let took = takeover(&fates, spread, ttl, Duration::from_millis(held_ms), look_again);
        let bound = bound(ttl, &fates);
        prop_assert!(took <= bound, "it took {took:?}, the bound is {bound:?}");
    }
}

#[test]
fn last_of_two_hundred_waiters_is_granted_within_the_bound() {
    let mut fates = vec![Fate::Dead; 199];
    fates.push(Fate::Live);
    for held in (60..90).step_by(4).map(Duration::from_secs) {
        let ttl = Duration::from_secs(10);
        let took = takeover(&fates, 0x1234_5678, ttl, held, Duration::from_secs(25));
        assert!(took <= bound(ttl, &fates), "it took {took:?}, held for {held:?}");
    }
}

#[test]
fn a_thousand_waiting_clients_send_fewer_than_fifty_commands_a_second() {
    let mut world = World::new();
    let ttl = Duration::from_secs(10);
    world.hold(ttl);
    for client in 0..1_000_u32 {
        let id = (u128::from(client) << 32) + u128::from(client.wrapping_mul(2_654_435_761));
        world.enqueue(id, ttl, Duration::from_secs(25));
    }
    world.hold_for(Duration::from_secs(60), ttl);
    let before = world.commands;
    world.hold_for(Duration::from_secs(100), ttl);
    let per_second = (world.commands - before) / 100;
    assert!(per_second < 50, "{per_second} commands a second");
}
