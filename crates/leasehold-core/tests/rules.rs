//! Single rules of the lease table, each in the shortest sequence of commands in which it decides.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{CLAIM_WINDOW, CommandContext, Rows, Table, apply};
use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Grant, Kind, Name, Now, Owner, Push, PushKind, Refusal, Release,
    Renew, Reply, Resource, StoreTime, Token, View, WaitFor,
};

const START: StoreTime = StoreTime::from_micros(1_700_000_000_000_000);
const TTL: Duration = Duration::from_secs(10);

fn id(client: u128, sequence: u64) -> Acquisition {
    Acquisition { client: ClientId::new(client), sequence }
}

/// An attempt with a weight out of a capacity.
fn attempt(client: u128, sequence: u64, (weight, capacity): (u32, u32)) -> Acquire {
    Acquire { capacity, weight, ..Acquire::exclusive(id(client, sequence), TTL) }
}

fn owned(owner: &str, acquire: Acquire) -> Acquire {
    Acquire { owner: Some(Owner::new(owner)), ..acquire }
}

fn waiting(acquire: Acquire) -> Acquire {
    Acquire { wait: Some(WaitFor { entry_ttl: Duration::from_secs(1_000), max_queue: 10 }), ..acquire }
}

/// One lock, its pushes, and the clients that cannot be reached.
struct World {
    table: Table,
    now: Now,
    pushes: Vec<Push>,
    unreachable: BTreeSet<ClientId>,
}

impl World {
    fn new() -> Self {
        Self { table: Table::new(), now: Now::same(START), pushes: Vec::new(), unreachable: BTreeSet::new() }
    }

    fn run(&mut self, command: &Command) -> Reply {
        let unreachable = &self.unreachable;
        let context = CommandContext {
            now: self.now,
            is_reachable: &mut |client| !unreachable.contains(&client),
            pushes: &mut self.pushes,
        };
        let Ok(answer) = apply(&mut self.table, context, command);
        answer.reply
    }

    fn acquire(&mut self, acquire: Acquire) -> Reply {
        self.run(&acquire.into())
    }

