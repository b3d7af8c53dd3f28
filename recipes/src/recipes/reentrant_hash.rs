//! `reentrant-hash`: a hash whose only field is the owner, with the number of acquisitions as its value.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis, Script};

const LOCK: Script = Script {
    name: "lock",
    text: "if redis.call('EXISTS', KEYS[1]) == 1 and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end\n\
           redis.call('HINCRBY', KEYS[1], ARGV[1], 1)\n\
           redis.call('EXPIRE', KEYS[1], ARGV[2])\n\
           return 1",
};

const UNLOCK: Script = Script {
    name: "unlock",
    text: "if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return nil end\n\
           if redis.call('HINCRBY', KEYS[1], ARGV[1], -1) > 0 then return 0 end\n\
           redis.call('DEL', KEYS[1])\n\
           return 1",
};

const RENEW: Script = Script {
    name: "renew",
    text: "if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end\n\
           redis.call('EXPIRE', KEYS[1], ARGV[2])\n\
           return 1",
};

pub(super) struct ReentrantHash {
    redis: Redis,
    options: LockOptions,
    owner: String,
}

impl ReentrantHash {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        let owner = options.owner.clone().unwrap_or_else(|| redis.token());
        Self { redis, options, owner }
    }

    fn seconds(&self) -> String {
        self.options.lease.as_secs().to_string()
    }
}

impl Recipe for ReentrantHash {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        let is_held: bool =
            self.redis.eval(&LOCK, &[&self.options.key], &[&self.owner, &self.seconds()]).await?;
        Ok(is_held.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let left: Option<i64> = self.redis.eval(&UNLOCK, &[&self.options.key], &[&self.owner]).await?;
        Ok(left.is_some())
    }

    async fn renew(&mut self) -> RedisResult<Option<Option<Hold>>> {
        let args = [self.owner.as_str(), &self.seconds()];
        let is_held: bool = self.redis.eval(&RENEW, &[&self.options.key], &args).await?;
        Ok(Some(is_held.then(Hold::default)))
    }
}
