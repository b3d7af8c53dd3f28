//! Opens the store that an address names.

use std::sync::{Arc, Weak};

use leasehold_core::ClientId;
#[cfg(feature = "postgres")]
use leasehold_postgres::Postgres;
#[cfg(feature = "redis")]
use leasehold_redis::{Redis, SharedConnection};
#[cfg(feature = "redlock")]
use leasehold_redlock::Redlock;
#[cfg(all(feature = "sqlite", unix))]
use leasehold_sqlite::Sqlite;
#[cfg(all(feature = "sqlite", unix))]
use leasehold_store::OpenError;
use leasehold_store::clock::Clock;
use leasehold_store::credentials::{CredentialCache, CredentialProvider};
use leasehold_store::memory::Memory;
#[cfg(all(feature = "sqlite", unix))]
use leasehold_store::tasks;
use leasehold_store::{Capabilities, EMBEDDED_POLL_INTERVALS, Inbox, Store};
use tokio::runtime::Handle;

use crate::error::Error;
use crate::url::StoreUrl;

/// Opens a Redis store from the caller's `redis::Client`, and a connection of the caller's, if there is one.
#[cfg(feature = "redis")]
pub(crate) async fn open_own(
    server: &redis::Client,
    shared: Option<SharedConnection>,
    provider: Option<CredentialProvider>,
    client: ClientId,
    inbox: Weak<dyn Inbox>,
    caller: Option<Handle>,
) -> Result<Arc<dyn Store>, Error> {
    Ok(Redis::open_own(server, shared, provider.map(CredentialCache::new), client, inbox, caller).await?)
}

/// Opens a store for one client. Pushes go to `inbox` while it lives. `caller` is the runtime in which the client is
/// created; callers' commands may run on it. The store reads the time of leases from `clock`.
#[cfg_attr(
    not(all(unix, feature = "postgres", feature = "redlock", feature = "sqlite")),
    allow(unused_variables)
)]
pub(crate) async fn open(
    url: &StoreUrl,
    provider: Option<CredentialProvider>,
    clock: Clock,
    client: ClientId,
    inbox: Weak<dyn Inbox>,
    caller: Option<Handle>,
) -> Result<Arc<dyn Store>, Error> {
    // The client's thread asks the provider, whatever becomes of the caller's runtime.
    let url = match provider {
        Some(provider) => &url.clone().with_credentials(&CredentialCache::new(provider)),
        None => url,
    };
    match url {
        StoreUrl::Memory { name } => {
            let store = Memory::open(name);
            store.join(client, inbox);
            Ok(store)
        }
        #[cfg(feature = "redlock")]
        StoreUrl::Redlock(url) => Ok(Redlock::open(url, clock, client, inbox, caller).await?),
        #[cfg(feature = "redis")]
        StoreUrl::Redis(url) => Ok(Redis::open(url, client, inbox, caller).await?),
        #[cfg(feature = "postgres")]
        StoreUrl::Postgres(url) => Ok(Postgres::open(url, client, inbox).await?),
        #[cfg(all(feature = "sqlite", unix))]
        StoreUrl::Sqlite(url) => {
            let url = url.clone();
            // The file may be busy.
            let open = move || Sqlite::open(&url, clock, client, inbox);
            Ok(tasks::blocking(open).await.map_err(OpenError::from)??)
        }
    }
}

/// What sets the store at this address apart. It is known before the store is opened.
pub(crate) fn capabilities(url: &StoreUrl) -> Capabilities {
    match url {
        StoreUrl::Memory { .. } => Capabilities::new(EMBEDDED_POLL_INTERVALS),
        #[cfg(feature = "redlock")]
        StoreUrl::Redlock(url) => leasehold_redlock::capabilities(url.max_ttl),
        #[cfg(feature = "redis")]
        StoreUrl::Redis(_) => leasehold_redis::capabilities(),
        #[cfg(feature = "postgres")]
        StoreUrl::Postgres(_) => leasehold_postgres::capabilities(),
        #[cfg(all(feature = "sqlite", unix))]
        StoreUrl::Sqlite(_) => Capabilities::new(EMBEDDED_POLL_INTERVALS),
    }
}
