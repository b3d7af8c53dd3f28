//! A read-write lock: many readers or one writer.
//!
//! A reader has the smallest weight, a writer the whole capacity, and an upgradable reader more than half of it, so that there
//! is at most one upgradable reader.

mod guards;

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::Kind;
use leasehold_core::weight::{READER, UPGRADABLE, WRITER};

use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::lock::Lock;
use crate::options::settings;
pub use guards::{UpgradableGuard, WriteGuard};

/// A lock with many readers or one writer. Created by [`Client::rw_lock`](crate::Client::rw_lock).
///
/// Readers and writers wait in one FIFO queue. Later readers do not overtake a waiting writer. Readers that are adjacent in
/// the queue are granted together. Neither readers nor writers starve. Each reader has its own lease, so a crashed reader
/// delays a writer for at most its ttl.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let prices = client.rw_lock("prices");
///
/// let (one, other) = (prices.read().await?, prices.read().await?);
/// assert!(prices.try_write().await?.is_none());
/// drop((one, other));
///
/// let guard = prices.upgradable_read().await?; // one at a time, beside readers
/// let guard = guard.upgrade().await?; // waits for the readers, ahead of the queue
/// println!("write with token {}", guard.token());
/// let guard = guard.downgrade().await?; // admits readers; no writer comes in between
/// guard.release().await?;
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct RwLock(Lock);

settings!(RwLock, "rw_lock(\"prices\")");

impl RwLock {
    pub(crate) fn new(handle: Arc<Handle>, name: &str) -> Self {
        Self(Lock::new(handle, Kind::ReadWrite, name, WRITER))
    }

    /// Also takes the read-write lock of Redisson, [`Foreign::redisson_read_write_lock`](crate::bridge::Foreign::redisson_read_write_lock),
    /// so that programs with Redisson and programs with leasehold exclude each other: [`crate::bridge`] has how it works.
    ///
    /// A reader takes its read lock, beside the readers of both sides, and a writer its write lock. The foreign lock is taken after
    /// this one and released before it, and its loss is the loss of the guard ([`Loss::Bridge`](crate::Loss::Bridge)). Needs a
    /// store on that server: `redis://`, or `redis-sentinel://`.
    ///
    /// A writer that waits for Redisson's readers holds this lock meanwhile: the readers with leasehold wait behind it, for as long as readers
    /// with Redisson overlap without a gap. `upgradable_read`, [`WriteGuard::downgrade`], `auto_renew(false)`, `min_hold` and
    /// `detach` can't be used. A reader's lease is trusted for 30 s at most, whatever its ttl: see the guide.
    ///
    /// ```no_run
    /// # leasehold::doc_test(async {
    /// use leasehold::bridge::Foreign;
    ///
    /// # let client = leasehold::Client::connect("redis://127.0.0.1").await?;
    /// let prices = client.rw_lock("prices").bridge(Foreign::redisson_read_write_lock("prices"));
    /// let guard = prices.read().await?;
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn bridge(mut self, foreign: crate::bridge::Foreign) -> Self {
        self.0.set_bridge(foreign);
        self
    }

    /// Waits for a read lease without a limit.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let readers = (prices.read().await?, prices.read().await?);
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
    /// If the future is dropped, the wait is cancelled and a granted lease is released.
    pub async fn read(&self) -> Result<Guard, Error> {
        self.0.lock(READER).await
    }

    /// Acquires a read lease if that is possible now; otherwise returns `None`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let writer = prices.write().await?;
    /// assert!(prices.try_read().await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::read`].
    pub async fn try_read(&self) -> Result<Option<Guard>, Error> {
        self.0.try_lock(READER).await
    }

    /// Waits at most `limit` for a read lease; returns `None` at the limit: as
    /// [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let writer = prices.write().await?;
    /// assert!(prices.read_timeout(Duration::from_millis(5)).await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::read`].
    pub async fn read_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        self.0.lock_timeout(READER, limit).await
    }

    /// Waits for the write lease without a limit.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.rw_lock("prices").write().await?;
    /// println!("write with token {}", guard.token());
    /// guard.release().await?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::read`].
    pub async fn write(&self) -> Result<WriteGuard, Error> {
        self.0.lock(WRITER).await.map(self.exchangeable())
    }

    /// Acquires the write lease if the lock is free now; otherwise returns `None`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let reader = prices.read().await?;
    /// assert!(prices.try_write().await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::read`].
    pub async fn try_write(&self) -> Result<Option<WriteGuard>, Error> {
        Ok(self.0.try_lock(WRITER).await?.map(self.exchangeable()))
    }

    /// Waits at most `limit` for the write lease; returns `None` at the limit: as
    /// [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let reader = prices.read().await?;
    /// assert!(prices.write_timeout(Duration::from_millis(5)).await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::read`].
    pub async fn write_timeout(&self, limit: Duration) -> Result<Option<WriteGuard>, Error> {
        Ok(self.0.lock_timeout(WRITER, limit).await?.map(self.exchangeable()))
    }

    /// Waits without a limit for the upgradable read lease. It is shared with readers, but there is one upgradable reader at
    /// a time. Two readers therefore cannot deadlock by upgrading.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let guard = prices.upgradable_read().await?;
    /// let reader = prices.read().await?; // beside it
    /// assert!(prices.try_upgradable_read().await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::read`].
    pub async fn upgradable_read(&self) -> Result<UpgradableGuard, Error> {
        self.0.lock(UPGRADABLE).await.map(self.exchangeable())
    }

    /// Acquires the upgradable read lease if that is possible now; otherwise returns `None`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// assert!(prices.try_upgradable_read().await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::read`].
    pub async fn try_upgradable_read(&self) -> Result<Option<UpgradableGuard>, Error> {
        Ok(self.0.try_lock(UPGRADABLE).await?.map(self.exchangeable()))
    }

    /// Waits at most `limit` for the upgradable read lease; returns `None` at the limit: as
    /// [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let first = prices.upgradable_read().await?;
    /// assert!(prices.upgradable_read_timeout(Duration::from_millis(5)).await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::read`].
    pub async fn upgradable_read_timeout(&self, limit: Duration) -> Result<Option<UpgradableGuard>, Error> {
        Ok(self.0.lock_timeout(UPGRADABLE, limit).await?.map(self.exchangeable()))
    }

    /// Wraps a guard in one that can be exchanged for another mode.
    fn exchangeable<G: From<(Guard, Lock)>>(&self) -> impl FnOnce(Guard) -> G {
        let lock = self.0.clone();
        |guard| G::from((guard, lock))
    }
}