    fn granted(&mut self, acquire: Acquire) -> Grant {
        match self.acquire(acquire) {
            Reply::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    fn queued(&mut self, acquire: Acquire) -> StoreTime {
        match self.acquire(acquire) {
            Reply::Queued(queued) => queued.repoll_at,
            other => panic!("{other:?}"),
        }
    }

    fn release(&mut self, acquisition: Acquisition, min_hold: Duration) {
        let release = Release { min_hold, ..Release::now(acquisition) };
        assert_eq!(self.run(&Command::Release(release)), Reply::Released);
    }

    fn renew(&mut self, acquisition: Acquisition, reserve: u32) -> Reply {
        self.run(&Command::Renew(Renew { reserve, ..Renew::to(acquisition, TTL) }))
    }

    fn view(&mut self) -> View {
        let Reply::View(view) = self.run(&Command::Inspect) else { panic!("no view") };
        view
    }

    fn token_of(&mut self, acquisition: Acquisition) -> u64 {
        let holders = self.view().holders;
        holders.iter().find(|holder| holder.acquisition == acquisition).expect("it holds").token.get()
    }

    fn waits(&mut self, by: Duration) {
        self.now = Now::same(self.now.time + by);
    }

    fn take_pushes(&mut self) -> Vec<(Acquisition, PushKind)> {
        self.pushes.drain(..).map(|push| (push.acquisition, push.kind)).collect()
    }
}

#[test]
fn owner_is_granted_again_with_its_token_but_not_with_more_weight() {
    let mut world = World::new();
    let first = world.granted(owned("a", attempt(1, 1, (2, 4))));
    let second = world.granted(owned("a", attempt(1, 2, (2, 4))));
    assert_eq!(second.tokens.first, first.tokens.first);
    assert_eq!(
        world.acquire(owned("a", attempt(1, 3, (3, 4)))),
        Reply::Refused(Refusal::HeavierReentry { held: 2 })
    );
    assert_eq!(
        world.acquire(owned("b", attempt(2, 1, (3, 4)))),
        Reply::Busy,
        "the owner's weight counts once"
    );
    assert!(world.granted(owned("b", attempt(2, 2, (2, 4)))).tokens.first > first.tokens.first);
}

#[test]
fn minimum_hold_keeps_the_lock_from_its_owner_too() {
    let mut world = World::new();
    world.granted(owned("a", attempt(1, 1, (1, 1))));
    world.release(id(1, 1), TTL);
    assert_eq!(world.acquire(owned("a", attempt(1, 2, (1, 1)))), Reply::Busy);
    world.waits(TTL);
    world.granted(owned("a", attempt(1, 3, (1, 1))));
}

#[test]
fn last_release_of_an_owner_decides_about_the_minimum_hold() {
    let mut world = World::new();
    world.granted(owned("a", attempt(1, 1, (1, 1))));
    world.granted(owned("a", attempt(1, 2, (1, 1))));
    world.release(id(1, 1), TTL);
    assert_eq!(world.view().holders.len(), 1, "nothing is retained beside the lease that goes on");
    world.release(id(1, 2), Duration::ZERO);
    world.granted(attempt(2, 1, (1, 1)));
}

#[test]
fn minimum_hold_counts_from_the_grant_and_not_from_a_renewal() {
    let mut world = World::new();
    world.granted(attempt(1, 1, (1, 1)));
    world.waits(Duration::from_secs(4));
    world.renew(id(1, 1), 0);
    world.release(id(1, 1), Duration::from_secs(6));
    world.waits(Duration::from_micros(1_999_999));
    assert_eq!(world.acquire(attempt(2, 1, (1, 1))), Reply::Busy);
    world.waits(Duration::from_micros(1));
    world.granted(attempt(2, 2, (1, 1)));
}

#[test]
fn weight_of_zero_or_above_the_capacity_is_refused() {
    let mut world = World::new();
    for weight in [0, 3] {
        assert_eq!(
            world.acquire(attempt(1, 1, (weight, 2))),
            Reply::Refused(Refusal::Weight { capacity: 2 }),
            "{weight}"
        );
    }
    world.granted(attempt(1, 2, (2, 2)));
}

#[test]
fn capacity_is_fixed_while_there_are_holders_or_waiters() {
    let refused = Reply::Refused(Refusal::Capacity { in_use: 2 });
    let mut world = World::new();
    world.granted(attempt(1, 1, (2, 2)));
    assert_eq!(world.acquire(attempt(2, 1, (1, 3))), refused, "held");
    world.queued(waiting(attempt(3, 1, (1, 2))));
    world.unreachable.insert(ClientId::new(3));
    world.release(id(1, 1), Duration::ZERO);
    assert_eq!((world.view().holders.len(), world.view().waiters.len()), (0, 1));
    assert_eq!(world.acquire(attempt(2, 2, (1, 3))), refused, "waited for");
}

#[test]
fn attempt_of_an_owner_replaces_no_lease() {
    let mut world = World::new();
    world.granted(attempt(1, 1, (1, 1)));
    let replacing = Acquire { replaces: Some(1), ..attempt(1, 2, (1, 1)) };
    assert_eq!(world.acquire(owned("a", replacing.clone())), Reply::Refused(Refusal::NotHeld));
    world.granted(replacing);
    assert_eq!(world.view().holders.len(), 1);
}

#[test]
fn only_a_holder_of_more_than_half_may_wait_for_more() {
    for (held, may_wait) in [(2, false), (3, true)] {
        let mut world = World::new();
        world.granted(attempt(1, 1, (held, 4)));
        world.granted(attempt(2, 1, (1, 4)));
        let more = waiting(Acquire { replaces: Some(1), ..attempt(1, 2, (4, 4)) });
        match world.acquire(more) {
            Reply::Queued(_) => assert!(may_wait),
            other => {
                assert_eq!(other, Reply::Refused(Refusal::HeavierReentry { held }));
                assert!(!may_wait);
            }
        }
    }
}

#[test]
fn holder_that_waits_for_more_goes_ahead_of_earlier_waiters() {
    let mut world = World::new();
    world.granted(attempt(1, 1, (3, 4)));
    world.granted(attempt(2, 1, (1, 4)));
    world.queued(waiting(attempt(3, 1, (1, 4))));
    world.queued(waiting(Acquire { replaces: Some(1), ..attempt(1, 2, (4, 4)) }));
    world.release(id(2, 1), Duration::ZERO);
    let holders: Vec<_> = world.view().holders.iter().map(|holder| holder.acquisition).collect();
    assert_eq!(holders, [id(1, 2)]);
}

#[test]
fn queue_goes_on_after_a_billion_places() {
    let mut world = World::new();
    world.granted(attempt(1, 1, (1, 1)));
    let Ok(Some(mut header)) = Rows::header(&mut world.table) else { panic!("no header") };
    header.next_place = 1 << 30;
    let Ok(()) = world.table.put_header(&header);
    for client in 2..5 {
        world.queued(waiting(attempt(client, 1, (1, 1))));
    }
    let order: Vec<_> = world.view().waiters.iter().map(|waiter| waiter.acquisition.client.get()).collect();
    assert_eq!(order, [2, 3, 4]);
}

#[test]
fn waiter_whose_owner_was_granted_meanwhile_is_granted_at_its_recheck() {
    let mut world = World::new();
    world.granted(attempt(9, 1, (2, 2)));
    world.queued(waiting(owned("a", attempt(1, 1, (1, 2)))));
    world.queued(waiting(attempt(2, 1, (2, 2))));
    let behind = waiting(owned("a", attempt(1, 2, (1, 2))));
    world.queued(behind.clone());
    world.release(id(9, 1), Duration::ZERO);
    let first = world.token_of(id(1, 1));
    assert_eq!(world.view().waiters.len(), 2, "the one that needs all holds up those behind it");
    assert_eq!(world.granted(behind).tokens.first.get(), first);
}

#[test]
fn waiters_recheck_at_different_times() {
    let mut world = World::new();
    world.granted(attempt(9, 1, (1, 1)));
    let head = world.queued(waiting(attempt(1, 1, (1, 1))));
    assert_eq!(head, START + TTL);
    for (client, apart) in [(2, 2), (1_000_000, 1_000_000), (1_500_001, 1), (7_000_000_000, 0)] {
        let low = client % (1_u128 << 32);
        let expected = if client == 7_000_000_000 { u64::try_from(low % 1_500_000).unwrap() } else { apart };
        let repoll_at = world.queued(waiting(attempt(client, 1, (1, 1))));
        assert_eq!(repoll_at, head + CLAIM_WINDOW + Duration::from_micros(expected), "client {client}");
    }
}

#[test]
fn parking_a_client_tells_the_next_waiter_that_it_is_the_head() {
    let mut world = World::new();
    world.granted(attempt(8, 1, (1, 2)));
    world.granted(attempt(9, 1, (1, 2)));
    for acquire in [attempt(1, 1, (1, 2)), attempt(1, 2, (1, 2)), attempt(2, 1, (2, 2))] {
        world.queued(waiting(acquire));
    }
    world.release(id(9, 1), Duration::ZERO);
    world.take_pushes();
    // The grant is not claimed, so its client is parked with its other place. What is behind does not fit yet.
    world.waits(CLAIM_WINDOW);
    assert_eq!(world.view().holders.len(), 1);
    let pushes = world.take_pushes();
    assert!(matches!(pushes[..], [(next, PushKind::Next(_))] if next == id(2, 1)), "{pushes:?}");
}

#[test]
fn parked_waiter_that_asks_is_granted_before_a_later_one() {
    let mut world = World::new();
    world.granted(attempt(8, 1, (1, 2)));
    world.granted(attempt(9, 1, (1, 2)));
    world.queued(waiting(attempt(1, 1, (1, 2))));
    let asking = waiting(attempt(1, 2, (1, 2)));
    world.queued(asking.clone());
    world.queued(waiting(attempt(2, 1, (2, 2))));
    world.unreachable.insert(ClientId::new(1));
    world.release(id(9, 1), Duration::ZERO);
    assert_eq!(world.view().holders.len(), 1, "the client is parked, and the next needs more");
    world.granted(asking);
}

#[test]
fn renewal_raises_the_token_to_the_floor_and_not_otherwise() {
    let mut world = World::new();
    let tokens = world.granted(Acquire { reserve: 5, ..attempt(1, 1, (1, 1)) }).tokens;
    let (first, last) = (tokens.first.get(), tokens.last.get());
    assert_eq!(last, first + 5);
    for (floor, expected) in [(first - 1, first), (last, first), (last + 7, last + 7), (last + 6, last + 7)] {
        world.now.floor = Token::new(floor);
        assert!(matches!(world.renew(id(1, 1), 0), Reply::Renewed { tokens: None, .. }));
        world.now.floor = None;
        assert_eq!(world.token_of(id(1, 1)), expected, "floor {floor}");
    }
    world.release(id(1, 1), Duration::ZERO);
    assert!(world.granted(attempt(2, 1, (1, 1))).tokens.first.get() > last + 7);
}

/// It may arrive at any time: it neither extends the lease nor shortens it to what was left when it was sent.
#[test]
fn question_for_a_lease_changes_nothing() {
    let mut world = World::new();
    world.granted(attempt(1, 1, (1, 1)));
    let ask = Command::Renew(Renew::to(id(1, 1), Duration::ZERO));
    for passed in [Duration::ZERO, TTL / 4, TTL / 4] {
        world.now = Now::same(world.now.time + passed);
        let before = world.view();
        let Reply::Renewed { valid_for, tokens: None, contended: false } = world.run(&ask) else { panic!() };
        assert_eq!(valid_for, before.holders[0].expires_at.since(world.now.time));
        assert_eq!(world.view(), before);
    }
    world.renew(id(1, 1), 0);
    let renewed = world.view();
    world.run(&ask);
    assert_eq!(world.view(), renewed);
    world.now = Now::same(world.now.time + 2 * TTL);
    assert_eq!(world.run(&ask), Reply::NotHeld);
}

#[test]
fn renewal_reserves_the_tokens_that_it_asks_for() {
    let mut world = World::new();
    let first = world.granted(attempt(1, 1, (1, 1))).tokens.last;
    let Reply::Renewed { tokens: Some(tokens), .. } = world.renew(id(1, 1), 4) else { panic!("no tokens") };
    assert!(tokens.first > first && tokens.last.get() == tokens.first.get() + 4);
}

#[test]
fn tombstone_ends_at_its_time() {
    let mut table = Table::new();
    let at = |seconds| START + Duration::from_secs(seconds);
    for (sequence, seconds) in [(1, 5), (2, 9)] {
        let Ok(()) = table.put_tombstone(id(1, sequence), at(seconds));
    }
    for (now, expected) in [
        (4, (0, Some(at(5)))),
        (5, (1, Some(at(9)))),
        (8, (0, Some(at(9)))),
        (10, (1, None)),
        (11, (0, None)),
    ] {
        assert_eq!(table.remove_tombstones(at(now)), Ok(expected), "at {now} s");
    }
}

#[test]
fn table_is_empty_until_a_token_is_drawn_and_shows_its_header() {
    let mut world = World::new();
    assert!(world.table.is_empty() && world.table.header().is_none());
    let token = world.granted(attempt(1, 1, (1, 1))).tokens.first;
    assert_eq!(token.get(), START.as_micros(), "tokens follow the wall clock");
    assert!(!world.table.is_empty());
    assert_eq!(world.table.header().map(|header| header.last_token), Some(token.get()));
}

#[test]
fn answers_give_access_to_the_metadata_of_all_that_they_show() {
    let mut world = World::new();
    let labelled = |text: &str, acquire| Acquire { metadata: Arc::from(text), ..acquire };
    world.granted(labelled("holds", attempt(1, 1, (1, 1))));
    world.queued(waiting(labelled("waits", attempt(2, 1, (1, 1)))));
    let mut shown = world.run(&Command::Inspect);
    let mut seen: Vec<_> =
        shown.metadata_mut().map(|(client, text)| (client.get(), text.to_string())).collect();
    assert_eq!(seen, [(1, "holds".to_owned()), (2, "waits".to_owned())]);
    let mut forced = world.run(&Command::ForceRelease);
    seen = forced.metadata_mut().map(|(client, text)| (client.get(), text.to_string())).collect();
    assert_eq!(seen[0], (1, "holds".to_owned()));
    assert_eq!(Reply::Released.metadata_mut().count(), 0);
}

#[test]
fn names_kinds_and_tokens_are_shown_as_they_are() {
    let name = Name::new("a\"b").unwrap();
    assert_eq!(
        (name.as_str(), name.to_string(), format!("{name:?}")),
        ("a\"b", "a\"b".to_owned(), "\"a\\\"b\"".to_owned())
    );
    assert_eq!(Resource { kind: Kind::ReadWrite, name }.to_string(), "rw \"a\\\"b\"");
    assert_eq!(Kind::Semaphore.to_string(), "semaphore");
    for (wrong, part) in [("", "empty"), ("a\nb", "byte 1"), (&"x".repeat(600), "600")] {
        let error = Name::new(wrong).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let token = Token::new(42).unwrap();
    assert_eq!(
        (u64::from(token), token.to_string(), format!("{token:?}")),
        (42, "42".to_owned(), "Token(42)".to_owned())
    );
    assert!(Token::new((1 << 53) - 1).is_some() && Token::new(1 << 53).is_none());
}

#[test]
fn last_token_is_remembered_for_an_hour_after_the_end_of_its_lease() {
    const HOUR: Duration = Duration::from_secs(3_600);
    for is_released in [true, false] {
        let mut world = World::new();
        let first = world.granted(Acquire { ttl: 2 * HOUR, ..attempt(1, 1, (1, 1)) });
        world.now = Now::same(START + 2 * HOUR);
        if is_released {
            world.now = Now::same(START + HOUR * 3 / 2);
            world.release(id(1, 1), Duration::ZERO);
        }
        assert!(matches!(world.run(&Command::Inspect), Reply::View(_)));
        // The clock is set back to before the grant.
        world.now = Now::same(START.saturating_sub(HOUR));
        let second = world.granted(attempt(2, 1, (1, 1)));
        assert!(second.tokens.first > first.tokens.last, "{second:?} after {first:?}");
    }
}
