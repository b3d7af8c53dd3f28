//! The promises, each checked after every step of random command sequences.

use leasehold_core::{Holder, Owner, QueueEntry, Refusal, Token};
use proptest::prelude::*;

use super::*;

/// Number of random sequences per property; more with `scripts/test --long` and before a release.
fn cases() -> u32 {
    match std::env::var("LEASEHOLD_TEST_LONG").as_deref() {
        Err(_) => 4_000,
        Ok("release") => 200_000,
        Ok(_) => 50_000,
    }
}

#[derive(Clone, Debug)]
pub(super) enum Op {
    Acquire {
        client: u128,
        sequence: u64,
        weight: u32,
        wait: bool,
        owner: Option<u8>,
    },
    Replace {
        client: u128,
        sequence: u64,
        weight: u32,
        wait: bool,
    },
    Renew {
        client: u128,
        sequence: u64,
        reserve: u32,
    },
    Release {
        client: u128,
        sequence: u64,
        at_least_s: u64,
        tombstone_s: u64,
    },
    Force,
    Pass {
        ms: u64,
    },
    /// The store's clock is set back.
    StepBack {
        ms: u64,
    },
    Leave {
        client: u128,
    },
    Return {
        client: u128,
    },
}

fn ops(capacity: u32) -> impl Strategy<Value = Vec<Op>> {
    let who = || (0..CLIENTS, 0..REPLACING);
    // A replacement is renewed, released and replaced too.
    let either = || (0..CLIENTS, 0..2 * REPLACING);
    let op = prop_oneof![
        8 => (who(), 0..=capacity + 1, any::<bool>(), proptest::option::weighted(0.2, 0..2_u8)).prop_map(
            |((client, sequence), weight, wait, owner)| Op::Acquire { client, sequence, weight, wait, owner }
        ),
        3 => (who(), 0..=capacity + 1, any::<bool>()).prop_map(
            |((client, sequence), weight, wait)| Op::Replace { client, sequence, weight, wait }
        ),
        4 => (either(), 0..3_u32).prop_map(|((client, sequence), reserve)| Op::Renew { client, sequence, reserve }),
        5 => (either(), prop_oneof![9 => Just(0), 1 => 0..20_u64], prop_oneof![3 => Just(0), 1 => 1..9_u64]).prop_map(
            |((client, sequence), at_least_s, tombstone_s)| Op::Release { client, sequence, at_least_s, tombstone_s }
        ),
        1 => Just(Op::Force),
        4 => (0..6_000_u64).prop_map(|ms| Op::Pass { ms }),
        1 => prop_oneof![0..5_000_u64, 0..4_000_000_u64].prop_map(|ms| Op::StepBack { ms }),
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
            Command::Renew(Renew { reserve, ..Renew::to(id(client, sequence), TTL) })
        }
        Op::Release { client, sequence, at_least_s, tombstone_s } => Command::Release(Release {
            min_hold: Duration::from_secs(at_least_s),
            tombstone: Duration::from_secs(tombstone_s),
            ..Release::now(id(client, sequence))
        }),
        Op::Force => Command::ForceRelease,
        Op::Pass { .. } | Op::StepBack { .. } | Op::Leave { .. } | Op::Return { .. } => return None,
    })
}

