//! Configures a client: the store, and the defaults of its locks.

mod store_config;

use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::ClientId;
#[cfg(all(feature = "sqlite", unix))]
use leasehold_sqlite::SqliteUrl;
use leasehold_store::clock::Clock;
use leasehold_store::credentials::{CredentialProvider, CredentialRequest, Credentials};
use leasehold_store::tasks::Tasks;
use leasehold_store::{BoxFuture, Capabilities, HolderMetadata, Inbox, StoreFactory};
use tokio::runtime;

use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::handle::ClientOptions;
use crate::lazy::Lazy;
use crate::locks::lock::{MAX_TTL, MIN_TTL};
use crate::open;
#[cfg(feature = "redis")]
use crate::url::two_passwords;
use crate::url::{StoreUrl, no_credentials};
use store_config::Choice;
pub use store_config::StoreConfig;

impl Client {
    /// Configures a client. Only the store is required.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// let client = leasehold::Client::builder().store("memory:").label("importer").connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    pub fn builder() -> ClientBuilder {
        ClientBuilder::new()
    }

    /// Connects with a client of the [`redis`](crate::redis) crate, for settings that an address can't express, such as
    /// certificates in memory or a custom DNS resolver. Leasehold opens its own connections with this client.
    /// [`StoreConfig::redis_connection`] also uses a connection of the program.
    ///
    /// ```no_run
    /// # leasehold::doc_test(async {
    /// let redis = leasehold::redis::Client::open("redis://127.0.0.1").expect("a valid address");
    /// let client = leasehold::Client::from_redis_client(redis).await?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable`: the message names the address.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped early, nothing remains open.
    #[cfg(feature = "redis")]
    pub async fn from_redis_client(redis: redis::Client) -> Result<Self, Error> {
        Self::builder().store(StoreConfig::redis(redis)).connect().await
    }

    /// Connects, with a connection on the caller's runtime if there is one. That runtime must not be blocked.
    pub(crate) async fn connect_from(url: &str, caller: Option<runtime::Handle>) -> Result<Self, Error> {
        Self::builder().store(url).connect_from(caller).await
    }
}

/// The settings of a [`Client`]. Created by [`Client::builder`].
///
/// ```
/// # leasehold::doc_test(async {
/// use std::time::Duration;
///
/// let client = leasehold::Client::builder()
///     .store("memory:")
///     .ttl(Duration::from_secs(30))
///     .label("import service")
///     .close_timeout(Duration::from_secs(3))
///     .connect()
///     .await?;
/// let guard = client.mutex("orders:42").lock().await?;
/// assert!(guard.remaining() > Duration::from_secs(20));
/// # drop(guard);
/// client.close().await?;
/// # Ok(()) });
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is connected before `connect`"]
pub struct ClientBuilder {
    store: Option<StoreConfig>,
    options: ClientOptions,
    label: Option<String>,
    is_lazy: bool,
}

impl ClientBuilder {
    pub(crate) fn new() -> Self {
        Self { store: None, options: ClientOptions::default(), label: None, is_lazy: false }
    }

