//! The same locks for programs without async: every call parks its thread.
//!
//! The same names mean the same things, and the errors are the same; see [`crate::Client`], [`crate::Mutex`] and
//! [`crate::Guard`] for them. Do not call these from async code: they would stop its executor.
//!
//! ```
//! # fn main() -> Result<(), leasehold::Error> {
//! let client = leasehold::blocking::Client::connect("memory:")?;
//! let guard = client.mutex("orders:42").lock()?;
//! assert!(guard.is_held());
//! guard.release()?;
//! client.close()
//! # }
//! ```

use std::fmt;
use std::future::poll_fn;
use std::ops::Deref;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{Kind, Loss, Token};
use pollster::block_on;

use crate::error::Error;
use crate::lock::Lock;
use crate::view::{HolderView, LockView};

/// As [`crate::Client`].
#[derive(Clone, Debug)]
pub struct Client(crate::Client);

impl Client {
    /// As [`crate::Client::connect`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn connect(url: &str) -> Result<Self, Error> {
        // A thread that is parked may be the one that a runtime needs, so none is used.
        block_on(crate::Client::connect_from(url, None)).map(Self)
    }

    /// As [`crate::Client::mutex`].
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex(self.0.mutex(name))
    }

    /// As [`crate::Client::semaphore`].
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore(self.0.semaphore(name, permits))
    }

    /// As [`crate::Client::reentrant`].
    pub fn reentrant(&self, name: impl AsRef<str>, owner: impl AsRef<str>) -> Reentrant {
        Reentrant(self.0.reentrant(name, owner))
    }

    /// As [`crate::Client::rw_lock`].
    pub fn rw_lock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock(self.0.rw_lock(name))
    }

    /// As [`crate::Client::election`].
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election(self.0.election(name))
    }

    /// As [`crate::Client::latch`].
    pub fn latch(&self, name: impl AsRef<str>, count: u32) -> Latch {
        Latch(self.0.latch(name, count))
    }

    /// As [`crate::Client::barrier`].
    pub fn barrier(&self, name: impl AsRef<str>, parties: u32) -> Barrier {
        Barrier(self.0.barrier(name, parties))
    }

    /// As [`crate::Client::once_per`].
    pub fn once_per(&self, name: impl AsRef<str>, period: Duration) -> OncePer {
        OncePer(self.0.once_per(name, period))
    }

    /// As [`crate::Client::inspect`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn inspect(&self, kind: Kind, name: impl AsRef<str>) -> Result<LockView, Error> {
        block_on(self.0.inspect(kind, name))
    }

    /// As [`crate::Client::force_release`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn force_release(&self, kind: Kind, name: impl AsRef<str>) -> Result<Vec<HolderView>, Error> {
        block_on(self.0.force_release(kind, name))
    }

    /// As [`crate::Client::list`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn list(&self) -> Result<Vec<LockView>, Error> {
        block_on(self.0.list())
    }

    /// As [`crate::Client::close`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn close(self) -> Result<(), Error> {
        block_on(self.0.close())
    }
}

/// The settings of a lock.
macro_rules! settings {
    ($kind:ident) => {
        impl $kind {
            #[doc = concat!("As [`crate::", stringify!($kind), "::at_least`].")]
            #[must_use]
            pub fn at_least(self, at_least: Duration) -> Self {
                Self(self.0.at_least(at_least))
            }
        }

        lease_settings!($kind);
    };
}

