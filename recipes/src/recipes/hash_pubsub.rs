//! `hash-pubsub`: `reentrant-hash` with a watchdog, and a channel on which the last release publishes.

use std::time::Duration;

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis, Script, millis};

/// Returns nil if the lock was acquired, otherwise the remaining lease of its holder in milliseconds.
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
    options: LockOptions,
    /// Client id and thread id.
    owner: String,
    channel: String,
    is_subscribed: bool,
    /// The holder's remaining lease, from the last attempt.
    remains: Duration,
}

impl HashPubsub {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        let owner = options.owner.clone().unwrap_or_else(|| redis.token());
        let channel = format!("released:{}", options.key);
        Self { redis, options, owner, channel, is_subscribed: false, remains: Duration::ZERO }
    }

    fn args(&self) -> [String; 2] {
        [millis(self.options.lease), self.owner.clone()]
    }
}

impl Recipe for HashPubsub {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        let [lease, owner] = self.args();
        let remains: Option<u64> = self.redis.eval(&LOCK, &[&self.options.key], &[&lease, &owner]).await?;
        self.remains = Duration::from_millis(remains.unwrap_or(0));
        Ok(remains.is_none().then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let [lease, owner] = self.args();
        let keys = [self.options.key.as_str(), &self.channel];
        let left: Option<i64> = self.redis.eval(&UNLOCK, &keys, &[&lease, &owner]).await?;
        Ok(left.is_some())
    }

    async fn renew(&mut self) -> RedisResult<Option<Option<Hold>>> {
        let [lease, owner] = self.args();
        let is_held: bool = self.redis.eval(&RENEW, &[&self.options.key], &[&lease, &owner]).await?;
        Ok(Some(is_held.then(Hold::default)))
    }

    /// The first call only subscribes, since the lock may have become free before. Later calls wait for a message, for the
    /// holder's remaining lease at most.
    async fn wait(&mut self, limit: Duration) -> RedisResult<bool> {
        if self.is_subscribed {
            self.redis.message(self.remains.max(limit)).await?;
        } else {
            self.redis.subscribe(&self.channel).await?;
            self.is_subscribed = true;
        }
        Ok(true)
    }
}
