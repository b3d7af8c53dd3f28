//! A number of permits that holders share.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::Kind;

use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::lock::Lock;
use crate::options::settings;

/// A number of permits, and how to take some of them. Made by [`Client::semaphore`](crate::Client::semaphore).
///
/// Permits are leases: those of a holder that dies come back when its lease ends. Whoever waits is served first come,
/// first served, also when a later one would need fewer permits. Everybody names the same number of permits while any
/// is taken or waited for. Each acquisition, of however many permits, has one guard and one token.
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

settings!(Semaphore);

impl Semaphore {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, permits: u32) -> Self {
        Self(Lock::new(handle, Kind::Semaphore, name, permits))
    }

    /// Waits for this many permits, for as long as it takes. They come all at once.
    ///
    /// # Errors
    ///
    /// `is_invalid` for no permits, more than there are, a setting that can't be, or a number of permits other than
    /// that with which the semaphore is in use; `is_unavailable` when the store could not be asked; `is_queue_full`;
    /// `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point it gives back whatever it has or may have come to have, a place in the queue or a lease.
    pub async fn acquire(&self, permits: u32) -> Result<Guard, Error> {
        self.0.lock(permits).await
    }

    /// Takes this many permits if they can be had at once, and otherwise answers `None`.
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

    /// Waits for this many permits for at most this long, and then answers `None`.
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
