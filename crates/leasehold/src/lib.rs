//! Distributed locks with leases, fencing tokens and FIFO hand-off.
//!
//! A client holds a lock through a **lease**: ownership for a bounded time, the ttl. The client renews the lease while the
//! guard lives. If the process dies, the lease expires. Waiting clients form a FIFO queue in the store, and a release grants
//! the lock to the first waiter. Each grant has a **fencing token**, which is higher than every earlier one. With it, a
//! resource can refuse the late write of a former holder.
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
//! # Types
//!
//! [`Client`] connects to a store: Redis or Valkey, a quorum of servers, PostgreSQL, a SQLite file, or memory. It creates
//! the locks. An acquisition returns a [`Guard`], which releases the lock when it is dropped.
//!
//! | | |
//! |---|---|
//! | [`Mutex`] | one holder at a time |
//! | [`ReentrantMutex`] | one named owner at a time, which may acquire again from any task or process |
//! | [`RwLock`] | many readers or one writer, with downgrade and upgrade |
//! | [`Semaphore`] | up to N permits, shared by several holders |
//! | [`MutexSet`] | several mutexes at once, all or none |
//! | [`Election`] | one leader at a time, which observers can look up |
//! | [`OncePer`] | one start per period among many candidates |
//! | [`Latch`], [`Barrier`] | wait for a number of counts; wait for all parties |
//! | [`Redlock`] | mutexes, elections and once-per-period work over several independent servers |
//! | [`Credentials`] | logins that change while clients run, such as tokens that expire |
//! | [`LeaseId`] | a lease that outlives its guard and its process |
//! | [`fence`] | resources that refuse the token of a former holder |
//! | [`LockInfo`], [`Diagnosis`] | the holders and waiters of a lock; the result of checking a store |
//!
//! The futures run on any executor. The module `blocking` has the same locks without async. All operations have one error
//! type, [`Error`]. Its predicates distinguish the kinds of failure. Contention is not an error: `try_lock` and
//! `lock_timeout` return `None`.
//!
//! # Guide
//!
//! | | |
//! |---|---|
//! | [Choosing a lock](guide::choosing) | how to choose a kind and a store |
//! | [Guarantees](guide::guarantees) | every promise with the tests that show it, and what a lease can't do |
//! | [Operations](guide::operations) | addresses, server settings, users, limits, monitoring |
//! | [Redlock](guide::redlock) | a quorum of independent servers |
//! | [PostgreSQL](guide::postgres) | addresses, tables, poolers, and locks inside a transaction |
//! | [Metrics](guide::metrics) | the metrics, their labels, and alerts |
//! | [Testing](guide::testing) | how to test code that uses locks |
//!
//! # Features
//!
//! | | | |
//! |---|---|---|
//! | | `memory:` | always available |
//! | `redis` | `redis:`, `redis+unix:`, `redis-sentinel:`, `redis-cluster:`; [`Client::from_redis_client`] | default |
//! | `tls` | `rediss:` and `tls=true`, with rustls; implies `redis` | |
//! | `redlock` | `redlock:` and the type `Redlock`; implies `redis` | |
//! | `sqlite` | `sqlite:`, with SQLite compiled in; only on Unix | |
//! | `postgres` | `postgres:`, `postgresql:`, and the modules `postgres` and `fence::postgres` | |
//! | `blocking` | the module `blocking` | |
//! | `metrics` | [metrics](guide::metrics) for the `metrics` facade | |
//! | `serde` | `Serialize` for [`LockInfo`] and [`Diagnosis`] with their parts, and for [`ErrorKind`] | |
//!
//! [`Client::connect`] with a scheme whose feature is off returns an error that names the feature.

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]
// Some functions serve one store or one of the two APIs only. A build with all features reports those that none uses.
#![cfg_attr(
    not(all(unix, feature = "blocking", feature = "postgres", feature = "redlock", feature = "sqlite")),
    allow(dead_code)
)]

mod barrier_rounds;
#[cfg(feature = "blocking")]
pub mod blocking;
pub mod bridge;
mod builder;
mod client;
mod detached;
mod engine;
mod error;
pub mod fence;
#[cfg(all(feature = "_fuzzing", feature = "redlock", feature = "sqlite", unix))]
#[doc(hidden)]
pub mod fuzzing;
mod guard;
pub mod guide;
mod handle;
mod inspect;
mod lazy;
mod locks;
mod open;
mod options;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redlock")]
mod redlock;
#[cfg(feature = "_simulation")]
#[doc(hidden)]
pub mod simulation;
mod telemetry;
pub mod testing;
#[cfg(test)]
mod tests;
mod url;

pub use builder::{ClientBuilder, StoreConfig};
pub use client::Client;
pub use detached::LeaseId;
pub use error::{Error, ErrorKind};
pub use guard::Guard;
pub use inspect::{ForeignInfo, HolderInfo, LockInfo, Mode, WaiterInfo};
pub use leasehold_core::{Kind, Loss, MAX_NAME_BYTES, Token};
pub use leasehold_store::credentials::{CredentialRequest, Credentials, ServerRole};
pub use leasehold_store::process::forked;
pub use leasehold_store::{
    Component, Diagnosis, FINDING_IDS, Fact, Finding, HolderMetadata, MAX_LABEL_BYTES, Severity,
};
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
/// The client library of [`Client::from_redis_client`], [`StoreConfig::redis`] and [`StoreConfig::redis_connection`]. Its types are part
/// of the public API, so a new major version of `redis` requires a new major version of `leasehold`.
#[cfg(feature = "redis")]
pub use redis;
#[cfg(feature = "redlock")]
pub use redlock::{Redlock, RedlockBuilder};
/// The client library of the modules [`postgres`] and [`fence::postgres`]. Its types are part of the public API, so a new major version
/// of `tokio-postgres` requires a new major version of `leasehold`.
#[cfg(feature = "postgres")]
pub use tokio_postgres;
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
