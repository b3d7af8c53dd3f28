//! The promises of the lease table, each checked after every step of random command sequences.

use std::convert::Infallible;
use std::time::Duration;

use leasehold_core::model::{Header, Lease, Rows, Table, Turn, Waiter, apply, sweep};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Now, Owner, Push, PushKind, Refusal, Release, Renew,
    Reply, StoreTime, View, WaitFor,
};
use proptest::prelude::*;

const CLIENTS: u128 = 4;
const TTL: Duration = Duration::from_secs(10);
const ENTRY_TTL: Duration = Duration::from_secs(30);
const START: StoreTime = StoreTime::from_micros(1_700_000_000_000_000);

fn id(client: u128, sequence: u64) -> Acquisition {
    Acquisition { client: ClientId::new(client), sequence }
}

fn acquire(acquisition: Acquisition, capacity: u32, weight: u32, wait: bool) -> Command {
    Command::from(Acquire {
        capacity,
        weight,
        wait: wait.then_some(WaitFor { entry_ttl: ENTRY_TTL, max_queue: 1_000 }),
        ..Acquire::exclusive(acquisition, TTL)
    })
}

/// Added to the sequence number of a lease for the attempt that is to take its place.
const REPLACING: u64 = 6;

fn replace(old: Acquisition, new: Acquisition, capacity: u32, weight: u32, wait: bool) -> Command {
    let Command::Acquire(command) = acquire(new, capacity, weight, wait) else { unreachable!() };
    Command::from(Acquire { replaces: Some(old.sequence), ..Acquire::clone(&command) })
}

fn release(acquisition: Acquisition) -> Command {
    Command::Release(Release::now(acquisition))
}

fn renew(acquisition: Acquisition) -> Command {
    Command::Renew(Renew { acquisition, ttl: TTL, reserve: 0 })
}

/// A table with a clock and a list of who is there.
struct World<R> {
    rows: R,
    now: StoreTime,
    absent: Vec<ClientId>,
    pushes: Vec<Push>,
}

impl World<Table> {
    fn new() -> Self {
        Self::over(Table::new())
    }
}

impl<R: Rows<Error = Infallible>> World<R> {
    fn over(rows: R) -> Self {
        Self { rows, now: START, absent: Vec::new(), pushes: Vec::new() }
    }

    fn run(&mut self, command: &Command) -> Reply {
        let absent = self.absent.clone();
        let turn = Turn {
            now: Now::same(self.now),
            is_there: &mut |client| !absent.contains(&client),
            pushes: &mut self.pushes,
        };
        let Answer { at, reply } =
            apply(&mut self.rows, turn, command).unwrap_or_else(|never| match never {});
        assert_eq!(at, self.now);
        reply
    }

    fn sweep(&mut self) -> bool {
        let turn = Turn { now: Now::same(self.now), is_there: &mut |_| true, pushes: &mut self.pushes };
        sweep(&mut self.rows, turn).unwrap_or_else(|never| match never {})
    }

    fn view(&mut self) -> View {
        match self.run(&Command::Inspect) {
            Reply::View(view) => view,
            other => panic!("inspecting answered {other:?}"),
        }
    }

    fn pass(&mut self, span: Duration) {
        self.now = self.now + span;
    }
}

/// How many sequences a property is checked with: `scripts/test --long` wants more.
fn cases() -> u32 {
    if std::env::var_os("LEASEHOLD_TEST_LONG").is_some() { 200_000 } else { 4_000 }
}

#[derive(Clone, Debug)]
enum Op {
    Acquire { client: u128, sequence: u64, weight: u32, wait: bool, owner: Option<u8> },
    Replace { client: u128, sequence: u64, weight: u32, wait: bool },
    Renew { client: u128, sequence: u64, reserve: u32 },
    Release { client: u128, sequence: u64, at_least_s: u64, tombstone_s: u64 },
    Force,
    Pass { ms: u64 },
    Leave { client: u128 },
    Return { client: u128 },
}

