//! The kinds of lock, without async.

use std::time::Duration;

use super::{Guard, IntoBlocking, SetGuard, UpgradableGuard, WriteGuard, block_on, calls};
use crate::error::Error;
use crate::inspect::{HolderInfo, LockInfo};

/// The options of a lock.
macro_rules! settings {
    ($kind:ident) => {
        impl $kind {
            #[doc = concat!("As [`crate::", stringify!($kind), "::min_hold`].")]
            #[must_use]
            pub fn min_hold(self, min_hold: Duration) -> Self {
                Self(self.0.min_hold(min_hold))
            }
        }

        identity_settings!($kind);
        lease_settings!($kind);
    };
}

/// The ids of attempts and leases, for kinds whose leases are held by one caller.
macro_rules! identity_settings {
    ($kind:ident) => {
        impl $kind {
            #[doc = concat!("As [`crate::", stringify!($kind), "::detachable`].")]
            #[must_use]
            pub fn detachable(self) -> Self {
                Self(self.0.detachable())
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::request`].")]
            #[must_use]
            pub fn request(self, id: impl AsRef<[u8]>) -> Self {
                Self(self.0.request(id))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::holder`].")]
            #[must_use]
            pub fn holder(self, program: impl Into<String>, host: impl Into<String>) -> Self {
                Self(self.0.holder(program, host))
            }
        }
    };
}

