//! The flash sale: a web service that acquires a lock for each sale, and the cost of each lock under 1,000 concurrent
//! clients.

pub mod ab;
pub mod chart;
pub mod driver;
pub mod measure;
pub mod service;
pub mod summary;

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use redis::RedisResult;
use tokio::time::timeout;

use crate::outcome::{Outcome, find};
use crate::recipe::AnyRecipe;
use crate::redis::Redis;

/// How long a request waits for the lock at most: the default timeout of `ab`.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// For how long some policies poll before they sleep.
const BUSY: Duration = Duration::from_millis(600);

/// What a request does while the lock is held: one of the published policies, or the recipe's own way to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Retry {
    /// Retry at once for 600 ms, then yield before each attempt
    SpinThenYield,
    /// Yield before each attempt for 600 ms, then sleep 200 ms
    YieldThenSleep,
    /// Sleep 200 ms
    Sleep200ms,
    /// Sleep 2 s
    Sleep2s,
    /// Yield before each attempt
    Yield,
    /// Wait for a notification: hash-pubsub only, and its default
    Listen,
}

impl Retry {
    /// The policies, in the order in which they were published.
    pub const POLICIES: [Self; 5] =
        [Self::SpinThenYield, Self::YieldThenSleep, Self::Sleep200ms, Self::Sleep2s, Self::Yield];

    /// PauseDetector after a failed attempt, `waited` after the first one.
    async fn pause(self, redis: &Redis, recipe: &mut dyn AnyRecipe, waited: Duration) -> RedisResult<()> {
        let is_busy = waited < BUSY;
        let pause = match self {
            Self::Listen => return listen(recipe, REQUEST_TIMEOUT.saturating_sub(waited)).await,
            Self::SpinThenYield if is_busy => return Ok(()),
            Self::SpinThenYield | Self::Yield => Duration::ZERO,
            Self::YieldThenSleep if is_busy => Duration::ZERO,
            Self::YieldThenSleep | Self::Sleep200ms => Duration::from_millis(200),
            Self::Sleep2s => Duration::from_secs(2),
        };
        redis.sleep(pause + jitter(pause)).await
    }
}

async fn listen(recipe: &mut dyn AnyRecipe, limit: Duration) -> RedisResult<()> {
    match timeout(limit, recipe.wait(Duration::ZERO)).await {
        Ok(message) => message.map(drop),
        // The holder's lease may last longer than the customer's retry_policy.
        Err(_) => Ok(()),
    }
}

/// A random delay of up to a tenth of the pause. The policies were published for threads, whose wake-ups spread by themselves. On
/// an event loop all tasks that began to sleep in the same millisecond would wake in the same millisecond again and again.
fn jitter(pause: Duration) -> Duration {
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

/// The lock of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A published recipe, with a policy.
    Recipe {
        /// Its name.
        id: &'static str,
        /// What it does while the lock is held.
        retry: Retry,
    },
    /// leasehold's mutex, on the server that counts the sales.
    Leasehold,
    /// leasehold's mutex on PostgreSQL.
    LeaseholdPostgres,
    /// No lock: shows that overselling is detected.
    Nothing,
}

impl Contender {
    /// The contenders of this name: a recipe once with each of these policies, or with all that it supports.
    ///
    /// # Errors
    ///
    /// An unknown name, or a policy that the recipe does not support.
    pub fn named(name: &str, retries: &[Retry]) -> Outcome<Vec<Self>> {
        let row = match name {
            "leasehold" => return Ok(vec![Self::Leasehold]),
            "leasehold-postgres" => return Ok(vec![Self::LeaseholdPostgres]),
            "none" => return Ok(vec![Self::Nothing]),
            id => find(id)?,
        };
        if retries.contains(&Retry::Listen) && !row.waits {
            return Err(format!("{name} has no notification to wait for: choose another --retry").into());
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
            Self::LeaseholdPostgres => f.write_str("leasehold-postgres"),
            Self::Nothing => f.write_str("none"),
        }
    }
}

/// Raises the limit of open files to its maximum: 1,000 connections need more than most shells allow.
pub fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // If it cannot be raised, connections fail with an error of their own.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
