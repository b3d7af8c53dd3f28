//! `setnx`: whoever sets it has it.

use redis::RedisResult;

use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis};

pub(super) struct Setnx {
    pub(super) redis: Redis,
    pub(super) terms: Terms,
}

impl Recipe for Setnx {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        Ok(self.redis.setnx(&self.terms.key, "1").await?.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.terms.key).await
    }
}
