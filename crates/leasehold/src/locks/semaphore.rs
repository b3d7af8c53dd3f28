//! A semaphore: a number of permits that several holders share.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::Kind;

use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::lock::Lock;
use crate::options::settings;

/// A number of permits, held through leases. Created by [`Client::semaphore`](crate::Client::semaphore).
///
/// The permits of a crashed holder are free again when its lease expires. Waiters are served in FIFO order: a later waiter
/// with fewer permits does not overtake an earlier one. All clients must pass the same number of permits while the semaphore
/// is in use. Each acquisition has one guard and one token for all of its permits.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let uploads = client.semaphore("uploads", 3);
///
/// let two = uploads.acquire(2).await?;
/// let one = uploads.acquire(1).await?;
/// assert!(uploads.try_acquire(1).await?.is_none());
/// two.release().await?;
/// assert!(uploads.try_acquire(2).await?.is_some());
/// # drop(one);
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Semaphore(Lock);

settings!(Semaphore, "semaphore(\"uploads\", 3)");

impl Semaphore {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, permits: u32) -> Self {
        Self(Lock::new(handle, Kind::Semaphore, name, permits))
    }

    /// Waits for this many permits without a limit. They are granted together.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.semaphore("uploads", 3).acquire(2).await?;
    /// guard.release().await?; // both permits
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for zero permits, more than the total, an invalid option, or a total that differs from the one in use;
    /// `is_unavailable` if the store did not respond; `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the wait is cancelled and a granted lease is released.
    pub async fn acquire(&self, permits: u32) -> Result<Guard, Error> {
        self.0.lock(permits).await
    }

    /// Acquires this many permits if they are free now; otherwise returns `None`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let uploads = client.semaphore("uploads", 3);
    /// let guard = uploads.try_acquire(3).await?;
    /// assert!(guard.is_some() && uploads.try_acquire(1).await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::acquire`].
    pub async fn try_acquire(&self, permits: u32) -> Result<Option<Guard>, Error> {
        self.0.try_lock(permits).await
    }

    /// Waits at most `limit` for this many permits; returns `None` at the limit: as
    /// [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let uploads = client.semaphore("uploads", 3);
    /// let guard = uploads.acquire(3).await?;
    /// assert!(uploads.acquire_timeout(1, Duration::from_millis(5)).await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::acquire`].
    pub async fn acquire_timeout(&self, permits: u32, limit: Duration) -> Result<Option<Guard>, Error> {
        self.0.lock_timeout(permits, limit).await
    }
}
