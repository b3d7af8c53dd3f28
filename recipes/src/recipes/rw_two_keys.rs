//! `rw-two-keys`: one key for all readers and one for the writer.

use redis::RedisResult;

use crate::recipe::{LockOptions, Recipe, Role};
use crate::redis::{Hold, Redis, Script};

const READ: Script = Script {
    name: "read",
    text: "if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end\n\
           redis.call('SET', KEYS[1], 1, 'EX', ARGV[1])\n\
           return 1",
};

const WRITE: Script = Script {
    name: "write",
    text: "if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end\n\
           if redis.call('SET', KEYS[2], 1, 'NX', 'EX', ARGV[1]) then return 1 end\n\
           return 0",
};

pub(super) struct RwTwoKeys {
    redis: Redis,
    options: LockOptions,
    read_key: String,
    write_key: String,
}

impl RwTwoKeys {
    pub(super) fn new(redis: Redis, options: LockOptions) -> Self {
        let [read_key, write_key] = keys(&options.key);
        Self { redis, options, read_key, write_key }
    }

    async fn read(&self, seconds: &str) -> RedisResult<bool> {
        if self.redis.exists(&self.write_key).await? {
            return Ok(false);
        }
        self.redis.call::<()>(&["SET", &self.read_key, "1", "EX", seconds]).await?;
        Ok(true)
    }

    async fn write(&self, seconds: &str) -> RedisResult<bool> {
        if self.redis.exists(&self.read_key).await? {
            return Ok(false);
        }
        let set: Option<String> =
            self.redis.call(&["SET", &self.write_key, "1", "NX", "EX", seconds]).await?;
        Ok(set.is_some())
    }
}

/// The readers' key and the writer's.
pub fn keys(key: &str) -> [String; 2] {
    [format!("{key}:read"), format!("{key}:write")]
}

impl Recipe for RwTwoKeys {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        let seconds = self.options.lease.as_secs().to_string();
        let keys = [self.read_key.as_str(), &self.write_key];
        let is_locked = match self.options.role {
            Role::Reader if self.options.in_one_step => self.redis.eval(&READ, &keys, &[&seconds]).await?,
            Role::Writer if self.options.in_one_step => self.redis.eval(&WRITE, &keys, &[&seconds]).await?,
            Role::Reader => self.read(&seconds).await?,
            Role::Writer => self.write(&seconds).await?,
        };
        Ok(is_locked.then(Hold::default))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let key = if self.options.role == Role::Reader { &self.read_key } else { &self.write_key };
        self.redis.del(key).await
    }
}