/// The options of a lease, for kinds that set the minimum hold themselves.
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

            #[doc = concat!("As [`crate::", stringify!($kind), "::max_hold`].")]
            #[must_use]
            pub fn max_hold(self, hold: Duration) -> Self {
                Self(self.0.max_hold(hold))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::max_waiters`].")]
            #[must_use]
            pub fn max_waiters(self, max_waiters: u32) -> Self {
                Self(self.0.max_waiters(max_waiters))
            }
        }
    };
}

/// The bridge to the lock of another library.
macro_rules! bridge {
    ($kind:ident) => {
        impl $kind {
            #[doc = concat!("As [`crate::", stringify!($kind), "::bridge`].")]
            #[must_use]
            pub fn bridge(self, foreign: crate::bridge::Foreign) -> Self {
                Self(self.0.bridge(foreign))
            }
        }
    };
}

/// A kind of lock, the options of all kinds, and its inspection.
macro_rules! kind {
    ($kind:ident) => {
        #[doc = concat!("As [`crate::", stringify!($kind), "`].")]
        #[derive(Clone, Debug)]
        pub struct $kind(pub(super) crate::$kind);

        impl $kind {
            #[doc = concat!("As [`crate::", stringify!($kind), "::replicas`].")]
            #[must_use]
            pub fn replicas(self, replicas: u32) -> Self {
                Self(self.0.replicas(replicas))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::label`].")]
            #[must_use]
            pub fn label(self, label: impl Into<String>) -> Self {
                Self(self.0.label(label))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::trace_id`].")]
            #[must_use]
            pub fn trace_id(self, trace_id: impl Into<String>) -> Self {
                Self(self.0.trace_id(trace_id))
            }

            #[doc = concat!("As [`crate::", stringify!($kind), "::metrics_label`].")]
            #[must_use]
            pub fn metrics_label(self, label: impl AsRef<str>) -> Self {
                Self(self.0.metrics_label(label))
            }
        }

        calls! { $kind:
            inspect(&self) -> LockInfo;
            force_release(&self) -> Vec<HolderInfo>;
        }
    };
}

kind!(Mutex);
settings!(Mutex);
bridge!(Mutex);

impl Mutex {
    /// As [`crate::Mutex::local_handoff`], among the threads that share a client.
    #[must_use]
    pub fn local_handoff(self, max_handoffs: u32, max_duration: Duration) -> Self {
        Self(self.0.local_handoff(max_handoffs, max_duration))
    }

    /// As [`crate::Mutex::global_fifo`].
    #[must_use]
    pub fn global_fifo(self) -> Self {
        Self(self.0.global_fifo())
    }
}

calls! { Mutex:
    lock(&self) -> Guard;
    try_lock(&self) -> Option<Guard>;
    lock_timeout(&self, limit: Duration) -> Option<Guard>;
}

kind!(ReentrantMutex);
settings!(ReentrantMutex);
calls! { ReentrantMutex:
    lock(&self) -> Guard;
    try_lock(&self) -> Option<Guard>;
    lock_timeout(&self, limit: Duration) -> Option<Guard>;
    hold_count(&self) -> usize;
    release_all(&self) -> usize;
}

kind!(Semaphore);
settings!(Semaphore);
calls! { Semaphore:
    acquire(&self, permits: u32) -> Guard;
    try_acquire(&self, permits: u32) -> Option<Guard>;
    acquire_timeout(&self, permits: u32, limit: Duration) -> Option<Guard>;
}

kind!(RwLock);
settings!(RwLock);
bridge!(RwLock);
calls! { RwLock:
    read(&self) -> Guard;
    try_read(&self) -> Option<Guard>;
    read_timeout(&self, limit: Duration) -> Option<Guard>;
    write(&self) -> WriteGuard;
    try_write(&self) -> Option<WriteGuard>;
    write_timeout(&self, limit: Duration) -> Option<WriteGuard>;
    upgradable_read(&self) -> UpgradableGuard;
    try_upgradable_read(&self) -> Option<UpgradableGuard>;
    upgradable_read_timeout(&self, limit: Duration) -> Option<UpgradableGuard>;
}

kind!(Election);
settings!(Election);
bridge!(Election);
calls! { Election:
    campaign(&self) -> Guard;
    try_campaign(&self) -> Option<Guard>;
    campaign_timeout(&self, limit: Duration) -> Option<Guard>;
    leader(&self) -> Option<HolderInfo>;
}

impl Election {
    /// As [`crate::Election::observe`].
    #[must_use]
    pub fn observe(&self) -> Observer {
        Observer(self.0.observe())
    }
}

/// As [`crate::Observer`], but it is no stream.
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
    /// As [`crate::Observer::next`].
    #[allow(clippy::should_implement_trait, reason = "it never ends, and an error does not end it")]
    pub fn next(&mut self) -> Result<Option<HolderInfo>, Error> {
        block_on(self.0.next())
    }

    /// As [`Self::next`], but waits at most `limit`. `None` if the leader has not changed by then.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::blocking::Client::connect("memory:")?;
    /// let mut observer = client.election("scheduler").observe();
    /// assert!(observer.next_within(Duration::from_secs(1))?.is_some_and(|leader| leader.is_none()));
    /// assert!(observer.next_within(Duration::from_millis(10))?.is_none());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`crate::Observer::next`].
    pub fn next_within(&mut self, limit: Duration) -> Result<Option<Option<HolderInfo>>, Error> {
        block_on(self.0.next_within(limit)).transpose()
    }
}

kind!(OncePer);
identity_settings!(OncePer);
lease_settings!(OncePer);
calls! { OncePer:
    start(&self) -> Option<Guard>;
    start_timeout(&self, limit: Duration) -> Option<Guard>;
}

impl OncePer {
    /// As [`crate::OncePer::at_least_once`].
    #[must_use]
    pub fn at_least_once(self) -> Self {
        Self(self.0.at_least_once())
    }
}

kind!(Barrier);
lease_settings!(Barrier);
calls! { Barrier:
    wait(&self) -> bool;
    wait_timeout(&self, limit: Duration) -> Option<bool>;
}

kind!(Latch);
calls! { Latch:
    count_down(&self) -> u32;
    count_down_as(&self, name: impl AsRef<str>) -> u32;
    remaining(&self) -> u32;
    wait(&self) -> ();
    wait_timeout(&self, limit: Duration) -> bool;
}

impl Latch {
    /// As [`crate::Latch::retention`].
    #[must_use]
    pub fn retention(self, retention: Duration) -> Self {
        Self(self.0.retention(retention))
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
}

calls! { MutexSet:
    lock(&self) -> SetGuard;
    try_lock(&self) -> Option<SetGuard>;
    lock_timeout(&self, limit: Duration) -> Option<SetGuard>;
}
