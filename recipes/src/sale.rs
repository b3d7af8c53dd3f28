//! The flash sale: a web service that takes a lock for each sale, and what each way to lock costs when a thousand
//! customers come at once.

pub mod ab;
pub mod contest;
pub mod driver;
pub mod picture;
pub mod service;

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use redis::RedisResult;
use tokio::time::timeout;

use crate::recipe::AnyRecipe;
use crate::redis::Redis;
use crate::run::{Outcome, find};

/// How long a customer waits at most, as `ab` has it.
pub const CUSTOMER_LIMIT: Duration = Duration::from_secs(30);

/// For how long some policies are busy before they rest.
const BUSY: Duration = Duration::from_millis(600);

/// What a request does while somebody else has the lock: one of the published policies, or what the recipe itself says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Retry {
    /// Try again at once for 600 ms, then let others run before each try
    SpinThenYield,
    /// Let others run before each try for 600 ms, then sleep 200 ms
    YieldThenSleep,
    /// Sleep 200 ms
    Sleep200ms,
    /// Sleep 2 s
    Sleep2s,
    /// Let others run before each try
    Yield,
    /// Wait for word that it is free: hash-pubsub, which does so unless it is told to do something else
    Listen,
}

impl Retry {
    /// The policies, in the order in which they were published.
    pub const POLICIES: [Self; 5] =
        [Self::SpinThenYield, Self::YieldThenSleep, Self::Sleep200ms, Self::Sleep2s, Self::Yield];

    /// After a try that failed, `waited` after the first one.
    async fn pause(self, redis: &Redis, recipe: &mut dyn AnyRecipe, waited: Duration) -> RedisResult<()> {
        let is_busy = waited < BUSY;
        let pause = match self {
            Self::Listen => return listen(recipe, CUSTOMER_LIMIT.saturating_sub(waited)).await,
            Self::SpinThenYield if is_busy => return Ok(()),
            Self::SpinThenYield | Self::Yield => Duration::ZERO,
            Self::YieldThenSleep if is_busy => Duration::ZERO,
            Self::YieldThenSleep | Self::Sleep200ms => Duration::from_millis(200),
            Self::Sleep2s => Duration::from_secs(2),
        };
        redis.sleep(pause + lateness(pause)).await
    }
}

async fn listen(recipe: &mut dyn AnyRecipe, limit: Duration) -> RedisResult<()> {
    match timeout(limit, recipe.wait(Duration::ZERO)).await {
        Ok(heard) => heard.map(drop),
        // The holder's lease may last longer than the customer's patience.
        Err(_) => Ok(()),
    }
}

/// How much too late a sleeper wakes: at random, up to a tenth. Threads, which the policies were published for, come apart by
/// themselves; on an event loop all who sleep from the same millisecond on would wake in the same millisecond for ever, and but
/// one of them get the lock.
fn lateness(pause: Duration) -> Duration {
    let part = u32::try_from(getrandom::u64().unwrap_or(0) % 1_000).unwrap_or(0);
    pause / 10 * part / 1_000
}

impl fmt::Display for Retry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SpinThenYield => "spin-then-yield",
            Self::YieldThenSleep => "yield-then-sleep",
            Self::Sleep200ms => "sleep200ms",
            Self::Sleep2s => "sleep2s",
            Self::Yield => "yield",
            Self::Listen => "listen",
        })
    }
}

/// Who takes part: how the service locks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A published recipe, with a policy.
    Recipe {
        /// Its name.
        id: &'static str,
        /// What it does while somebody else has the lock.
        retry: Retry,
    },
    /// leasehold's mutex.
    Leasehold,
    /// No lock: what is sold twice has to be seen.
    Nothing,
}

impl Contender {
    /// Those of this name: a recipe once with each of these ways to wait, or with all that suit it.
    ///
    /// # Errors
    ///
    /// There is none of that name, or it tells nobody what one of them would listen to.
    pub fn named(name: &str, retries: &[Retry]) -> Outcome<Vec<Self>> {
        let row = match name {
            "leasehold" => return Ok(vec![Self::Leasehold]),
            "none" => return Ok(vec![Self::Nothing]),
            id => find(id)?,
        };
        if retries.contains(&Retry::Listen) && !row.waits {
            return Err(format!("{name} tells nobody that it is free: choose another --retry").into());
        }
        let retries = match retries {
            [] if row.waits => &[Retry::Listen],
            [] => &Retry::POLICIES[..],
            some => some,
        };
        Ok(retries.iter().map(|retry| Self::Recipe { id: row.id, retry: *retry }).collect())
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recipe { id, retry } => write!(f, "{id}, {retry}"),
            Self::Leasehold => f.write_str("leasehold"),
            Self::Nothing => f.write_str("none"),
        }
    }
}

/// Lets this process have as many files as it may have at all: a thousand connections need more than most shells allow.
pub fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Where it can't be raised, connections fail and say so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
