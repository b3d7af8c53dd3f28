//! `redlock`: the same key and token on several masters, of which most must agree.

use std::time::Duration;

use redis::RedisResult;

use super::lua_setnx_token::UNLOCK;
use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis};

/// How many masters there are.
pub const MASTERS: usize = 3;

pub(super) struct Redlock {
    redis: Redis,
    terms: Terms,
    token: String,
}

impl Redlock {
    pub(super) fn new(redis: Redis, terms: Terms) -> Self {
        Self { redis, terms, token: String::new() }
    }

    fn masters(&self) -> impl Iterator<Item = Redis> {
        (0..MASTERS).map(|node| self.redis.node(node))
    }

    async fn unlock_all(&self) -> RedisResult<usize> {
        let mut freed = 0;
        for master in self.masters() {
            let is_freed = master.eval::<bool>(&UNLOCK, &[&self.terms.key], &[&self.token]).await;
            freed += usize::from(is_freed.unwrap_or(false));
        }
        Ok(freed)
    }
}

impl Recipe for Redlock {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        self.token = self.redis.token();
        let start = self.redis.clock();
        let mut agree = 0;
        for master in self.masters() {
            // A master that does not answer in time has not agreed; the connection's limit is short.
            let is_set = master.set_nx_px(&self.terms.key, &self.token, self.terms.lease).await;
            agree += usize::from(is_set.unwrap_or(false));
        }
        let drift = self.terms.lease / 100 + Duration::from_millis(2);
        let valid_until = start + self.terms.lease.saturating_sub(drift);
        if agree > MASTERS / 2 && self.redis.clock() < valid_until {
            return Ok(Some(Hold { valid_until: Some(valid_until), token: None }));
        }
        self.unlock_all().await?;
        Ok(None)
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        Ok(self.unlock_all().await? > 0)
    }
}
