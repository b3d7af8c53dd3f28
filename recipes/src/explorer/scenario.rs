//! Who does what in an exploration, what may happen meanwhile, and what is to hold.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::RedisResult;

use crate::recipe::{AnyRecipe, Role};
use crate::redis::{Note, Redis, Soon};

/// What every lock should be able to promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// Two clients are never in the critical section while the leases of both run.
    OneHolder,
    /// Whose lease has passed knows it, before somebody else is in the critical section.
    KnowsItsEnd,
    /// Whatever becomes of the clients, one lease later the lock can be had.
    FreeAgain,
    /// No step of one client frees what another one holds.
    FreesOnlyOwn,
    /// Who holds can release.
    CanRelease,
    /// When nobody has died, and all are through, the lock can be had.
    NothingLeft,
    /// Nobody waits for word while nobody holds, nobody has died, and nobody is about to do anything.
    Woken,
    /// Each holder's number is higher than all before it.
    Fenced,
}

impl Check {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::OneHolder,
        Self::KnowsItsEnd,
        Self::FreeAgain,
        Self::FreesOnlyOwn,
        Self::CanRelease,
        Self::NothingLeft,
        Self::Woken,
        Self::Fenced,
    ];
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneHolder => "at most one holder",
            Self::KnowsItsEnd => "a holder whose lease has passed knows it",
            Self::FreeAgain => "free again within a lease after all clients are gone",
            Self::FreesOnlyOwn => "nobody frees another's lock",
            Self::CanRelease => "the holder can release what it holds",
            Self::NothingLeft => "what nobody holds can be had",
            Self::Woken => "whoever waits gets word",
            Self::Fenced => "fencing tokens rise",
        })
    }
}

/// What else is wrong in a scenario, beside clients that die or are late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// Nothing.
    None,
    /// The second client's clock is more than a lease ahead.
    ClocksDiffer,
    /// A master restarts without its data.
    MasterRestarts,
    /// A master's clock jumps ahead by more than a lease.
    MasterJumps,
    /// Two clients give the same name.
    SameOwner,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "always",
            Self::ClocksDiffer => "if clocks differ",
            Self::MasterRestarts => "if a master restarts without its data",
            Self::MasterJumps => "if a master's clock jumps",
            Self::SameOwner => "if two clients give the same owner",
        })
    }
}

/// What a client does in the critical section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// It leaves again.
    Plain,
    /// It makes the lease last longer first.
    Renews,
    /// It enters once more, and leaves twice.
    Twice,
}

/// What one client does.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// What it comes for.
    pub role: Role,
    /// How often it tries.
    pub tries: u32,
    /// What it does when it is in.
    pub stay: Stay,
}

/// Who does what, and what may happen meanwhile.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The clients: A, B, C.
    pub parts: Vec<Part>,
    /// What is wrong.
    pub fault: Fault,
    /// How many seconds may pass at once.
    pub passes: Vec<u64>,
    /// How often time may pass.
    pub most_passes: u8,
    /// How many clients may die between two steps.
    pub most_deaths: u8,
    /// The bound: more states than this are not looked at.
    pub most_states: usize,
}

/// Makes one client of what is explored. The number is the client's; who has the same number as another one names the same
/// owner.
pub type MakeClient = Arc<dyn Fn(Redis, Role, usize) -> Box<dyn AnyRecipe> + Send + Sync>;

/// What is explored.
#[derive(Clone)]
pub struct Subject {
    /// Makes its clients.
    pub make: MakeClient,
    /// For how many seconds a lease runs; none has no end.
    pub lease: fn(Role) -> Option<u64>,
    /// When all is to be over: seconds, more than any lease.
    pub longest: u64,
    /// How many servers it needs.
    pub nodes: usize,
}

/// The clients' names; the last one is the one who comes to see whether the lock is free.
pub const NAMES: [&str; 4] = ["A", "B", "C", "Z"];

/// Whoever comes to see.
pub const PROBE: usize = 3;

/// What a client does, from beginning to end.
pub(super) type Visit = Soon<'static, RedisResult<()>>;

impl Subject {
    /// What this client does, from beginning to end.
    pub(super) fn program(&self, part: Part, owner: usize) -> impl Fn(Redis) -> Visit + use<> {
        let make = self.make.clone();
        move |redis| {
            let recipe = make(redis.clone(), part.role, owner);
            Box::pin(visit(redis, recipe, part))
        }
    }
}

/// Comes, tries, stays and goes, and tells of it.
async fn visit(redis: Redis, mut recipe: Box<dyn AnyRecipe>, part: Part) -> RedisResult<()> {
    for attempt in 1..=part.tries {
        redis.note(Note::Asks);
        let Some(hold) = recipe.try_lock().await? else {
            if attempt < part.tries {
                recipe.wait(Duration::ZERO).await?;
            }
            continue;
        };
        redis.note(Note::Holds(hold));
        return stay(&redis, &mut *recipe, part.stay).await;
    }
    recipe.give_up().await
}

async fn stay(redis: &Redis, recipe: &mut dyn AnyRecipe, stay: Stay) -> RedisResult<()> {
    match stay {
        Stay::Plain => {}
        Stay::Renews => {
            redis.note(Note::Asks);
            match recipe.renew().await? {
                Some(Some(hold)) => redis.note(Note::Holds(hold)),
                Some(None) => {
                    redis.note(Note::Lost);
                    return Ok(());
                }
                None => {}
            }
        }
        Stay::Twice => {
            if recipe.try_lock().await?.is_some() {
                recipe.unlock().await?;
            }
        }
    }
    redis.note(Note::Leaves);
    let was_found = recipe.unlock().await?;
    redis.note(Note::Released(was_found));
    Ok(())
}
