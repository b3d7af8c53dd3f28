//! Redlock: locks by majority vote of independent servers.

use std::fmt;
use std::time::Duration;

use leasehold_redis::RedisUrl;
use leasehold_redlock::RedlockUrl;
use leasehold_store::Diagnosis;
use leasehold_store::credentials::{CredentialProvider, CredentialRequest, Credentials};
use tokio::runtime;

use crate::client::Client;
use crate::error::Error;
use crate::locks::election::Election;
use crate::locks::mutex::Mutex;
use crate::locks::once_per::OncePer;

/// Locks over several independent Redis servers. A lock is held when more than half of the servers have granted it, so any
/// minority may fail
/// ([Redlock](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/)).
///
/// It has only kinds with one holder: mutexes, elections and once-per-period work. With two permits and three servers, three
/// clients could each get a majority, so there are no semaphores and no read-write locks. [`Client::connect`] with
/// `redlock://host,host,host` is equivalent for servers that differ only in host and port.
///
/// Unlike other implementations it has **fencing tokens**. The token is the highest one that any server of the majority
/// granted. A majority stores it before the client returns the guard. The guarantees depend on what the servers keep after a
/// crash: see [`RedlockBuilder::max_ttl`] and [the guide](crate::guide::redlock).
///
/// ```no_run
/// # async fn example() -> Result<(), leasehold::Error> {
/// use std::time::Duration;
///
/// let redlock = leasehold::Redlock::builder()
///     .node("redis://:one@10.0.0.1")
///     .node("rediss://:two@10.0.0.2")
///     .node("redis-sentinel://10.0.0.3,10.0.0.4,10.0.0.5/third")
///     .max_ttl(Duration::from_secs(30))
///     .connect()
///     .await?;
/// let guard = redlock.mutex("orders:42").lock().await?;
/// println!("token {}", guard.token());
/// guard.release().await?;
/// # Ok(()) }
/// ```
///
/// It has no semaphores:
///
/// ```compile_fail
/// # async fn example(redlock: leasehold::Redlock) {
/// redlock.semaphore("pool", 2);
/// # }
/// ```
///
/// and no read-write locks:
///
/// ```compile_fail
/// # async fn example(redlock: leasehold::Redlock) {
/// redlock.rw_lock("table");
/// # }
/// ```
#[derive(Clone)]
pub struct Redlock {
    client: Client,
}

impl Redlock {
    /// Configures the servers and the vote.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), leasehold::Error> {
    /// let redlock = leasehold::Redlock::builder()
    ///     .node("redis://10.0.0.1")
    ///     .node("redis://10.0.0.2")
    ///     .node("redis://10.0.0.3")
    ///     .connect()
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn builder() -> RedlockBuilder {
        RedlockBuilder { nodes: Vec::new(), url: RedlockUrl::new(Vec::new()), provider: None }
    }

    /// A lock with one holder at a time. Sends nothing. The tasks of one client do not hand off a lease.
    ///
    /// One waiting client at a time is in the queues of all servers. The other clients wait in an admission queue on one
    /// server. When the lock is released, the next client is admitted. If several clients compete at the servers, they retry
    /// after random pauses of up to 100 ms.
    ///
    /// ```no_run
    /// # async fn example(redlock: leasehold::Redlock) -> Result<(), leasehold::Error> {
    /// let guard = redlock.mutex("orders:42").lock().await?;
    /// guard.release().await
    /// # }
    /// ```
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        self.client.mutex(name)
    }

    /// As [`Client::election`].
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        self.client.election(name)
    }

    /// As [`Client::once_per`].
    pub fn once_per(&self, name: impl AsRef<str>, period: Duration) -> OncePer {
        self.client.once_per(name, period)
    }

    /// As [`Client::warnings`], for each server.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.client.warnings()
    }

    /// As [`Client::refresh_credentials`].
    pub fn refresh_credentials(&self) {
        self.client.refresh_credentials();
    }

    /// As [`Client::diagnose`], for each server. It also checks whether the servers are independent.
    ///
    /// # Errors
    ///
    /// `is_unavailable`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// As [`Client::diagnose`].
    pub async fn diagnose(&self) -> Result<Diagnosis, Error> {
        self.client.diagnose().await
    }

    /// As [`Client::close`].
    ///
    /// # Errors
    ///
    /// As [`Client::close`].
    ///
    /// # Cancel safety
    ///
    /// As [`Client::close`].
    pub async fn close(self) -> Result<(), Error> {
        self.client.close().await
    }

    /// As [`Client::close_timeout`].
    ///
    /// # Errors
    ///
    /// As [`Client::close_timeout`].
    ///
    /// # Cancel safety
    ///
    /// As [`Client::close_timeout`].
    pub async fn close_timeout(self, limit: Duration) -> Result<(), Error> {
        self.client.close_timeout(limit).await
    }
}

