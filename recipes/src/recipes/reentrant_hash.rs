//! `reentrant-hash`: a hash with one field, the owner, that counts how often it is held.

use redis::RedisResult;

use crate::recipe::{Recipe, Terms};
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
    terms: Terms,
    owner: String,
}

impl ReentrantHash {
    pub(super) fn new(redis: Redis, terms: Terms) -> Self {
        let owner = terms.owner.clone().unwrap_or_else(|| redis.token());
        Self { redis, terms, owner }
    }

    fn seconds(&self) -> String {
        self.terms.lease.as_secs().to_string()
    }
}

impl Recipe for ReentrantHash {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        let is_held: bool =
            self.redis.eval(&LOCK, &[&self.terms.key], &[&self.owner, &self.seconds()]).await?;
        Ok(is_held.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let left: Option<i64> = self.redis.eval(&UNLOCK, &[&self.terms.key], &[&self.owner]).await?;
        Ok(left.is_some())
    }

    async fn renew(&mut self) -> RedisResult<Option<Option<Hold>>> {
        let args = [self.owner.as_str(), &self.seconds()];
        let is_held: bool = self.redis.eval(&RENEW, &[&self.terms.key], &args).await?;
        Ok(Some(is_held.then(Hold::default)))
    }
}
