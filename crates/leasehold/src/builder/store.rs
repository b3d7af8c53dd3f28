//! The store that a client is made for.

use std::fmt;
#[cfg(all(feature = "sqlite", unix))]
use std::path::PathBuf;

#[cfg(feature = "redis")]
use redis::aio::ConnectionLike;

#[cfg(feature = "redis")]
use crate::store::SharedConnection;
use crate::url::StoreUrl;

/// Where a client keeps its locks, for [`ClientBuilder::store`](crate::ClientBuilder::store). A `&str` or a `String` is an address, as for
/// [`Client::connect`](crate::Client::connect).
///
/// ```
/// # leasehold::doc_test(async {
/// use leasehold::{Client, Store};
///
/// let memory = Client::builder().store(Store::memory()).connect().await?;
/// let shared = Client::builder().store("memory:jobs").connect().await?;
/// # drop((memory, shared));
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Store(pub(super) Choice);

#[derive(Clone)]
pub(super) enum Choice {
    Address(String),
    Url(StoreUrl),
    #[cfg(feature = "redis")]
    Redis(Box<redis::Client>, Option<SharedConnection>),
}

impl Store {
    /// The memory of this process (`memory:`), for this client and its clones. `"memory:NAME"` is shared by the clients of the
    /// process that name it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::{Client, Store};
    /// let client = Client::builder().store(Store::memory()).connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn memory() -> Self {
        Self(Choice::Url(StoreUrl::Memory { name: String::new() }))
    }

    /// A file that the processes of this machine share. It is created if it is missing. For `synchronous=full` write an
    /// address.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let directory = folder.path();
    /// use leasehold::{Client, Store};
    ///
    /// let client = Client::builder().store(Store::sqlite(directory.join("locks.db"))).connect().await?;
    /// client.mutex("backup").lock().await?.release().await?;
    /// # client.close().await?;
    /// # Ok(()) });
    /// ```
    #[cfg(all(feature = "sqlite", unix))]
    pub fn sqlite(path: impl Into<PathBuf>) -> Self {
        Self(Choice::Url(StoreUrl::Sqlite { path: path.into(), is_durable: false }))
    }

    /// One Redis server, for settings that an address can't express, such as certificates in memory or a custom DNS resolver.
    /// leasehold opens its own connections with this client.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use leasehold::{Client, Store, redis};
    ///
    /// let server = redis::Client::open("redis://127.0.0.1")?;
    /// let client = Client::builder().store(Store::redis(server)).connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis(client: redis::Client) -> Self {
        Self(Choice::Redis(Box::new(client), None))
    }

    /// One Redis server, with a connection that the program has already: a [`redis::aio::MultiplexedConnection`] or a
    /// `redis::aio::ConnectionManager`. `client` is what it was made with, because a connection does not tell its address.
    ///
    /// Commands of the program's own tasks go out over `connection`. leasehold opens one more connection, for pushes, and for
    /// what its own thread sends: renewals, rechecks, and releases of dropped guards must not depend on a runtime that may
    /// be busy. With `replicas(n)` there is a third one, because WAIT needs a connection of its own. `diagnose` opens
    /// connections while it runs.
    ///
    /// **Safety.** When the client connects, a key that is written over one connection is read over the other. A
    /// `ConnectionManager` may reconnect to another server later, and a program may select another database. So each command has a
    /// CLIENT INFO before it in the same round trip (some microseconds of the server). If the reply shows another connection,
    /// the answers behind it are discarded, as those of a lost connection are, and leasehold's own connection serves until the
    /// shared one has been verified again. A lock that was granted elsewhere in the meantime is never used; it expires there
    /// after its ttl. The user of the connection needs the right `+client|info`.
    ///
    /// **Conditions.** Call `connect` in the tokio runtime that drives the connection. Commands that block a connection (BLPOP,
    /// XREAD with BLOCK) delay the locks' commands behind them, which fail after 1 s. Not for clusters and Sentinels: those have
    /// addresses.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use leasehold::{Client, Store, redis};
    ///
    /// let server = redis::Client::open("redis://127.0.0.1")?;
    /// let connection = server.get_multiplexed_async_connection().await?; // the program's own
    /// let client = Client::builder().store(Store::redis_connection(server, connection)).connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "redis")]
    pub fn redis_connection<C>(client: redis::Client, connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self(Choice::Redis(Box::new(client), Some(SharedConnection::new(connection))))
    }
}

impl From<&str> for Store {
    fn from(address: &str) -> Self {
        Self(Choice::Address(address.to_owned()))
    }
}

impl From<String> for Store {
    fn from(address: String) -> Self {
        Self(Choice::Address(address))
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            // It may have a password in it.
            Choice::Address(_) => f.write_str("Store(an address)"),
            Choice::Url(url) => write!(f, "Store({url})"),
            #[cfg(feature = "redis")]
            Choice::Redis(client, _) => write!(f, "Store(redis://{})", client.get_connection_info().addr()),
        }
    }
}
