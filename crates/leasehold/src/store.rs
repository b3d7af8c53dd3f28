//! Where leases live. Every store runs the same commands; they differ in who shares it.

#[cfg(test)]
mod histories;
pub(crate) mod memory;
mod redis;
mod redlock;
mod sqlite;

pub(crate) use self::redis::steps;

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::{Acquire, Answer, ClientId, Command, Failure, Kind, Name, Push, Resource};
use tokio::runtime::Handle;

use crate::diagnostics::Diagnosis;
use crate::error::Error;
use crate::url::StoreUrl;

/// What a store says when it could not decide.
#[derive(Clone, Debug)]
pub(crate) struct StoreError {
    /// Whether the command may have taken effect.
    pub(crate) failure: Failure,
    /// What happened, without the store's address.
    pub(crate) message: String,
}

/// Receives what a store tells a client unasked. Called from any thread, with no lock of the store held.
pub(crate) trait Inbox: Send + Sync {
    fn deliver(&self, push: Push);

    /// The way to the store is new for the resources that this concerns: what was told meanwhile was missed.
    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool);

    /// The shortest ttl of the leases that the client holds and renews: how soon it needs a way to the store.
    fn shortest_ttl(&self) -> Option<Duration> {
        None
    }
}

pub(crate) type CallResult = Result<Answer, StoreError>;
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// How waiters keep their place in a store's queues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PollIntervals {
    /// How often the head of a queue looks again when it hears nothing: what a lost push can cost.
    pub(crate) repoll_interval: Duration,
    /// How long a place is kept without a sign of life; several times `repoll_interval`.
    pub(crate) entry_ttl: Duration,
}

/// Looking again costs an embedded store microseconds. The head does so sooner than a claim window ends, so that a lost push
/// costs it no place; of the others there may be thousands.
pub(crate) const EMBEDDED_POLL_INTERVALS: PollIntervals =
    PollIntervals { repoll_interval: Duration::from_secs(2), entry_ttl: Duration::from_secs(80) };

/// Where leases live.
///
/// A store answers every command within a bound, with an error where it must: a waiter without a deadline waits for
/// the answer.
pub(crate) trait Store: Send + Sync {
    /// Runs one command at once; nothing when that could mean to wait.
    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult>;

    /// Runs commands in this order, and answers in this order.
    fn call(&self, batch: Vec<(Arc<Resource>, Command)>) -> BoxFuture<Vec<CallResult>>;

    /// As `call`, but an answer counts only when this many replicas have what it tells; otherwise it is
    /// `Failure::NotDurable`. Only for stores that have replicas.
    fn call_replicated(
        &self,
        batch: Vec<(Arc<Resource>, Command)>,
        _replicas: u32,
    ) -> BoxFuture<Vec<CallResult>> {
        self.call(batch)
    }

    /// Runs attempts that don't wait as one command: all of them are granted, or none. Nothing where the store can't do that
    /// with these, and then nothing has happened.
    fn acquire_all(&self, _attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        None
    }

    /// Whether there may be replicas that can be waited for.
    fn has_replicas(&self) -> bool {
        false
    }

    /// Whether it has this kind of lock, with named owners or without.
    fn supports(&self, _kind: Kind, _is_owned: bool) -> bool {
        true
    }

    /// Whether whoever waits tries again and again, and should wait for its turn to do so.
    fn needs_admission_queue(&self) -> bool {
        false
    }

    /// Whether this client has lately met others at this resource: it queues behind them, and does not try first. Only where
    /// there are turns.
    fn is_contended(&self, _resource: &Resource) -> bool {
        false
    }

    /// Whether it can't grant anything yet, and soon will.
    fn in_restart_grace(&self) -> bool {
        false
    }

    /// The longest ttl that it lets a lease have, where it has been told one.
    fn max_ttl(&self) -> Option<Duration> {
        None
    }

    /// The resources that somebody holds or waits for, in the order of their names. It may name some that have
    /// expired just now.
    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>>;

    fn poll_intervals(&self) -> PollIntervals;

    /// Commands with the same number go to the same place, in batches; a slow place is not to delay another one.
    fn shard(&self, _resource: &Resource, _command: &Command) -> u64 {
        0
    }

    /// Looks at everything that locks depend on. It changes nothing, and leaves nothing behind.
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>>;

    /// What an operator should know.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Where those wait who are to wait for this resource in their turn. None for a name that is as long as a name may be.
pub(crate) fn admission_queue_of(resource: &Resource) -> Option<Resource> {
    let name = Name::new(&format!("{}:{}", resource.kind, resource.name.as_str())).ok()?;
    Some(Resource { kind: Kind::Admission, name })
}

/// Opens the store of a caller that knows how to connect to its Redis server.
pub(crate) async fn open_own(
    server: &::redis::Client,
    client: ClientId,
    inbox: Weak<dyn Inbox>,
    caller: Option<Handle>,
) -> Result<Arc<dyn Store>, Error> {
    Ok(redis::Redis::open_own(server, client, inbox, caller).await?)
}

/// Opens a store for one client. What is pushed to that client goes to its inbox, for as long as that lives. `caller` is
/// the runtime that the client is made in, where it may be used for the callers' own commands.
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
        StoreUrl::Redlock(url) => Ok(redlock::Redlock::open(url, client, inbox, caller).await?),
        StoreUrl::Redis(url) => Ok(redis::Redis::open(url, client, inbox, caller).await?),
        StoreUrl::Sqlite { path, is_durable } => Ok(sqlite::Sqlite::open(path, *is_durable, client, inbox)?),
    }
}
