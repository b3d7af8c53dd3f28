//! What each client does in an exploration, which faults may happen, and which properties must hold.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::RedisResult;

use crate::recipe::{AnyRecipe, Role};
use crate::redis::{BoxFuture, Note, Redis};

/// A property that every lock should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// Two clients are never in the critical section while the leases of both run.
    OneHolder,
    /// A holder whose lease has expired notices that before another client enters the critical section.
    DetectsExpiry,
    /// One lease after all clients crashed, the lock can be acquired.
    FreeAgain,
    /// No step of one client frees a lock that another client holds.
    FreesOnlyOwn,
    /// A holder whose lease runs can release.
    CanRelease,
    /// When no client has crashed and all have finished, the lock can be acquired.
    NoStaleLock,
    /// No client waits for a notification while the lock is free and no other client is about to act.
    WaitersWoken,
    /// The fencing token of each holder is higher than all before it.
    TokensIncrease,
}

impl Check {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::OneHolder,
        Self::DetectsExpiry,
        Self::FreeAgain,
        Self::FreesOnlyOwn,
        Self::CanRelease,
        Self::NoStaleLock,
        Self::WaitersWoken,
        Self::TokensIncrease,
    ];
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneHolder => "at most one holder",
            Self::DetectsExpiry => "the holder notices that its lease has expired",
            Self::FreeAgain => "the lock is free one lease after all clients crashed",
            Self::FreesOnlyOwn => "no client frees another client's lock",
            Self::CanRelease => "the holder can release its lock",
            Self::NoStaleLock => "a lock without a holder can be acquired",
            Self::WaitersWoken => "a waiter is notified when the lock becomes free",
            Self::TokensIncrease => "fencing tokens increase",
        })
    }
}

/// A fault of a scenario, beside clients that crash or are delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// No fault.
    None,
    /// The second client's clock is more than a lease ahead.
    ClocksDiffer,
    /// A master restarts without its data.
    MasterRestarts,
    /// A master's clock jumps ahead by more than a lease.
    MasterJumps,
    /// Two clients use the same owner name.
    SameOwner,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "without any fault",
            Self::ClocksDiffer => "if the clients' clocks differ",
            Self::MasterRestarts => "if a master restarts without its data",
            Self::MasterJumps => "if a master's clock jumps",
            Self::SameOwner => "if two clients use the same owner name",
        })
    }
}

/// What a client does in the critical section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolderAction {
    /// It releases.
    None,
    /// It renews its lease, then releases.
    Renew,
    /// It acquires the lock once more, and releases twice.
    Reenter,
}

/// What one client does.
#[derive(Clone, Copy, Debug)]
pub struct Participant {
    /// Reader or writer.
    pub role: Role,
    /// Maximum number of attempts.
    pub tries: u32,
    /// What it does as the holder.
    pub action: HolderAction,
}

/// The clients, and the events that may happen between their steps.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The clients: A, B, C.
    pub participants: Vec<Participant>,
    /// The fault.
    pub fault: Fault,
    /// By how many seconds time may advance at once.
    pub passes: Vec<u64>,
    /// How often time may advance.
    pub most_passes: u8,
    /// How many clients may crash between two steps.
    pub most_deaths: u8,
    /// The search stops after this many states.
    pub most_states: usize,
}

/// Creates one client of the lock under test. Clients with the same number use the same owner name.
pub type MakeClient = Arc<dyn Fn(Redis, Role, usize) -> Box<dyn AnyRecipe> + Send + Sync>;

/// The lock under test.
#[derive(Clone)]
pub struct Subject {
    /// Creates its clients.
    pub make: MakeClient,
    /// The lease in seconds. None: the lock never expires.
    pub lease: fn(Role) -> Option<u64>,
    /// Seconds after which every lease has expired.
    pub longest: u64,
    /// How many servers it needs.
    pub nodes: usize,
}

/// The clients' names; the last one is the probe's, which tests whether the lock is free.
pub const NAMES: [&str; 4] = ["A", "B", "C", "Z"];

/// The number of the probe.
pub const PROBE: usize = 3;

/// The whole run of one client.
pub(super) type Visit = BoxFuture<'static, RedisResult<()>>;

impl Subject {
    /// The function that one client runs.
    pub(super) fn program(&self, participant: Participant, owner: usize) -> impl Fn(Redis) -> Visit + use<> {
        let make = self.make.clone();
        move |redis| {
            let recipe = make(redis.clone(), participant.role, owner);
            Box::pin(visit(redis, recipe, participant))
        }
    }
}

/// Acquires, acts as the holder and releases, with a note for each of these.
async fn visit(redis: Redis, mut recipe: Box<dyn AnyRecipe>, participant: Participant) -> RedisResult<()> {
    for attempt in 1..=participant.tries {
        redis.note(Note::Attempting);
        let Some(hold) = recipe.try_lock().await? else {
            if attempt < participant.tries {
                recipe.wait(Duration::ZERO).await?;
            }
            continue;
        };
        redis.note(Note::Acquired(hold));
        return act(&redis, &mut *recipe, participant.action).await;
    }
    recipe.give_up().await
}

async fn act(redis: &Redis, recipe: &mut dyn AnyRecipe, action: HolderAction) -> RedisResult<()> {
    match action {
        HolderAction::None => {}
        HolderAction::Renew => {
            redis.note(Note::Attempting);
            match recipe.renew().await? {
                Some(Some(hold)) => redis.note(Note::Acquired(hold)),
                Some(None) => {
                    redis.note(Note::Lost);
                    return Ok(());
                }
                None => {}
            }
        }
        HolderAction::Reenter => {
            if recipe.try_lock().await?.is_some() {
                recipe.unlock().await?;
            }
        }
    }
    redis.note(Note::Releasing);
    let was_found = recipe.unlock().await?;
    redis.note(Note::Released(was_found));
    Ok(())
}
