//! `timestamp-getset-expire`: the same with an expiry after each success, and a second for clocks that differ.

use std::time::Duration;

use redis::RedisResult;

use super::timestamp_del::{read, written};
use crate::recipe::{GetNil, GetSetNil, Recipe, Terms};
use crate::redis::{Hold, Redis};

/// How much clocks may differ.
const ALLOWED: Duration = Duration::from_secs(1);

pub(super) struct TimestampGetsetExpire {
    pub(super) redis: Redis,
    pub(super) terms: Terms,
}

impl TimestampGetsetExpire {
    fn end(&self) -> String {
        written(self.redis.clock() + self.terms.lease)
    }

    async fn acquired(&self) -> RedisResult<Option<Hold>> {
        self.redis.expire(&self.terms.key, self.terms.lease).await?;
        Ok(Some(Hold::default()))
    }
}

impl Recipe for TimestampGetsetExpire {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        loop {
            if self.redis.setnx(&self.terms.key, &self.end()).await? {
                return self.acquired().await;
            }
            let seen = self.redis.get(&self.terms.key).await?;
            match &seen {
                None if self.terms.get_nil == GetNil::StartAgain => continue,
                Some(seen) if read(seen) + ALLOWED >= self.redis.clock() => return Ok(None),
                _ => {}
            }
            let before = self.redis.getset(&self.terms.key, &self.end()).await?;
            let is_ours = match before {
                Some(_) => before == seen,
                None => self.terms.getset_nil == GetSetNil::Acquired,
            };
            return if is_ours { self.acquired().await } else { Ok(None) };
        }
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.terms.key).await
    }
}