/// Runs the sequence. The error names the first broken promise.
pub(super) fn check<R: Rows<Error = Infallible>>(rows: R, capacity: u32, ops: &[Op]) -> Result<(), String> {
    let mut world = World::over(rows);
    let mut highest = 0_u64;
    for op in ops {
        match *op {
            Op::Pass { ms } => world.pass(Duration::from_millis(ms)),
            Op::StepBack { ms } => world.step_back(Duration::from_millis(ms)),
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
        no_waiter_is_overtaken(&world, &before, &after, &command)?;
        highest = tokens_rise(highest, &before, &after, &reply)?;
        pushes_match_the_table(&after, &pushes)?;
        attempt_passes_absent_clients(&world, &command, &after)?;
        answer_follows_from_the_table(&world, &before, (&command, &reply))?;
        hold_counts_from_its_grant(&world, &before, &after)?;
        head_of_the_queue_knows(&world, &after)?;
        release_retains_the_rest_of_min_hold(&world, (&command, &reply), (&before, &after))?;
        release_says_what_it_ended((&command, &reply), &before)?;
        grant_lasts_at_most_its_ttl(&command, &reply)?;
        let repeated = world.run(&command);
        let again = world.view();
        repeat_is_idempotent(&command, (&reply, &after), (&repeated, &again))?;
        highest = highest.max(again.last_token.map_or(0, Token::get));
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

/// The client whose liveness the command proves.
fn sender(command: &Command) -> Option<ClientId> {
    match command {
        Command::Acquire(acquire) => Some(acquire.acquisition.client),
        Command::Renew(renew) => Some(renew.acquisition.client),
        _ => None,
    }
}

/// A new holder overtook no reachable waiter that could have been granted, unless its owner held the lock already.
fn no_waiter_is_overtaken<R>(
    world: &World<R>,
    before: &View,
    after: &View,
    command: &Command,
) -> Result<(), String> {
    let sender = sender(command);
    for holder in &after.holders {
        let is_new = before.holders.iter().all(|old| old.acquisition != holder.acquisition);
        let shares = |other: &Holder| other.acquisition != holder.acquisition && other.token == holder.token;
        // An upgrade goes before all waiters.
        let has_held = holder.acquisition.sequence >= REPLACING;
        if !is_new || has_held || after.holders.iter().any(shares) {
            continue;
        }
        for waiter in &before.waiters {
            if waiter.acquisition == holder.acquisition {
                break;
            }
            let client = waiter.acquisition.client;
            let was_ready = !waiter.skipped || sender == Some(client);
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
        let known = |old: &Holder| old.token == holder.token;
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
    Ok(highest.max(held).max(after.last_token.map_or(0, Token::get)))
}

/// The lease of this owner, or of this attempt, that counts: the heaviest one, of several the latest acquisition's. A retained lease has
/// no holder.
fn live(view: &View, is_it: impl Fn(&Holder) -> bool) -> Option<&Holder> {
    let heaviest = view
        .holders
        .iter()
        .filter(|holder| is_it(holder))
        .max_by_key(|holder| (holder.weight, holder.acquisition));
    heaviest.filter(|holder| !holder.retained)
}

/// What the answer to an attempt must be.
#[derive(Debug)]
enum Expected {
    /// A lease with this token, or with a new one.
    Granted(Option<Token>),
    Queued,
    Answer(Reply),
}

/// The answer to an attempt, from what `Inspect` showed before it; `None` for a waiter, and for a client that is parked.
fn expected<R>(world: &World<R>, before: &View, acquire: &Acquire) -> Option<Expected> {
    let Acquire { acquisition, weight, ref owner, .. } = *acquire;
    let free = before.capacity - before.in_use;
    let has_waiters = before.waiters.iter().any(|waiter| !waiter.skipped);
    let or_wait = || if acquire.wait.is_some() { Expected::Queued } else { Expected::Answer(Reply::Busy) };
    let refused = |refusal| Some(Expected::Answer(Reply::Refused(refusal)));
    let is_parked =
        |client| before.waiters.iter().any(|other| other.acquisition.client == client && other.skipped);
    if world.tombstones.contains_key(&acquisition) {
        return Some(Expected::Answer(Reply::Cancelled));
    }
    if let Some(known) = before.holders.iter().find(|holder| holder.acquisition == acquisition) {
        let cancelled = Expected::Answer(Reply::Cancelled);
        return Some(if known.retained { cancelled } else { Expected::Granted(Some(known.token)) });
    }
    if before.waiters.iter().any(|waiter| waiter.acquisition == acquisition) || is_parked(acquisition.client)
    {
        return None;
    }
    if weight == 0 || weight > acquire.capacity {
        return refused(Refusal::Weight { capacity: acquire.capacity });
    }
    // Absent clients at the head are skipped if something is free, and those behind them are granted before the attempt.
    let is_absent = |waiter: &&QueueEntry| world.absent.contains(&waiter.acquisition.client);
    let mut ready = before.waiters.iter().filter(|waiter| !waiter.skipped).peekable();
    let is_head_absent = free > 0 && ready.peek().is_some_and(is_absent);
    if is_head_absent && !ready.all(|waiter| is_absent(&waiter)) {
        return None;
    }
    if let Some(sequence) = acquire.replaces {
        let replaced = Acquisition { sequence, ..acquisition };
        let held = live(before, |holder| holder.acquisition == replaced && holder.owner.is_none());
        let Some(held) = held else { return refused(Refusal::NotHeld) };
        return Some(match weight.saturating_sub(held.weight) {
            0 => Expected::Granted(Some(held.token)),
            further if further <= free => Expected::Granted(None),
            _ if acquire.wait.is_none() || 2 * held.weight > acquire.capacity => or_wait(),
            _ => return refused(Refusal::HeavierReentry { held: held.weight }),
        });
    }
    if let Some(held) = live(before, |holder| owner.is_some() && holder.owner == *owner) {
        if weight > held.weight {
            return refused(Refusal::HeavierReentry { held: held.weight });
        }
        return Some(Expected::Granted(Some(held.token)));
    }
    let is_free = before.holders.is_empty() && before.waiters.is_empty() || weight <= free;
    if is_head_absent {
        return is_free.then_some(Expected::Granted(None));
    }
    Some(if is_free && !has_waiters { Expected::Granted(None) } else { or_wait() })
}

fn answer_follows_from_the_table<R>(
    world: &World<R>,
    before: &View,
    (command, reply): (&Command, &Reply),
) -> Result<(), String> {
    let Command::Acquire(acquire) = command else { return Ok(()) };
    let Some(expected) = expected(world, before, acquire) else { return Ok(()) };
    let held = |token| before.holders.iter().any(|holder| holder.token == token);
    let is_right = match (&expected, reply) {
        (Expected::Granted(Some(token)), Reply::Granted(grant)) => grant.tokens.first == *token,
        (Expected::Granted(None), Reply::Granted(grant)) => !held(grant.tokens.first),
        (Expected::Queued, Reply::Queued(_)) => true,
        (Expected::Answer(expected), reply) => expected == reply,
        _ => false,
    };
    if is_right { Ok(()) } else { Err(format!("{acquire:?} was answered {reply:?} instead of {expected:?}")) }
}

/// From the grant of the lease that it replaced, if it did; from now, if the clock was set back to before the grant.
fn hold_counts_from_its_grant<R>(world: &World<R>, before: &View, after: &View) -> Result<(), String> {
    for holder in &after.holders {
        let of = |acquisition| before.holders.iter().find(move |old| old.acquisition == acquisition);
        let Acquisition { client, sequence } = holder.acquisition;
        let replaced =
            sequence.checked_sub(REPLACING).and_then(|sequence| of(Acquisition { client, sequence }));
        let is_right = match of(holder.acquisition) {
            Some(same) if same.granted_at <= world.now => holder.granted_at == same.granted_at,
            Some(same) => [same.granted_at, world.now].contains(&holder.granted_at),
            None => holder.granted_at == replaced.map_or(world.now, |old| old.granted_at.min(world.now)),
        };
        if !is_right {
            return Err(format!(
                "it is {:?}, and the hold of {holder:?} counts from {replaced:?}",
                world.now
            ));
        }
    }
    Ok(())
}

/// Where an attempt might fit, it is not behind a waiter whose client is absent.
fn attempt_passes_absent_clients<R>(world: &World<R>, command: &Command, after: &View) -> Result<(), String> {
    let Command::Acquire(acquire) = command else { return Ok(()) };
    let head = after.waiters.iter().find(|waiter| !waiter.skipped);
    match head.filter(|_| after.in_use < after.capacity) {
        Some(head)
            if head.acquisition != acquire.acquisition && world.absent.contains(&head.acquisition.client) =>
        {
            Err(format!("{acquire:?} is behind {head:?}, whose client is absent"))
        }
        _ => Ok(()),
    }
}

/// The first waiter that is not skipped was told so, because it re-checks on behalf of all.
fn head_of_the_queue_knows<R>(world: &World<R>, after: &View) -> Result<(), String> {
    let head = after.waiters.iter().find(|waiter| !waiter.skipped).map(|waiter| waiter.acquisition);
    if head.is_some() && head != world.notified_head {
        return Err(format!("the head is {head:?}, and {:?} was told that it is", world.notified_head));
    }
    Ok(())
}

/// The rest counts from the grant. If the clock was set back since, all of it is left, and no more. The last release of an
/// owner decides.
fn release_retains_the_rest_of_min_hold<R>(
    world: &World<R>,
    (command, reply): (&Command, &Reply),
    (before, after): (&View, &View),
) -> Result<(), String> {
    let (Command::Release(release), Reply::Released) = (command, reply) else { return Ok(()) };
    let of =
        |view: &View| view.holders.iter().find(|holder| holder.acquisition == release.acquisition).cloned();
    let Some(held) = of(before) else { return Ok(()) };
    let is_other = |holder: &Holder| holder.acquisition != held.acquisition && holder.owner == held.owner;
    let has_other = held.owner.is_some() && before.holders.iter().any(is_other);
    let rest = release.min_hold.saturating_sub(world.now.since(held.granted_at));
    let retained_until = (!has_other && !rest.is_zero()).then(|| world.now + rest);
    match of(after) {
        None if retained_until.is_none() => Ok(()),
        Some(kept) if kept.retained && Some(kept.expires_at) == retained_until => Ok(()),
        kept => Err(format!("{release:?} retains {kept:?}, and it should until {retained_until:?}")),
    }
}

/// A holder whose lease the store does not have learns of it.
fn release_says_what_it_ended((command, reply): (&Command, &Reply), before: &View) -> Result<(), String> {
    let Command::Release(release) = command else { return Ok(()) };
    let had_lease = |holder: &Holder| holder.acquisition == release.acquisition && !holder.retained;
    let waited = |waiter: &QueueEntry| waiter.acquisition == release.acquisition;
    let expected = if before.holders.iter().any(had_lease) {
        Reply::Released
    } else if before.waiters.iter().any(waited) {
        // The same command may grant it first.
        if *reply == Reply::Released { Reply::Released } else { Reply::Dequeued }
    } else {
        Reply::NotHeld
    };
    if *reply == expected {
        Ok(())
    } else {
        Err(format!("{release:?} was answered {reply:?}, not {expected:?}"))
    }
}

fn grant_lasts_at_most_its_ttl(command: &Command, reply: &Reply) -> Result<(), String> {
    match (command, reply) {
        (Command::Acquire(acquire), Reply::Granted(grant)) if grant.valid_for > acquire.ttl => {
            Err(format!("{acquire:?} was granted {grant:?}"))
        }
        _ => Ok(()),
    }
}

fn pushes_match_the_table(after: &View, pushes: &[Push]) -> Result<(), String> {
    for push in pushes {
        let holds = after.holders.iter().any(|holder| holder.acquisition == push.acquisition);
        let waits = after.waiters.iter().any(|waiter| waiter.acquisition == push.acquisition);
        let right = match push.kind {
            PushKind::Granted(..) => holds,
            PushKind::Next(_) => waits,
            PushKind::Revoked => !holds,
            PushKind::Contended => holds && !after.waiters.is_empty(),
        };
        if !right {
            return Err(format!("{push:?} contradicts the table"));
        }
    }
    Ok(())
}

fn repeat_is_idempotent(
    command: &Command,
    (first, after): (&Reply, &View),
    (second, again): (&Reply, &View),
) -> Result<(), String> {
    let may_differ = match command {
        // A repeated release finds nothing.
        Command::Release(_) => {
            matches!((first, second), (Reply::Released | Reply::Dequeued, Reply::NotHeld))
        }
        Command::ForceRelease => true,
        // The first answer has the reserved range; the lease is the same.
        Command::Renew(renew) => renew.reserve > 0,
        // As below: proof of liveness may move another entry of the client to the head.
        Command::Acquire(_) => matches!((first, second), (Reply::Queued(_), Reply::Queued(_))),
        _ => false,
    };
    if first != second && !may_differ {
        return Err(format!("{command:?} answered {first:?}, then {second:?}"));
    }
    let (mut after, mut again) = (after.clone(), again.clone());
    match command {
        Command::Renew(renew) if renew.reserve > 0 => (after.last_token, again.last_token) = (None, None),
        // The second one releases the holder that the first one granted.
        Command::ForceRelease => return Ok(()),
        _ => {}
    }
    // A repeat proves liveness, which shows in the client's other entries.
    if let Some(client) = sender(command) {
        for waiter in after.waiters.iter_mut().chain(&mut again.waiters) {
            waiter.skipped &= waiter.acquisition.client != client;
        }
    }
    if after != again {
        return Err(format!("repeating {command:?} made {after:?} into {again:?}"));
    }
    Ok(())
}

/// When all clients have been silent for long enough, a new one is granted at once, and finally no row is left.
fn nothing_is_left<R: Rows<Error = Infallible>>(mut world: World<R>) -> Result<(), String> {
    let absent = (0..CLIENTS).map(ClientId::new);
    world.absent.extend(absent);
    // A clock that was set back delays each expiry by as much, and by no more.
    world.pass(ENTRY_TTL.max(TTL) + world.stepped_back + Duration::from_secs(1));
    let view = world.view();
    if !view.holders.is_empty() || !view.waiters.is_empty() {
        return Err(format!("dead clients still hold or wait: {view:?}"));
    }
    let newcomer = id(99, 0);
    let reply = world.run(&acquire(newcomer, 7, 7, false));
    if !matches!(reply, Reply::Granted(_)) {
        return Err(format!("a new client got {reply:?}"));
    }
    if !world.sweep() || world.view().holders.is_empty() {
        return Err(String::from("a held lease was swept"));
    }
    world.run(&release(newcomer));
    world.pass(Duration::from_secs(3_601) + world.stepped_back);
    if world.sweep() {
        return Err(String::from("a row is never swept"));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutex_upholds_its_properties(ops in ops(1)) {
        check(Table::new(), 1, &ops).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn weighted_resource_upholds_its_properties(ops in ops(3)) {
        check(Table::new(), 3, &ops).map_err(TestCaseError::fail)?;
    }
}
