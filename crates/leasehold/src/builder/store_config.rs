//! The store that a client is made for.

use std::fmt;
#[cfg(all(feature = "sqlite", unix))]
use std::path::PathBuf;
use std::sync::Arc;

#[cfg(feature = "redis")]
use leasehold_redis::SharedConnection;
use leasehold_store::StoreFactory;
#[cfg(feature = "redis")]
use redis::aio::ConnectionLike;

/// Where a client keeps its locks, for [`ClientBuilder::store`](crate::ClientBuilder::store). A `&str` or a `String` is an address, as for
/// [`Client::connect`](crate::Client::connect).
///
/// ```
/// # leasehold::doc_test(async {
/// use leasehold::{Client, StoreConfig};
///
/// let memory = Client::builder().store(StoreConfig::memory()).connect().await?;
/// let shared = Client::builder().store("memory:jobs").connect().await?;
/// # drop((memory, shared));
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct StoreConfig(pub(super) Choice);

#[derive(Clone)]
pub(super) enum Choice {
    Address(String),
    Memory,
    #[cfg(all(feature = "sqlite", unix))]
    File(PathBuf),
    #[cfg(feature = "redis")]
    Redis(Box<redis::Client>, Option<SharedConnection>),
    Factory(Arc<dyn StoreFactory>),
}

impl StoreConfig {
    /// The memory of this process (`memory:`), for this client and its clones. The address `"memory:NAME"` is shared by the
    /// clients of the process that use the same NAME.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::{Client, StoreConfig};
    /// let client = Client::builder().store(StoreConfig::memory()).connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn memory() -> Self {
        Self(Choice::Memory)
    }

    /// A file that the processes of this machine share. It is created if it is missing. For `synchronous=full` pass an
    /// address instead.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let directory = folder.path();
    /// use leasehold::{Client, StoreConfig};
    ///
    /// let client = Client::builder().store(StoreConfig::sqlite(directory.join("locks.db"))).connect().await?;
    /// client.mutex("backup").lock().await?.release().await?;
    /// # client.close().await?;
    /// # Ok(()) });
    /// ```
    #[cfg(all(feature = "sqlite", unix))]
    #[must_use]
    pub fn sqlite(path: impl Into<PathBuf>) -> Self {
        Self(Choice::File(path.into()))
    }

    /// One Redis server, for settings that an address can't express, such as certificates in memory or a custom DNS
    /// resolver. Leasehold opens its own connections with this client.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use leasehold::{Client, StoreConfig, redis};
    ///
    /// let server = redis::Client::open("redis://127.0.0.1")?;
    /// let client = Client::builder().store(StoreConfig::redis(server)).connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis(client: redis::Client) -> Self {
        Self(Choice::Redis(Box::new(client), None))
    }

    /// One Redis server, with an existing connection of the program: a [`redis::aio::MultiplexedConnection`] or a
    /// `redis::aio::ConnectionManager`. `client` is the client that made the connection, because a connection has no
    /// address.
    ///
    /// When a task of the program calls leasehold, its commands go over `connection`. Leasehold opens one more
    /// connection, for pushes, renewals, re-checks and releases of dropped guards. Leasehold's own thread uses it, so
    /// these do not depend on a runtime that may be busy. With `replicas(n)` there is a third connection, because WAIT
    /// blocks its connection. `diagnose` opens connections while it runs.
    ///
    /// **Safety.** Both connections must lead to the same database. At connect, leasehold writes a key over one connection
    /// and reads it over the other. Later, a `ConnectionManager` may reconnect to another server, and a program may select
    /// another database. Leasehold therefore sends CLIENT INFO before each command, in the same round trip (some
    /// microseconds of the server). If the reply shows another connection, leasehold discards the answers that follow it, as
    /// for a lost connection. It then uses its own connection until the shared one has been verified again. A lock that
    /// another server granted in the meantime is never used; it expires there after its ttl. The user of the connection
    /// needs the right `+client|info`.
    ///
    /// **Conditions.** Call `connect` in the tokio runtime that drives the connection. Commands that block a connection
    /// (BLPOP, XREAD with BLOCK) delay the lock commands behind them, and these fail after 1 s. Clusters and Sentinels are
    /// not supported; use their addresses.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use leasehold::{Client, StoreConfig, redis};
    ///
    /// let server = redis::Client::open("redis://127.0.0.1")?;
    /// let connection = server.get_multiplexed_async_connection().await?; // the program's own
    /// let client = Client::builder().store(StoreConfig::redis_connection(server, connection)).connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis_connection<C>(client: redis::Client, connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self(Choice::Redis(Box::new(client), Some(SharedConnection::new(connection))))
    }
}

impl StoreConfig {
    /// A store that is not part of leasehold. [`StoreFactory`] is in the crate `leasehold-store`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::sync::{Arc, Weak};
    /// # use leasehold_core::ClientId;
    /// # use leasehold_store::memory::Memory;
    /// # use leasehold_store::{BoxFuture, Capabilities, EMBEDDED_POLL_INTERVALS, Inbox, OpenError, Store, StoreFactory};
    /// # struct Mine;
    /// # impl StoreFactory for Mine {
    /// #     fn name(&self) -> String { "mine:".to_owned() }
    /// #     fn capabilities(&self) -> Capabilities { Capabilities::new(EMBEDDED_POLL_INTERVALS) }
    /// #     fn open(&self, client: ClientId, inbox: Weak<dyn Inbox>) -> BoxFuture<Result<Arc<dyn Store>, OpenError>> {
    /// #         let store = Memory::open("mine");
    /// #         store.join(client, inbox);
    /// #         Box::pin(std::future::ready(Ok(store as Arc<dyn Store>)))
    /// #     }
    /// # }
    /// use leasehold::{Client, StoreConfig};
    ///
    /// // `Mine` implements `StoreFactory`.
    /// let client = Client::builder().store(StoreConfig::factory(Mine)).connect().await?;
    /// client.mutex("backup").lock().await?.release().await?;
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn factory(factory: impl StoreFactory + 'static) -> Self {
        Self(Choice::Factory(Arc::new(factory)))
    }
}

impl StoreConfig {
    /// The address, if it is one.
    #[cfg(feature = "postgres")]
    pub(crate) fn address(&self) -> Option<&str> {
        match &self.0 {
            Choice::Address(address) => Some(address),
            _ => None,
        }
    }
}

impl From<&str> for StoreConfig {
    fn from(address: &str) -> Self {
        Self(Choice::Address(address.to_owned()))
    }
}

impl From<String> for StoreConfig {
    fn from(address: String) -> Self {
        Self(Choice::Address(address))
    }
}

impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Choice::Factory(factory) => write!(f, "StoreConfig({})", factory.name()),
            // It may have a password in it.
            Choice::Address(_) => f.write_str("StoreConfig(an address)"),
            Choice::Memory => f.write_str("StoreConfig(memory:)"),
            #[cfg(all(feature = "sqlite", unix))]
            Choice::File(path) => write!(f, "StoreConfig(sqlite:{})", path.display()),
            #[cfg(feature = "redis")]
            Choice::Redis(client, _) => {
                write!(f, "StoreConfig(redis://{})", client.get_connection_info().addr())
            }
        }
    }
}
