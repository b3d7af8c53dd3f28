//! `local-count`: taken once, then counted in the process, by thread and key. Renewed in the background once in every
//! lease, a few times at most.

use redis::RedisResult;

use super::lua_setnx_token::UNLOCK;
use crate::recipe::{Recipe, Terms};
use crate::redis::{Hold, Redis};

/// How often the background renews, and no more.
const RENEWALS: u32 = 4;

pub(super) struct LocalCount {
    redis: Redis,
    terms: Terms,
    token: String,
    /// How often this thread holds this key.
    count: u32,
    renewals: u32,
}

impl LocalCount {
    pub(super) fn new(redis: Redis, terms: Terms) -> Self {
        Self { redis, terms, token: String::new(), count: 0, renewals: 0 }
    }
}

impl Recipe for LocalCount {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.count == 0 {
            self.token = self.redis.token();
            let seconds = self.terms.lease.as_secs().to_string();
            let words = ["SET", &self.terms.key, &self.token, "NX", "EX", &seconds];
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
        self.redis.eval(&UNLOCK, &[&self.terms.key], &[&self.token]).await
    }

    async fn renew(&mut self) -> RedisResult<Option<Option<Hold>>> {
        if self.renewals == RENEWALS {
            return Ok(Some(None));
        }
        self.renewals += 1;
        if self.is_mine().await? == Some(false) {
            return Ok(Some(None));
        }
        let is_there = self.redis.expire(&self.terms.key, self.terms.lease).await?;
        Ok(Some(is_there.then(Hold::default)))
    }

    async fn is_mine(&mut self) -> RedisResult<Option<bool>> {
        Ok(Some(self.redis.get(&self.terms.key).await?.as_ref() == Some(&self.token)))
    }
}
