//! `setnx-expire`: SETNX acquires, and a second command sets the expiry.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

pub(super) struct SetnxExpire {
    pub(super) redis: Redis,
    pub(super) options: LockOptions,
}

impl Recipe for SetnxExpire {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if !self.redis.setnx(&self.options.key, "1").await? {
            return Ok(None);
        }
        self.redis.expire(&self.options.key, self.options.lease).await?;
        Ok(Some(Hold::default()))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.options.key).await
    }
}
