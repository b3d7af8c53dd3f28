//! The promises about an attempt that several clients make for one caller, checked after every step of random command sequences.

use leasehold_core::{FIRST_REQUESTED, ReleaseIf, Token};
use proptest::prelude::*;

use super::*;

/// The clients that make the request.
const SERVERS: u128 = 3;

const REQUEST: Acquisition = Acquisition { client: ClientId::new(99), sequence: FIRST_REQUESTED };

#[derive(Clone, Debug)]
enum Op {
    /// A client makes the request.
    Ask {
        client: u128,
        wait: bool,
    },
    /// It gives back what its caller was not notified of.
    GiveBack {
        client: u128,
    },
    /// The caller renews, or releases, the lease that it was notified of last.
    Renew,
    Release,
    /// Another attempt, by a client of its own.
    Other {
        release: bool,
    },
    Force,
    Pass {
        ms: u64,
    },
    Leave {
        client: u128,
    },
    Return {
        client: u128,
    },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let client = || 0..SERVERS;
    let op = prop_oneof![
        6 => (client(), any::<bool>()).prop_map(|(client, wait)| Op::Ask { client, wait }),
        4 => client().prop_map(|client| Op::GiveBack { client }),
        2 => Just(Op::Renew),
        1 => Just(Op::Release),
        4 => any::<bool>().prop_map(|release| Op::Other { release }),
        1 => Just(Op::Force),
        3 => (0..6_000_u64).prop_map(|ms| Op::Pass { ms }),
        1 => client().prop_map(|client| Op::Leave { client }),
        2 => client().prop_map(|client| Op::Return { client }),
    ];
    proptest::collection::vec(op, 1..60)
}

fn ask(client: u128, wait: bool) -> Command {
    let Command::Acquire(command) = acquire(REQUEST, 1, 1, wait) else { unreachable!("it is one") };
    Command::from(Acquire { inbox: Some(ClientId::new(client)), ..Acquire::clone(&command) })
}

/// What the caller and its servers know.
#[derive(Default)]
struct Notified {
    /// The lease of the last grant that an answer has reported.
    token: Option<Token>,
    /// Who has reported it, in order.
    by: Vec<u128>,
    /// The last client whose `Acquire` waits.
    waits_at: Option<u128>,
}

fn check(ops: &[Op]) -> Result<(), String> {
    let (mut world, mut notified) = (World::new(), Notified::default());
    for op in ops {
        world.pushes.clear();
        let before = world.view();
        if !before.waiters.iter().any(|entry| entry.acquisition == REQUEST)
            && before.holders.iter().all(|held| held.acquisition != REQUEST)
        {
            notified.waits_at = None;
        }
        let holds = before.holders.iter().find(|holder| holder.acquisition == REQUEST).map(|held| held.token);
        match *op {
            Op::Ask { client, wait } => {
                let reply = world.run(&ask(client, wait));
                asked(&mut notified, client, wait, &reply, &world)?;
            }
            Op::GiveBack { client } => {
                let only_if = Some(ReleaseIf::SpeaksFor(ClientId::new(client)));
                let tombstone = Duration::from_secs(60);
                let reply =
                    world.run(&Command::Release(Release { only_if, tombstone, ..Release::now(REQUEST) }));
                given_back(&mut notified, client, holds, &reply)?;
            }
            Op::Renew | Op::Release => {
                let Some(token) = notified.token else { continue };
                let reply = match op {
                    Op::Renew => {
                        world.run(&Command::Renew(Renew { token: Some(token), ..Renew::to(REQUEST, TTL) }))
                    }
                    _ => {
                        let only_if = Some(ReleaseIf::HasToken(token));
                        let tombstone = Duration::from_secs(60);
                        world.run(&Command::Release(Release { only_if, tombstone, ..Release::now(REQUEST) }))
                    }
                };
                let is_done = matches!(reply, Reply::Renewed { .. } | Reply::Released);
                if is_done != (holds == Some(token)) {
                    return Err(format!("{op:?} of {token:?} beside {holds:?}: {reply:?}"));
                }
            }
            Op::Other { release: false } => drop(world.run(&acquire(id(9, 0), 1, 1, true))),
            Op::Other { release: true } => drop(world.run(&release(id(9, 0)))),
            Op::Force => drop(world.run(&Command::ForceRelease)),
            Op::Pass { ms } => world.pass(Duration::from_millis(ms)),
            Op::Leave { client } => world.absent.push(ClientId::new(client)),
            Op::Return { client } => world.absent.retain(|absent| *absent != ClientId::new(client)),
        }
        if world.view().holders.len() > 1 {
            return Err(format!("two holders after {op:?}"));
        }
    }
    Ok(())
}

/// The answer to a client that has made the request.
fn asked(
    notified: &mut Notified,
    client: u128,
    wait: bool,
    reply: &Reply,
    world: &World<Table>,
) -> Result<(), String> {
    let revoked = |client: u128| {
        world.pushes.iter().any(|push| push.inbox == ClientId::new(client) && push.kind == PushKind::Revoked)
    };
    let notified_of_move = |former: Option<u128>, client| match former {
        Some(former) if former != client && !revoked(former) => {
            Err(format!("client {former} still waits, and was not notified"))
        }
        _ => Ok(()),
    };
    match reply {
        Reply::Granted(grant) => {
            if notified.token != Some(grant.tokens.first) {
                (notified.token, notified.by) = (Some(grant.tokens.first), Vec::new());
            }
            let is_first = grant.valid_for == TTL;
            if is_first != notified.by.is_empty() {
                return Err(format!("reported by {:?}, and {reply:?} says otherwise", notified.by));
            }
            notified.by.push(client);
            notified_of_move(notified.waits_at.take(), client)?;
        }
        Reply::Queued(_) if wait => {
            notified_of_move(notified.waits_at.replace(client), client)?;
        }
        _ => {}
    }
    Ok(())
}

/// The answer to a client that gives back what its caller was not notified of.
fn given_back(
    notified: &mut Notified,
    client: u128,
    holds: Option<Token>,
    reply: &Reply,
) -> Result<(), String> {
    let is_notified = holds.is_some() && holds == notified.token;
    let others_notified = is_notified && notified.by != [client];
    match reply {
        Reply::Released if others_notified => {
            Err(format!("client {client} has ended the lease of which {:?} gave notice", notified.by))
        }
        Reply::NotHeld if is_notified && !others_notified => {
            Err(format!("client {client} alone gave notice of it: {reply:?}"))
        }
        Reply::Dequeued if notified.waits_at != Some(client) => {
            Err(format!("client {client} has ended the wait at {:?}", notified.waits_at))
        }
        Reply::Dequeued => {
            notified.waits_at = None;
            Ok(())
        }
        _ => Ok(()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn request_of_several_clients_upholds_its_properties(ops in ops()) {
        check(&ops).map_err(TestCaseError::fail)?;
    }
}
