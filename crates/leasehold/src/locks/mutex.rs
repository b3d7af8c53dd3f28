//! A lock with one holder at a time.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{HandoffLimits, Kind};

use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::lock::Lock;
use crate::options::settings;

/// A lock with one holder at a time. Created by [`Client::mutex`](crate::Client::mutex).
///
/// Waiting clients form a FIFO queue in the store, across processes. Cloning is cheap.
///
/// **Tasks of one client** that use the same mutex with the same options form a local FIFO queue. The local queue has one
/// place in the store's queue and one lease. It hands the lease off from task to task without calling the store. Each task
/// gets its own token, which is higher than every earlier one of any client. While no other client waits, hand-offs continue
/// without limit. Once another client waits, at most 64 further hand-offs follow, and none after 10 ms. At either limit, the
/// local queue releases the lease as soon as the current critical section ends. A client therefore waits for each client
/// before it at most 10 ms, one critical section and the network delay. [`Self::local_handoff`] sets the two limits, and
/// [`Self::global_fifo`] turns local queues off. Leases with [`Self::min_hold`], with [`Self::max_hold`], or without renewal
/// are not handed off.
///
/// After a hand-off the lease has at least 750 ms left, or a quarter of a shorter ttl, and renewals continue.
/// `inspect` reports the first holder's token; a local queue appears as one waiter.
///
/// ```
/// # leasehold::doc_test(async {
/// use std::time::Duration;
///
/// let client = leasehold::Client::connect("memory:").await?;
/// let orders = client.mutex("orders:42").ttl(Duration::from_secs(30)).label("nightly export");
///
/// let guard = orders.lock().await?;
/// assert!(orders.try_lock().await?.is_none());
/// let exported = guard.run(async { 42 }).await?; // dropped if the lease is lost
/// guard.release().await?;
/// # assert_eq!(exported, 42);
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Mutex(pub(crate) Lock);

/// The default hand-off limits once another client waits: enough hand-offs to outweigh the round trip to the store, and a time
/// in the order of network jitter.
const HAND_OFF: HandoffLimits = HandoffLimits { max_handoffs: 64, max_duration: Duration::from_millis(10) };

settings!(Mutex, "mutex(\"orders:42\")");

impl Mutex {
    pub(crate) fn new(handle: Arc<Handle>, name: &str) -> Self {
        let mut lock = Lock::new(handle, Kind::Mutex, name, 1);
        lock.hand_off = Some(HAND_OFF);
        Self(lock)
    }

    /// Limits the hand-offs between this client's tasks once another client waits. At most `max_handoffs` follow, and none
    /// later than `max_duration`; the defaults are 64 and 10 ms. With higher limits the throughput is higher, and other
    /// clients wait longer. If the push about the waiting client is lost, the next renewal reports that client, at a third
    /// of the ttl.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let counter = client.mutex("counter").local_handoff(16, Duration::from_millis(2));
    /// let guard = counter.lock().await?;
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn local_handoff(mut self, max_handoffs: u32, max_duration: Duration) -> Self {
        self.0.hand_off = Some(HandoffLimits { max_handoffs, max_duration });
        self
    }

    /// Orders the tasks of all clients in one FIFO queue; off by default. Each task then has its own place in the store's
    /// queue, and each release calls the store.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let tickets = client.mutex("tickets").global_fifo();
    /// let guard = tickets.lock().await?;
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn global_fifo(mut self) -> Self {
        self.0.hand_off = None;
        self
    }

    /// Also takes the lock of another library on the same Redis server, so that programs with that library and programs with
    /// leasehold exclude each other. [The guide](https://github.com/leasehold/leasehold/blob/main/docs/bridges.md) has the libraries, and [`crate::bridge`] how it works.
    ///
    /// The foreign lock is taken after this one and released before it, and its loss is the loss of the guard
    /// ([`Loss::Bridge`](crate::Loss::Bridge)). [`Self::try_lock`] returns `None` if another leasehold client
    /// waits for the foreign lock.
    ///
    /// A guard begins with at most 3 s of [`remaining`](Guard::remaining), and the first renewal makes it the whole ttl. Fencing tokens
    /// order only the programs that use leasehold. Tasks of one client do not hand a bridged lock off among themselves.
    /// [`auto_renew(false)`](Self::auto_renew) and [`min_hold`](Self::min_hold) are invalid with it. The store must be Redis, or,
    /// for a lock on which several servers vote, a quorum.
    ///
    /// ```no_run
    /// # leasehold::doc_test(async {
    /// use leasehold::bridge::Foreign;
    ///
    /// let client = leasehold::Client::connect("redis://127.0.0.1").await?;
    /// let jobs = client.mutex("jobs").bridge(Foreign::redisson_lock("jobs"));
    /// let guard = jobs.lock().await?;
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn bridge(mut self, foreign: crate::bridge::Foreign) -> Self {
        self.0.set_bridge(foreign);
        self
    }

    /// Waits for the lock without a limit.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// println!("fencing token {}", guard.token());
    /// guard.release().await?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for an invalid name or option; `is_unavailable` if the store did not respond;
    /// `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the wait is cancelled and a granted lease is released. A future that is kept without being polled
    /// may be granted the lock, which is then renewed as if it was held: drop it instead.
    pub async fn lock(&self) -> Result<Guard, Error> {
        self.0.lock(1).await
    }

    /// Acquires the lock if it is free now; otherwise returns `None`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// if let Some(guard) = orders.try_lock().await? {
    ///     assert!(orders.try_lock().await?.is_none());
    ///     guard.release().await?;
    /// }
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn try_lock(&self) -> Result<Option<Guard>, Error> {
        self.0.try_lock(1).await
    }

    /// Waits at most `limit` for the lock; returns `None` at the limit. `Duration::MAX` waits without a limit. Zero does not
    /// wait.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// let held = orders.lock().await?;
    /// assert!(orders.lock_timeout(Duration::from_millis(5)).await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// Before it returns `None`, the client cancels the attempt in the store, which takes a round trip after the
    /// limit. If the store does not answer within 2 s (5 s over a quorum), the result is an error. If another task of this client holds
    /// the lock, the store is not called.
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn lock_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        self.0.lock_timeout(1, limit).await
    }
}
