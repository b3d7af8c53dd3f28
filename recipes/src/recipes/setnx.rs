//! `setnx`: SETNX acquires, DEL releases; the key never expires.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

pub(super) struct Setnx {
    pub(super) redis: Redis,
    pub(super) options: LockOptions,
}

impl Recipe for Setnx {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        Ok(self.redis.setnx(&self.options.key, "1").await?.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.options.key).await
    }
}