/// Those that a kind has which keeps by itself what was taken.
macro_rules! lease_settings {
    ($kind:ident) => {
        impl $kind {
            #[doc = concat!("As [`crate::", stringify!($kind), "::ttl`].")]
            #[must_use]
            pub fn ttl(self, ttl: Duration) -> Self {
                Self(self.0.ttl(ttl))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::auto_renew`].")]
            #[must_use]
            pub fn auto_renew(self, renews: bool) -> Self {
                Self(self.0.auto_renew(renews))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::longest_hold`].")]
            #[must_use]
            pub fn longest_hold(self, hold: Duration) -> Self {
                Self(self.0.longest_hold(hold))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::max_waiters`].")]
            #[must_use]
            pub fn max_waiters(self, max_waiters: u32) -> Self {
                Self(self.0.max_waiters(max_waiters))
            }
        }
    };
}

/// A lock and looking at it, for every kind.
macro_rules! kind {
    ($kind:ident) => {
        #[doc = concat!("As [`crate::", stringify!($kind), "`].")]
        #[derive(Clone, Debug)]
        pub struct $kind(crate::$kind);

        impl $kind {
            #[doc = concat!("As [`crate::", stringify!($kind), "::note`].")]
            #[must_use]
            pub fn note(self, note: impl Into<String>) -> Self {
                Self(self.0.note(note))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::inspect`].")]
            ///
            /// # Errors
            ///
            /// As there.
            pub fn inspect(&self) -> Result<LockView, Error> {
                block_on(self.0.inspect())
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::force_release`].")]
            ///
            /// # Errors
            ///
            /// As there.
            pub fn force_release(&self) -> Result<Vec<HolderView>, Error> {
                block_on(self.0.force_release())
            }
        }
    };
}

kind!(Mutex);
kind!(Reentrant);
kind!(Semaphore);
kind!(RwLock);
kind!(Election);
kind!(OncePer);
kind!(Latch);
kind!(Barrier);

settings!(Mutex);
settings!(Reentrant);
settings!(Semaphore);
settings!(RwLock);
settings!(Election);
lease_settings!(OncePer);
lease_settings!(Barrier);

impl OncePer {
    /// As [`crate::OncePer::at_least_once`].
    #[must_use]
    pub fn at_least_once(self) -> Self {
        Self(self.0.at_least_once())
    }

    /// As [`crate::OncePer::start`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn start(&self) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.start())?.map(Guard))
    }
}

impl Barrier {
    /// As [`crate::Barrier::wait`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wait(&self) -> Result<bool, Error> {
        block_on(self.0.wait())
    }

    /// As [`crate::Barrier::wait_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wait_timeout(&self, limit: Duration) -> Result<Option<bool>, Error> {
        block_on(self.0.wait_timeout(limit))
    }
}

impl Latch {
    /// As [`crate::Latch::keep`].
    #[must_use]
    pub fn keep(self, keep: Duration) -> Self {
        Self(self.0.keep(keep))
    }

    /// As [`crate::Latch::count_down`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn count_down(&self) -> Result<u32, Error> {
        block_on(self.0.count_down())
    }

    /// As [`crate::Latch::count_down_as`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn count_down_as(&self, name: impl AsRef<str>) -> Result<u32, Error> {
        block_on(self.0.count_down_as(name))
    }

    /// As [`crate::Latch::remaining`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn remaining(&self) -> Result<u32, Error> {
        block_on(self.0.remaining())
    }

    /// As [`crate::Latch::wait`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wait(&self) -> Result<(), Error> {
        block_on(self.0.wait())
    }

    /// As [`crate::Latch::wait_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wait_timeout(&self, limit: Duration) -> Result<bool, Error> {
        block_on(self.0.wait_timeout(limit))
    }
}

impl Mutex {
    /// As [`crate::Mutex::lock`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn lock(&self) -> Result<Guard, Error> {
        block_on(self.0.lock()).map(Guard)
    }

    /// As [`crate::Mutex::try_lock`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_lock(&self) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.try_lock())?.map(Guard))
    }

    /// As [`crate::Mutex::lock_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn lock_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.lock_timeout(limit))?.map(Guard))
    }
}

impl Semaphore {
    /// As [`crate::Semaphore::acquire`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn acquire(&self, permits: u32) -> Result<Guard, Error> {
        block_on(self.0.acquire(permits)).map(Guard)
    }

    /// As [`crate::Semaphore::try_acquire`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_acquire(&self, permits: u32) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.try_acquire(permits))?.map(Guard))
    }

    /// As [`crate::Semaphore::acquire_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn acquire_timeout(&self, permits: u32, limit: Duration) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.acquire_timeout(permits, limit))?.map(Guard))
    }
}

impl Reentrant {
    /// As [`crate::Reentrant::lock`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn lock(&self) -> Result<Guard, Error> {
        block_on(self.0.lock()).map(Guard)
    }

    /// As [`crate::Reentrant::try_lock`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_lock(&self) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.try_lock())?.map(Guard))
    }

    /// As [`crate::Reentrant::lock_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn lock_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.lock_timeout(limit))?.map(Guard))
    }

    /// As [`crate::Reentrant::hold_count`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn hold_count(&self) -> Result<usize, Error> {
        block_on(self.0.hold_count())
    }

    /// As [`crate::Reentrant::release_all`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn release_all(&self) -> Result<usize, Error> {
        block_on(self.0.release_all())
    }
}

