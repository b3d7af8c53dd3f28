//! `set-nx-px`: one command sets a token with an expiry; a script deletes the key if it still has that token.

use redis::RedisResult;

use super::lua_setnx_token::UNLOCK;
use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

pub(super) struct SetNxPx {
    redis: Redis,
    options: LockOptions,
    token: String,
}

impl SetNxPx {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        Self { redis, options, token: String::new() }
    }
}

impl Recipe for SetNxPx {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        self.token = self.redis.token();
        let is_set = self.redis.set_nx_px(&self.options.key, &self.token, self.options.lease).await?;
        Ok(is_set.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.eval(&UNLOCK, &[&self.options.key], &[&self.token]).await
    }
}
