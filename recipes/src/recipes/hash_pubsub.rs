//! `hash-pubsub`: the hash again, with a watchdog, and a channel on which the last release is told.

use std::time::Duration;

use redis::RedisResult;

use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis, Script, millis};

/// Nothing when it is taken; otherwise for how long somebody else has it.
const LOCK: Script = Script {
    name: "lock",
    text: "if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then\n\
             redis.call('HINCRBY', KEYS[1], ARGV[2], 1)\n\
             redis.call('PEXPIRE', KEYS[1], ARGV[1])\n\
             return nil\n\
           end\n\
           return redis.call('PTTL', KEYS[1])",
};

const UNLOCK: Script = Script {
    name: "unlock",
    text: "if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return nil end\n\
           if redis.call('HINCRBY', KEYS[1], ARGV[2], -1) > 0 then\n\
             redis.call('PEXPIRE', KEYS[1], ARGV[1])\n\
             return 0\n\
           end\n\
           redis.call('DEL', KEYS[1])\n\
           redis.call('PUBLISH', KEYS[2], 'free')\n\
           return 1",
};

const RENEW: Script = Script {
    name: "watchdog",
    text: "if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return 0 end\n\
           return redis.call('PEXPIRE', KEYS[1], ARGV[1])",
};

pub(super) struct HashPubsub {
    redis: Redis,
    terms: Terms,
    /// A client and its thread.
    owner: String,
    channel: String,
    hears: bool,
    /// How long the holder still has it, as the last try was told.
    remains: Duration,
}

impl HashPubsub {
    pub(super) fn new(redis: Redis, terms: Terms) -> Self {
        let owner = terms.owner.clone().unwrap_or_else(|| redis.token());
        let channel = format!("released:{}", terms.key);
        Self { redis, terms, owner, channel, hears: false, remains: Duration::ZERO }
    }

    fn args(&self) -> [String; 2] {
        [millis(self.terms.lease), self.owner.clone()]
    }
}

impl Recipe for HashPubsub {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        let [lease, owner] = self.args();
        let remains: Option<u64> = self.redis.eval(&LOCK, &[&self.terms.key], &[&lease, &owner]).await?;
        self.remains = Duration::from_millis(remains.unwrap_or(0));
        Ok(remains.is_none().then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let [lease, owner] = self.args();
        let keys = [self.terms.key.as_str(), &self.channel];
        let left: Option<i64> = self.redis.eval(&UNLOCK, &keys, &[&lease, &owner]).await?;
        Ok(left.is_some())
    }

    async fn renew(&mut self) -> RedisResult<Option<Option<Hold>>> {
        let [lease, owner] = self.args();
        let is_held: bool = self.redis.eval(&RENEW, &[&self.terms.key], &[&lease, &owner]).await?;
        Ok(Some(is_held.then(Hold::default)))
    }

    /// The first time it only subscribes, since the lock may have been freed before; after that it waits for the word, for no
    /// longer than the holder's lease.
    async fn wait(&mut self, limit: Duration) -> RedisResult<bool> {
        if self.hears {
            self.redis.message(self.remains.max(limit)).await?;
        } else {
            self.redis.subscribe(&self.channel).await?;
            self.hears = true;
        }
        Ok(true)
    }
}
