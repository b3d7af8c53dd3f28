//! How soon a lock goes on after its holder and any of those who wait are gone: attempts against the model, in virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use leasehold_core::model::{CLAIM_WINDOW, CommandContext, Table, apply};
use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, ClientId, Command, LocalTime, Now, Outcome, Push, Release, Renew,
    Reply, SecretKey, StoreTime, WaitFor, WaitPolicy,
};
use proptest::prelude::*;

const START: u64 = 1_700_000_000_000_000;
/// Sorts behind all waiters.
const HOLDER: u128 = 1 << 100;

/// What becomes of a waiter when the holder dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    /// It is gone, and its connection too.
    Dead,
    /// It could be pushed to, but does nothing any more.
    Frozen,
    Live,
}

/// One place in the queue, and the host that it is on.
struct Waiter {
    fate: Fate,
    machine: AcquireMachine,
    /// How many microseconds slower than the store's its host's clock runs in a second; negative if it is faster.
    slow: i64,
}

impl Waiter {
    fn local(&self, time: u64) -> LocalTime {
        let passed = time - START;
        let differs = i64::try_from(passed / 1_000).unwrap() * self.slow / 1_000;
        LocalTime::from_micros(START.saturating_add_signed(i64::try_from(passed).unwrap() - differs))
    }

    /// When its clock shows this time.
    fn global(&self, local: LocalTime) -> u64 {
        let passed = local.as_micros().saturating_sub(START);
        let mut time = START + passed * 1_000_000 / 1_000_000_u64.saturating_add_signed(-self.slow);
        while self.local(time) < local {
            time += 1;
        }
        time
    }
}

/// A command on its way to the store.
struct Sent {
    arrives: u64,
    by: Acquisition,
    sent_at: LocalTime,
    command: Command,
}

/// One lock, and its waiters in the order of the queue.
struct World {
    table: Table,
    /// By the store's clock.
    now: u64,
    waiters: BTreeMap<Acquisition, Waiter>,
    /// In the order in which they arrive.
    sent: VecDeque<Sent>,
    /// How long a command is on its way. Answers and pushes are there at once.
    delay: Duration,
    commands: u64,
}

impl World {
    fn new(delay: Duration) -> Self {
        let (table, waiters, sent) = (Table::new(), BTreeMap::new(), VecDeque::new());
        Self { table, now: START, waiters, sent, delay, commands: 0 }
    }

