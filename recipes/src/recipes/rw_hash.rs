//! `rw-hash`: one hash with a field for all readers and one for the writer. Each holds the client's time of acquisition.

use std::time::Duration;

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe, Role};
use crate::redis::{Hold, Redis, Script, millis};

/// A reader's lease.
pub(super) const READ: Duration = Duration::from_secs(1);
/// A writer's lease.
pub(super) const WRITE: Duration = Duration::from_secs(3);

/// Times are client times in milliseconds.
const LOCK: Script = Script {
    name: "lock",
    text: "local function is_held(field, lease)\n\
             local since = redis.call('HGET', KEYS[1], field)\n\
             return since and tonumber(since) + lease > tonumber(ARGV[2])\n\
           end\n\
           if is_held('write', 3000) then return 0 end\n\
           if ARGV[1] == 'write' and is_held('read', 1000) then return 0 end\n\
           redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])\n\
           redis.call('EXPIRE', KEYS[1], ARGV[3])\n\
           return 1",
};

const UNLOCK: Script = Script {
    name: "unlock",
    text: "if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end\n\
           return redis.call('HDEL', KEYS[1], ARGV[1])",
};

pub(super) struct RwHash {
    redis: Redis,
    options: LockOptions,
    since: String,
}

impl RwHash {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        Self { redis, options, since: String::new() }
    }

    fn field(&self) -> &'static str {
        if self.options.role == Role::Reader { "read" } else { "write" }
    }
}

impl Recipe for RwHash {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        self.since = millis(self.redis.clock());
        let seconds = self.options.lease.as_secs().to_string();
        let args = [self.field(), &self.since, &seconds];
        let is_locked: bool = self.redis.eval(&LOCK, &[&self.options.key], &args).await?;
        Ok(is_locked.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.eval(&UNLOCK, &[&self.options.key], &[self.field(), &self.since]).await
    }
}
