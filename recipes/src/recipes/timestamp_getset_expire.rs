//! `timestamp-getset-expire`: `timestamp-getset` with EXPIRE after each success, and a second of tolerance for clock differences.

use std::time::Duration;

use redis::RedisResult;

use super::timestamp_del::{format_time, parse_time};
use crate::recipe::{GetNil, GetSetNil, LockOptions, Recipe};
use crate::redis::{Hold, Redis};

/// Tolerated clock difference.
const TOLERANCE: Duration = Duration::from_secs(1);

pub(super) struct TimestampGetsetExpire {
    pub(super) redis: Redis,
    pub(super) options: LockOptions,
}

impl TimestampGetsetExpire {
    fn end(&self) -> String {
        format_time(self.redis.clock() + self.options.lease)
    }

    async fn acquired(&self) -> RedisResult<Option<Hold>> {
        self.redis.expire(&self.options.key, self.options.lease).await?;
        Ok(Some(Hold::default()))
    }
}

impl Recipe for TimestampGetsetExpire {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        loop {
            if self.redis.setnx(&self.options.key, &self.end()).await? {
                return self.acquired().await;
            }
            let seen = self.redis.get(&self.options.key).await?;
            match &seen {
                None if self.options.get_nil == GetNil::StartAgain => continue,
                Some(seen) if parse_time(seen) + TOLERANCE >= self.redis.clock() => return Ok(None),
                _ => {}
            }
            let before = self.redis.getset(&self.options.key, &self.end()).await?;
            let is_acquired = match before {
                Some(_) => before == seen,
                None => self.options.getset_nil == GetSetNil::Acquired,
            };
            return if is_acquired { self.acquired().await } else { Ok(None) };
        }
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.options.key).await
    }
}
