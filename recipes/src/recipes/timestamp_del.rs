//! `timestamp-del`: the value is the expiry time; a client that sees an expired one deletes the key and tries again.

use std::time::Duration;

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

pub(super) struct TimestampDel {
    pub(super) redis: Redis,
    pub(super) options: LockOptions,
}

impl TimestampDel {
    async fn set(&self) -> RedisResult<bool> {
        let ends = self.redis.clock() + self.options.lease;
        self.redis.setnx(&self.options.key, &format_time(ends)).await
    }
}

impl Recipe for TimestampDel {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.set().await? {
            return Ok(Some(Hold::default()));
        }
        let stored = self.redis.get(&self.options.key).await?;
        if stored.is_some_and(|stored| parse_time(&stored) >= self.redis.clock()) {
            return Ok(None);
        }
        self.redis.del(&self.options.key).await?;
        Ok(self.set().await?.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.options.key).await
    }
}

/// A time as these recipes store it: seconds since 1970, with a fraction.
pub(super) fn format_time(time: Duration) -> String {
    time.as_secs_f64().to_string()
}

/// Parses a stored time. Any other text counts as expired.
pub(super) fn parse_time(text: &str) -> Duration {
    text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or_default()
}
