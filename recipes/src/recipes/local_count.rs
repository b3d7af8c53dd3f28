//! `local-count`: acquired once, then counted in the process by thread and key. A background thread renews once per lease, a
//! limited number of times.

use redis::RedisResult;

use super::lua_setnx_token::UNLOCK;
use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis};

/// Maximum number of renewals.
const RENEWALS: u32 = 4;

pub(super) struct LocalCount {
    redis: Redis,
    options: LockOptions,
    token: String,
    /// Number of acquisitions by this thread.
    count: u32,
    renewals: u32,
}

impl LocalCount {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        Self { redis, options, token: String::new(), count: 0, renewals: 0 }
    }
}

impl Recipe for LocalCount {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.count == 0 {
            self.token = self.redis.token();
            let seconds = self.options.lease.as_secs().to_string();
            let words = ["SET", &self.options.key, &self.token, "NX", "EX", &seconds];
            if self.redis.call::<Option<String>>(&words).await?.is_none() {
                return Ok(None);
            }
            self.renewals = 0;
        }
        self.count += 1;
        Ok(Some(Hold::default()))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.count -= 1;
        if self.count > 0 {
            return Ok(true);
        }
        self.redis.eval(&UNLOCK, &[&self.options.key], &[&self.token]).await
    }

    async fn renew(&mut self) -> RedisResult<Option<Option<Hold>>> {
        if self.renewals == RENEWALS {
            return Ok(Some(None));
        }
        self.renewals += 1;
        if self.is_mine().await? == Some(false) {
            return Ok(Some(None));
        }
        let is_there = self.redis.expire(&self.options.key, self.options.lease).await?;
        Ok(Some(is_there.then(Hold::default)))
    }

    async fn is_mine(&mut self) -> RedisResult<Option<bool>> {
        Ok(Some(self.redis.get(&self.options.key).await?.as_ref() == Some(&self.token)))
    }
}
