//! The guards of a read-write lock that can be exchanged for another mode.

use std::ops::Deref;
use std::time::Duration;

use leasehold_core::weight::{READER, WRITER};

use crate::error::Error;
use crate::guard::Guard;
use crate::locks::lock::{Lock, WaitMode};

/// What the exchangeable guards share: they dereference to a guard, and are released like one.
macro_rules! exchangeable {
    ($guard:ident) => {
        impl $guard {
            /// As [`Guard::release`].
            ///
            /// # Errors
            ///
            /// As [`Guard::release`].
            ///
            /// # Cancel safety
            ///
            /// As [`Guard::release`].
            pub async fn release(self) -> Result<(), Error> {
                self.guard.release().await
            }

            /// As [`Guard::release_timeout`].
            ///
            /// # Errors
            ///
            /// As [`Guard::release_timeout`].
            ///
            /// # Cancel safety
            ///
            /// As [`Guard::release_timeout`].
            pub async fn release_timeout(self, limit: Duration) -> Result<(), Error> {
                self.guard.release_timeout(limit).await
            }
        }

        impl From<(Guard, Lock)> for $guard {
            fn from((guard, lock): (Guard, Lock)) -> Self {
                Self { guard, lock: Box::new(lock) }
            }
        }

        impl Deref for $guard {
            type Target = Guard;

            fn deref(&self) -> &Guard {
                &self.guard
            }
        }
    };
}

exchangeable!(WriteGuard);
exchangeable!(UpgradableGuard);

/// A write lease: a [`Guard`] that can be downgraded to a read lease. Created by [`RwLock::write`](crate::RwLock::write).
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let writer = client.rw_lock("prices").write().await?;
/// assert!(writer.is_held()); // it dereferences to a `Guard`
/// let guard: leasehold::Guard = writer.into(); // a writer that stays one
/// guard.release().await?;
/// # Ok(()) });
/// ```
#[derive(Debug)]
#[must_use = "the lock is released when the guard is dropped"]
pub struct WriteGuard {
    pub(crate) guard: Guard,
    pub(crate) lock: Box<Lock>,
}

impl WriteGuard {
    /// Continues as a reader with the same token. No other writer is granted in between. Readers at the head of the queue
    /// are granted at once.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let writer = prices.write().await?;
    /// let reader = writer.downgrade().await?;
    /// assert!(prices.try_read().await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost` if the lease had ended before; nothing is held in that case. `is_unavailable` if the store did not respond;
    /// the client then releases the lease.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease is released.
    pub async fn downgrade(self) -> Result<Guard, Error> {
        become_reader(&self.lock, self.guard).await
    }
}

impl From<WriteGuard> for Guard {
    /// For a writer that stays one.
    fn from(writer: WriteGuard) -> Self {
        writer.guard
    }
}

/// A read lease: a [`Guard`] that can be upgraded to the write lease. Created by [`RwLock::upgradable_read`](crate::RwLock::upgradable_read).
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let reader = client.rw_lock("prices").upgradable_read().await?;
/// let is_outdated = true; // read
/// if is_outdated {
///     let writer = reader.upgrade().await?;
///     writer.release().await?;
/// } else {
///     reader.release().await?;
/// }
/// # Ok(()) });
/// ```
#[derive(Debug)]
#[must_use = "the lock is released when the guard is dropped"]
pub struct UpgradableGuard {
    pub(crate) guard: Guard,
    pub(crate) lock: Box<Lock>,
}

impl UpgradableGuard {
    /// Waits ahead of the queue until the other readers have released, and continues as a writer with a higher token. No
    /// other writer is granted in between.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let reader = client.rw_lock("prices").upgradable_read().await?;
    /// let token = reader.token();
    /// let writer = reader.upgrade().await?;
    /// assert!(writer.token() > token);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost` if the lease ended before the upgrade: nothing is held, and data that was read under the lease may be
    /// stale. `is_unavailable` if the store did not respond; `is_closed`. In both cases the client releases the lease.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease is released.
    pub async fn upgrade(self) -> Result<WriteGuard, Error> {
        let closed = self.lock.handle.clone();
        match self.upgrade_within(WaitMode::Forever).await? {
            Ok(guard) => Ok(guard),
            Err(_) => Err(closed.closed()),
        }
    }

    /// Upgrades if no other reader holds the lock. Otherwise returns this guard as the inner error.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let (upgradable, reader) = (prices.upgradable_read().await?, prices.read().await?);
    /// let upgradable = upgradable.try_upgrade().await?.unwrap_err();
    /// drop(reader);
    /// let writer = upgradable.try_upgrade().await?.unwrap();
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::upgrade`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::upgrade`].
    pub async fn try_upgrade(self) -> Result<Result<WriteGuard, Self>, Error> {
        self.upgrade_within(WaitMode::NoWait).await
    }

    /// Waits at most `limit` for the upgrade. At the limit returns this guard as the inner error.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let (upgradable, reader) = (prices.upgradable_read().await?, prices.read().await?);
    /// let limit = Duration::from_millis(5);
    /// let upgradable = upgradable.upgrade_timeout(limit).await?.unwrap_err();
    /// assert!(upgradable.is_held());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::upgrade`]. `is_lost` also if the store grants the upgrade at the moment of the limit: it is released then, and the
    /// lease that it has replaced has ended.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::upgrade`].
    pub async fn upgrade_timeout(self, limit: Duration) -> Result<Result<WriteGuard, Self>, Error> {
        self.upgrade_within(WaitMode::AtMost(limit)).await
    }

    /// Continues as an ordinary reader, and admits another upgradable reader.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let prices = client.rw_lock("prices");
    /// let reader = prices.upgradable_read().await?.downgrade().await?;
    /// assert!(prices.try_upgradable_read().await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`WriteGuard::downgrade`].
    ///
    /// # Cancel safety
    ///
    /// As [`WriteGuard::downgrade`].
    pub async fn downgrade(self) -> Result<Guard, Error> {
        become_reader(&self.lock, self.guard).await
    }

    async fn upgrade_within(self, wait: WaitMode) -> Result<Result<WriteGuard, Self>, Error> {
        match self.lock.replace(&self.guard, WRITER, wait).await? {
            Some(guard) => {
                self.guard.mark_replaced();
                Ok(Ok(WriteGuard { guard, lock: self.lock }))
            }
            None => Ok(Err(self)),
        }
    }
}

/// A smaller weight always fits, so this fails only if the client is closed.
async fn become_reader(lock: &Lock, held: Guard) -> Result<Guard, Error> {
    let reader = lock.replace(&held, READER, WaitMode::NoWait).await?;
    let reader = reader.ok_or_else(|| lock.handle.closed())?;
    held.mark_replaced();
    Ok(reader)
}
