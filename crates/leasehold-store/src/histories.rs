//! Random histories for the model and a store, whose answers must be equal.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::Rows;
use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, FIRST_REQUESTED, GrantSecret, Owner, Release, ReleaseIf, Renew,
    Token, WaitFor,
};
use proptest::prelude::*;

/// Number of clients.
pub const CLIENTS: u128 = 4;

/// A client id with all bits in use, because each bit affects something: the order of rows, the name of an inbox, or the time
/// of a re-check.
pub const fn client_id(number: u128) -> ClientId {
    ClientId::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
}

/// One step of a history.
#[derive(Clone, Debug)]
pub enum Step {
    /// Runs a command.
    Do(Command),
    /// The store sweeps, unless its server does so without a command.
    Sweep,
    /// Milliseconds.
    Pass(u64),
    /// The store's clock is set back by so many milliseconds.
    SetBack(u64),
    /// Raises the token floor to this many milliseconds after the present time.
    Raise(u64),
    /// This client becomes unreachable.
    Leave(u128),
    /// It can be reached again.
    Return(u128),
}

/// Any commands about one resource, with time passing and clients coming and going.
pub fn steps(capacity: u32) -> impl Strategy<Value = Vec<Step>> {
    let one = one(capacity).prop_map(|step| vec![step]);
    let waits_for_more = waits_for_more(capacity);
    let waits_twice = waits_twice(capacity);
    let some = prop_oneof![
        20 => one,
        1 => waits_for_more,
        1 => waits_twice,
        1 => life(capacity),
        1 => queue(capacity)
    ];
    let some = proptest::collection::vec(some, 1..40).prop_map(|some| some.concat());
    (some, any::<bool>()).prop_map(|(steps, has_requests)| {
        if has_requests { steps.into_iter().filter_map(with_requests).collect() } else { steps }
    })
}

/// In a step of a history some attempts become requests. No request is made of a quorum, so that no floor is raised then. Nor is the clock
/// set back: a tombstone that has ended may then be there again, in a store that removes it later.
fn with_requests(step: Step) -> Option<Step> {
    match step {
        Step::Raise(_) | Step::SetBack(_) => None,
        Step::Do(command) => Some(Step::Do(requested(command))),
        other => Some(other),
    }
}

/// One in three attempts is a request.
const fn requested_sequence(sequence: u64) -> u64 {
    if sequence % 3 == 1 { FIRST_REQUESTED + sequence } else { sequence }
}

fn requested(command: Command) -> Command {
    let of = |acquisition: Acquisition| Acquisition {
        sequence: requested_sequence(acquisition.sequence),
        ..acquisition
    };
    match command {
        Command::Acquire(acquire) => {
            let acquisition = of(acquire.acquisition);
            let named = acquisition.is_requested().then_some(acquisition.client);
            Command::from(Acquire {
                acquisition,
                inbox: acquire.inbox.or(named),
                replaces: acquire.replaces.map(requested_sequence),
                ..Acquire::clone(&acquire)
            })
        }
        Command::Renew(renew) => Command::Renew(requested_renewal(&renew)),
        Command::Release(release) => {
            let acquisition = of(release.acquisition);
            let (mut tombstone, mut only_if) = (release.tombstone, release.only_if);
            if acquisition.is_requested() {
                only_if = only_if.or(some_token(acquisition.sequence).map(ReleaseIf::HasToken));
                if acquisition.sequence % 2 == 0 {
                    tombstone = tombstone.max(Duration::from_secs(4));
                }
            }
            Command::Release(Release { acquisition, tombstone, only_if, ..release })
        }
        Command::Inspect | Command::ForceRelease => command,
    }
}

fn requested_renewal(renew: &Renew) -> Renew {
    let sequence = requested_sequence(renew.acquisition.sequence);
    let token = some_token(sequence).filter(|_| sequence >= FIRST_REQUESTED);
    Renew { acquisition: Acquisition { sequence, ..renew.acquisition }, token, ..renew.clone() }
}

/// Stands for the token that the attempt's lease has, if it has one. As long as those of the present are.
const OWN_TOKEN: u64 = 1 << 50;

/// Sometimes none, and rarely one that no lease has.
fn some_token(sequence: u64) -> Option<Token> {
    match sequence / 3 % 4 {
        0 | 1 => Token::new(OWN_TOKEN),
        2 => None,
        _ => Token::new(OWN_TOKEN + 1),
    }
}

