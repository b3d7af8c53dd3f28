//! The store trait. All stores run the same commands; they differ in scope (process, machine, network).

#[cfg(test)]
mod histories;
pub(crate) mod memory;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redlock")]
mod redlock;
#[cfg(all(feature = "sqlite", unix))]
mod sqlite;

#[cfg(feature = "redis")]
pub(crate) use self::redis::SharedConnection;

use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::{Acquire, Answer, ClientId, Command, Failure, Kind, Name, Push, Resource};
use tokio::runtime::Handle;

use crate::diagnostics::Diagnosis;
use crate::error::{Cause, Error};
use crate::url::StoreUrl;

/// A command failed without a reply.
#[derive(Clone, Debug)]
pub(crate) struct StoreError {
    /// Whether the command may have taken effect.
    pub(crate) failure: Failure,
    /// What happened and what to do, without the store's address.
    pub(crate) message: String,
    /// The error of the driver or of the system, if there is one.
    pub(crate) cause: Option<Cause>,
}

impl StoreError {
    pub(crate) fn new(failure: Failure, message: impl Into<String>) -> Self {
        Self { failure, message: message.into(), cause: None }
    }

    pub(crate) fn caused_by(self, cause: impl StdError + Send + Sync + 'static) -> Self {
        Self { cause: Some(Arc::new(cause)), ..self }
    }
}

/// Receives a store's pushes for one client. Called from any thread, with no lock of the store held.
pub(crate) trait Inbox: Send + Sync {
    fn deliver(&self, push: Push);

    /// The connection was re-established for the matching resources: pushes may have been missed.
    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool);

    /// Shortest ttl of the client's renewed leases: bounds how long a reconnect may take.
    fn shortest_ttl(&self) -> Option<Duration> {
        None
    }
}

pub(crate) type ListResult = Result<Vec<(Resource, Answer)>, StoreError>;
pub(crate) type CallResult = Result<Answer, StoreError>;
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// How often waiters poll a store, and how long it keeps their queue entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PollIntervals {
    /// Time between re-checks of the head of a queue without a push: its max delay after a lost push.
    pub(crate) repoll_interval: Duration,
    /// Lifetime of a queue entry without a re-check; several times `repoll_interval`.
    pub(crate) entry_ttl: Duration,
}

/// A re-check costs an embedded store microseconds. The head's comes before a claim window ends, so that a lost push costs it
/// no place. Of the other waiters there may be thousands.
pub(crate) const EMBEDDED_POLL_INTERVALS: PollIntervals =
    PollIntervals { repoll_interval: Duration::from_secs(2), entry_ttl: Duration::from_secs(80) };

/// A place that keeps leases.
///
/// A store must answer every command within a bounded time, if necessary with an error, because a waiter without a
/// deadline waits for the answer.
pub(crate) trait Store: Send + Sync {
    /// Runs one command inline; `None` if that might block.
    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult>;

    /// Runs commands in order. Returns one result per command, in the same order.
    fn call(&self, batch: Vec<(Arc<Resource>, Command)>) -> BoxFuture<Vec<CallResult>>;

    /// As `call`, but fails with `Failure::NotDurable` unless this many replicas acknowledge. Only for stores with replicas.
    fn call_replicated(
        &self,
        batch: Vec<(Arc<Resource>, Command)>,
        _replicas: u32,
    ) -> BoxFuture<Vec<CallResult>> {
        self.call(batch)
    }

    /// Runs non-waiting attempts atomically: all are granted, or none. `None`, without effect, if the store cannot do that for
    /// these resources.
    fn acquire_all(&self, _attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        None
    }

    /// Whether the store can wait for replicas.
    fn has_replicas(&self) -> bool {
        false
    }

    /// Whether the store supports this kind of lock, with or without a named owner.
    fn supports(&self, _kind: Kind, _is_owned: bool) -> bool {
        true
    }

    /// Whether waiters poll and therefore need an admission queue.
    fn needs_admission_queue(&self) -> bool {
        false
    }

    /// Whether this client recently met other clients at this resource: it then queues without trying first. Only for stores
    /// with an admission queue.
    fn is_contended(&self, _resource: &Resource) -> bool {
        false
    }

    /// Whether the store abstains after a restart and cannot grant anything yet.
    fn in_restart_grace(&self) -> bool {
        false
    }

    /// Max ttl of a lease, if configured.
    fn max_ttl(&self) -> Option<Duration> {
        None
    }

    /// Resources with holders or waiters. May include ones that have just expired.
    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>>;

    /// As `list`, with the answer to an `Inspect` of each. `None` if the store does that no faster than by such commands.
    fn inspect_all(&self) -> Option<BoxFuture<ListResult>> {
        None
    }

    fn poll_intervals(&self) -> PollIntervals;

    /// Batching key: commands with the same key go to the same node in one batch, so that a slow node delays no other.
    fn shard(&self, _resource: &Resource, _command: &Command) -> u64 {
        0
    }

    /// Checks everything that locks depend on, without side effects.
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>>;

    /// Warnings for operators.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The admission queue of a resource. `None` if the derived name would be too long.
pub(crate) fn admission_queue_of(resource: &Resource) -> Option<Resource> {
    let name = Name::new(&format!("{}:{}", resource.kind, resource.name.as_str())).ok()?;
    Some(Resource { kind: Kind::Admission, name })
}

/// Opens a Redis store from the caller's `redis::Client`, and a connection of the caller's, if there is one.
#[cfg(feature = "redis")]
pub(crate) async fn open_own(
    server: &::redis::Client,
    shared: Option<SharedConnection>,
    client: ClientId,
    inbox: Weak<dyn Inbox>,
    caller: Option<Handle>,
) -> Result<Arc<dyn Store>, Error> {
    Ok(redis::Redis::open_own(server, shared, client, inbox, caller).await?)
}

/// Opens a store for one client. Pushes go to `inbox` while it lives. `caller` is the runtime in which the client is
/// created; callers' commands may run on it.
#[cfg_attr(not(feature = "redis"), allow(unused_variables))]
pub(crate) async fn open(
    url: &StoreUrl,
    client: ClientId,
    inbox: Weak<dyn Inbox>,
    caller: Option<Handle>,
) -> Result<Arc<dyn Store>, Error> {
    match url {
        StoreUrl::Memory { name } => {
            let store = memory::Memory::open(name);
            store.join(client, inbox);
            Ok(store)
        }
        #[cfg(feature = "redlock")]
        StoreUrl::Redlock(url) => Ok(redlock::Redlock::open(url, client, inbox, caller).await?),
        #[cfg(feature = "redis")]
        StoreUrl::Redis(url) => Ok(redis::Redis::open(url, client, inbox, caller).await?),
        #[cfg(all(feature = "sqlite", unix))]
        StoreUrl::Sqlite { path, is_durable } => Ok(sqlite::Sqlite::open(path, *is_durable, client, inbox)?),
    }
}
