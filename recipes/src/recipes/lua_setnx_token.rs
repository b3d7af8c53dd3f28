//! `lua-setnx-token`: one script sets a unique value with an expiry; another one deletes the key if it still has that value.
//!
//! Locking twice and unlocking without a lock are errors of the caller.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis, Script, misuse};

const LOCK: Script = Script {
    name: "lock",
    text: "if redis.call('SETNX', KEYS[1], ARGV[1]) == 0 then return 0 end\n\
           redis.call('EXPIRE', KEYS[1], ARGV[2])\n\
           return 1",
};

/// Other recipes use this script too.
pub(super) const UNLOCK: Script = Script {
    name: "unlock",
    text: "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end\n\
           return redis.call('DEL', KEYS[1])",
};

pub(super) struct LuaSetnxToken {
    redis: Redis,
    options: LockOptions,
    /// Some while the client holds the lock.
    value: Option<String>,
}

impl LuaSetnxToken {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        Self { redis, options, value: None }
    }
}

impl Recipe for LuaSetnxToken {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.value.is_some() {
            return Err(misuse("the client holds the lock already"));
        }
        let value = self.redis.token();
        let seconds = self.options.lease.as_secs().to_string();
        let is_locked: bool = self.redis.eval(&LOCK, &[&self.options.key], &[&value, &seconds]).await?;
        self.value = is_locked.then_some(value);
        Ok(is_locked.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let value = self.value.take().ok_or_else(|| misuse("the client does not hold the lock"))?;
        self.redis.eval(&UNLOCK, &[&self.options.key], &[&value]).await
    }
}
