//! A lock with one holder at a time.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::Kind;

use crate::client::Handle;
use crate::error::Error;
use crate::guard::Guard;
use crate::lock::Lock;
use crate::settings::settings;

/// A lock with one holder at a time, and how to take it. Made by [`Client::mutex`](crate::Client::mutex).
///
/// It waits in the store's queue: first come, first served, across processes. Cloning is cheap.
#[derive(Clone)]
pub struct Mutex(pub(crate) Lock);

settings!(Mutex);

impl Mutex {
    pub(crate) fn new(handle: Arc<Handle>, name: &str) -> Self {
        Self(Lock::new(handle, Kind::Mutex, name, 1))
    }

    /// Waits for the lock, for as long as it takes.
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name or a setting that can't be; `is_unavailable` when the store could not be asked;
    /// `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point it gives back whatever it has or may have come to have, a place in the queue or a lease.
    pub async fn lock(&self) -> Result<Guard, Error> {
        self.0.lock(1).await
    }

    /// Takes the lock if it can be had at once, and otherwise answers `None`.
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

    /// Waits for the lock for at most this long, and then answers `None`. With `Duration::MAX` it waits for as long as it
    /// takes, with zero not at all.
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
