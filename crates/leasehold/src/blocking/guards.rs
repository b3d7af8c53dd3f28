//! Held leases, without async.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use super::{IntoBlocking, block_on, calls};
use crate::detached::LeaseId;
use crate::error::Error;
use crate::locks::lock::Lock;
use futures_util::future::join_all;
use leasehold_core::{Loss, Token};

/// A held lease, as [`crate::Guard`]. A thread can't be cancelled, so there is no `run`: check [`Self::is_held`] between the steps
/// of the work, or let another thread call [`Self::lost_within`].
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// # let client = leasehold::blocking::Client::connect("memory:")?;
/// let guard = client.mutex("import").lock()?;
/// for file in ["a.csv", "b.csv"] {
///     if !guard.is_held() {
///         break; // the lease was lost
///     }
///     println!("importing {file} with token {}", guard.token());
/// }
/// guard.release()
/// # }
/// ```
#[must_use = "the lock is released when the guard is dropped"]
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

    /// As [`crate::Guard::lease_token`].
    #[must_use]
    pub fn lease_token(&self) -> Token {
        self.0.lease_token()
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

    /// Waits at most `limit` until the lease is lost; returns `None` at the limit. Otherwise as [`crate::Guard::lost`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::blocking::Client::connect("memory:")?;
    /// let mutex = client.mutex("import");
    /// let guard = mutex.lock()?;
    /// assert!(guard.lost_within(Duration::from_millis(1)).is_none());
    /// mutex.force_release()?;
    /// assert!(guard.lost_within(Duration::from_secs(1)).is_some());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn lost_within(&self, limit: Duration) -> Option<Loss> {
        block_on(self.0.lost_within(limit))
    }

    /// As [`crate::Guard::release`].
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::release`].
    pub fn release(self) -> Result<(), Error> {
        block_on(self.0.release())
    }

    /// As [`crate::Guard::release_timeout`].
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::release_timeout`].
    pub fn release_timeout(self, limit: Duration) -> Result<(), Error> {
        block_on(self.0.release_timeout(limit))
    }

    /// As [`crate::Guard::detach`].
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::detach`].
    pub fn detach(self) -> Result<LeaseId, Error> {
        block_on(self.0.detach())
    }

    /// As [`crate::Guard::detach_valid_for`].
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::detach_valid_for`].
    pub fn detach_valid_for(self) -> Result<(LeaseId, Duration), Error> {
        block_on(self.0.detach_valid_for())
    }
}

calls! { Guard:
    renew(&self) -> ();
}

