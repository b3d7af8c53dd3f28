//! Several servers that vote about each lock.

use std::fmt;
use std::time::Duration;

use tokio::runtime;

use crate::client::Client;
use crate::diagnostics::Diagnosis;
use crate::error::Error;
use crate::locks::election::Election;
use crate::locks::mutex::Mutex;
use crate::locks::once_per::OncePer;
use crate::url::{RedisUrl, RedlockUrl};

/// Locks of several Redis servers that know nothing of each other: a lock is held by whoever more than half of them have
/// granted it to, so that any minority may fail (Redlock; <https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/>).
///
/// It has mutexes and elections, and nothing that holders share: two permits over three servers could have three holders.
/// Where addresses are at hand, [`Client::connect`] with `redlock://host,host,host` does the same.
///
/// Unlike Redlock elsewhere it has **fencing tokens**: the highest that any node of the quorum gave, known to a quorum before
/// the guard exists. What a quorum can promise depends on what its members remember: see
/// [`RedlockBuilder::max_ttl`], and `docs/guarantees.md`.
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
    /// Which servers, and how they vote.
    pub fn builder() -> RedlockBuilder {
        RedlockBuilder { nodes: Vec::new(), url: RedlockUrl::new(Vec::new()) }
    }

    /// A lock with one holder at a time. As [`Client::mutex`]: nothing is sent.
    ///
    /// Whoever waits tries again after random pauses, in turn: all but one wait in a queue that one of the servers has, and
    /// the turn goes on when the lock is given back. The client's tasks don't hand a lease on among themselves.
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        self.client.mutex(name)
    }

    /// One leader at a time. As [`Client::election`].
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        self.client.election(name)
    }

    /// Work that one of many starts in each period. As [`Client::once_per`].
    pub fn once_per(&self, name: impl AsRef<str>, period: Duration) -> OncePer {
        self.client.once_per(name, period)
    }

    /// As [`Client::warnings`], of each server.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.client.warnings()
    }

    /// As [`Client::diagnose`]: each server, and whether they are independent.
    ///
    /// # Errors
    ///
    /// `is_unavailable`.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn diagnose(&self) -> Result<Diagnosis, Error> {
        self.client.diagnose().await
    }

    /// As [`Client::close`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn close(self) -> Result<(), Error> {
        self.client.close().await
    }

    /// As [`Client::close_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn close_timeout(self, limit: Duration) -> Result<(), Error> {
        self.client.close_timeout(limit).await
    }
}

impl fmt::Debug for Redlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redlock({:?})", self.client)
    }
}

/// Which servers a [`Redlock`] consists of, and how they vote. Created by [`Redlock::builder`].
#[derive(Clone)]
#[must_use = "nothing is connected before `connect`"]
pub struct RedlockBuilder {
    nodes: Vec<String>,
    url: RedlockUrl,
}

impl RedlockBuilder {
    /// One more server, by an address that [`Client::connect`] takes: `redis:`, `rediss:`, `redis+unix:`, or
    /// `redis-sentinel:` for the master of a group. Each with its own password. An odd number of them, three or five, is
    /// what makes sense: an even one needs one more, and survives the loss of no more.
    pub fn node(mut self, url: impl Into<String>) -> Self {
        self.nodes.push(url.into());
        self
    }

    /// How long a server may take to answer. Unless set it is a tenth of the ttl, between 100 ms and 1 s, or eight times
    /// as long as most servers usually take, if that is longer; but never more than a third of the ttl. Nobody waits for a
    /// slow server once the others have decided.
    pub fn node_timeout(mut self, limit: Duration) -> Self {
        self.url.node_timeout = Some(limit);
        self
    }

    /// The longest ttl that any of those locks has, at any client: a server that may have forgotten what it granted, because
    /// it was restarted, emptied or replaced, does not vote for as long. Everybody is to say the same. So a lock can't come to
    /// have two holders by that; but when more than a minority are restarted at a time, nobody has a lock for that long, and
    /// so it is when servers are used for the first time. A longer ttl, or an [`outlives`](OncePer) of it, is refused then.
    ///
    /// Without it servers that restart vote at once: let them write each change to disk (`appendfsync always`), or don't start
    /// them again before that time is over.
    pub fn max_ttl(mut self, ttl: Duration) -> Self {
        self.url.max_ttl = Some(ttl);
        self
    }

    /// Tokens need not rise: nobody has to be told what another server gave. This rarely costs anything, since servers whose
    /// clocks agree are asked for the same token; otherwise it costs one more round trip.
    pub fn unfenced(mut self) -> Self {
        self.url.is_fenced = false;
        self
    }

    /// Connects to all of them. More than half have to be there.
    ///
    /// # Errors
    ///
    /// `is_invalid` for an address that can't be used, no address, or a server that is named twice, also by different names;
    /// `is_unavailable` when too few are there, and why each is not.
    ///
    /// # Cancel safety
    ///
    /// Nothing is left when it is dropped early.
    pub async fn connect(self) -> Result<Redlock, Error> {
        let Self { nodes, mut url } = self;
        url.nodes = nodes.iter().map(|node| RedisUrl::of_node(node)).collect::<Result<_, _>>()?;
        let caller = runtime::Handle::try_current().ok();
        Ok(Redlock { client: Client::connect_to(url.checked()?.into(), caller).await? })
    }
}

impl fmt::Debug for RedlockBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Addresses have passwords in them.
        write!(f, "RedlockBuilder({} nodes)", self.nodes.len())
    }
}