fn ops(capacity: u32) -> impl Strategy<Value = Vec<Op>> {
    let who = || (0..CLIENTS, 0..REPLACING);
    // What took another's place is renewed, released and replaced too.
    let either = || (0..CLIENTS, 0..2 * REPLACING);
    let op = prop_oneof![
        8 => (who(), 1..=capacity, any::<bool>(), proptest::option::weighted(0.2, 0..2_u8)).prop_map(
            |((client, sequence), weight, wait, owner)| Op::Acquire { client, sequence, weight, wait, owner }
        ),
        3 => (who(), 1..=capacity, any::<bool>()).prop_map(
            |((client, sequence), weight, wait)| Op::Replace { client, sequence, weight, wait }
        ),
        4 => (either(), 0..3_u32).prop_map(|((client, sequence), reserve)| Op::Renew { client, sequence, reserve }),
        5 => (either(), prop_oneof![9 => Just(0), 1 => 0..20_u64], prop_oneof![3 => Just(0), 1 => 1..9_u64]).prop_map(
            |((client, sequence), at_least_s, tombstone_s)| Op::Release { client, sequence, at_least_s, tombstone_s }
        ),
        1 => Just(Op::Force),
        4 => (0..6_000_u64).prop_map(|ms| Op::Pass { ms }),
        1 => (0..CLIENTS).prop_map(|client| Op::Leave { client }),
        2 => (0..CLIENTS).prop_map(|client| Op::Return { client }),
    ];
    proptest::collection::vec(op, 1..80)
}

fn command(op: &Op, capacity: u32) -> Option<Command> {
    Some(match *op {
        Op::Acquire { client, sequence, weight, wait, owner } => {
            let Command::Acquire(command) = acquire(id(client, sequence), capacity, weight, wait) else {
                unreachable!()
            };
            let mut command = Acquire::clone(&command);
            command.owner = owner.map(|owner| Owner::new(&owner.to_string()));
            Command::from(command)
        }
        Op::Replace { client, sequence, weight, wait } => {
            replace(id(client, sequence), id(client, sequence + REPLACING), capacity, weight, wait)
        }
        Op::Renew { client, sequence, reserve } => {
            Command::Renew(Renew { acquisition: id(client, sequence), ttl: TTL, reserve })
        }
        Op::Release { client, sequence, at_least_s, tombstone_s } => Command::Release(Release {
            acquisition: id(client, sequence),
            at_least: Duration::from_secs(at_least_s),
            tombstone: Duration::from_secs(tombstone_s),
        }),
        Op::Force => Command::ForceRelease,
        Op::Pass { .. } | Op::Leave { .. } | Op::Return { .. } => return None,
    })
}

/// Runs the sequence, and says which promise broke first.
fn check<R: Rows<Error = Infallible>>(rows: R, capacity: u32, ops: &[Op]) -> Result<(), String> {
    let mut world = World::over(rows);
    let mut highest = 0_u64;
    for op in ops {
        match *op {
            Op::Pass { ms } => world.pass(Duration::from_millis(ms)),
            Op::Leave { client } => world.absent.push(ClientId::new(client)),
            Op::Return { client } => world.absent.retain(|absent| *absent != ClientId::new(client)),
            _ => {}
        }
        let Some(command) = command(op, capacity) else { continue };
        let before = world.view();
        world.pushes.clear();
        let reply = world.run(&command);
        let pushes = world.pushes.clone();
        let after = world.view();
        weights_fit(&after, capacity)?;
        nobody_overtakes(&world, &before, &after, &command)?;
        highest = tokens_rise(highest, &before, &after, &reply)?;
        pushes_tell_the_truth(&after, &pushes)?;
        let repeated = world.run(&command);
        let again = world.view();
        a_repeat_changes_nothing(&command, (&reply, &after), (&repeated, &again))?;
        highest = highest.max(again.last_token.map_or(0, leasehold_core::Token::get));
    }
    nothing_is_left(world)
}

fn weights_fit(view: &View, capacity: u32) -> Result<(), String> {
    let mut held: Vec<(Option<Owner>, Acquisition, u32)> = Vec::new();
    for holder in &view.holders {
        let same = held.iter_mut().find(|(owner, _, _)| owner.is_some() && *owner == holder.owner);
        match same {
            Some((_, _, weight)) => *weight = holder.weight.max(*weight),
            None => held.push((holder.owner.clone(), holder.acquisition, holder.weight)),
        }
    }
    let sum: u32 = held.iter().map(|(_, _, weight)| weight).sum();
    if sum > capacity || sum != view.in_use {
        return Err(format!("{sum} of {capacity} is held, the header says {}", view.in_use));
    }
    Ok(())
}

/// Whose sign of life the command is.
fn speaker(command: &Command) -> Option<ClientId> {
    match command {
        Command::Acquire(acquire) => Some(acquire.acquisition.client),
        Command::Renew(renew) => Some(renew.acquisition.client),
        _ => None,
    }
}