/// The command, with the token of the lease in this table where the history asks for it.
pub fn with_tokens(command: &Command, table: &mut impl Rows<Error = Infallible>) -> Command {
    let mut own = |acquisition, token: Token| {
        if token.get() != OWN_TOKEN {
            return token;
        }
        let lease = table.lease(acquisition).unwrap_or_else(|never| match never {});
        lease.map_or(token, |lease| lease.token)
    };
    match command {
        Command::Renew(renew) => {
            let token = renew.token.map(|token| own(renew.acquisition, token));
            Command::Renew(Renew { token, ..renew.clone() })
        }
        Command::Release(release) => {
            let only_if = match release.only_if {
                Some(ReleaseIf::HasToken(token)) => {
                    Some(ReleaseIf::HasToken(own(release.acquisition, token)))
                }
                other => other,
            };
            Command::Release(Release { only_if, ..release.clone() })
        }
        other => other.clone(),
    }
}

/// One step of a history of several resources.
#[derive(Clone, Debug)]
pub enum Joint {
    /// At the resource of this number.
    At(usize, Step),
    /// At the first resources, one attempt each.
    Together(Vec<Arc<Acquire>>),
    /// At the resources of these numbers, each as if it were alone.
    Renewals(Vec<(usize, Renew)>),
}

/// Number of resources of such a history.
pub const RESOURCES: usize = 3;

/// Any commands about several resources, some of which are taken together.
pub fn joint_steps(capacity: u32) -> impl Strategy<Value = Vec<Joint>> {
    let at = || 0..RESOURCES;
    let attempt = acquire(capacity).prop_map(|any| Arc::new(Acquire { wait: None, replaces: None, ..any }));
    let any = proptest::collection::vec(attempt, 1..=RESOURCES).prop_map(Joint::Together);
    // As clients do it: attempts of one client, which are new, or repeated, or released in part.
    let sequences = || 10..16_u64;
    let usual = (0..CLIENTS, sequences(), 2..=RESOURCES).prop_map(move |(client, sequence, count)| {
        let attempt = |_| Arc::new(plain(client, sequence, capacity));
        Joint::Together((0..count).map(attempt).collect())
    });
    let back = (at(), 0..CLIENTS, sequences(), 0..2_u64).prop_map(|(at, client, sequence, tombstone)| {
        let acquisition = Acquisition { client: client_id(client), sequence };
        let tombstone = Duration::from_secs(4 * tombstone);
        Joint::At(at, Step::Do(Command::Release(Release { tombstone, ..Release::now(acquisition) })))
    });
    // By one client and one ttl, and without tokens.
    let renewal = (at(), prop_oneof![0..5_u64, sequences()]);
    let renewals = (0..CLIENTS, 1..20_u64, proptest::collection::vec(renewal, 1..5));
    let renewals = renewals.prop_map(|(client, ttl, renewals)| {
        let renewal = |(at, sequence)| {
            let acquisition = Acquisition { client: client_id(client), sequence };
            (at, Renew::to(acquisition, Duration::from_secs(ttl * ttl * ttl)))
        };
        Joint::Renewals(renewals.into_iter().map(renewal).collect())
    });
    let one = prop_oneof![
        3 => renewals.prop_map(|joint| vec![joint]),
        6 => (at(), one(capacity)).prop_map(|(at, step)| vec![Joint::At(at, step)]),
        3 => any.prop_map(|joint| vec![joint]),
        6 => usual.prop_map(|joint| vec![joint]),
        6 => back.prop_map(|joint| vec![joint]),
        1 => (at(), queue(capacity)).prop_map(|(at, steps)| {
            steps.into_iter().map(|step| Joint::At(at, step)).collect()
        }),
    ];
    let some = proptest::collection::vec(one, 1..40).prop_map(|some| some.concat());
    (some, proptest::bool::ANY).prop_map(|(steps, has_requests)| {
        let with_requests = |joint| match joint {
            Joint::At(at, step) => with_requests(step).map(|step| Joint::At(at, step)),
            Joint::Renewals(renewals) => {
                let requested = |(at, renew)| (at, requested_renewal(&renew));
                Some(Joint::Renewals(renewals.into_iter().map(requested).collect()))
            }
            // What is acquired together are no requests.
            Joint::Together(_) => Some(joint),
        };
        if has_requests { steps.into_iter().filter_map(with_requests).collect() } else { steps }
    })
}

