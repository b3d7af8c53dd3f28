//! `lua-setnx-expire`: one script sets the key and its expiry; a plain DEL releases.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe};
use crate::redis::{Hold, Redis, Script};

const LOCK: Script = Script {
    name: "lock",
    text: "if redis.call('SETNX', KEYS[1], ARGV[1]) == 0 then return 0 end\n\
           redis.call('EXPIRE', KEYS[1], ARGV[2])\n\
           return 1",
};

pub(super) struct LuaSetnxExpire {
    pub(super) redis: Redis,
    pub(super) options: LockOptions,
}

impl Recipe for LuaSetnxExpire {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        let seconds = self.options.lease.as_secs().to_string();
        let is_locked: bool = self.redis.eval(&LOCK, &[&self.options.key], &["1", &seconds]).await?;
        Ok(is_locked.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        self.redis.del(&self.options.key).await
    }
}
