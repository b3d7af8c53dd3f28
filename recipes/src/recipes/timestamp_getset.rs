//! `timestamp-getset`: the value is the expiry time. The client whose GETSET returns the expired value acquires the lock.

use redis::RedisResult;

use super::timestamp_del::{format_time, parse_time};
use crate::recipe::{GetNil, GetSetNil, LockOptions, Recipe};
use crate::redis::{Hold, Redis};

pub(super) struct TimestampGetset {
    pub(super) redis: Redis,
    pub(super) options: LockOptions,
    /// The value that this client stored, by which it recognises its lock.
    pub(super) stored: String,
}

impl TimestampGetset {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        Self { redis, options, stored: String::new() }
    }

    async fn take_over(&mut self, seen: Option<&str>) -> RedisResult<bool> {
        self.stored = format_time(self.redis.clock() + self.options.lease);
        match self.redis.getset(&self.options.key, &self.stored).await? {
            Some(before) => Ok(Some(before.as_str()) == seen),
            None => Ok(self.options.getset_nil == GetSetNil::Acquired),
        }
    }
}

impl Recipe for TimestampGetset {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        loop {
            self.stored = format_time(self.redis.clock() + self.options.lease);
            if self.redis.setnx(&self.options.key, &self.stored).await? {
                return Ok(Some(Hold::default()));
            }
            let seen = self.redis.get(&self.options.key).await?;
            match &seen {
                None if self.options.get_nil == GetNil::StartAgain => continue,
                Some(seen) if parse_time(seen) >= self.redis.clock() => return Ok(None),
                _ => {}
            }
            return Ok(self.take_over(seen.as_deref()).await?.then(Hold::default));
        }
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let mine = Some(self.stored.clone());
        if self.redis.get(&self.options.key).await? != mine {
            return Ok(false);
        }
        self.redis.del(&self.options.key).await
    }
}