fn plain(client: u128, sequence: u64, capacity: u32) -> Acquire {
    Acquire {
        capacity,
        weight: capacity,
        metadata: Arc::from("m"),
        ..Acquire::exclusive(Acquisition { client: client_id(client), sequence }, Duration::from_secs(10))
    }
}

fn who() -> impl Strategy<Value = Acquisition> {
    (0..CLIENTS, 0..5_u64).prop_map(|(client, sequence)| Acquisition { client: client_id(client), sequence })
}

/// Sometimes another client than that of the attempt's id, or the same by name.
fn another() -> impl Strategy<Value = Option<ClientId>> {
    proptest::option::weighted(0.2, (0..CLIENTS).prop_map(client_id))
}

fn acquire(capacity: u32) -> impl Strategy<Value = Acquire> {
    let owner = proptest::option::weighted(0.3, 0..3_u8);
    let replaces = proptest::option::weighted(0.2, 0..5_u64);
    let secret = any::<[u8; 8]>().prop_map(GrantSecret::new);
    ((who(), another()), 1..=capacity + 1, any::<bool>(), owner, 0..3_u32, 0..9_u64, replaces, secret)
        .prop_map(move |((acquisition, inbox), weight, waits, owner, reserve, ttl, replaces, secret)| {
            Acquire {
                acquisition,
                inbox,
                owner: owner.map(|owner| Owner::new(&"o".repeat(usize::from(owner)))),
                capacity,
                weight,
                ttl: Duration::from_secs(ttl + 1),
                reserve,
                wait: waits.then_some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 6 }),
                replaces,
                secret,
                metadata: Arc::from("ä\0b"),
            }
        })
}

fn one(capacity: u32) -> impl Strategy<Value = Step> {
    let acquire = acquire(capacity).prop_map(|acquire| Step::Do(Command::from(acquire)));
    // One in five only asks.
    let renew = (who(), 0..3_u32, 0..5_u64).prop_map(|(acquisition, reserve, part)| {
        Step::Do(Command::Renew(Renew {
            reserve,
            ..Renew::to(acquisition, Duration::from_secs(10 * part.min(1)))
        }))
    });
    let release =
        (who(), another(), 0..4_u64, 0..3_u64).prop_map(|(acquisition, speaker, min_hold, tombstone)| {
            let min_hold = Duration::from_secs(min_hold * min_hold);
            Step::Do(Command::Release(Release {
                only_if: speaker.map(ReleaseIf::SpeaksFor),
                min_hold,
                tombstone: Duration::from_secs(tombstone * 4),
                ..Release::now(acquisition)
            }))
        });
    prop_oneof![
        8 => acquire,
        4 => renew,
        5 => release,
        1 => Just(Step::Do(Command::ForceRelease)),
        1 => Just(Step::Do(Command::Inspect)),
        1 => Just(Step::Sweep),
        4 => (0..6_000_u64).prop_map(Step::Pass),
        1 => prop_oneof![0..9_000_u64, 0..5_000_000_u64].prop_map(Step::SetBack),
        1 => prop_oneof![0..50_u64, 0..9_000_000_u64].prop_map(Step::Raise),
        1 => (0..CLIENTS).prop_map(Step::Leave),
        2 => (0..CLIENTS).prop_map(Step::Return),
    ]
}

/// A holder that waits for more, beside others, and what then becomes of one of them: too rare in what is drawn step by step.
fn waits_for_more(capacity: u32) -> impl Strategy<Value = Vec<Step>> {
    let others = proptest::collection::vec(1..CLIENTS, 1..3);
    let back = proptest::option::of((0..3_usize, 0..900_u64));
    (0..CLIENTS, others, 1..=capacity, 1..=capacity, back).prop_map(
        move |(client, others, weight, more, back)| {
            let ask = |client: u128, sequence, weight, replaces| {
                Command::from(Acquire {
                    acquisition: Acquisition { client: client_id(client % CLIENTS), sequence },
                    inbox: None,
                    owner: None,
                    capacity,
                    weight,
                    ttl: Duration::from_secs(4),
                    reserve: 1,
                    wait: Some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 6 }),
                    replaces,
                    secret: GrantSecret::new([7; 8]),
                    metadata: Arc::from(""),
                })
            };
            let holders: Vec<u128> =
                [client].into_iter().chain(others.iter().map(|other| client + other)).collect();
            let mut steps = vec![Step::Do(ask(client, 50, weight, None))];
            steps.extend(
                (60..).zip(&others).map(|(number, other)| Step::Do(ask(client + other, number, 1, None))),
            );
            steps.push(Step::Do(ask(client, 51, more, Some(50))));
            // A waiter behind it.
            steps.push(Step::Do(ask(client + 1, 70, 1, None)));
            if let Some((at, pass)) = back {
                let (at, sequence) = if at == 0 { (0, 50) } else { (1, 60) };
                let acquisition = Acquisition { client: client_id(holders[at] % CLIENTS), sequence };
                steps.extend([Step::Pass(pass), Step::Do(release_of(acquisition))]);
            }
            steps
        },
    )
}

