//! Many readers, or one writer.
//!
//! A reader weighs little, an upgradable reader more than half of what the lock bears, so that there is one at most
//! beside the readers, and a writer all of it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::Kind;

use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::inspect::Mode;
use crate::locks::lock::{Lock, WaitMode};
use crate::options::settings;

/// What a reader weighs.
pub const READER: u32 = 1;
const UPGRADABLE: u32 = 1 << 31;
/// What a writer weighs, and what the lock bears.
pub const WRITER: u32 = u32::MAX;

/// What a holder does, by its weight.
pub(crate) fn mode_of(weight: u32) -> Mode {
    match weight {
        WRITER => Mode::Write,
        UPGRADABLE => Mode::UpgradableRead,
        _ => Mode::Read,
    }
}

/// A lock with many readers or one writer. Made by [`Client::rw_lock`](crate::Client::rw_lock).
///
/// All wait in one queue, first come, first served: a waiting writer is not overtaken by later readers, and readers who
/// stand next to each other start together. So neither starves the other. Each reader has a lease of its own: one that
/// dies delays a writer for its own ttl at most.
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
/// let guard = prices.upgradable_read().await?; // beside readers, one at a time
/// let guard = guard.upgrade().await?; // waits for the readers, before anybody else
/// println!("write with token {}", guard.token());
/// let guard = guard.downgrade().await?; // lets readers in, and no writer between
/// guard.release().await?;
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct RwLock(Lock);

settings!(RwLock);

impl RwLock {
    pub(crate) fn new(handle: Arc<Handle>, name: &str) -> Self {
        Self(Lock::new(handle, Kind::ReadWrite, name, WRITER))
    }

    /// Waits until it may read, for as long as it takes.
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name or a setting that can't be; `is_unavailable` when the store could not be asked;
    /// `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point it gives back whatever it has or may have come to have, a place in the queue or a lease.
    pub async fn read(&self) -> Result<Guard, Error> {
        self.0.lock(READER).await
    }

    /// Reads if that can be had at once, and otherwise answers `None`.
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

    /// Waits until it may read for at most this long, and then answers `None`.
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

    /// Waits until it may write, for as long as it takes.
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

    /// Writes if that can be had at once, and otherwise answers `None`.
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

    /// Waits until it may write for at most this long, and then answers `None`.
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

    /// Waits until it may read with a view to writing: beside readers, but one at a time.
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

    /// Reads with a view to writing if that can be had at once, and otherwise answers `None`.
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

    /// Waits until it may read with a view to writing for at most this long, and then answers `None`.
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

    /// What makes a lease of this lock one that can become another.
    fn exchangeable<G: From<(Guard, Lock)>>(&self) -> impl FnOnce(Guard) -> G {
        let lock = self.0.clone();
        |guard| G::from((guard, lock))
    }
}

/// What the leases that can become others have in common: they are guards, and end like them.
macro_rules! exchangeable {
    ($guard:ident) => {
        impl $guard {
            /// As [`Guard::release`].
            ///
            /// # Errors
            ///
            /// As there.
            pub async fn release(self) -> Result<(), Error> {
                self.guard.release().await
            }

            /// As [`Guard::release_timeout`].
            ///
            /// # Errors
            ///
            /// As there.
            pub async fn release_timeout(self, limit: Duration) -> Result<(), Error> {
                self.guard.release_timeout(limit).await
            }
        }

        impl From<(Guard, Lock)> for $guard {
            fn from((guard, lock): (Guard, Lock)) -> Self {
                Self { guard, lock }
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

/// A held lease to write, which is a [`Guard`] that can become one to read.
#[derive(Debug)]
#[must_use = "the lock is given back when the guard is dropped"]
pub struct WriteGuard {
    pub(crate) guard: Guard,
    pub(crate) lock: Lock,
}

impl WriteGuard {
    /// Goes on as a reader, with the same token: nobody writes in between. Readers who wait directly behind start.
    ///
    /// # Errors
    ///
    /// `is_lost` when the lease had ended before, and nothing is held then; `is_unavailable` when the store could not
    /// be asked: then everything is being given back.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, everything is given back.
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

/// A held lease to read, which is a [`Guard`] that can become one to write.
#[derive(Debug)]
#[must_use = "the lock is given back when the guard is dropped"]
pub struct UpgradableGuard {
    pub(crate) guard: Guard,
    pub(crate) lock: Lock,
}

impl UpgradableGuard {
    /// Waits until the readers have gone, before everybody else who waits, and goes on as a writer, with a higher token:
    /// nobody has written in between.
    ///
    /// # Errors
    ///
    /// `is_lost` when the lease ended before: what was read may be stale, and nothing is held. `is_unavailable` when the
    /// store could not be asked, and `is_closed`: then everything is being given back.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, everything is given back.
    pub async fn upgrade(self) -> Result<WriteGuard, Error> {
        let closed = self.lock.handle.clone();
        match self.upgrade_within(WaitMode::Forever).await? {
            Ok(guard) => Ok(guard),
            Err(_) => Err(closed.closed()),
        }
    }

    /// Goes on as a writer if that can be had at once, and otherwise hands itself back, as the inner error.
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

    /// Waits for at most this long until it may write, and otherwise hands itself back, as the inner error.
    ///
    /// # Errors
    ///
    /// As [`Self::upgrade`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::upgrade`].
    pub async fn upgrade_timeout(self, limit: Duration) -> Result<Result<WriteGuard, Self>, Error> {
        self.upgrade_within(WaitMode::AtMost(limit)).await
    }

    /// Goes on as a reader like any other, and lets another upgradable one in.
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

/// Less weight than is held fits at once, unless the client is closed meanwhile.
async fn become_reader(lock: &Lock, held: Guard) -> Result<Guard, Error> {
    let reader = lock.replace(&held, READER, WaitMode::NoWait).await?;
    let reader = reader.ok_or_else(|| lock.handle.closed())?;
    held.mark_replaced();
    Ok(reader)
}
