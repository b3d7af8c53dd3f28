//! Locks with their terms.

use std::sync::Arc;
use std::time::Duration;

use leasehold::bridge::Foreign;
use leasehold::{Client, Election, Error, Mutex, MutexSet, OncePer, ReentrantMutex, RwLock, Semaphore};

use crate::call::Limit;
use crate::failure::Failure;
use crate::held::Held;
use crate::lease::{Answer, Granted, Operation, Outcome};
use crate::opened::Opened;
use crate::queue::Queue;

/// What to lock, and how. `_backend.py` of the Python package explains each.
#[expect(missing_docs, reason = "the packages' contracts have them")]
pub struct Terms {
    pub kind: String,
    pub names: Vec<String>,
    pub ttl: Option<Duration>,
    pub auto_renew: bool,
    pub min_hold: Duration,
    pub max_hold: Option<Duration>,
    pub max_waiters: Option<u32>,
    pub replicas: Option<u32>,
    pub label: Option<String>,
    pub trace_id: Option<String>,
    pub owner: Option<String>,
    pub permits: u32,
    pub capacity: u32,
    pub period: Duration,
    pub at_least_once: bool,
    pub global_fifo: bool,
    pub detachable: bool,
    pub bridge: Option<Vec<String>>,
}

/// Another library's lock: the name of a function of `leasehold.bridge`, and its arguments.
fn foreign(terms: &[String]) -> Result<Foreign, Failure> {
    let Some((function, arguments)) = terms.split_first() else {
        return Err(Failure::invalid("a bridge is created by a function of leasehold.bridge"));
    };
    Ok(match (function.as_str(), arguments) {
        ("redis_py", [name]) => Foreign::redis_py(name),
        ("pottery", [name]) => Foreign::pottery(name),
        ("python_redis_lock", [name]) => Foreign::python_redis_lock(name),
        ("set_nx_px", [key]) => Foreign::set_nx_px(key),
        ("redsync", [name]) => Foreign::redsync(name),
        ("node_redlock", [resource]) => Foreign::node_redlock(resource),
        ("rslock", [resource]) => Foreign::rslock(resource),
        ("bsm_redislock", [key]) => Foreign::bsm_redislock(key),
        ("rueidislock", [name]) => Foreign::rueidislock(name),
        ("dapr", [app_id, resource]) => Foreign::dapr(app_id, resource),
        ("spring_integration", [registry, name]) => Foreign::spring_integration(registry, name),
        ("redisson_lock", [name]) => Foreign::redisson_lock(name),
        ("redisson_fenced_lock", [name]) => Foreign::redisson_fenced_lock(name),
        ("redisson_read_write_lock", [name]) => Foreign::redisson_read_write_lock(name),
        ("redlock", [key, servers @ ..]) => Foreign::redlock(servers, key)?,
        ("redisson_redlock", [name, servers @ ..]) => Foreign::redisson_redlock(servers, name)?,
        _ => {
            return Err(Failure::invalid(format!(
                "{function:?} is no function of leasehold.bridge with these arguments"
            )));
        }
    })
}

/// Options that every kind has.
macro_rules! with_terms {
    ($lock:expr, $terms:expr) => {{
        let (mut lock, terms) = ($lock, $terms);
        if let Some(ttl) = terms.ttl {
            lock = lock.ttl(ttl);
        }
        if !terms.auto_renew {
            lock = lock.auto_renew(false);
        }
        if let Some(hold) = terms.max_hold {
            lock = lock.max_hold(hold);
        }
        if let Some(max_waiters) = terms.max_waiters {
            lock = lock.max_waiters(max_waiters);
        }
        if let Some(replicas) = terms.replicas {
            lock = lock.replicas(replicas);
        }
        if let Some(label) = &terms.label {
            lock = lock.label(label);
        }
        if let Some(trace_id) = &terms.trace_id {
            lock = lock.trace_id(trace_id);
        }
        lock
    }};
}

/// Options of every kind but `once_per`.
macro_rules! with_hold {
    ($lock:expr, $terms:expr) => {{
        let mut lock = with_terms!($lock, $terms);
        if !$terms.min_hold.is_zero() {
            lock = lock.min_hold($terms.min_hold);
        }
        if $terms.detachable {
            lock = lock.detachable();
        }
        lock
    }};
}

/// A lock of an open client.
enum AnyLock {
    Mutex(Mutex),
    Reentrant(ReentrantMutex),
    Reader(RwLock),
    Writer(RwLock),
    Upgradable(RwLock),
    Semaphore(Semaphore, u32),
    OncePer(OncePer),
    Election(Election),
    Set(MutexSet),
}