impl RwLock {
    /// As [`crate::RwLock::read`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn read(&self) -> Result<Guard, Error> {
        block_on(self.0.read()).map(Guard)
    }

    /// As [`crate::RwLock::try_read`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_read(&self) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.try_read())?.map(Guard))
    }

    /// As [`crate::RwLock::read_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn read_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.read_timeout(limit))?.map(Guard))
    }

    /// As [`crate::RwLock::write`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn write(&self) -> Result<WriteGuard, Error> {
        block_on(self.0.write()).map(WriteGuard::of)
    }

    /// As [`crate::RwLock::try_write`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_write(&self) -> Result<Option<WriteGuard>, Error> {
        Ok(block_on(self.0.try_write())?.map(WriteGuard::of))
    }

    /// As [`crate::RwLock::write_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn write_timeout(&self, limit: Duration) -> Result<Option<WriteGuard>, Error> {
        Ok(block_on(self.0.write_timeout(limit))?.map(WriteGuard::of))
    }

    /// As [`crate::RwLock::upgradable_read`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn upgradable_read(&self) -> Result<UpgradableGuard, Error> {
        block_on(self.0.upgradable_read()).map(UpgradableGuard::of)
    }

    /// As [`crate::RwLock::try_upgradable_read`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_upgradable_read(&self) -> Result<Option<UpgradableGuard>, Error> {
        Ok(block_on(self.0.try_upgradable_read())?.map(UpgradableGuard::of))
    }

    /// As [`crate::RwLock::upgradable_read_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn upgradable_read_timeout(&self, limit: Duration) -> Result<Option<UpgradableGuard>, Error> {
        Ok(block_on(self.0.upgradable_read_timeout(limit))?.map(UpgradableGuard::of))
    }
}

impl Election {
    /// As [`crate::Election::campaign`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn campaign(&self) -> Result<Guard, Error> {
        block_on(self.0.campaign()).map(Guard)
    }

    /// As [`crate::Election::try_campaign`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_campaign(&self) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.try_campaign())?.map(Guard))
    }

    /// As [`crate::Election::campaign_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn campaign_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        Ok(block_on(self.0.campaign_timeout(limit))?.map(Guard))
    }

    /// As [`crate::Election::leader`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn leader(&self) -> Result<Option<HolderView>, Error> {
        block_on(self.0.leader())
    }

    /// As [`crate::Election::observe`].
    #[must_use]
    pub fn observe(&self) -> Observer {
        Observer(self.0.observe())
    }
}

/// As [`crate::Observer`].
#[derive(Debug)]
pub struct Observer(crate::Observer);

impl Observer {
    /// As [`crate::Observer::every`].
    #[must_use]
    pub fn every(self, every: Duration) -> Self {
        Self(self.0.every(every))
    }

    /// As [`crate::Observer::next`].
    ///
    /// # Errors
    ///
    /// As there.
    #[allow(clippy::should_implement_trait, reason = "it never ends, and an error does not end it")]
    pub fn next(&mut self) -> Result<Option<HolderView>, Error> {
        block_on(self.0.next())
    }
}

/// As [`crate::Guard`]. A thread can't be cancelled, so instead of `run` look at [`Self::is_held`] between the steps
/// of the work, or let another thread wait with [`Self::lost_within`].
#[must_use = "the lock is given back when the guard is dropped"]
pub struct Guard(crate::Guard);

impl Guard {
    /// As [`crate::Guard::name`].
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// As [`crate::Guard::token`].
    #[must_use]
    pub fn token(&self) -> Token {
        self.0.token()
    }

    /// As [`crate::Guard::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// As [`crate::Guard::is_held`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// Waits until the lease is lost, as [`crate::Guard::lost`], but for at most this long.
    #[must_use]
    pub fn lost_within(&self, limit: Duration) -> Option<Loss> {
        let mut lost = pin!(self.0.lost());
        let mut sleep = pin!(self.0.sleep(limit));
        block_on(poll_fn(|context| match lost.as_mut().poll(context) {
            Poll::Ready(loss) => Poll::Ready(Some(loss)),
            Poll::Pending => sleep.as_mut().poll(context).map(|()| None),
        }))
    }

