//! `set-nx-px`: one command takes it, with a token and an expiry; a script frees it if the token is still there.

use redis::RedisResult;

use super::lua_setnx_token::UNLOCK;
use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis};

pub(super) struct SetNxPx {
    redis: Redis,
    terms: Terms,
    token: String,
}

impl SetNxPx {
    pub(super) fn new(redis: Redis, terms: Terms) -> Self {
        Self { redis, terms, token: String::new() }
    }
}

impl Recipe for SetNxPx {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        self.token = self.redis.token();
        let is_set = self.redis.set_nx_px(&self.terms.key, &self.token, self.terms.lease).await?;
        Ok(is_set.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.eval(&UNLOCK, &[&self.terms.key], &[&self.token]).await
    }
}
