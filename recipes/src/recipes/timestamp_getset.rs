//! `timestamp-getset`: the value says when it ends; whoever sees that it has ended, and is the first to put its own there,
//! has it.

use redis::RedisResult;

use super::timestamp_del::{read, written};
use crate::recipe::{GetNil, GetSetNil, Recipe, Terms};
use crate::redis::{Hold, Redis};

pub(super) struct TimestampGetset {
    pub(super) redis: Redis,
    pub(super) terms: Terms,
    /// What we stored, which is how we know it again.
    pub(super) stored: String,
}

impl TimestampGetset {
    pub(super) fn new(redis: Redis, terms: Terms) -> Self {
        Self { redis, terms, stored: String::new() }
    }

    async fn take_over(&mut self, seen: Option<&str>) -> RedisResult<bool> {
        self.stored = written(self.redis.clock() + self.terms.lease);
        match self.redis.getset(&self.terms.key, &self.stored).await? {
            Some(before) => Ok(Some(before.as_str()) == seen),
            None => Ok(self.terms.getset_nil == GetSetNil::Acquired),
        }
    }
}

impl Recipe for TimestampGetset {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        loop {
            self.stored = written(self.redis.clock() + self.terms.lease);
            if self.redis.setnx(&self.terms.key, &self.stored).await? {
                return Ok(Some(Hold::default()));
            }
            let seen = self.redis.get(&self.terms.key).await?;
            match &seen {
                None if self.terms.get_nil == GetNil::StartAgain => continue,
                Some(seen) if read(seen) >= self.redis.clock() => return Ok(None),
                _ => {}
            }
            return Ok(self.take_over(seen.as_deref()).await?.then(Hold::default));
        }
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let mine = Some(self.stored.clone());
        if self.redis.get(&self.terms.key).await? != mine {
            return Ok(false);
        }
        self.redis.del(&self.terms.key).await
    }
}
