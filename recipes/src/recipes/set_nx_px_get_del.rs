//! `set-nx-px-get-del`: one command sets the key with a token and an expiry. The release reads the token with GET, compares it
//! in the client, and deletes the key with a second command.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

pub(super) struct SetNxPxGetDel {
    redis: Redis,
    options: LockOptions,
    token: String,
}

impl SetNxPxGetDel {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        Self { redis, options, token: String::new() }
    }
}

impl Recipe for SetNxPxGetDel {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        self.token = self.redis.token();
        let is_set = self.redis.set_nx_px(&self.options.key, &self.token, self.options.lease).await?;
        Ok(is_set.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        if self.redis.get(&self.options.key).await?.as_ref() != Some(&self.token) {
            return Ok(false);
        }
        self.redis.del(&self.options.key).await
    }
}
