//! `setnx-expire`: whoever sets it has it, and then says for how long.

use redis::RedisResult;

use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis};

pub(super) struct SetnxExpire {
    pub(super) redis: Redis,
    pub(super) terms: Terms,
}

impl Recipe for SetnxExpire {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if !self.redis.setnx(&self.terms.key, "1").await? {
            return Ok(None);
        }
        self.redis.expire(&self.terms.key, self.terms.lease).await?;
        Ok(Some(Hold::default()))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.terms.key).await
    }
}
