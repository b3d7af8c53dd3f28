//! The locks of other libraries: their keys.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, invalid};

/// A lock of another library on the same Redis server.
///
/// [`Mutex::bridge`](crate::Mutex::bridge) and [`Election::bridge`](crate::Election::bridge) take it. The constructors build the
/// key that the library itself uses for a lock of that name. [The guide](https://github.com/leasehold/leasehold/blob/main/docs/bridges.md) has the formats and versions.
///
/// As text it is the library and the name, for example `redisson:jobs`, as in `leasehold run --bridge`:
///
/// ```
/// use leasehold::bridge::Foreign;
///
/// let foreign: Foreign = "redisson:jobs".parse()?;
/// assert_eq!(foreign, Foreign::redisson_lock("jobs"));
/// assert_eq!(foreign.key(), "jobs");
/// assert!("redisson-fair:jobs".parse::<Foreign>().unwrap_err().is_invalid());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Foreign {
    pub(super) protocol: Protocol,
    pub(super) key: String,
}

/// How a library writes its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Protocol {
    /// A key with the holder's value: `SET key value NX PX ttl`.
    SetNxPx,
    /// Redisson's `RLock`: a hash with a field per holder.
    Redisson,
}

/// Makes a lock of its name.
type Build = fn(&str) -> Foreign;

/// What precedes the name in the text of a lock.
const SCHEMES: [(&str, Build); 6] = [
    ("set-nx-px", |key| Foreign::set_nx_px(key)),
    ("redisson", |name| Foreign::redisson_lock(name)),
    ("redis-py", |name| Foreign::redis_py(name)),
    ("redsync", |name| Foreign::redsync(name)),
    ("node-redlock", |name| Foreign::node_redlock(name)),
    ("rslock", |name| Foreign::rslock(name)),
];

/// Why Redisson's fair lock has no bridge.
const NO_FAIR_LOCK: &str = "Redisson's fair lock can't be bridged: its queue is ordered by the clocks of its clients, and a waiter \
                            that has died delays the others by minutes. Use RLock (getLock) in the Java programs first";

impl Foreign {
    /// A lock that is a key with a random value, taken by `SET key value NX PX ttl` and released by a compare and delete: the
    /// lock of most libraries, and of most programs without one. Waiters are expected to poll.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::set_nx_px("lock:jobs").key(), "lock:jobs");
    /// ```
    pub fn set_nx_px(key: impl Into<String>) -> Self {
        Self { protocol: Protocol::SetNxPx, key: key.into() }
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

    /// `RedissonClient.getLock(name)` of Redisson. Waiters in Java are woken by message.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::redisson_lock("jobs").key(), "jobs");
    /// ```
    pub fn redisson_lock(name: impl Into<String>) -> Self {
        Self { protocol: Protocol::Redisson, key: name.into() }
    }

    /// The key of the lock on the server.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::redisson_lock("jobs").key(), "jobs");
    /// ```
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.protocol {
            Protocol::SetNxPx => "set-nx-px",
            Protocol::Redisson => "redisson",
        };
        write!(f, "{scheme}:{}", self.key)
    }
}

impl FromStr for Foreign {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (scheme, name) = text.split_once(':').unwrap_or((text, ""));
        if scheme == "redisson-fair" {
            return Err(invalid(NO_FAIR_LOCK));
        }
        let Some((_, build)) = SCHEMES.iter().find(|(known, _)| *known == scheme) else {
            let known: Vec<_> = SCHEMES.iter().map(|(known, _)| format!("{known}:NAME")).collect();
            return Err(invalid(format!("a bridge is one of {}, not {text:?}", known.join(", "))));
        };
        if name.is_empty() {
            return Err(invalid(format!("a bridge has a name: {scheme}:NAME")));
        }
        Ok(build(name))
    }
}