    /// Sets the store of the locks, which is required: an address, or a [`StoreConfig`].
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::{Client, StoreConfig};
    /// let client = Client::builder().store("memory:jobs").connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    pub fn store(mut self, store: impl Into<StoreConfig>) -> Self {
        self.store = Some(store.into());
        self
    }

    /// Sets the default ttl of this client's locks: 100 ms to 30 days, 10 s by default.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::{Client, StoreConfig};
    /// let client = Client::builder().store("memory:").ttl(Duration::from_secs(30)).connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = ttl;
        self
    }

    /// Sets the default maximum length of a wait queue, 100,000 by default.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::{Client, StoreConfig};
    /// let client = Client::builder().store("memory:").max_waiters(100).connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    pub fn max_waiters(mut self, max_waiters: u32) -> Self {
        self.options.max_waiters = max_waiters;
        self
    }

    /// Sets the default number of replicas that must confirm each grant, each renewal and each release that retains the lock, 0 by default.
    /// Redis only.
    ///
    /// ```no_run
    /// # leasehold::doc_test(async {
    /// # use leasehold::Client;
    /// let client = Client::builder().store("redis://10.0.0.1").replicas(1).connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    pub fn replicas(mut self, replicas: u32) -> Self {
        self.options.replicas = replicas;
        self
    }

    /// Sets the metadata that this client's holders and waiters publish. The default has the host, the process id and the
    /// program. Empty metadata hides them:
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// use leasehold::{Client, HolderMetadata};
    ///
    /// let hidden = HolderMetadata::default();
    /// let client = Client::builder().store("memory:").metadata(hidden).connect().await?;
    /// let guard = client.mutex("a").lock().await?;
    /// assert_eq!(client.mutex("a").inspect().await?.holders[0].metadata.host, None);
    /// # drop(guard);
    /// # Ok(()) });
    /// ```
    pub fn metadata(mut self, metadata: HolderMetadata) -> Self {
        self.options.metadata = metadata;
        self
    }

    /// Sets the default label: text that inspection shows in addition to host, process and program. At most 1
    /// KiB.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::{Client, StoreConfig};
    /// let client = Client::builder().store("memory:").label("importer").connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Opens the store when a lock is first used, so that a program starts although its store does not run yet.
    /// [`connect`](Self::connect) then only checks the settings. While the store can't be opened, a waiting attempt retries until
    /// its limit, and every other call fails with `is_unavailable`; so does an attempt over a quorum (`redlock:`). [`Client::warnings`] is empty until the store is open.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::Client;
    /// let client = Client::builder().store("redis://127.0.0.1:1").lazy().connect().await?;
    /// let orders = client.mutex("orders:42");
    /// assert!(orders.try_lock().await.unwrap_err().is_unavailable()); // no server listens there
    /// # Ok(()) });
    /// ```
    pub fn lazy(mut self) -> Self {
        self.is_lazy = true;
        self
    }

    /// Sets the maximum duration of [`connect`](Self::connect). The default depends on the store: 5 s for a Redis server.
    /// This does not affect reconnects, whose time limit depends on the ttl of the held leases. It does not interrupt the
    /// opening of a file.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::{Client, StoreConfig};
    /// let client = Client::builder().store("memory:").connect_timeout(Duration::from_secs(2)).connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.options.connect_timeout = Some(limit);
        self
    }

    /// Sets the maximum duration of [`Client::close`]. By default `close` waits until every lease is released or has
    /// expired.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # use leasehold::{Client, StoreConfig};
    /// let client = Client::builder().store("memory:").close_timeout(Duration::from_secs(3)).connect().await?;
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    pub fn close_timeout(mut self, limit: Duration) -> Self {
        self.options.close_timeout = Some(limit);
        self
    }

    /// Sets where the logins of Redis and PostgreSQL come from, in place of a password in the address: a function that is called when
    /// credentials are needed, and again before they expire. Use it for tokens with a limited lifetime, and for passwords that are
    /// replaced while clients run.
    ///
    /// The function gets the server, and returns its [`Credentials`]. It is called once for each server, however many connections the
    /// client has to it; calls for different servers may overlap. It is called again when two thirds of the lifetime of the
    /// credentials have passed, and at once when a server refuses them for a new connection. Leasehold then logs in again on every open
    /// connection to Redis. PostgreSQL checks a login only when a connection is opened: open ones stay.
    ///
    /// An address may have passwords for some of its servers, for example `sentinel_password=`: the function is not called for these. It is
    /// also called for the servers of [bridges](crate::bridge) whose addresses have none.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # async fn fetch_token(host: &str) -> std::io::Result<String> { Ok(format!("a token for {host}")) }
    /// # let server = leasehold_testkit::Server::on_port();
    /// # server.run(&["ACL", "SETUSER", "locks", "on", ">a token for 127.0.0.1", "allkeys", "allchannels", "+@all"]);
    /// # let address = format!("redis://locks@127.0.0.1:{}", server.port());
    /// # leasehold::doc_test(async {
    /// use leasehold::{Client, Credentials};
    ///
    /// let client = Client::builder()
    ///     .store(address) // such as rediss://locks@locks.example.com
    ///     .credentials(|server| async move {
    ///         let token = fetch_token(&server.host).await?;
    ///         Ok::<_, std::io::Error>(Credentials::new(token).valid_for(Duration::from_secs(15 * 60)))
    ///     })
    ///     .connect()
    ///     .await?;
    /// client.mutex("backup").lock().await?.release().await?;
    /// # client.close().await?;
    /// # Ok(()) });
    /// ```
    ///
    /// **Errors.** While the function fails, what it returned last is used until it expires. A warning is logged, and the function is called
    /// again after pauses of 250 ms to 5 s. Without credentials that last, connections fail with `is_unavailable` and the text of its
    /// error, which must contain no secret. A panic is an error, too. A call that takes longer than 10 s is given up.
    ///
    /// **Threads.** The function runs on a thread of its own, so it may block. Leases are renewed meanwhile. Its timers and sockets
    /// are those of leasehold's runtime.
    ///
    /// **Cancel safety.** Whatever becomes of the connections that need its result, the future is not dropped before it ends, unless it
    /// takes longer than 10 s.
    pub fn credentials<P, F, E>(mut self, provide: P) -> Self
    where
        P: Fn(CredentialRequest) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.options.provider = Some(CredentialProvider::new(provide));
        self
    }

    /// Connects to the store.
    ///
    /// If this is called in a tokio runtime (with its timers and sockets enabled), the calling tasks send their
    /// commands to Redis themselves. Otherwise the client's thread sends them.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// let error = leasehold::Client::builder().connect().await.unwrap_err();
    /// assert!(error.is_invalid()); // it has no store
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` if no store is set, if a setting or an address is invalid, or if a shared connection leads to another
    /// server than its client; `is_unsupported` if this build does not support the store; `is_unavailable` if the store
    /// can't be opened; `is_timeout` if that took longer than [`connect_timeout`](Self::connect_timeout).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped early, nothing remains open.
    pub async fn connect(self) -> Result<Client, Error> {
        self.connect_from(runtime::Handle::try_current().ok()).await
    }

    /// Connects, with a connection on the caller's runtime if there is one. That runtime must not be blocked.
    pub(crate) async fn connect_from(self, caller: Option<runtime::Handle>) -> Result<Client, Error> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        let (is_lazy, provider) = (self.is_lazy, self.options.provider.clone());
        let (store, options) = self.into_parts()?;
        let url = match store.map(|store| store.0) {
            None => return invalid("name the store: Client::builder().store(…)".to_owned()),
            Some(Choice::Address(address)) => StoreUrl::parse(&address)?,
            Some(Choice::Factory(factory)) if provider.is_some() => {
                return Err(no_credentials(&factory.name()).into());
            }
            Some(Choice::Factory(factory)) => return connect_to(factory, options, is_lazy).await,
            Some(Choice::Memory) => StoreUrl::Memory { name: String::new() },
            #[cfg(all(feature = "sqlite", unix))]
            Some(Choice::File(path)) => StoreUrl::Sqlite(SqliteUrl::new(path, false)?),
            #[cfg(feature = "redis")]
            Some(Choice::Redis(client, shared)) => {
                let shown = format!("redis://{}", client.get_connection_info().addr());
                if shared.is_some() && caller.is_none() {
                    return invalid(format!("{shown}: a connection can only be shared in its tokio runtime"));
                }
                if is_lazy {
                    return invalid(format!("{shown}: only a store with an address can be opened later"));
                }
                if provider.is_some() && client.get_connection_info().redis_settings().password().is_some() {
                    return Err(two_passwords(&shown).into());
                }
                let open = move |id, inbox, _| async move {
                    open::open_own(&client, shared, provider, id, inbox, caller).await
                };
                return Client::with_options(shown, options, open).await;
            }
        };
        if provider.is_some() {
            url.check_credentials()?;
        }
        let shown = url.to_string();
        if is_lazy {
            let capabilities = open::capabilities(&url);
            let open = move |id: ClientId, inbox: Weak<dyn Inbox>, clock: Clock| async move {
                let open = move || -> BoxFuture<_> {
                    let (url, provider, clock) = (url.clone(), provider.clone(), clock.clone());
                    let (inbox, caller) = (inbox.clone(), caller.clone());
                    Box::pin(async move { open::open(&url, provider, clock, id, inbox, caller).await })
                };
                Ok(lazy(capabilities, open))
            };
            return Client::with_options(shown, options, open).await;
        }
        let open =
            move |id, inbox, clock| async move { open::open(&url, provider, clock, id, inbox, caller).await };
        Client::with_options(shown, options, open).await
    }

    /// The store, and the other settings, which are valid.
    pub(crate) fn into_parts(self) -> Result<(Option<StoreConfig>, ClientOptions), Error> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        let Self { store, mut options, label, is_lazy: _ } = self;
        if !(MIN_TTL..=MAX_TTL).contains(&options.ttl) {
            return invalid(format!("a ttl is between {MIN_TTL:?} and 30 days, not {:?}", options.ttl));
        }
        if label.is_some() {
            options.metadata.label = label;
        }
        if let Err(what) = options.metadata.check() {
            return invalid(what);
        }
        Ok((store, options))
    }
}

/// A client of a store that is not part of leasehold.
async fn connect_to(
    factory: Arc<dyn StoreFactory>,
    options: ClientOptions,
    is_lazy: bool,
) -> Result<Client, Error> {
    let (shown, capabilities) = (factory.name(), factory.capabilities());
    let open = move |id: ClientId, inbox: Weak<dyn Inbox>, _: Clock| async move {
        let open = move || -> BoxFuture<_> {
            let (factory, inbox) = (factory.clone(), inbox.clone());
            Box::pin(async move { Ok(factory.open(id, inbox).await?) })
        };
        if is_lazy { Ok(lazy(capabilities, open)) } else { open().await }
    };
    Client::with_options(shown, options, open).await
}

/// A store that its first command opens. Called on the client's thread.
fn lazy(
    capabilities: Capabilities,
    open: impl Fn() -> BoxFuture<Result<Arc<dyn leasehold_store::Store>, Error>> + Send + Sync + 'static,
) -> Arc<dyn leasehold_store::Store> {
    Arc::new(Lazy::new(capabilities, Tasks::current(), Box::new(open)))
}
