//! The same locks without async. Each call blocks its thread.
//!
//! Types, methods and errors have the same names and meanings as in the crate's root: see [`crate::Client`],
//! [`crate::Mutex`] and [`crate::Guard`]. What needs a future has no counterpart, such as `Guard::run` and the stream of an
//! observer. Do not use this module in async code, because its calls block the executor.
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

mod guards;
mod locks;

use std::time::Duration;

use leasehold_core::{Kind, Token};
use leasehold_store::Diagnosis;

use crate::detached::LeaseId;
use crate::error::Error;
use crate::inspect::{HolderInfo, LockInfo};

pub use guards::{Guard, SetGuard, UpgradableGuard, WriteGuard};
pub use locks::{
    Barrier, Election, Latch, Mutex, MutexSet, Observer, OncePer, ReentrantMutex, RwLock, Semaphore,
};

/// Runs `work` without tokio's budget for polls. A call that blocks its thread inside a task would use the budget up, and would then
/// never be woken.
pub(crate) fn block_on<F: Future>(work: F) -> F::Output {
    pollster::block_on(tokio::task::coop::unconstrained(async {
        leasehold_store::wakes::learn_blocking().await;
        work.await
    }))
}

/// Converts an async type, or the result of an async call, into its blocking counterpart.
trait IntoBlocking {
    type Blocking;

    fn blocking(self) -> Self::Blocking;
}

impl<T: IntoBlocking> IntoBlocking for Option<T> {
    type Blocking = Option<T::Blocking>;

    fn blocking(self) -> Self::Blocking {
        self.map(IntoBlocking::blocking)
    }
}

impl<T: IntoBlocking, E: IntoBlocking> IntoBlocking for Result<T, E> {
    type Blocking = Result<T::Blocking, E::Blocking>;

    fn blocking(self) -> Self::Blocking {
        self.map(IntoBlocking::blocking).map_err(IntoBlocking::blocking)
    }
}

/// Types that are the same in both.
macro_rules! unchanged {
    ($($type:ty),*) => {
        $(impl IntoBlocking for $type {
            type Blocking = Self;

            fn blocking(self) -> Self {
                self
            }
        })*
    };
}

unchanged!(
    (),
    bool,
    u32,
    usize,
    Error,
    Diagnosis,
    HolderInfo,
    LockInfo,
    Vec<HolderInfo>,
    Vec<LockInfo>,
    Vec<(Kind, String)>
);

/// Calls that block, with their arguments and results.
macro_rules! calls {
    ($type_name:ident: $($call:ident(& $self:ident $(, $arg:ident: $type:ty)*) -> $ret:ty;)*) => {
        impl $type_name {
            $(
                #[doc = concat!("As [`crate::", stringify!($type_name), "::", stringify!($call), "`].")]
                ///
                /// # Errors
                ///
                /// The same as those of the async method.
                pub fn $call(&$self $(, $arg: $type)*) -> Result<$ret, Error> {
                    block_on($self.0.$call($($arg),*)).blocking()
                }
            )*
        }
    };
}
use calls;

/// As [`crate::Client`]. Its calls block the thread.
#[derive(Clone, Debug)]
pub struct Client(pub(crate) crate::Client);

impl Client {
    /// As [`crate::Client::connect`], but the client's thread sends all commands.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::connect`].
    pub fn connect(url: &str) -> Result<Self, Error> {
        // The caller's runtime is not used, because the blocked thread may be the one that it needs.
        block_on(crate::Client::connect_from(url, None)).map(Self)
    }

    /// Connects with the settings of a builder: [`crate::Client::builder`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), leasehold::Error> {
    /// let builder = leasehold::Client::builder().store("memory:").ttl(Duration::from_secs(60));
    /// let client = leasehold::blocking::Client::connect_with(builder)?;
    /// assert!(client.mutex("import").lock()?.remaining() > Duration::from_secs(50));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`crate::ClientBuilder::connect`].
    pub fn connect_with(builder: crate::ClientBuilder) -> Result<Self, Error> {
        block_on(builder.connect_from(None)).map(Self)
    }

    /// As [`crate::Client::address`].
    #[must_use]
    pub fn address(&self) -> &str {
        self.0.address()
    }

    /// As [`crate::Client::warnings`].
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.0.warnings()
    }

    /// As [`crate::Client::refresh_credentials`].
    pub fn refresh_credentials(&self) {
        self.0.refresh_credentials();
    }

    /// As [`crate::Client::refusal`].
    #[must_use]
    pub fn refusal(&self) -> Option<Error> {
        self.0.refusal()
    }

    /// As [`crate::Client::mutex`].
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex(self.0.mutex(name))
    }

    /// As [`crate::Client::semaphore`].
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore(self.0.semaphore(name, permits))
    }

    /// As [`crate::Client::reentrant_mutex`].
    pub fn reentrant_mutex(&self, name: impl AsRef<str>, owner: impl AsRef<str>) -> ReentrantMutex {
        ReentrantMutex(self.0.reentrant_mutex(name, owner))
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
}

impl Client {
    /// As [`crate::Client::renew_leases`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::renew_leases`].
    pub fn renew_leases<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a LeaseId>,
    ) -> Vec<Result<Duration, Error>> {
        block_on(self.0.renew_leases(ids))
    }

    /// As [`crate::Client::release_leases`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::release_leases`].
    pub fn release_leases<'a>(&self, ids: impl IntoIterator<Item = &'a LeaseId>) -> Vec<Result<bool, Error>> {
        block_on(self.0.release_leases(ids))
    }

    /// As [`crate::Client::return_lease`].
    #[must_use = "false if the lease is still held"]
    pub fn return_lease(&self, id: &LeaseId) -> bool {
        self.0.return_lease(id)
    }
}

calls! { Client:
    inspect(&self, kind: Kind, name: impl AsRef<str>) -> LockInfo;
    force_release(&self, kind: Kind, name: impl AsRef<str>) -> Vec<HolderInfo>;
    force_release_token(&self, kind: Kind, name: impl AsRef<str>, token: Token) -> Option<HolderInfo>;
    list(&self) -> Vec<LockInfo>;
    list_names(&self) -> Vec<(Kind, String)>;
    attach(&self, id: &LeaseId) -> Guard;
    renew_lease(&self, id: &LeaseId) -> ();
    inspect_lease(&self, id: &LeaseId) -> Option<HolderInfo>;
    diagnose(&self) -> Diagnosis;
}

impl Client {
    /// As [`crate::Client::close`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::close`].
    pub fn close(self) -> Result<(), Error> {
        block_on(self.0.close())
    }

    /// As [`crate::Client::close_timeout`].
    ///
    /// # Errors
    ///
    /// As [`crate::Client::close_timeout`].
    pub fn close_timeout(self, limit: Duration) -> Result<(), Error> {
        block_on(self.0.close_timeout(limit))
    }
}