/// A new holder had nobody before it that was there and ready, unless its owner held already.
fn nobody_overtakes<R>(
    world: &World<R>,
    before: &View,
    after: &View,
    command: &Command,
) -> Result<(), String> {
    let speaker = speaker(command);
    for holder in &after.holders {
        let is_new = before.holders.iter().all(|old| old.acquisition != holder.acquisition);
        let shares = |other: &leasehold_core::Holder| {
            other.acquisition != holder.acquisition && other.token == holder.token
        };
        // A holder that takes more is before all who wait.
        let has_held = holder.acquisition.sequence >= REPLACING;
        if !is_new || has_held || after.holders.iter().any(shares) {
            continue;
        }
        for waiter in &before.waiters {
            if waiter.acquisition == holder.acquisition {
                break;
            }
            let client = waiter.acquisition.client;
            let was_ready = !waiter.passed_over || speaker == Some(client);
            let waits_on = after.waiters.iter().any(|still| still.acquisition == waiter.acquisition);
            if was_ready && waits_on && !world.absent.contains(&client) {
                return Err(format!("{} overtook {}", holder.acquisition, waiter.acquisition));
            }
        }
    }
    Ok(())
}

fn tokens_rise(highest: u64, before: &View, after: &View, reply: &Reply) -> Result<u64, String> {
    for holder in &after.holders {
        let known = |old: &leasehold_core::Holder| old.token == holder.token;
        if !before.holders.iter().any(known) && holder.token.get() <= highest {
            return Err(format!("token {} came after {highest}", holder.token));
        }
    }
    if let Reply::Renewed { tokens: Some(range), .. } = reply
        && range.first.get() <= highest
    {
        return Err(format!("the reserved token {} came after {highest}", range.first));
    }
    let held = after.holders.iter().map(|holder| holder.token.get()).max().unwrap_or(0);
    Ok(highest.max(held).max(after.last_token.map_or(0, leasehold_core::Token::get)))
}

fn pushes_tell_the_truth(after: &View, pushes: &[Push]) -> Result<(), String> {
    for push in pushes {
        let holds = after.holders.iter().any(|holder| holder.acquisition == push.acquisition);
        let waits = after.waiters.iter().any(|waiter| waiter.acquisition == push.acquisition);
        let right = match push.kind {
            PushKind::Granted(_) => holds,
            PushKind::Next(_) => waits,
            PushKind::Revoked => !holds,
            PushKind::Wanted => holds && !after.waiters.is_empty(),
        };
        if !right {
            return Err(format!("{push:?} is not so"));
        }
    }
    Ok(())
}

fn a_repeat_changes_nothing(
    command: &Command,
    (first, after): (&Reply, &View),
    (second, again): (&Reply, &View),
) -> Result<(), String> {
    let may_differ = match command {
        // What is gone is gone: the second answer says so, and takes nothing else.
        Command::Release(_) => matches!((first, second), (Reply::Released, Reply::NotHeld)),
        Command::ForceRelease => true,
        // The range that was set aside is the first answer's, the lease is the same.
        Command::Renew(renew) => renew.reserve > 0,
        // As below: a sign of life may bring another entry of the speaker's to the head, before this one.
        Command::Acquire(_) => matches!((first, second), (Reply::Queued(_), Reply::Queued(_))),
        _ => false,
    };
    if first != second && !may_differ {
        return Err(format!("{command:?} answered {first:?}, then {second:?}"));
    }
    let (mut after, mut again) = (after.clone(), again.clone());
    match command {
        Command::Renew(renew) if renew.reserve > 0 => (after.last_token, again.last_token) = (None, None),
        // Forcing again takes it from whoever was granted it by the first.
        Command::ForceRelease => return Ok(()),
        _ => {}
    }
    // Speaking again is a sign of life, which the speaker's other entries show.
    if let Some(client) = speaker(command) {
        for waiter in after.waiters.iter_mut().chain(&mut again.waiters) {
            waiter.passed_over &= waiter.acquisition.client != client;
        }
    }
    if after != again {
        return Err(format!("repeating {command:?} made {after:?} into {again:?}"));
    }
    Ok(())
}

