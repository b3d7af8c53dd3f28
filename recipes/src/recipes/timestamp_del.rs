//! `timestamp-del`: the value says when it ends; whoever sees that it has ended clears it away.

use std::time::Duration;

use redis::RedisResult;

use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis};

pub(super) struct TimestampDel {
    pub(super) redis: Redis,
    pub(super) terms: Terms,
}

impl TimestampDel {
    async fn set(&self) -> RedisResult<bool> {
        let ends = self.redis.clock() + self.terms.lease;
        self.redis.setnx(&self.terms.key, &written(ends)).await
    }
}

impl Recipe for TimestampDel {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.set().await? {
            return Ok(Some(Hold::default()));
        }
        let stored = self.redis.get(&self.terms.key).await?;
        if stored.is_some_and(|stored| read(&stored) >= self.redis.clock()) {
            return Ok(None);
        }
        self.redis.del(&self.terms.key).await?;
        Ok(self.set().await?.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.terms.key).await
    }
}

/// A point of time as these recipes store it: seconds, with a fraction if there is one.
pub(super) fn written(time: Duration) -> String {
    time.as_secs_f64().to_string()
}

/// What is no time has ended long ago.
pub(super) fn read(text: &str) -> Duration {
    text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or_default()
}
