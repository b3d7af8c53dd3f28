//! Distributed locks with leases, fencing tokens and FIFO hand-off.
//!
//! A lock is held through a **lease**: ownership for a bounded time, renewed while its holder lives. Each grant has a
//! **fencing token**, higher than every earlier one. The store itself hands a released lock to the next waiter.
//!
//! ```
//! # leasehold::doc_test(async {
//! use std::time::Duration;
//!
//! let client = leasehold::Client::connect("memory:").await?;
//! let orders = client.mutex("orders:42");
//!
//! let guard = orders.lock().await?; // waits in a FIFO queue
//! assert!(orders.try_lock().await?.is_none()); // contention is a value, not an error
//! let sum = guard.run(async { 1 + 1 }).await?; // the work is dropped when the lease is lost
//! assert_eq!(sum, 2);
//! guard.release().await?; // or drop it
//!
//! let guard = orders.lock_timeout(Duration::from_secs(2)).await?;
//! assert!(guard.is_some());
//! # Ok(()) });
//! ```
//!
//! | | |
//! |---|---|
//! | [`Mutex`] | one holder at a time |
//! | [`ReentrantMutex`] | one named owner at a time, which may acquire again from any task or process |
//! | [`RwLock`] | many readers or one writer, with downgrade and upgrade |
//! | [`Semaphore`] | up to N permits, shared by several holders |
//! | [`MutexSet`] | several mutexes at once, all or none |
//! | [`Election`] | one leader at a time, and who it is |
//! | [`OncePer`] | one start per period among many candidates |
//! | [`Latch`], [`Barrier`] | wait for a number of counts, or for all parties |
//! | [`fence`] | resources that refuse a holder whose lease has ended |
//!
//! The futures run on any executor. The module `blocking` has the same locks for programs without one.
//!
//! # Features
//!
//! | | | |
//! |---|---|---|
//! | | `memory:` | always there |
//! | `redis` | `redis:`, `redis+unix:`, `redis-sentinel:`, `redis-cluster:`; [`Client::from_redis_client`] | default |
//! | `tls` | `rediss:` and `tls=true`, with rustls; implies `redis` | |
//! | `redlock` | `redlock:` and the type `Redlock`; implies `redis` | |
//! | `sqlite` | `sqlite:`, with SQLite compiled in; only on Unix | |
//! | `blocking` | the module `blocking` | |
//!
//! [`Client::connect`] with a scheme whose feature is off returns an error that names the feature.

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]
// Some functions serve one store or one face only. A build with all features reports those that none uses.
#![cfg_attr(not(all(unix, feature = "blocking", feature = "redlock", feature = "sqlite")), allow(dead_code))]

#[cfg(feature = "blocking")]
pub mod blocking;
mod client;
mod diagnostics;
mod engine;
mod error;
mod guard;
mod handle;
mod inspect;
mod locks;
mod metadata;
mod options;
#[cfg(feature = "redlock")]
mod redlock;
mod store;
#[cfg(test)]
mod tests;
mod url;

/// The other half of fencing: resources that remember the highest token they have seen, and refuse lower ones.
///
/// A lock alone can't stop a holder that was stopped for longer than its lease and then goes on. A resource can, and two
/// are here: something in this process, and a file. For what is in a database or an object store, see the examples
/// `fencing_sql` and `fencing_object`: there it is a condition of the write itself.
pub mod fence {
    #[cfg(unix)]
    mod file;
    mod in_process;

    use leasehold_core::Token;

    use crate::error::{Error, ErrorKind};
    #[cfg(unix)]
    pub use file::FencedFile;
    pub use in_process::Fence;

    fn stale(what: impl std::fmt::Display, token: Token, highest: u64) -> Error {
        let message =
            format!("{what} was written with token {highest}, and {token} is older: its lease has ended");
        Error::new(ErrorKind::Stale, message)
    }
}

pub use client::Client;
pub use diagnostics::{Component, Diagnosis, FINDING_IDS, Fact, Finding, Severity};
pub use error::Error;
pub use guard::Guard;
pub use inspect::{HolderInfo, LockInfo, Mode, WaiterInfo};
pub use leasehold_core::{Kind, Loss, MAX_NAME_BYTES, Token};
pub use locks::barrier::Barrier;
pub use locks::election::{Election, Observer};
pub use locks::latch::Latch;
pub use locks::lock::{MAX_TTL, MIN_TTL};
pub use locks::mutex::Mutex;
pub use locks::mutex_set::{MutexSet, SetGuard};
pub use locks::once_per::OncePer;
pub use locks::reentrant::ReentrantMutex;
pub use locks::rw::{RwLock, UpgradableGuard, WriteGuard};
pub use locks::semaphore::Semaphore;
pub use metadata::{HolderMetadata, MAX_LABEL_BYTES};
/// The client library that [`Client::from_redis_client`] takes a client of: the only crate whose types this one's public API has.
/// A new major version of it is therefore a new major version of `leasehold`.
#[cfg(feature = "redis")]
pub use redis;
#[cfg(feature = "redlock")]
pub use redlock::{Redlock, RedlockBuilder};
pub use url::SCHEMES;

/// The README's example is a test too.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the examples in this documentation.
#[doc(hidden)]
pub fn doc_test(example: impl Future<Output = Result<(), Error>>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    if let Err(error) = runtime.expect("a runtime for the example").block_on(example) {
        panic!("{error}");
    }
}
