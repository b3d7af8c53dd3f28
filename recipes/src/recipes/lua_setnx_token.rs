//! `lua-setnx-token`: one script takes it, with a value that nobody else has; another one frees it if that is still there.
//!
//! Locking twice, and unlocking what is not locked, are errors of the caller.

use redis::RedisResult;

use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis, Script, misuse};

const LOCK: Script = Script {
    name: "lock",
    text: "if redis.call('SETNX', KEYS[1], ARGV[1]) == 0 then return 0 end\n\
           redis.call('EXPIRE', KEYS[1], ARGV[2])\n\
           return 1",
};

/// Also what other recipes free their locks with.
pub(super) const UNLOCK: Script = Script {
    name: "unlock",
    text: "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end\n\
           return redis.call('DEL', KEYS[1])",
};

pub(super) struct LuaSetnxToken {
    redis: Redis,
    terms: Terms,
    /// Present while it is locked.
    value: Option<String>,
}

impl LuaSetnxToken {
    pub(super) fn new(redis: Redis, terms: Terms) -> Self {
        Self { redis, terms, value: None }
    }
}

impl Recipe for LuaSetnxToken {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.value.is_some() {
            return Err(misuse("it is locked already"));
        }
        let value = self.redis.token();
        let seconds = self.terms.lease.as_secs().to_string();
        let is_locked: bool = self.redis.eval(&LOCK, &[&self.terms.key], &[&value, &seconds]).await?;
        self.value = is_locked.then_some(value);
        Ok(is_locked.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let value = self.value.take().ok_or_else(|| misuse("it is not locked"))?;
        self.redis.eval(&UNLOCK, &[&self.terms.key], &[&value]).await
    }
}
