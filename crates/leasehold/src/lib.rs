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
//! The futures run on any executor. [`blocking`] has the same locks for programs without one.

#![forbid(unsafe_code)]

pub mod blocking;
mod builder;
mod client;
mod diagnostics;
mod engine;
mod error;
pub mod fence;
mod guard;
mod handle;
mod inspect;
mod locks;
mod metadata;
mod options;
mod redlock;
#[doc(hidden)]
pub mod steps;
mod store;
#[cfg(test)]
mod tests;
mod url;

pub use builder::{ClientBuilder, Store};
pub use client::Client;
pub use diagnostics::{Component, Diagnosis, FINDING_IDS, Fact, Finding, Severity};
pub use error::{Error, ErrorKind};
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
pub use redis;
pub use redlock::{Redlock, RedlockBuilder};
pub use url::SCHEMES;

/// The README's example is a test too.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Runs the examples in this documentation.
#[doc(hidden)]
pub fn doc_test(example: impl Future<Output = Result<(), Error>>) {
    if let Err(error) = pollster::block_on(example) {
        panic!("{error}");
    }
}