impl AnyLock {
    fn new(client: &Client, terms: &Terms, bridge: Option<&Foreign>) -> Result<Self, Failure> {
        let name = terms.names.first().map_or("", String::as_str);
        let mutex = |name: &str| {
            let mut mutex = with_hold!(client.mutex(name), terms);
            if terms.global_fifo {
                mutex = mutex.global_fifo();
            }
            match bridge {
                Some(foreign) => mutex.bridge(foreign.clone()),
                None => mutex,
            }
        };
        let is_bridgeable =
            matches!(terms.kind.as_str(), "mutex" | "read" | "write" | "upgradable" | "election");
        if bridge.is_some() && !is_bridgeable {
            return Err(Failure::unsupported("a bridge is for a lock, an rwlock and an election"));
        }
        let rw = || {
            let lock = with_hold!(client.rw_lock(name), terms);
            match bridge {
                Some(foreign) => lock.bridge(foreign.clone()),
                None => lock,
            }
        };
        Ok(match terms.kind.as_str() {
            "mutex" => Self::Mutex(mutex(name)),
            "reentrant" => {
                let owner = terms.owner.as_deref().unwrap_or_default();
                Self::Reentrant(with_hold!(client.reentrant_mutex(name, owner), terms))
            }
            "read" => Self::Reader(rw()),
            "write" => Self::Writer(rw()),
            "upgradable" => Self::Upgradable(rw()),
            "semaphore" => {
                let semaphore = with_hold!(client.semaphore(name, terms.capacity), terms);
                Self::Semaphore(semaphore, terms.permits)
            }
            "once_per" => {
                if !terms.min_hold.is_zero() || terms.detachable {
                    return Err(Failure::unsupported("once_per has neither min_hold nor detachable"));
                }
                let lock = with_terms!(client.once_per(name, terms.period), terms);
                Self::OncePer(if terms.at_least_once { lock.at_least_once() } else { lock })
            }
            "election" => {
                let lock = with_hold!(client.election(name), terms);
                Self::Election(match bridge {
                    Some(foreign) => lock.bridge(foreign.clone()),
                    None => lock,
                })
            }
            "set" => Self::Set(MutexSet::new(terms.names.iter().map(|name| mutex(name)))),
            kind => return Err(Failure::invalid(format!("{kind:?} is no kind of lock"))),
        })
    }

    async fn acquire(&self, wait: Duration) -> Result<Option<Held>, Error> {
        Ok(match self {
            Self::Mutex(lock) if wait.is_zero() => lock.try_lock().await?.map(Held::Plain),
            Self::Mutex(lock) => lock.lock_timeout(wait).await?.map(Held::Plain),
            Self::Reentrant(lock) => lock.lock_timeout(wait).await?.map(Held::Plain),
            Self::Reader(lock) => lock.read_timeout(wait).await?.map(Held::Plain),
            Self::Writer(lock) => lock.write_timeout(wait).await?.map(Held::Writer),
            Self::Upgradable(lock) => lock.upgradable_read_timeout(wait).await?.map(Held::Upgradable),
            Self::Semaphore(lock, permits) => lock.acquire_timeout(*permits, wait).await?.map(Held::Plain),
            Self::OncePer(lock) => lock.start_timeout(wait).await?.map(Held::Plain),
            Self::Election(lock) => lock.campaign_timeout(wait).await?.map(Held::Plain),
            Self::Set(lock) => lock.lock_timeout(wait).await?.map(Held::Set),
        })
    }
}

/// A lock, which needs the client only when it is acquired. It keeps no handle of the library's, with which a closed client would keep its connections.
struct Prepared {
    opened: Arc<Opened>,
    terms: Terms,
    bridge: Option<Foreign>,
}

impl Prepared {
    async fn acquire(&self, limit: Limit) -> Outcome {
        let lock = AnyLock::new(&self.opened.client().await?, &self.terms, self.bridge.as_ref())?;
        let granted = lock.acquire(limit.left()).await?;
        Ok(granted.map_or(Answer::Nothing, |held| Answer::Lease(Granted::new(held, self.opened.clone()))))
    }
}

/// A lock that can be acquired any number of times. Nothing is sent before, and nothing is held.
pub struct Lock {
    prepared: Arc<Prepared>,
}

impl Lock {
    pub(crate) fn new(opened: Arc<Opened>, terms: Terms) -> Result<Self, Failure> {
        let bridge = terms.bridge.as_deref().map(foreign).transpose()?;
        Ok(Self { prepared: Arc::new(Prepared { opened, terms, bridge }) })
    }

    /// Ends with a lease, or with nothing if the lock was not granted within the limit.
    #[must_use]
    pub fn acquire(&self, limit: Limit, queue: Option<&Arc<Queue>>) -> Arc<Operation> {
        let prepared = self.prepared.clone();
        Operation::start(async move { prepared.acquire(limit).await }, queue)
    }
}