/// An owner with two waiters, and another waiter between them.
fn waits_twice(capacity: u32) -> impl Strategy<Value = Vec<Step>> {
    let (half, rest) = ((capacity / 2).max(1), (capacity - capacity / 2).max(1));
    let between = prop_oneof![3 => Just((capacity - 1).max(1)), 1 => 1..=capacity];
    (0..CLIENTS, between, any::<bool>()).prop_map(move |(client, between, is_named)| {
        let step = |number: u32, weight, owner: Option<&str>| {
            let client = (client + u128::from(number)) % CLIENTS;
            let acquisition = Acquisition { client: client_id(client), sequence: u64::from(80 + number) };
            let command = Acquire {
                acquisition,
                owner: owner.map(Owner::new),
                wait: Some(WaitFor { entry_ttl: Duration::from_secs(10), max_queue: 6 }),
                ..plain(client, 0, capacity)
            };
            (acquisition, Step::Do(Command::from(Acquire { weight, ..command })))
        };
        let (first, take_first) = step(0, half, None);
        let (second, take_second) = step(1, rest, None);
        let owner = |is_named: bool| is_named.then_some("o");
        let waits =
            [step(2, 1, owner(true)), step(3, between, None), step(4, 1, owner(is_named)), step(5, 1, None)];
        let mut steps = vec![take_first, take_second];
        steps.extend(waits.into_iter().map(|(_, step)| step));
        steps.extend([first, second].map(|acquisition| Step::Do(release_of(acquisition))));
        steps
    })
}

/// The usual life of a lock: acquired, perhaps renewed, released. Some take so long that the store may forget the last token.
fn life(capacity: u32) -> impl Strategy<Value = Vec<Step>> {
    let pass = || prop_oneof![0..6_000_u64, 0..5_000_000_u64];
    let ttl = || prop_oneof![1..10_u64, Just(2 * 3_600)].prop_map(Duration::from_secs);
    let renewal = proptest::option::of((ttl(), 0..3_u32, pass()));
    let taken = (0..CLIENTS, 0..5_u64, 1..=capacity, ttl(), 0..3_u32);
    (taken, pass(), renewal, pass()).prop_map(move |(taken, before, renewal, after)| {
        let (client, sequence, weight, ttl, reserve) = taken;
        let acquisition = Acquisition { client: client_id(client), sequence };
        let (owner, wait, replaces, metadata) = (None, None, None, Arc::from("m"));
        let acquire = Command::from(Acquire {
            acquisition,
            inbox: None,
            owner,
            capacity,
            weight,
            ttl,
            reserve,
            wait,
            replaces,
            secret: GrantSecret::UNUSED,
            metadata,
        });
        let mut steps = vec![Step::Do(acquire), Step::Pass(before)];
        if let Some((ttl, reserve, pass)) = renewal {
            steps.extend([
                Step::Do(Command::Renew(Renew { reserve, ..Renew::to(acquisition, ttl) })),
                Step::Pass(pass),
            ]);
        }
        steps.extend([Step::Do(release_of(acquisition)), Step::Pass(after)]);
        steps
    })
}

