//! The stores, and how one is opened.

#[cfg(any(feature = "postgres", feature = "redis"))]
mod certificates;
mod contract;
#[cfg(feature = "redis")]
mod foreign;
#[cfg(test)]
mod histories;
mod lazy;
pub(crate) mod memory;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redlock")]
mod redlock;
#[cfg(any(feature = "postgres", all(feature = "sqlite", unix)))]
mod sql;
#[cfg(all(feature = "sqlite", unix))]
mod sqlite;
mod trial;

use std::sync::{Arc, Weak};

use leasehold_core::ClientId;
use tokio::runtime::Handle;

// Some are for stores that are features.
#[cfg(feature = "redis")]
pub(crate) use self::contract::ForeignKeys;
#[cfg_attr(
    not(all(unix, feature = "postgres", feature = "redlock", feature = "sqlite")),
    allow(unused_imports)
)]
pub(crate) use self::contract::{
    Batch, BoxFuture, CallResult, Capabilities, Cause, EMBEDDED_POLL_INTERVALS, Inbox, ListResult,
    PollIntervals, Store, StoreError, admission_queue_of, inspect_all, missing_response, only,
};
#[cfg(feature = "redis")]
pub(crate) use self::foreign::{ForeignCall, ForeignOutcome, ForeignScript, KeyWatch, MAX_DELAY, UNDECIDED};
pub(crate) use self::lazy::Lazy;
#[cfg(feature = "redis")]
pub(crate) use self::redis::{SharedConnection, store_error};
#[cfg(all(feature = "_fuzzing", feature = "redlock"))]
pub(crate) use self::redis::{fuzz_cluster_slots, fuzz_connection_info};
#[cfg(feature = "redlock")]
pub(crate) use self::redlock::Redlock;
#[cfg(all(feature = "_fuzzing", feature = "sqlite", unix))]
pub(crate) use self::sqlite::fuzz_pipe_record;
use crate::engine::clock::Clock;
use crate::error::Error;
#[cfg(all(feature = "sqlite", unix))]
use crate::tasks;
use crate::url::StoreUrl;

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
/// created; callers' commands may run on it. The store reads the time of leases from `clock`.
#[cfg_attr(
    not(all(unix, feature = "postgres", feature = "redlock", feature = "sqlite")),
    allow(unused_variables)
)]
pub(crate) async fn open(
    url: &StoreUrl,
    clock: Clock,
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
        StoreUrl::Redlock(url) => Ok(Redlock::open(url, clock, client, inbox, caller).await?),
        #[cfg(feature = "redis")]
        StoreUrl::Redis(url) => Ok(redis::Redis::open(url, client, inbox, caller).await?),
        #[cfg(feature = "postgres")]
        StoreUrl::Postgres(url) => Ok(postgres::Postgres::open(url, client, inbox).await?),
        #[cfg(all(feature = "sqlite", unix))]
        StoreUrl::Sqlite { path, is_durable } => {
            let (path, is_durable) = (path.clone(), *is_durable);
            // The file may be busy.
            let open = move || sqlite::Sqlite::open(&path, is_durable, clock, client, inbox);
            Ok(tasks::blocking(open).await??)
        }
    }
}

/// What sets the store at this address apart. It is known before the store is opened.
pub(crate) fn capabilities(url: &StoreUrl) -> Capabilities {
    match url {
        StoreUrl::Memory { .. } => Capabilities::new(EMBEDDED_POLL_INTERVALS),
        #[cfg(feature = "redlock")]
        StoreUrl::Redlock(url) => redlock::capabilities(url.max_ttl),
        #[cfg(feature = "redis")]
        StoreUrl::Redis(_) => redis::capabilities(),
        #[cfg(feature = "postgres")]
        StoreUrl::Postgres(_) => postgres::capabilities(),
        #[cfg(all(feature = "sqlite", unix))]
        StoreUrl::Sqlite { .. } => Capabilities::new(EMBEDDED_POLL_INTERVALS),
    }
}
