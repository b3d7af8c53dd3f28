//! The interface of a recipe, as one client uses it.

use std::future::Future;
use std::time::Duration;

use redis::RedisResult;

use crate::redis::{BoxFuture, Hold, Redis};

/// Reader or writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// Exclusive.
    #[default]
    Writer,
    /// Shared with other readers. A mutex treats it as a writer.
    Reader,
}

/// What a recipe does if `GET` returns nil after `SETNX` has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GetNil {
    /// It starts again with `SETNX`.
    #[default]
    StartAgain,
    /// It continues with `GETSET`.
    GetSet,
}

/// How a recipe interprets a `GETSET` that returns nil.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GetSetNil {
    /// The client has acquired the lock.
    #[default]
    Acquired,
    /// The attempt has failed.
    Failed,
}

/// The options of a recipe. Each recipe uses those that it supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockOptions {
    /// The lock's name.
    pub key: String,
    /// The lease.
    pub lease: Duration,
    /// Reader or writer.
    pub role: Role,
    /// The owner name of a reentrant lock. None: a unique one.
    pub owner: Option<String>,
    /// A variant of the recipes that store a time.
    pub get_nil: GetNil,
    /// A variant of the recipes that store a time.
    pub getset_nil: GetSetNil,
    /// A variant of `rw-two-keys`: one script checks and sets, which needs both keys on one node.
    pub in_one_step: bool,
}

impl Default for LockOptions {
    fn default() -> Self {
        Self {
            key: "lock".to_owned(),
            lease: Duration::from_secs(10),
            role: Role::Writer,
            owner: None,
            get_nil: GetNil::default(),
            getset_nil: GetSetNil::default(),
            in_one_step: false,
        }
    }
}

/// One published recipe, as one client uses it.
#[allow(clippy::option_option, reason = "no support for renewal differs from a lost lock")]
pub trait Recipe: Send {
    /// Makes one attempt. None: another client holds the lock.
    fn try_lock(&mut self) -> impl Future<Output = RedisResult<Option<Hold>>> + Send;

    /// Releases the lock. False: it was not the client's any more.
    fn unlock(&mut self) -> impl Future<Output = RedisResult<bool>> + Send;

    /// Renews the lease. None: the recipe cannot renew. `Some(None)`: the lock was not the client's any more.
    fn renew(&mut self) -> impl Future<Output = RedisResult<Option<Option<Hold>>>> + Send {
        async { Ok(None) }
    }

    /// Whether the client still holds the lock. None: the recipe cannot tell.
    fn is_mine(&mut self) -> impl Future<Output = RedisResult<Option<bool>>> + Send {
        async { Ok(None) }
    }

    /// Waits for a notification after a failed attempt. False: the recipe has none, so the caller sleeps.
    fn wait(&mut self, _limit: Duration) -> impl Future<Output = RedisResult<bool>> + Send {
        async { Ok(false) }
    }

    /// Cleans up after the last failed attempt.
    fn give_up(&mut self) -> impl Future<Output = RedisResult<()>> + Send {
        async { Ok(()) }
    }
}

/// [`Recipe`] as a trait object.
#[allow(missing_docs, clippy::option_option, reason = "the methods are those of `Recipe`")]
pub trait AnyRecipe: Send {
    fn try_lock(&mut self) -> BoxFuture<'_, RedisResult<Option<Hold>>>;
    fn unlock(&mut self) -> BoxFuture<'_, RedisResult<bool>>;
    fn renew(&mut self) -> BoxFuture<'_, RedisResult<Option<Option<Hold>>>>;
    fn is_mine(&mut self) -> BoxFuture<'_, RedisResult<Option<bool>>>;
    fn wait(&mut self, limit: Duration) -> BoxFuture<'_, RedisResult<bool>>;
    fn give_up(&mut self) -> BoxFuture<'_, RedisResult<()>>;
}

impl<R: Recipe> AnyRecipe for R {
    fn try_lock(&mut self) -> BoxFuture<'_, RedisResult<Option<Hold>>> {
        Box::pin(Recipe::try_lock(self))
    }
    fn unlock(&mut self) -> BoxFuture<'_, RedisResult<bool>> {
        Box::pin(Recipe::unlock(self))
    }
    fn renew(&mut self) -> BoxFuture<'_, RedisResult<Option<Option<Hold>>>> {
        Box::pin(Recipe::renew(self))
    }
    fn is_mine(&mut self) -> BoxFuture<'_, RedisResult<Option<bool>>> {
        Box::pin(Recipe::is_mine(self))
    }
    fn wait(&mut self, limit: Duration) -> BoxFuture<'_, RedisResult<bool>> {
        Box::pin(Recipe::wait(self, limit))
    }
    fn give_up(&mut self) -> BoxFuture<'_, RedisResult<()>> {
        Box::pin(Recipe::give_up(self))
    }
}

/// Creates a client of a recipe.
pub type MakeRecipe = fn(Redis, LockOptions) -> Box<dyn AnyRecipe>;

/// How often and for how long a client polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryPolicy {
    /// One attempt.
    OneShot,
    /// Attempts until a timeout.
    Until {
        /// Counts from the first attempt.
        timeout: Duration,
        /// Pause between two attempts.
        interval: Duration,
    },
    /// A limited number of attempts.
    Polling {
        /// Pause between two attempts.
        interval: Duration,
        /// Maximum number of attempts.
        tries: u32,
    },
}

/// Acquires the lock. None: the policy allows no further attempt.
///
/// # Errors
///
/// The recipe's error.
pub async fn lock(
    redis: &Redis,
    recipe: &mut dyn AnyRecipe,
    retry_policy: RetryPolicy,
) -> RedisResult<Option<Hold>> {
    let start = redis.clock();
    let mut attempts = 0;
    loop {
        if let Some(hold) = recipe.try_lock().await? {
            return Ok(Some(hold));
        }
        attempts += 1;
        let interval = match retry_policy {
            RetryPolicy::Until { timeout, interval } if redis.clock() < start + timeout => interval,
            RetryPolicy::Polling { interval, tries } if attempts < tries => interval,
            _ => {
                recipe.give_up().await?;
                return Ok(None);
            }
        };
        if !recipe.wait(interval).await? {
            redis.sleep(interval).await?;
        }
    }
}

/// Releases the lock, and retries until the timeout if the server does not respond.
///
/// # Errors
///
/// The last error.
pub async fn unlock_within(
    redis: &Redis,
    recipe: &mut dyn AnyRecipe,
    timeout: Duration,
) -> RedisResult<bool> {
    let start = redis.clock();
    loop {
        match recipe.unlock().await {
            Err(error) if redis.clock() < start + timeout && !error.is_unrecoverable_error() => {
                redis.sleep(Duration::from_millis(50)).await?;
            }
            released => return released,
        }
    }
}