impl fmt::Debug for Redlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redlock({:?})", self.client)
    }
}

/// The servers of a [`Redlock`], and the options of the vote. Created by [`Redlock::builder`].
///
/// ```no_run
/// # async fn example() -> Result<(), leasehold::Error> {
/// use std::time::Duration;
///
/// let mut builder = leasehold::Redlock::builder().max_ttl(Duration::from_secs(30));
/// for host in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
///     builder = builder.node(format!("rediss://:secret@{host}"));
/// }
/// let redlock = builder.node_timeout(Duration::from_millis(200)).connect().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "nothing is connected before `connect`"]
pub struct RedlockBuilder {
    nodes: Vec<String>,
    url: RedlockUrl,
    provider: Option<CredentialProvider>,
}

impl RedlockBuilder {
    /// Adds a server by its address: `redis:`, `rediss:`, `redis+unix:`, or `redis-sentinel:` for the master of a group.
    /// Each may have its own password. The number of servers is 2 to 15. Use three or five: an even number tolerates no more
    /// failures than the odd number below it.
    ///
    /// ```
    /// let builder = leasehold::Redlock::builder()
    ///     .node("redis://:one@10.0.0.1")
    ///     .node("redis-sentinel://10.0.0.3,10.0.0.4/third");
    /// ```
    pub fn node(mut self, url: impl Into<String>) -> Self {
        self.nodes.push(url.into());
        self
    }

    /// Sets the time limit for a server's answer. The default is the longer of a tenth of the ttl (between 100 ms and 1 s)
    /// and eight usual round trips, but at most a third of the ttl. If the other servers have decided, the client does not
    /// wait for a slow one.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let builder = leasehold::Redlock::builder().node_timeout(Duration::from_millis(200));
    /// ```
    pub fn node_timeout(mut self, limit: Duration) -> Self {
        self.url.node_timeout = Some(limit);
        self
    }

    /// Sets the longest ttl of any lock on these servers; all clients must pass the same value. If a server was restarted,
    /// emptied or replaced, it may have lost leases. It then does not vote for `max_ttl`. By then every lost lease has
    /// expired, so no lock gets two holders. A server also does not vote for `max_ttl` after its first use. If a majority is
    /// new or was restarted, no lock can be acquired for that long. A longer ttl or minimum hold is refused with
    /// `is_invalid`.
    ///
    /// By default there is no `max_ttl`, and servers vote at once after a restart. In that case, configure them to write
    /// each change to disk (`appendfsync always`), or keep a crashed server down for the longest ttl.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let builder = leasehold::Redlock::builder().max_ttl(Duration::from_secs(30));
    /// ```
    pub fn max_ttl(mut self, ttl: Duration) -> Self {
        self.url.max_ttl = Some(ttl);
        self
    }

    /// As [`ClientBuilder::credentials`](crate::ClientBuilder::credentials), for the servers whose addresses have no password.
    ///
    /// ```
    /// use leasehold::Credentials;
    ///
    /// let token = async || Ok::<_, std::io::Error>(Credentials::new("a token").user("locks"));
    /// let builder = leasehold::Redlock::builder().node("redis://10.0.0.1").credentials(move |_server| token());
    /// ```
    pub fn credentials<P, F, E>(mut self, provide: P) -> Self
    where
        P: Fn(CredentialRequest) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.provider = Some(CredentialProvider::new(provide));
        self
    }

    /// Turns fencing off: a token may be lower than an earlier one. If the servers' clocks differ, this saves one round trip
    /// per grant. If they agree, fencing costs no round trip.
    ///
    /// ```
    /// let builder = leasehold::Redlock::builder().unfenced();
    /// ```
    pub fn unfenced(mut self) -> Self {
        self.url.is_fenced = false;
        self
    }

    /// Connects to the servers. More than half of them must be reachable. The client connects to the others
    /// later.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), leasehold::Error> {
    /// let builder = leasehold::Redlock::builder().node("redis://10.0.0.1").node("redis://10.0.0.2").node("redis://10.0.0.3");
    /// let redlock = builder.connect().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for an invalid address, fewer than two addresses, one server under two addresses, a `node_timeout` of zero, or a `max_ttl` that is
    /// no valid ttl; `is_unavailable` if too few servers are reachable, with the reason for each.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped early, nothing remains open.
    pub async fn connect(self) -> Result<Redlock, Error> {
        let Self { nodes, mut url, provider } = self;
        url.nodes = nodes.iter().map(|node| RedisUrl::of_node(node)).collect::<Result<_, _>>()?;
        let caller = runtime::Handle::try_current().ok();
        Ok(Redlock { client: Client::connect_to(url.checked()?.into(), provider, caller).await? })
    }
}

impl fmt::Debug for RedlockBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Addresses may contain passwords.
        write!(f, "RedlockBuilder({} nodes)", self.nodes.len())
    }
}