    fn run(&mut self, command: &Command) -> leasehold_core::Answer {
        let mut pushes = Vec::new();
        let waiters = &self.waiters;
        let mut is_reachable = |client: ClientId| {
            let first = waiters.range(Acquisition { client, sequence: 0 }..).next();
            first.is_none_or(|(id, waiter)| id.client != client || waiter.fate != Fate::Dead)
        };
        let now = Now::same(StoreTime::from_micros(self.now));
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut pushes };
        let Ok(answer) = apply(&mut self.table, context, command);
        self.commands += 1;
        for push in pushes {
            self.deliver(&push);
        }
        answer
    }

    fn deliver(&mut self, push: &Push) {
        let Some(waiter) = self.waiters.get_mut(&push.acquisition) else { return };
        if waiter.fate == Fate::Live {
            let now = waiter.local(self.now);
            waiter.machine.handle_push(now, push);
        }
    }

    fn hold(&mut self, ttl: Duration) {
        let granted = self.run(&Command::from(Acquire::exclusive(holder(), ttl)));
        assert!(matches!(granted.reply, Reply::Granted(_)));
    }

    fn enqueue(&mut self, acquisition: Acquisition, slow: i64, ttl: Duration, repoll_interval: Duration) {
        let wait = Some(WaitFor { entry_ttl: Duration::from_secs(80), max_queue: 1_000 });
        let command = Acquire { wait, ..Acquire::exclusive(acquisition, ttl) };
        let secret_key = SecretKey::new(1);
        let patience =
            WaitPolicy { deadline: LocalTime::NEVER, repoll_interval, confirms_pushes: false, secret_key };
        let machine = AcquireMachine::new(command, Some(patience), LocalTime::ZERO);
        self.waiters.insert(acquisition, Waiter { fate: Fate::Live, machine, slow });
        self.ask(acquisition);
    }

    /// Sends what this waiter has to send, if it has.
    fn ask(&mut self, by: Acquisition) {
        let Some(waiter) = self.waiters.get_mut(&by) else { return };
        let sent_at = waiter.local(self.now);
        if let Some(command) = waiter.machine.poll_transmit(sent_at) {
            self.sent.push_back(Sent { arrives: self.now + micros(self.delay), by, sent_at, command });
        }
    }

    fn arrive(&mut self) {
        let Some(Sent { by, sent_at, command, .. }) = self.sent.pop_front() else { return };
        let answer = self.run(&command);
        if let Some(waiter) = self.waiters.get_mut(&by).filter(|waiter| waiter.fate == Fate::Live) {
            let now = waiter.local(self.now);
            waiter.machine.handle_answer(sent_at, now, &answer);
        }
    }

    /// Runs until this time, or until a live waiter has the lock.
    fn run_until(&mut self, end: u64) -> Option<Acquisition> {
        loop {
            let mut next = None;
            for (id, waiter) in self.waiters.iter().filter(|(_, waiter)| waiter.fate == Fate::Live) {
                if let Some(Outcome::Granted { .. }) = waiter.machine.poll_outcome() {
                    return Some(*id);
                }
                let due = waiter.machine.poll_timeout().map_or(u64::MAX, |time| waiter.global(time));
                next = next.min(Some((due, *id))).or(Some((due, *id)));
            }
            let arrives = self.sent.front().map_or(u64::MAX, |sent| sent.arrives);
            let due = next.map_or(u64::MAX, |(due, _)| due);
            if due.min(arrives) > end {
                self.now = end;
                return None;
            }
            self.now = self.now.max(due.min(arrives));
            if arrives <= due {
                self.arrive();
            } else if let Some((_, id)) = next {
                self.ask(id);
            }
        }
    }

    /// The holder renews at a third of its ttl, for this long, and all others wait.
    fn hold_for(&mut self, span: Duration, ttl: Duration) {
        let end = self.now + micros(span);
        while self.now < end {
            let next = (self.now + micros(ttl / 3)).min(end);
            assert_eq!(self.run_until(next), None, "a held lock was granted");
            let renewed = self.run(&Command::Renew(Renew::to(holder(), ttl)));
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

/// A queue, and what becomes of it.
#[derive(Debug)]
struct Case {
    fates: Vec<Fate>,
    /// How many places the clients have in it: the first of these many, the second so many, and so on from the beginning.
    places: Vec<u64>,
    /// Random bits.
    spread: u32,
    ttl: Duration,
    held: Duration,
    repoll_interval: Duration,
    delay: Duration,
    /// The holder gives the lock back, and only of the waiters some are gone.
    is_released: bool,
}

impl Case {
    /// How long it takes until a live waiter has the lock.
    fn takeover(&self) -> Duration {
        let Self { ttl, repoll_interval, .. } = *self;
        let mut places = self.places.iter().cycle();
        let mut world = World::new(self.delay);
        world.hold(ttl);
        for place in 0..u32::try_from(self.fates.len()).unwrap() {
            // In the order of the queue, and each with low bits of its own.
            let bits = self.spread.rotate_left(5 * place);
            let client = ClientId::new((u128::from(place) << 32) + u128::from(bits));
            for sequence in 1..=*places.next().unwrap() {
                world.enqueue(
                    Acquisition { client, sequence },
                    i64::from(bits % 20_001) - 10_000,
                    ttl,
                    repoll_interval,
                );
            }
            world.run_until(world.now + 20_000);
            world.run(&Command::Renew(Renew::to(holder(), ttl)));
        }
        world.hold_for(self.held, ttl);
        let clients: Vec<ClientId> = world.waiters.keys().map(|id| id.client).collect();
        for (waiter, client) in world.waiters.values_mut().zip(&clients) {
            waiter.fate = self.fates[usize::try_from(client.get() >> 32).unwrap()];
        }
        let died_at = world.now;
        if self.is_released {
            world.run(&Command::Release(Release::now(holder())));
        }
        let limit = died_at + micros(Duration::from_secs(600));
        world.run_until(limit).expect("the lock was never granted again");
        Duration::from_micros(world.now - died_at)
    }

    fn check(&self) -> Result<(), String> {
        let (took, bound) = (self.takeover(), bound(self.ttl, &self.fates));
        if took <= bound {
            Ok(())
        } else {
            Err(format!("it took {took:?}, the bound is {bound:?}: {self:?}"))
        }
    }
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
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn first_live_waiter_is_granted_within_the_bound(
        fates in fates(30),
        places in prop_oneof![3 => Just(vec![1]), 1 => proptest::collection::vec(1..5_u64, 1..5)],
        spread in any::<u32>(),
        ttl_ms in prop_oneof![100..5_000_u64, 5_000..60_000_u64],
        held_ms in 0..90_000_u64,
        repoll_interval in prop_oneof![Just(Duration::from_secs(25)), Just(Duration::from_secs(2))],
        delay_ms in prop_oneof![Just(0), 0..100_u64],
        is_released in any::<bool>(),
    ) {
        let (ttl, held) = (Duration::from_millis(ttl_ms), Duration::from_millis(held_ms));
        let delay = Duration::from_millis(delay_ms);
        let case = Case { fates, places, spread, ttl, held, repoll_interval, delay, is_released };
        case.check().map_err(TestCaseError::fail)?;
    }
}

#[test]
fn last_of_a_hundred_and_eighty_waiters_is_granted_within_the_bound() {
    for (number, held) in (0..).zip((60..90).step_by(5)) {
        let mut fates = vec![Fate::Dead; 179];
        if number % 2 == 1 {
            fates[number * 31] = Fate::Frozen;
        }
        fates.push(Fate::Live);
        let (ttl, repoll_interval) = (Duration::from_secs(10), Duration::from_secs(25));
        let held = Duration::from_secs(held) + ttl * u32::try_from(number).unwrap() / 97;
        let spread = 0x1234_5678_u32.rotate_left(u32::try_from(number).unwrap());
        let (places, delay, is_released) = (vec![1], Duration::ZERO, false);
        let case = Case { fates, places, spread, ttl, held, repoll_interval, delay, is_released };
        case.check().unwrap();
    }
}

/// What one client has in the queue costs the others no time.
#[test]
fn waiter_behind_a_gone_client_with_many_places_is_granted_within_the_bound() {
    for (number, fate) in (0..).zip([Fate::Frozen, Fate::Dead, Fate::Frozen, Fate::Dead]) {
        let case = Case {
            fates: vec![fate, Fate::Live],
            places: vec![500, 1 + number / 2],
            spread: 0x9abc_def0,
            ttl: Duration::from_secs(10),
            held: Duration::from_secs(60 + number),
            repoll_interval: Duration::from_secs(25),
            delay: Duration::ZERO,
            is_released: number > 1,
        };
        case.check().unwrap();
    }
}

/// How many commands they send together in a second, while the lock is held.
fn commands_per_second(clients: u32, places: u64) -> u64 {
    let mut world = World::new(Duration::ZERO);
    let ttl = Duration::from_secs(10);
    world.hold(ttl);
    for client in 0..clients {
        let id = (u128::from(client) << 32) + u128::from(client.wrapping_mul(2_654_435_761));
        for sequence in 1..=places {
            let acquisition = Acquisition { client: ClientId::new(id), sequence };
            world.enqueue(acquisition, 0, ttl, Duration::from_secs(25));
        }
    }
    world.hold_for(Duration::from_secs(60), ttl);
    let before = world.commands;
    world.hold_for(Duration::from_secs(100), ttl);
    (world.commands - before) / 100
}

#[test]
fn thousand_waiters_send_fewer_than_fifty_commands_a_second() {
    for (clients, places) in [(1_000, 1), (500, 2), (30, 33), (1, 1_000)] {
        let per_second = commands_per_second(clients, places);
        assert!(per_second < 50, "{clients} clients with {places} places: {per_second} commands a second");
    }
}