impl Guard {
    /// As [`crate::Guard::set_min_hold`].
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::set_min_hold`].
    pub fn set_min_hold(&self, min_hold: Duration) -> Result<(), Error> {
        self.0.set_min_hold(min_hold)
    }

    /// As [`crate::Guard::renewal_error`].
    #[must_use]
    pub fn renewal_error(&self) -> Option<Error> {
        self.0.renewal_error()
    }

    /// As [`crate::Guard::wait_until_expiring`].
    pub fn wait_until_expiring(&self, left: Duration) {
        block_on(self.0.wait_until_expiring(left));
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl IntoBlocking for crate::Guard {
    type Blocking = Guard;

    fn blocking(self) -> Guard {
        Guard(self)
    }
}

/// The guards of a read-write lock that can be upgraded or downgraded.
macro_rules! exchangeable {
    ($guard:ident) => {
        #[doc = concat!("As [`crate::", stringify!($guard), "`].")]
        #[must_use = "the lock is released when the guard is dropped"]
        #[derive(Debug)]
        pub struct $guard {
            guard: Guard,
            lock: Box<Lock>,
        }

        impl $guard {
            fn inner(self) -> crate::$guard {
                crate::$guard { guard: self.guard.0, lock: self.lock }
            }

            #[doc = concat!("As [`crate::", stringify!($guard), "::downgrade`].")]
            ///
            /// # Errors
            ///
            /// The same as those of the async method.
            pub fn downgrade(self) -> Result<Guard, Error> {
                block_on(self.inner().downgrade()).blocking()
            }

            /// As [`crate::Guard::release`].
            ///
            /// # Errors
            ///
            /// As [`crate::Guard::release`].
            pub fn release(self) -> Result<(), Error> {
                self.guard.release()
            }

            /// As [`crate::Guard::release_timeout`].
            ///
            /// # Errors
            ///
            /// As [`crate::Guard::release_timeout`].
            pub fn release_timeout(self, limit: Duration) -> Result<(), Error> {
                self.guard.release_timeout(limit)
            }
        }

        impl IntoBlocking for crate::$guard {
            type Blocking = $guard;

            fn blocking(self) -> $guard {
                $guard { guard: Guard(self.guard), lock: self.lock }
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

impl From<WriteGuard> for Guard {
    /// For a writer that stays one.
    fn from(writer: WriteGuard) -> Self {
        writer.guard
    }
}

impl UpgradableGuard {
    /// As [`crate::UpgradableGuard::upgrade`].
    ///
    /// # Errors
    ///
    /// As [`crate::UpgradableGuard::upgrade`].
    pub fn upgrade(self) -> Result<WriteGuard, Error> {
        block_on(self.inner().upgrade()).blocking()
    }

    /// As [`crate::UpgradableGuard::try_upgrade`].
    ///
    /// # Errors
    ///
    /// As [`crate::UpgradableGuard::try_upgrade`].
    pub fn try_upgrade(self) -> Result<Result<WriteGuard, Self>, Error> {
        block_on(self.inner().try_upgrade()).blocking()
    }

    /// As [`crate::UpgradableGuard::upgrade_timeout`].
    ///
    /// # Errors
    ///
    /// As [`crate::UpgradableGuard::upgrade_timeout`].
    pub fn upgrade_timeout(self, limit: Duration) -> Result<Result<WriteGuard, Self>, Error> {
        block_on(self.inner().upgrade_timeout(limit)).blocking()
    }
}

/// As [`crate::SetGuard`]. To wait for a loss, use one of its [`guards`](Self::guards).
#[must_use = "the locks are released when the guard is dropped"]
#[derive(Debug)]
pub struct SetGuard(Vec<Guard>);

impl SetGuard {
    /// As [`crate::SetGuard::token`].
    #[must_use]
    pub fn token(&self, name: &str) -> Option<Token> {
        self.0.iter().find(|guard| guard.name() == name).map(Guard::token)
    }

    /// As [`crate::SetGuard::guards`].
    pub fn guards(&self) -> &[Guard] {
        &self.0
    }

    /// As [`crate::SetGuard::into_guards`].
    pub fn into_guards(self) -> Vec<Guard> {
        self.0
    }

    /// As [`crate::SetGuard::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.0.iter().map(Guard::remaining).min().unwrap_or_default()
    }

    /// As [`crate::SetGuard::is_held`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.iter().all(Guard::is_held)
    }

    /// As [`crate::SetGuard::renew`].
    ///
    /// # Errors
    ///
    /// As [`crate::SetGuard::renew`].
    pub fn renew(&self) -> Result<(), Error> {
        block_on(join_all(self.0.iter().map(|guard| guard.0.renew()))).into_iter().collect()
    }

    /// As [`crate::SetGuard::release`].
    ///
    /// # Errors
    ///
    /// As [`crate::SetGuard::release`].
    pub fn release(self) -> Result<(), Error> {
        block_on(join_all(self.0.into_iter().map(|guard| guard.0.release()))).into_iter().collect()
    }
}

impl IntoBlocking for crate::SetGuard {
    type Blocking = SetGuard;

    fn blocking(self) -> SetGuard {
        SetGuard(self.into_guards().into_iter().map(Guard).collect())
    }
}