    /// As [`crate::Guard::renew`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn renew(&self) -> Result<(), Error> {
        block_on(self.0.renew())
    }

    /// As [`crate::Guard::release`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn release(self) -> Result<(), Error> {
        block_on(self.0.release())
    }

    /// As [`crate::Guard::release_within`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn release_within(self, limit: Duration) -> Result<(), Error> {
        block_on(self.0.release_within(limit))
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A guard that can be exchanged for another one.
macro_rules! exchangeable {
    ($guard:ident) => {
        #[doc = concat!("As [`crate::", stringify!($guard), "`].")]
        #[must_use = "the lock is given back when the guard is dropped"]
        #[derive(Debug)]
        pub struct $guard {
            guard: Guard,
            lock: Lock,
        }

        impl $guard {
            fn of(guard: crate::$guard) -> Self {
                Self { guard: Guard(guard.guard), lock: guard.lock }
            }

            fn inner(self) -> crate::$guard {
                crate::$guard { guard: self.guard.0, lock: self.lock }
            }

            #[doc = concat!("As [`crate::", stringify!($guard), "::downgrade`].")]
            ///
            /// # Errors
            ///
            /// As there.
            pub fn downgrade(self) -> Result<Guard, Error> {
                block_on(self.inner().downgrade()).map(Guard)
            }

            /// As [`crate::Guard::release`].
            ///
            /// # Errors
            ///
            /// As there.
            pub fn release(self) -> Result<(), Error> {
                self.guard.release()
            }

            /// As [`crate::Guard::release_within`].
            ///
            /// # Errors
            ///
            /// As there.
            pub fn release_within(self, limit: Duration) -> Result<(), Error> {
                self.guard.release_within(limit)
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

impl UpgradableGuard {
    /// As [`crate::UpgradableGuard::upgrade`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn upgrade(self) -> Result<WriteGuard, Error> {
        block_on(self.inner().upgrade()).map(WriteGuard::of)
    }

    /// As [`crate::UpgradableGuard::try_upgrade`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_upgrade(self) -> Result<Result<WriteGuard, Self>, Error> {
        Ok(block_on(self.inner().try_upgrade())?.map(WriteGuard::of).map_err(Self::of))
    }

    /// As [`crate::UpgradableGuard::upgrade_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn upgrade_timeout(self, limit: Duration) -> Result<Result<WriteGuard, Self>, Error> {
        Ok(block_on(self.inner().upgrade_timeout(limit))?.map(WriteGuard::of).map_err(Self::of))
    }
}

/// As [`crate::MutexSet`].
#[derive(Clone, Debug)]
pub struct MutexSet(crate::MutexSet);

impl MutexSet {
    /// As [`crate::MutexSet::new`].
    pub fn new(mutexes: impl IntoIterator<Item = Mutex>) -> Self {
        Self(crate::MutexSet::new(mutexes.into_iter().map(|mutex| mutex.0)))
    }

    /// As [`crate::MutexSet::lock`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn lock(&self) -> Result<SetGuard, Error> {
        block_on(self.0.lock()).map(SetGuard::of)
    }

    /// As [`crate::MutexSet::try_lock`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_lock(&self) -> Result<Option<SetGuard>, Error> {
        Ok(block_on(self.0.try_lock())?.map(SetGuard::of))
    }

    /// As [`crate::MutexSet::lock_timeout`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn lock_timeout(&self, limit: Duration) -> Result<Option<SetGuard>, Error> {
        Ok(block_on(self.0.lock_timeout(limit))?.map(SetGuard::of))
    }
}

/// As [`crate::SetGuard`].
#[must_use = "the locks are given back when the guard is dropped"]
#[derive(Debug)]
pub struct SetGuard(Vec<Guard>);

impl SetGuard {
    fn of(guard: crate::SetGuard) -> Self {
        Self(guard.into_guards().into_iter().map(Guard).collect())
    }

    /// As [`crate::SetGuard::token`].
    #[must_use]
    pub fn token(&self, name: &str) -> Option<Token> {
        self.0.iter().find(|guard| guard.name() == name).map(Guard::token)
    }

    /// As [`crate::SetGuard::guards`].
    pub fn guards(&self) -> &[Guard] {
        &self.0
    }

    /// As [`crate::SetGuard::is_held`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.iter().all(Guard::is_held)
    }

    /// As [`crate::SetGuard::release`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn release(self) -> Result<(), Error> {
        self.0.into_iter().map(Guard::release).fold(Ok(()), Result::and)
    }
}
