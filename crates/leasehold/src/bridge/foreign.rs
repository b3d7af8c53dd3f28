//! The locks of other libraries: their keys.

use std::fmt;
use std::str::FromStr;

use super::libraries::{on_servers, with_prefix};
use super::servers::Servers;
use crate::error::{Error, invalid};
use crate::url::RedisUrl;

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
}

/// Makes a lock of its name.
type Build = fn(&str) -> Result<Foreign, Error>;

/// What precedes the name in the text of a lock.
const SCHEMES: [(&str, Build); 14] = [
    ("set-nx-px", |key| Ok(Foreign::set_nx_px(key))),
    ("redisson", |name| Ok(Foreign::redisson_lock(name))),
    ("redis-py", |name| Ok(Foreign::redis_py(name))),
    ("redsync", |name| Ok(Foreign::redsync(name))),
    ("node-redlock", |name| Ok(Foreign::node_redlock(name))),
    ("rslock", |name| Ok(Foreign::rslock(name))),
    ("bsm", |key| Ok(Foreign::bsm_redislock(key))),
    ("pottery", |name| Ok(Foreign::pottery(name))),
    ("dapr", |text| with_prefix(|app, name| Foreign::dapr(app, name), text, "dapr:APP:NAME")),
    ("spring", |text| {
        with_prefix(
            |registry, name| Foreign::spring_integration(registry, name),
            text,
            "spring:REGISTRY:NAME",
        )
    }),
    ("python-redis-lock", |name| Ok(Foreign::python_redis_lock(name))),
    ("rueidislock", |name| Ok(Foreign::rueidislock(name))),
    ("redlock", |text| on_servers(|key| Foreign::set_nx_px(key), text)),
    ("redisson-redlock", |text| on_servers(|name| Foreign::redisson_lock(name), text)),
];

/// Why Redisson's fair lock has no bridge.
const NO_FAIR_LOCK: &str = "Redisson's fair lock can't be bridged: its queue is ordered by the clocks of its clients, and a waiter \
                            that has died delays the others by minutes. Use RLock (getLock) in the Java programs first";

impl Foreign {
    /// `RedissonClient.getLock(name)` of Redisson. Waiters in Java are woken by message.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::redisson_lock("jobs").key(), "jobs");
    /// ```
    pub fn redisson_lock(name: impl Into<String>) -> Self {
        Self { protocol: Protocol::Redisson, key: name.into(), wakes: None, servers: None }
    }

    /// `RedissonRedLock` over `getLock(name)` of several Redisson clients, one for each server: the lock is held by the holder of
    /// more than half of them. It also excludes a `RedissonMultiLock` over the same locks, which needs all of them.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    ///
    /// let servers = ["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"];
    /// assert_eq!(Foreign::redisson_redlock(servers, "jobs")?.key(), "jobs");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Foreign::redlock`].
    pub fn redisson_redlock<U: AsRef<str>>(
        servers: impl IntoIterator<Item = U>,
        name: impl Into<String>,
    ) -> Result<Self, Error> {
        Ok(Self { servers: Some(Servers::parse(servers)?), ..Self::redisson_lock(name) })
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

    /// The addresses of the servers that vote; none if it is the client's own server.
    pub(crate) fn servers(&self) -> &[RedisUrl] {
        self.servers.as_ref().map_or(&[], Servers::urls)
    }
}

/// The text that [`FromStr`] reads, without the passwords of servers.
impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        let name = |prefix: &str| key.strip_prefix(prefix).unwrap_or(key).to_owned();
        match (&self.servers, self.protocol) {
            (Some(servers), Protocol::Redisson) => write!(f, "redisson-redlock:{key}@{servers}"),
            (Some(servers), _) => write!(f, "redlock:{key}@{servers}"),
            (None, Protocol::SetNxPx) => write!(f, "set-nx-px:{key}"),
            (None, Protocol::Redisson) => write!(f, "redisson:{key}"),
            (None, Protocol::SpringIntegration) => write!(f, "spring:{key}"),
            (None, Protocol::PythonRedisLock) => write!(f, "python-redis-lock:{}", name("lock:")),
            (None, Protocol::Rueidislock) => write!(f, "rueidislock:{}", name("rueidislock:0:")),
        }
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
            // The text may contain a password.
            let scheme = scheme.chars().take(40).collect::<String>();
            return Err(invalid(format!("a bridge is one of {}, not {scheme:?}", known.join(", "))));
        };
        if name.is_empty() {
            return Err(invalid(format!("a bridge has a name: {scheme}:NAME")));
        }
        build(name)
    }
}
