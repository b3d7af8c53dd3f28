//! What every recipe can do, in one client's hands.

use std::future::Future;
use std::time::Duration;

use redis::RedisResult;

use crate::redis::{Hold, Redis, Soon};

/// What a client comes for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// To be alone.
    #[default]
    Writer,
    /// To be there beside other readers. A mutex takes it for a writer.
    Reader,
}

/// What a recipe does when `GET` says that the lock it has just found taken is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GetNil {
    /// It starts again at `SETNX`.
    #[default]
    StartAgain,
    /// It goes on to `GETSET`.
    GetSet,
}

/// What a recipe makes of a `GETSET` that found nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GetSetNil {
    /// It has the lock.
    #[default]
    Acquired,
    /// It has not.
    Failed,
}

/// What a recipe can be told beside its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The lock's name.
    pub key: String,
    /// For how long it is taken, where that can be said.
    pub lease: Duration,
    /// What the client comes for.
    pub role: Role,
    /// As whom a reentrant lock is taken. None: nobody else has that name.
    pub owner: Option<String>,
    /// A variant of the recipes that store a time.
    pub get_nil: GetNil,
    /// A variant of the recipes that store a time.
    pub getset_nil: GetSetNil,
    /// A variant of `rw-two-keys`: a script looks and sets, which needs both keys on one node.
    pub in_one_step: bool,
}

impl Default for Terms {
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

/// One published recipe, in one client's hands.
#[allow(clippy::option_option, reason = "that a recipe can't renew is not that it has lost")]
pub trait Recipe: Send {
    /// Tries once. None: somebody else has it.
    fn try_lock(&mut self) -> impl Future<Output = RedisResult<Option<Hold>>> + Send;

    /// Gives it back. False: it was not there to be given back.
    fn unlock(&mut self) -> impl Future<Output = RedisResult<bool>> + Send;

    /// Makes it last longer, where the recipe has that. Some nothing: it is not ours any more.
    fn renew(&mut self) -> impl Future<Output = RedisResult<Option<Option<Hold>>>> + Send {
        async { Ok(None) }
    }

    /// Asks whether it is ours, where the recipe has that.
    fn is_mine(&mut self) -> impl Future<Output = RedisResult<Option<bool>>> + Send {
        async { Ok(None) }
    }

    /// After a try that failed: waits until another one may be worth it, where the recipe knows better than to sleep.
    /// False: it does not.
    fn wait(&mut self, _limit: Duration) -> impl Future<Output = RedisResult<bool>> + Send {
        async { Ok(false) }
    }

    /// After the last try: leaves nothing behind that waits.
    fn give_up(&mut self) -> impl Future<Output = RedisResult<()>> + Send {
        async { Ok(()) }
    }
}

/// Any of them.
#[allow(
    missing_docs,
    clippy::option_option,
    reason = "it is `Recipe`, for a recipe that is chosen while the program runs"
)]
pub trait AnyRecipe: Send {
    fn try_lock(&mut self) -> Soon<'_, RedisResult<Option<Hold>>>;
    fn unlock(&mut self) -> Soon<'_, RedisResult<bool>>;
    fn renew(&mut self) -> Soon<'_, RedisResult<Option<Option<Hold>>>>;
    fn is_mine(&mut self) -> Soon<'_, RedisResult<Option<bool>>>;
    fn wait(&mut self, limit: Duration) -> Soon<'_, RedisResult<bool>>;
    fn give_up(&mut self) -> Soon<'_, RedisResult<()>>;
}

impl<R: Recipe> AnyRecipe for R {
    fn try_lock(&mut self) -> Soon<'_, RedisResult<Option<Hold>>> {
        Box::pin(Recipe::try_lock(self))
    }
    fn unlock(&mut self) -> Soon<'_, RedisResult<bool>> {
        Box::pin(Recipe::unlock(self))
    }
    fn renew(&mut self) -> Soon<'_, RedisResult<Option<Option<Hold>>>> {
        Box::pin(Recipe::renew(self))
    }
    fn is_mine(&mut self) -> Soon<'_, RedisResult<Option<bool>>> {
        Box::pin(Recipe::is_mine(self))
    }
    fn wait(&mut self, limit: Duration) -> Soon<'_, RedisResult<bool>> {
        Box::pin(Recipe::wait(self, limit))
    }
    fn give_up(&mut self) -> Soon<'_, RedisResult<()>> {
        Box::pin(Recipe::give_up(self))
    }
}

/// Makes a client of a recipe.
pub type Make = fn(Redis, Terms) -> Box<dyn AnyRecipe>;

/// How often, and for how long, a client tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Once.
    OneShot,
    /// Until so much time is over, sleeping between tries.
    Until {
        /// From the first try on.
        timeout: Duration,
        /// Between two tries.
        interval: Duration,
    },
    /// At most so many tries.
    Polling {
        /// Between two tries.
        interval: Duration,
        /// The first included.
        tries: u32,
    },
}

/// Tries as long as the patience lasts.
///
/// # Errors
///
/// The recipe's.
pub async fn lock(
    redis: &Redis,
    recipe: &mut dyn AnyRecipe,
    patience: Patience,
) -> RedisResult<Option<Hold>> {
    let start = redis.clock();
    let mut tried = 0;
    loop {
        if let Some(hold) = recipe.try_lock().await? {
            return Ok(Some(hold));
        }
        tried += 1;
        let interval = match patience {
            Patience::Until { timeout, interval } if redis.clock() < start + timeout => interval,
            Patience::Polling { interval, tries } if tried < tries => interval,
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

/// Releases, and tries again for some time where a server fails to answer.
///
/// # Errors
///
/// The last failure.
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
