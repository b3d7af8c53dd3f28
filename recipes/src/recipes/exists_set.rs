//! `exists-set`: look, then take.

use redis::RedisResult;

use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis};

pub(super) struct ExistsSet {
    pub(super) redis: Redis,
    pub(super) terms: Terms,
}

impl Recipe for ExistsSet {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.redis.exists(&self.terms.key).await? {
            return Ok(None);
        }
        self.redis.set(&self.terms.key, "1").await?;
        Ok(Some(Hold::default()))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.terms.key).await
    }
}
