//! `exists-set`: EXISTS, then SET.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

pub(super) struct ExistsSet {
    pub(super) redis: Redis,
    pub(super) options: LockOptions,
}

impl Recipe for ExistsSet {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.redis.exists(&self.options.key).await? {
            return Ok(None);
        }
        self.redis.set(&self.options.key, "1").await?;
        Ok(Some(Hold::default()))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.options.key).await
    }
}
