//! The libraries whose lock is a key with the holder's value, taken by `SET key value NX PX ttl` or by a script with the same
//! effect: their keys, and what wakes their waiters.

use super::foreign::{Foreign, Protocol};
use super::servers::Servers;
use crate::error::Error;

/// How many keys rueidislock takes by default (`KeyMajority: 2`).
const RUEIDISLOCK_KEYS: usize = 3;

impl Foreign {
    /// A lock that is a key with a random value, taken by `SET key value NX PX ttl` and released by a compare and delete: the
    /// lock of most libraries, and of most programs without one. Waiters are expected to poll.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::set_nx_px("lock:jobs").key(), "lock:jobs");
    /// ```
    pub fn set_nx_px(key: impl Into<String>) -> Self {
        Self { protocol: Protocol::SetNxPx, key: key.into(), wakes: None, servers: None }
    }

    /// `redis.Redis.lock(name)` of redis-py, which uses the name as its key.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::redis_py("jobs").key(), "jobs");
    /// ```
    pub fn redis_py(name: impl Into<String>) -> Self {
        Self::set_nx_px(name)
    }

    /// `Redsync.NewMutex(name)` of redsync with one server, which uses the name as its key.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::redsync("jobs").key(), "jobs");
    /// ```
    pub fn redsync(name: impl Into<String>) -> Self {
        Self::set_nx_px(name)
    }

    /// `Redlock.acquire([resource])` of node-redlock with one server, which uses the resource as its key.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::node_redlock("jobs").key(), "jobs");
    /// ```
    pub fn node_redlock(resource: impl Into<String>) -> Self {
        Self::set_nx_px(resource)
    }

    /// `LockManager::lock(resource)` of rslock with one server, which uses the resource as its key.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::rslock("jobs").key(), "jobs");
    /// ```
    pub fn rslock(resource: impl Into<String>) -> Self {
        Self::set_nx_px(resource)
    }

    /// `Client.Obtain(ctx, key, …)` of bsm/redislock. Its `ObtainMulti` is a [`MutexSet`](crate::MutexSet) with a bridge for each
    /// key.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::bsm_redislock("jobs").key(), "jobs");
    /// ```
    pub fn bsm_redislock(key: impl Into<String>) -> Self {
        Self::set_nx_px(key)
    }

    /// `Redlock(key=name, masters={one})` of pottery, with one master. With several, [`Foreign::redlock`] takes the key
    /// `redlock:NAME`.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::pottery("jobs").key(), "redlock:jobs");
    /// ```
    pub fn pottery(name: impl AsRef<str>) -> Self {
        Self::set_nx_px(format!("redlock:{}", name.as_ref()))
    }

    /// The lock of this resource in the Redis lock component of Dapr, as the application with this id takes it (`keyPrefix: appid`,
    /// the default). With the prefix strategy `name`, give the component's name instead; with `none`, the key is `lock||RESOURCE`,
    /// for [`Foreign::set_nx_px`].
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::dapr("billing", "jobs").key(), "lock||billing||jobs");
    /// ```
    pub fn dapr(app_id: impl AsRef<str>, resource: impl AsRef<str>) -> Self {
        Self::set_nx_px(format!("lock||{}||{}", app_id.as_ref(), resource.as_ref()))
    }

    /// `RedisLockRegistry.obtain(name)` of Spring Integration, in the registry with this key. Its waiters are woken by message
    /// with `PUB_SUB_LOCK`, and poll with `SPIN_LOCK`.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::spring_integration("registry", "jobs").key(), "registry:jobs");
    /// ```
    pub fn spring_integration(registry: impl AsRef<str>, name: impl AsRef<str>) -> Self {
        let registry = registry.as_ref();
        let key = format!("{registry}:{}", name.as_ref());
        let wakes = Some(format!("{registry}-channel:{key}"));
        Self { protocol: Protocol::SpringIntegration, key, wakes, servers: None }
    }

    /// `redis_lock.Lock(client, name)` of python-redis-lock, whose waiters wait for an element of a list.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::python_redis_lock("jobs").key(), "lock:jobs");
    /// ```
    pub fn python_redis_lock(name: impl AsRef<str>) -> Self {
        let name = name.as_ref();
        let (key, wakes) = (format!("lock:{name}"), Some(format!("lock-signal:{name}")));
        Self { protocol: Protocol::PythonRedisLock, key, wakes, servers: None }
    }

    /// `Locker.WithContext(ctx, name)` of rueidislock, with its default prefix, and with the `KeyMajority` 2 (the default) or 1. The
    /// lock holds the first of its keys and one of the other two at least, and the library two of the three, or the first one.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::rueidislock("jobs").key(), "rueidislock:0:jobs");
    /// ```
    pub fn rueidislock(name: impl AsRef<str>) -> Self {
        let key = format!("{RUEIDISLOCK_PREFIX}0:{}", name.as_ref());
        Self { protocol: Protocol::Rueidislock, key, wakes: None, servers: None }
    }

    /// A lock by majority vote of independent servers, as redsync with several pools, node-redlock and rslock with several servers,
    /// and pottery with several masters take it: the key has the holder's value on more than half of them.
    ///
    /// The servers are those of the other programs, each with its own address. They may be other ones than those of the client.
    /// The lock is lost when it is not confirmed by a majority any more.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    ///
    /// let foreign = Foreign::redlock(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"], "jobs")?;
    /// assert_eq!(foreign.key(), "jobs");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid`: an address that is not that of one server, or that is given twice.
    pub fn redlock<U: AsRef<str>>(
        servers: impl IntoIterator<Item = U>,
        key: impl Into<String>,
    ) -> Result<Self, Error> {
        Ok(Self { servers: Some(Servers::parse(servers)?), ..Self::set_nx_px(key) })
    }

    /// All keys of the lock on a server.
    pub(super) fn keys(&self) -> Vec<String> {
        match self.protocol {
            Protocol::Rueidislock => {
                let name = self.key.strip_prefix(RUEIDISLOCK_PREFIX).and_then(|key| key.strip_prefix("0:"));
                let name = name.unwrap_or(&self.key);
                (0..RUEIDISLOCK_KEYS).map(|number| format!("{RUEIDISLOCK_PREFIX}{number}:{name}")).collect()
            }
            _ => vec![self.key.clone()],
        }
    }
}

const RUEIDISLOCK_PREFIX: &str = "rueidislock:";