/// The usual life of a queue: several clients acquire the same lock in turn, hold it for a while and release it. Sometimes
/// another step comes in between.
fn queue(capacity: u32) -> impl Strategy<Value = Vec<Step>> {
    let seconds = || prop_oneof![8 => 5..20_u64, 1 => 1..5_u64, 1 => Just(30 * 60), 1 => Just(2 * 3_600)];
    let weight = prop_oneof![3 => Just(capacity), 1 => 1..=capacity];
    let owner = proptest::option::weighted(0.1, 1..3_usize);
    let asked = ((0..CLIENTS, another()), 0..3_u32, seconds(), seconds(), weight, owner);
    let asked = proptest::collection::vec(asked, 2..12);
    let aside = prop_oneof![
        6 => Just(Aside::Nothing),
        6 => (seconds(), 0..8_u32).prop_map(|(ttl, reserve)| Aside::Renew(ttl, reserve.saturating_sub(6))),
        6 => (0..900_u64).prop_map(Aside::Pass),
        1 => (0..9_u64).prop_map(|seconds| Aside::Pass(1_000 * seconds * seconds)),
        2 => (0..12_usize, another()).prop_map(|(index, inbox)| Aside::AskAgain(index, inbox)),
        1 => (0..12_usize, another()).prop_map(|(index, inbox)| Aside::GiveUp(index, inbox)),
        1 => (0..900_u64).prop_map(|ms| Aside::Do(Step::Raise(ms))),
        1 => (0..900_000_u64).prop_map(|ms| Aside::Do(Step::SetBack(ms))),
        1 => (0..CLIENTS).prop_map(|client| Aside::Do(Step::Leave(client))),
        1 => (0..CLIENTS).prop_map(|client| Aside::Do(Step::Return(client))),
    ];
    let asides = proptest::collection::vec(aside, 36);
    (asked, asides, 1..8_usize, 5..100_u64).prop_map(move |(asked, asides, depth, first)| {
        let mut asides = asides.into_iter();
        let asked: Vec<Acquire> = (first..)
            .zip(asked)
            .map(|(sequence, ((client, inbox), reserve, ttl, entry_ttl, weight, owner))| Acquire {
                acquisition: Acquisition { client: client_id(client), sequence },
                inbox,
                owner: owner.map(|owner| Owner::new(&"o".repeat(owner))),
                capacity,
                weight,
                ttl: Duration::from_secs(ttl),
                reserve,
                wait: Some(WaitFor { entry_ttl: Duration::from_secs(entry_ttl), max_queue: 6 }),
                replaces: None,
                secret: GrantSecret::new(sequence.to_be_bytes()),
                metadata: Arc::from("m".repeat(usize::try_from(sequence % 4).unwrap_or(0))),
            })
            .collect();
        let mut steps = Vec::new();
        // As many are in it at a time as `depth` says, the holder included.
        for round in 0..asked.len() + depth {
            let holder =
                round.checked_sub(depth - 1).and_then(|round| asked.get(round)).map(|held| held.acquisition);
            let mut aside = || asides.next()?.step(holder?, &asked);
            steps.extend(aside());
            steps.extend(asked.get(round).map(|acquire| Step::Do(Command::from(acquire.clone()))));
            steps.extend([aside(), aside()].into_iter().flatten());
            steps.extend(holder.map(|holder| Step::Do(release_of(holder))));
        }
        steps
    })
}

/// What happens while a queue is worked off.
#[derive(Clone, Debug)]
enum Aside {
    Nothing,
    Renew(u64, u32),
    Pass(u64),
    /// Perhaps from another client.
    AskAgain(usize, Option<ClientId>),
    /// Perhaps only if this client speaks for it.
    GiveUp(usize, Option<ClientId>),
    Do(Step),
}

impl Aside {
    fn step(self, acquisition: Acquisition, asked: &[Acquire]) -> Option<Step> {
        match self {
            Self::Nothing => None,
            Self::Renew(ttl, reserve) => {
                let ttl = Duration::from_secs(ttl);
                Some(Step::Do(Command::Renew(Renew { reserve, ..Renew::to(acquisition, ttl) })))
            }
            Self::Pass(ms) => Some(Step::Pass(ms)),
            Self::AskAgain(index, inbox) => {
                let again = |acquire: &Acquire| Acquire { inbox: inbox.or(acquire.inbox), ..acquire.clone() };
                asked.get(index).map(|acquire| Step::Do(Command::from(again(acquire))))
            }
            Self::GiveUp(index, speaker) => {
                let given_up = |acquire: &Acquire| Release {
                    only_if: speaker.map(ReleaseIf::SpeaksFor),
                    ..Release::now(acquire.acquisition)
                };
                asked.get(index).map(|acquire| Step::Do(Command::Release(given_up(acquire))))
            }
            Self::Do(step) => Some(step),
        }
    }
}

/// A release of this attempt or lease.
pub fn release_of(acquisition: Acquisition) -> Command {
    Command::Release(Release::now(acquisition))
}
