//! `redlock`: the same key and token on several masters; a majority grants the lock.

use std::time::Duration;

use redis::RedisResult;

use super::lua_setnx_token::UNLOCK;
use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

/// Number of masters.
pub const MASTERS: usize = 3;

pub(super) struct Redlock {
    redis: Redis,
    options: LockOptions,
    token: String,
}

impl Redlock {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        Self { redis, options, token: String::new() }
    }

    fn masters(&self) -> impl Iterator<Item = Redis> {
        (0..MASTERS).map(|node| self.redis.node(node))
    }

    async fn unlock_all(&self) -> RedisResult<usize> {
        let mut released = 0;
        for master in self.masters() {
            let is_released = master.eval::<bool>(&UNLOCK, &[&self.options.key], &[&self.token]).await;
            released += usize::from(is_released.unwrap_or(false));
        }
        Ok(released)
    }
}

impl Recipe for Redlock {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        self.token = self.redis.token();
        let start = self.redis.clock();
        let mut granted = 0;
        for master in self.masters() {
            // A master that does not reply within the connection's short timeout has not granted the lock.
            let is_set = master.set_nx_px(&self.options.key, &self.token, self.options.lease).await;
            granted += usize::from(is_set.unwrap_or(false));
        }
        let drift = self.options.lease / 100 + Duration::from_millis(2);
        let valid_until = start + self.options.lease.saturating_sub(drift);
        if granted > MASTERS / 2 && self.redis.clock() < valid_until {
            return Ok(Some(Hold { valid_until: Some(valid_until), token: None }));
        }
        self.unlock_all().await?;
        Ok(None)
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        Ok(self.unlock_all().await? > 0)
    }
}