/// When everybody has been silent for long enough, a newcomer is served at once, and in the end not a
/// row is left.
fn nothing_is_left<R: Rows<Error = Infallible>>(mut world: World<R>) -> Result<(), String> {
    let absent = (0..CLIENTS).map(ClientId::new);
    world.absent.extend(absent);
    world.pass(ENTRY_TTL.max(TTL) + Duration::from_secs(1));
    let view = world.view();
    if !view.holders.is_empty() || !view.waiters.is_empty() {
        return Err(format!("the dead still hold or wait: {view:?}"));
    }
    let newcomer = id(99, 0);
    let reply = world.run(&acquire(newcomer, 7, 7, false));
    if !matches!(reply, Reply::Granted(_)) {
        return Err(format!("a newcomer got {reply:?}"));
    }
    world.run(&release(newcomer));
    world.pass(Duration::from_secs(3_601));
    if world.sweep() {
        return Err(String::from("something is kept for ever"));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_mutex_keeps_its_promises(ops in ops(1)) {
        check(Table::new(), 1, &ops).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn a_weighted_resource_keeps_its_promises(ops in ops(3)) {
        check(Table::new(), 3, &ops).map_err(TestCaseError::fail)?;
    }
}

// --- Broken specimens: each checker must be able to fail --------------------------------------------

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    LastComesFirst,
    ForgetsTokens,
    LosesWeight,
    KeepsDeadWaiters,
    ForgetsLeases,
}

/// A store that keeps its rows wrongly.
struct Broken {
    table: Table,
    fault: Fault,
}

impl Rows for Broken {
    type Error = Infallible;

    fn header(&mut self) -> Result<Option<Header>, Infallible> {
        let mut header = Rows::header(&mut self.table)?;
        if let Some(header) = &mut header {
            match self.fault {
                Fault::ForgetsTokens => header.last_token = 0,
                Fault::LosesWeight if header.leases == 1 => header.in_use = 0,
                _ => {}
            }
        }
        Ok(header)
    }
    fn put_header(&mut self, header: &Header) -> Result<(), Infallible> {
        self.table.put_header(header)
    }
    fn remove_header(&mut self) -> Result<(), Infallible> {
        self.table.remove_header()
    }
    fn lease(&mut self, acquisition: Acquisition) -> Result<Option<Lease>, Infallible> {
        if self.fault == Fault::ForgetsLeases {
            return Ok(None);
        }
        self.table.lease(acquisition)
    }
    fn put_lease(&mut self, lease: Lease) -> Result<(), Infallible> {
        self.table.put_lease(lease)
    }
    fn remove_lease(&mut self, acquisition: Acquisition) -> Result<(), Infallible> {
        self.table.remove_lease(acquisition)
    }
    fn first_expiring_lease(&mut self) -> Result<Option<Lease>, Infallible> {
        self.table.first_expiring_lease()
    }
    fn heaviest_lease_of(&mut self, owner: &Owner) -> Result<Option<Lease>, Infallible> {
        self.table.heaviest_lease_of(owner)
    }
    fn each_lease(&mut self, see: &mut dyn FnMut(Lease)) -> Result<(), Infallible> {
        self.table.each_lease(see)
    }
    fn waiter(&mut self, acquisition: Acquisition) -> Result<Option<Waiter>, Infallible> {
        self.table.waiter(acquisition)
    }
    fn put_waiter(&mut self, waiter: Waiter) -> Result<(), Infallible> {
        self.table.put_waiter(waiter)
    }
    fn remove_waiter(&mut self, acquisition: Acquisition) -> Result<(), Infallible> {
        self.table.remove_waiter(acquisition)
    }
    fn first_ready_waiter(&mut self) -> Result<Option<Waiter>, Infallible> {
        if self.fault != Fault::LastComesFirst {
            return self.table.first_ready_waiter();
        }
        let mut last = None;
        self.table.each_waiter(&mut |waiter| {
            if !waiter.parked {
                last = Some(waiter);
            }
        })?;
        Ok(last)
    }
    fn first_expiring_waiter(&mut self) -> Result<Option<Waiter>, Infallible> {
        if self.fault == Fault::KeepsDeadWaiters {
            return Ok(None);
        }
        self.table.first_expiring_waiter()
    }
    fn set_parked(&mut self, client: ClientId, parked: bool) -> Result<u32, Infallible> {
        self.table.set_parked(client, parked)
    }
    fn each_waiter(&mut self, see: &mut dyn FnMut(Waiter)) -> Result<(), Infallible> {
        self.table.each_waiter(see)
    }
    fn tombstone(&mut self, acquisition: Acquisition) -> Result<Option<StoreTime>, Infallible> {
        self.table.tombstone(acquisition)
    }
    fn put_tombstone(&mut self, acquisition: Acquisition, until: StoreTime) -> Result<(), Infallible> {
        self.table.put_tombstone(acquisition, until)
    }
    fn remove_tombstones(&mut self, now: StoreTime) -> Result<(u32, Option<StoreTime>), Infallible> {
        self.table.remove_tombstones(now)
    }
}

fn complaint(fault: Fault, ops: &[Op]) -> String {
    check(Broken { table: Table::new(), fault }, 1, ops).expect_err("the checkers saw nothing")
}

fn take(client: u128) -> Op {
    Op::Acquire { client, sequence: 0, weight: 1, wait: true, owner: None }
}

fn give(client: u128) -> Op {
    Op::Release { client, sequence: 0, at_least_s: 0, tombstone_s: 0 }
}

#[test]
fn a_store_that_serves_the_last_waiter_first_is_caught() {
    let ops = [take(0), take(1), take(2), give(0)];
    let complaint = complaint(Fault::LastComesFirst, &ops);
    assert!(complaint.contains("overtook"), "{complaint}");
}

#[test]
fn a_store_that_forgets_the_last_token_is_caught() {
    let ops = [take(0), give(0), take(1)];
    let complaint = complaint(Fault::ForgetsTokens, &ops);
    assert!(complaint.contains("came after"), "{complaint}");
}

#[test]
fn a_store_that_loses_weight_is_caught() {
    let ops = [take(0), take(1)];
    let complaint = complaint(Fault::LosesWeight, &ops);
    assert!(complaint.contains("is held"), "{complaint}");
}

#[test]
fn a_store_that_keeps_dead_waiters_is_caught() {
    let ops = [take(0), take(1)];
    let complaint = complaint(Fault::KeepsDeadWaiters, &ops);
    assert!(complaint.contains("the dead still hold or wait"), "{complaint}");
}

#[test]
fn a_store_that_forgets_leases_is_caught() {
    let ops = [take(0)];
    let complaint = complaint(Fault::ForgetsLeases, &ops);
    assert!(complaint.contains("then"), "{complaint}");
}

// --- Single stories ----------------------------------------------------------------------------------

#[test]
fn a_release_grants_to_the_head_for_a_claim_window_and_tells_the_next_that_it_is_next() {
    let mut world = World::new();
    for client in 0..3 {
        world.run(&acquire(id(client, 0), 1, 1, true));
    }
    assert_eq!(world.run(&release(id(0, 0))), Reply::Released);
    let [granted, next] = &world.pushes[..] else { panic!("{:?}", world.pushes) };
    assert!(matches!(granted.kind, PushKind::Granted(grant) if grant.lasts == Duration::from_secs(3)));
    assert_eq!(granted.to(), ClientId::new(1));
    assert!(
        matches!(next.kind, PushKind::Next(head) if head.look_again_at == START + Duration::from_secs(3))
    );
    assert_eq!(next.to(), ClientId::new(2));
}

#[test]
fn a_holder_with_tokens_set_aside_is_told_once_that_it_is_wanted_and_by_each_renewal() {
    let mut world = World::new();
    let Command::Acquire(plain) = acquire(id(0, 0), 1, 1, true) else { unreachable!() };
    world.run(&Command::from(Acquire { reserve: 8, ..Acquire::clone(&plain) }));
    assert!(matches!(world.run(&renew(id(0, 0))), Reply::Renewed { wanted: false, .. }));
    world.run(&acquire(id(1, 0), 1, 1, true));
    assert!(
        matches!(world.pushes[..], [Push { acquisition, kind: PushKind::Wanted, .. }] if acquisition == id(0, 0))
    );
    world.pushes.clear();
    world.run(&acquire(id(2, 0), 1, 1, true));
    assert!(world.pushes.is_empty(), "it knows: {:?}", world.pushes);
    assert!(matches!(world.run(&renew(id(0, 0))), Reply::Renewed { wanted: true, .. }));
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
    assert!(world.view().waiters.iter().all(|waiter| !waiter.passed_over));
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
        at_least: Duration::ZERO,
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
        matches!(world.run(&replace(upgradable, write, 9, 9, true)), Reply::Queued(queued) if queued.head.is_some())
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
        Release { acquisition: id(0, 0), at_least: Duration::from_secs(25), tombstone: Duration::ZERO };
    assert_eq!(world.run(&Command::Release(keep)), Reply::Released);
    assert!(matches!(world.pushes[..], [Push { kind: PushKind::Next(head), .. }]
        if head.look_again_at == START + Duration::from_secs(25)));
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
    assert!(world.view().waiters[0].passed_over);
    // Its own answer reaches it, so what it asks for now it gets.
    assert!(matches!(world.run(&acquire(held, 3, 3, false)), Reply::Granted(_)));
    for _ in 0..2 {
        assert!(matches!(world.run(&acquire(late, 3, 1, true)), Reply::Queued(_)));
        let view = world.view();
        assert!(!view.waiters[0].passed_over, "nothing fits yet, so nobody asked whether it is there");
        assert_eq!((view.waiters[0].acquisition, view.waiters[1].acquisition), (early, late));
    }
}
