//! Locks with their terms, as Python sees them.

use std::sync::Arc;
use std::time::Duration;

use leasehold::bridge::Foreign;
use leasehold::{Client, Election, Error, Mutex, MutexSet, OncePer, ReentrantMutex, RwLock, Semaphore};
use leasehold_store::process::Own;
use pyo3::prelude::*;

use crate::completions::{Completions, queue_of};
use crate::core::{Core, Outcome, done};
use crate::errors::Failure;
use crate::lease::{Held, LeaseParts};
use crate::opened::Opened;
use crate::operation::Operation;
use crate::time::{Limit, duration};

/// `leasehold._terms.Terms`
#[derive(FromPyObject)]
pub(crate) struct Terms {
    kind: String,
    names: Vec<String>,
    ttl: Option<f64>,
    auto_renew: bool,
    min_hold: f64,
    max_hold: Option<f64>,
    max_waiters: Option<u32>,
    replicas: Option<u32>,
    label: Option<String>,
    trace_id: Option<String>,
    owner: Option<String>,
    permits: u32,
    capacity: u32,
    period: f64,
    at_least_once: bool,
    global_fifo: bool,
    detachable: bool,
    bridge: Option<Vec<String>>,
}

/// Terms whose durations were checked.
pub(crate) struct Checked {
    terms: Terms,
    ttl: Option<Duration>,
    min_hold: Duration,
    max_hold: Option<Duration>,
    period: Duration,
    bridge: Option<Foreign>,
}

impl Terms {
    pub(crate) fn check(self, py: Python<'_>) -> PyResult<Checked> {
        let optional = |seconds: Option<f64>| seconds.map(|seconds| duration(py, seconds)).transpose();
        let bridge = self.bridge.as_deref().map(foreign).transpose();
        Ok(Checked {
            ttl: optional(self.ttl)?,
            min_hold: duration(py, self.min_hold)?,
            max_hold: optional(self.max_hold)?,
            period: duration(py, self.period)?,
            bridge: bridge.map_err(|failure| failure.into_exception(py))?,
            terms: self,
        })
    }
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
    ($lock:expr, $checked:expr) => {{
        let (mut lock, checked) = ($lock, $checked);
        if let Some(ttl) = checked.ttl {
            lock = lock.ttl(ttl);
        }
        if !checked.terms.auto_renew {
            lock = lock.auto_renew(false);
        }
        if let Some(hold) = checked.max_hold {
            lock = lock.max_hold(hold);
        }
        if let Some(max_waiters) = checked.terms.max_waiters {
            lock = lock.max_waiters(max_waiters);
        }
        if let Some(replicas) = checked.terms.replicas {
            lock = lock.replicas(replicas);
        }
        if let Some(label) = &checked.terms.label {
            lock = lock.label(label);
        }
        if let Some(trace_id) = &checked.terms.trace_id {
            lock = lock.trace_id(trace_id);
        }
        lock
    }};
}

/// Options of every kind but `once_per`.
macro_rules! with_hold {
    ($lock:expr, $checked:expr) => {{
        let mut lock = with_terms!($lock, $checked);
        if !$checked.min_hold.is_zero() {
            lock = lock.min_hold($checked.min_hold);
        }
        if $checked.terms.detachable {
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
    fn new(client: &Client, checked: &Checked) -> Result<Self, Failure> {
        let terms = &checked.terms;
        let name = terms.names.first().map_or("", String::as_str);
        let mutex = |name: &str| {
            let mut mutex = with_hold!(client.mutex(name), checked);
            if terms.global_fifo {
                mutex = mutex.global_fifo();
            }
            match &checked.bridge {
                Some(foreign) => mutex.bridge(foreign.clone()),
                None => mutex,
            }
        };
        let is_bridgeable =
            matches!(terms.kind.as_str(), "mutex" | "read" | "write" | "upgradable" | "election");
        if checked.bridge.is_some() && !is_bridgeable {
            return Err(Failure::unsupported("a bridge is for a lock, an rwlock and an election"));
        }
        let rw = || {
            let lock = with_hold!(client.rw_lock(name), checked);
            match &checked.bridge {
                Some(foreign) => lock.bridge(foreign.clone()),
                None => lock,
            }
        };
        Ok(match terms.kind.as_str() {
            "mutex" => Self::Mutex(mutex(name)),
            "reentrant" => {
                let owner = terms.owner.as_deref().unwrap_or_default();
                Self::Reentrant(with_hold!(client.reentrant_mutex(name, owner), checked))
            }
            "read" => Self::Reader(rw()),
            "write" => Self::Writer(rw()),
            "upgradable" => Self::Upgradable(rw()),
            "semaphore" => {
                let semaphore = with_hold!(client.semaphore(name, terms.capacity), checked);
                Self::Semaphore(semaphore, terms.permits)
            }
            "once_per" => {
                if !checked.min_hold.is_zero() || terms.detachable {
                    return Err(Failure::unsupported("once_per has neither min_hold nor detachable"));
                }
                let lock = with_terms!(client.once_per(name, checked.period), checked);
                Self::OncePer(if terms.at_least_once { lock.at_least_once() } else { lock })
            }
            "election" => {
                let lock = with_hold!(client.election(name), checked);
                Self::Election(match &checked.bridge {
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
pub(crate) struct Prepared {
    opened: Arc<Opened>,
    checked: Checked,
}

impl Prepared {
    async fn acquire(&self, limit: Limit) -> Outcome {
        let lock = AnyLock::new(&self.opened.client().await?, &self.checked)?;
        let granted = lock.acquire(limit.left()).await?;
        match granted {
            Some(held) => done(LeaseParts::new(held, self.opened.clone())),
            None => done(()),
        }
    }
}

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Lock {
    prepared: Own<Arc<Prepared>>,
}

impl Lock {
    pub(crate) fn new(opened: Arc<Opened>, checked: Checked) -> Self {
        Self { prepared: Own::new(Arc::new(Prepared { opened, checked })) }
    }
}

#[pymethods]
impl Lock {
    #[staticmethod]
    fn completions() -> PyResult<Completions> {
        Completions::open()
    }

    #[pyo3(signature = (wait=None, completions=None))]
    fn acquire(
        &self,
        py: Python<'_>,
        wait: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let prepared = self.prepared.get().ok_or_else(|| crate::errors::forked(py))?.clone();
        let (limit, queue) = (Limit::new(py, wait)?, queue_of(completions)?);
        Ok(Operation::new(Core::start(async move { prepared.acquire(limit).await }, queue.as_ref())))
    }
}
