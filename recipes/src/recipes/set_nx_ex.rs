//! `set-nx-ex`: one command sets the key with an expiry, with the same value for every client; a plain DEL releases.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

pub(super) struct SetNxEx {
    pub(super) redis: Redis,
    pub(super) options: LockOptions,
}

impl Recipe for SetNxEx {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        let seconds = self.options.lease.as_secs().to_string();
        let set: Option<String> =
            self.redis.call(&["SET", &self.options.key, "1", "EX", &seconds, "NX"]).await?;
        Ok(set.map(|_| Hold::default()))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.options.key).await
    }
}
