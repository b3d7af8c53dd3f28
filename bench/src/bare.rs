//! The same work without a lock library, for comparison.

use std::sync::atomic::{AtomicU64, Ordering};

use std::time::Duration;

use redis::aio::MultiplexedConnection;

/// A connection with the client library's defaults, except for a longer timeout: a virtual machine may pause for more than 0.5 s.
///
/// # Panics
///
/// If the connection fails.
pub async fn connection(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).expect("an address");
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    client.get_multiplexed_async_connection_with_config(&config).await.expect("connects")
}

/// The token.
const VALUE: &str = "7a1f9c52b0d34e68";

/// The commands of most libraries: SET NX PX with a token, and a script that compares and deletes.
#[derive(Clone)]
pub struct Bare {
    connection: MultiplexedConnection,
    delete: std::sync::Arc<redis::Script>,
}

impl Bare {
    /// Uses this connection.
    #[must_use]
    pub fn new(connection: MultiplexedConnection) -> Self {
        let delete = redis::Script::new(
            "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end",
        );
        Self { connection, delete: delete.into() }
    }

    /// Locks and releases once.
    ///
    /// # Panics
    ///
    /// If the server sends an unexpected reply.
    pub async fn pair(&mut self, name: &str) {
        self.take(name).await.expect("it is free");
        self.give(name).await.expect("it is held");
    }

    /// The lock.
    ///
    /// # Errors
    ///
    /// The lock is held, or the server does not reply.
    pub async fn take(&mut self, name: &str) -> redis::RedisResult<()> {
        let mut set = redis::cmd("SET");
        set.arg(name).arg(VALUE).arg("NX").arg("PX").arg(10_000);
        let _: String = set.query_async(&mut self.connection).await?;
        Ok(())
    }

    /// Its release.
    ///
    /// # Errors
    ///
    /// If the server does not reply.
    ///
    /// # Panics
    ///
    /// If the lock was not held.
    pub async fn give(&mut self, name: &str) -> redis::RedisResult<()> {
        let deleted = self.delete.key(name).arg(VALUE).invoke_async::<i64>(&mut self.connection).await?;
        assert_eq!(deleted, 1);
        Ok(())
    }
}

/// Two PINGs: the lower bound of a lock and a release.
///
/// # Panics
///
/// If the server does not reply.
pub async fn two_pings(connection: &mut MultiplexedConnection) {
    for _ in 0..2 {
        let _: String = redis::cmd("PING").query_async(connection).await.expect("answers");
    }
}

/// The number of the next unlock. The script treats a number that was used before as a repetition, and does nothing.
static UNLOCKS: AtomicU64 = AtomicU64::new(0);

/// What Redisson 3.52 sends for its reentrant lock: a hash that counts per owner, a message when it becomes free, and a
/// key per unlock that tells a repetition. (It then deletes that key with one command more, which is left out here.)
#[derive(Clone)]
pub struct Hash {
    connection: MultiplexedConnection,
    lock: std::sync::Arc<redis::Script>,
    unlock: std::sync::Arc<redis::Script>,
}

impl Hash {
    /// Uses this connection.
    #[must_use]
    pub fn new(connection: MultiplexedConnection) -> Self {
        let lock = redis::Script::new(
            "if redis.call('exists', KEYS[1]) == 0 or redis.call('hexists', KEYS[1], ARGV[2]) == 1 then
               redis.call('hincrby', KEYS[1], ARGV[2], 1)
               redis.call('pexpire', KEYS[1], ARGV[1])
               return nil
             end
             return redis.call('pttl', KEYS[1])",
        );
        let unlock = redis::Script::new(
            "local before = redis.call('get', KEYS[3])
             if before ~= false then return tonumber(before) end
             if redis.call('hexists', KEYS[1], ARGV[3]) == 0 then return nil end
             local left = redis.call('hincrby', KEYS[1], ARGV[3], -1)
             if left > 0 then
               redis.call('pexpire', KEYS[1], ARGV[2])
               redis.call('set', KEYS[3], 0, 'px', ARGV[5])
               return 0
             end
             redis.call('del', KEYS[1])
             redis.call(ARGV[4], KEYS[2], ARGV[1])
             redis.call('set', KEYS[3], 1, 'px', ARGV[5])
             return 1",
        );
        Self { connection, lock: lock.into(), unlock: unlock.into() }
    }

    /// Locks and releases once.
    ///
    /// # Panics
    ///
    /// If the server sends an unexpected reply.
    pub async fn pair(&mut self, name: &str) {
        let owner = "285475da-9152-4c83-822a-67ee2f116a79:52";
        let lock = self.lock.key(name).arg(30_000).arg(owner).invoke_async(&mut self.connection).await;
        let busy: Option<i64> = lock.expect("answers");
        assert_eq!(busy, None);
        let channel = format!("redisson_lock__channel:{{{name}}}");
        let mut unlock = self.unlock.key(name);
        let number = UNLOCKS.fetch_add(1, Ordering::Relaxed);
        unlock.key(channel).key(format!("redisson_unlock_latch:{{{name}}}:{number:032x}"));
        unlock.arg(0).arg(30_000).arg(owner).arg("publish").arg(13_500);
        assert_eq!(unlock.invoke_async::<Option<i64>>(&mut self.connection).await.expect("answers"), Some(1));
    }
}
