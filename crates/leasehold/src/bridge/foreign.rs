//! The locks of other libraries: their keys.

use super::servers::Servers;

/// A lock of another library on the same Redis server.
///
/// [`Mutex::bridge`](crate::Mutex::bridge), [`Election::bridge`](crate::Election::bridge) and [`RwLock::bridge`](crate::RwLock::bridge) take it. The constructors build the
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
    /// The channel or the list that wakes the library's waiters, if it can't be computed from the key.
    pub(super) wakes: Option<String>,
    /// The servers that vote; none: the client's own server.
    pub(super) servers: Option<Servers>,
}

/// How a library writes its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Protocol {
    /// A key with the holder's value: `SET key value NX PX ttl`.
    SetNxPx,
    /// The same, and the release sends a message.
    SpringIntegration,
    /// The same, and the release adds an element to a list.
    PythonRedisLock,
    /// Several such keys on one server.
    Rueidislock,
    /// Redisson's `RLock`: a hash with a field per holder.
    Redisson,
    /// The same with a counter of tokens: its `RFencedLock`.
    RedissonFenced,
    /// Its `RReadWriteLock`: a hash with the mode and the fields. The leg of a reader.
    RedissonRead,
    /// The leg of a writer.
    RedissonWrite,
}

impl Protocol {
    pub(super) fn is_redisson(self) -> bool {
        use Protocol::{Redisson, RedissonFenced, RedissonRead, RedissonWrite};
        matches!(self, Redisson | RedissonFenced | RedissonRead | RedissonWrite)
    }
}

impl Foreign {
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

    /// The addresses of the servers that vote; none if it is the client's own server.
    pub(crate) fn servers(&self) -> &[String] {
        self.servers.as_ref().map_or(&[], Servers::urls)
    }
}
