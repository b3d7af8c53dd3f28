//! For tests of programs that use locks: a store in memory whose clock the test moves.
//!
//! No real time passes. Leases are renewed and expire, waiters are granted, and losses are reported when the test moves the
//! clock. The engine is the same as for every other store, so the program behaves as it does there.
//!
//! ```
//! use std::time::Duration;
//! use leasehold::testing::TestStore;
//!
//! # leasehold::doc_test(async {
//! let store = TestStore::new();
//! let client = store.client()?;
//! let guard = client.mutex("report").ttl(Duration::from_secs(10)).lock().await?;
//!
//! store.advance(Duration::from_secs(60)); // renewed all the while
//! assert!(guard.is_held());
//!
//! store.set_reachable(false);
//! store.advance(Duration::from_secs(10)); // no renewal succeeds
//! assert!(!guard.is_held());
//! guard.lost().await; // does not wait
//! # Ok(()) });
//! ```

use std::fmt;
use std::future::ready;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use leasehold_core::{Acquire, Command, Failure, LocalTime, Push, Resource};
use leasehold_store::clock::Clock;
use leasehold_store::clock::manual::ManualClock;
use leasehold_store::memory::Memory;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, Diagnose, Diagnosis, Inbox, Store, StoreError,
};

use crate::builder::ClientBuilder;
use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::handle::ClientOptions;

/// A store in memory whose clock the test moves. Clones are the same store. A test can create any number of clients, each of
/// which represents a process.
///
/// When a call that moves the clock returns, the store and its clients have done everything that was due. A future that the
/// call woke runs when the test's executor polls it next. If a task must act between two events, move the clock in several
/// steps, and await something after each step.
///
/// ```
/// # use std::time::Duration;
/// # leasehold::doc_test(async {
/// let store = leasehold::testing::TestStore::new();
/// let guard = store.client()?.mutex("orders").ttl(Duration::from_secs(10)).lock().await?;
/// store.advance(Duration::from_secs(60)); // renewed at its times
/// assert!(guard.is_held());
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct TestStore {
    clock: Arc<ManualClock>,
    started: LocalTime,
    memory: Arc<Memory>,
    network: Arc<Network>,
}

/// What is between the clients and their store.
struct Network {
    is_down: AtomicBool,
    /// With which the store refuses all commands of this crate's tests.
    #[cfg(test)]
    refusal: Mutex<Option<Failure>>,
    links: Mutex<Vec<Weak<Link>>>,
}

impl TestStore {
    /// A store without locks. Only [`Self::advance`] and [`Self::suspend`] move its clock.
    ///
    /// ```
    /// let store = leasehold::testing::TestStore::new();
    /// assert!(store.elapsed().is_zero());
    /// ```
    #[must_use]
    pub fn new() -> Self {
        let clock = Arc::new(ManualClock::default());
        let memory = Arc::new(Memory::with_clock(Clock::Manual(clock.clone())));
        let network = Arc::new(Network {
            is_down: AtomicBool::new(false),
            #[cfg(test)]
            refusal: Mutex::default(),
            links: Mutex::default(),
        });
        Self { started: clock.now(), clock, memory, network }
    }

    /// A client of this store. It has no thread.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// let store = leasehold::testing::TestStore::new();
    /// let (here, there) = (store.client()?, store.client()?);
    /// let guard = here.mutex("orders").lock().await?;
    /// assert!(there.mutex("orders").try_lock().await?.is_none());
    /// guard.release().await?;
    /// assert!(there.mutex("orders").try_lock().await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable` if the system gives no random numbers for the client's id.
    pub fn client(&self) -> Result<Client, Error> {
        self.open(ClientOptions::default())
    }

    /// A client of this store with the settings of a builder, which has no store of its own.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use leasehold::Client;
    /// # leasehold::doc_test(async {
    /// let store = leasehold::testing::TestStore::new();
    /// let client = store.client_with(Client::builder().ttl(Duration::from_secs(60)))?;
    /// assert!(client.mutex("orders").lock().await?.remaining() > Duration::from_secs(50));
    /// assert!(store.client_with(Client::builder().store("memory:")).unwrap_err().is_invalid());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for a setting, or if the builder has a store; and as [`Self::client`].
    pub fn client_with(&self, builder: ClientBuilder) -> Result<Client, Error> {
        let (None, options) = builder.into_parts()? else {
            return Err(Error::new(ErrorKind::Invalid, "a client of a test's store has no other one"));
        };
        self.open(options)
    }

    fn open(&self, options: ClientOptions) -> Result<Client, Error> {
        let network = self.network.clone();
        Client::with_manual_clock(&self.clock, options, |id, inbox| {
            let link = Arc::new(Link { network, inbox });
            let is_open = |link: &Weak<Link>| link.strong_count() > 0;
            let mut links = self.network.links.lock().unwrap_or_else(PoisonError::into_inner);
            links.retain(is_open);
            links.push(Arc::downgrade(&link));
            let inbox: Arc<dyn Inbox> = link.clone();
            self.memory.join(id, Arc::downgrade(&inbox));
            Arc::new(Linked { memory: self.memory.clone(), link })
        })
    }

    /// A client of this store for code without async. A call that waits blocks its thread until another thread moves the clock
    /// or releases the lock.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), leasehold::Error> {
    /// let store = leasehold::testing::TestStore::new();
    /// let guard = store.blocking_client()?.mutex("orders").ttl(Duration::from_secs(10)).lock()?;
    /// store.suspend(Duration::from_secs(11));
    /// assert!(!guard.is_held());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::client`].
    #[cfg(feature = "blocking")]
    pub fn blocking_client(&self) -> Result<crate::blocking::Client, Error> {
        self.client().map(crate::blocking::Client)
    }

    /// Moves the clock by this much. Renewals, expiries, timeouts and retries that become due happen at their time and in
    /// their order. Several threads may call this: each moves the clock on by its own amount, one after the other.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # leasehold::doc_test(async {
    /// let store = leasehold::testing::TestStore::new();
    /// let guard = store.client()?.mutex("orders").ttl(Duration::from_secs(10)).lock().await?;
    /// store.advance(Duration::from_secs(60)); // renewed at its times
    /// assert!(guard.is_held());
    /// # Ok(()) });
    /// ```
    pub fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    /// Moves the clock by this much at once, as if all clients were suspended. No lease is renewed in between.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # leasehold::doc_test(async {
    /// let store = leasehold::testing::TestStore::new();
    /// let guard = store.client()?.mutex("orders").ttl(Duration::from_secs(10)).lock().await?;
    /// store.suspend(Duration::from_secs(11));
    /// assert!(!guard.is_held());
    /// # Ok(()) });
    /// ```
    pub fn suspend(&self, by: Duration) {
        self.clock.jump(by);
    }

    /// Sets whether commands and pushes reach the store and its clients; true at first. While the store is unreachable,
    /// commands fail with `is_unavailable`, also renewals, and leases are lost when they expire. When the store is reachable
    /// again, the clients reconnect and re-check at once.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # leasehold::doc_test(async {
    /// let store = leasehold::testing::TestStore::new();
    /// let guard = store.client()?.mutex("orders").ttl(Duration::from_secs(10)).lock().await?;
    /// store.set_reachable(false);
    /// store.advance(Duration::from_secs(10)); // no renewal succeeds
    /// assert!(!guard.is_held());
    /// # Ok(()) });
    /// ```
    pub fn set_reachable(&self, is_reachable: bool) {
        if !self.network.is_down.swap(!is_reachable, Ordering::SeqCst) || !is_reachable {
            return;
        }
        let links = self.network.links.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for inbox in links.iter().filter_map(Weak::upgrade).filter_map(|link| link.inbox.upgrade()) {
            inbox.reconnected(&|_| true);
        }
    }

    /// Sets with which failure the store refuses commands.
    #[cfg(test)]
    pub(crate) fn refuse(&self, failure: impl Into<Option<Failure>>) {
        *self.network.refusal.lock().unwrap() = failure.into();
    }

    /// The time by which the clock was moved since the store was created.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let store = leasehold::testing::TestStore::new();
    /// store.advance(Duration::from_secs(3));
    /// assert_eq!(store.elapsed(), Duration::from_secs(3));
    /// ```
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.clock.now().since(self.started)
    }
}

impl Default for TestStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for TestStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TestStore(after {:?})", self.elapsed())
    }
}

/// One client's connection.
struct Link {
    network: Arc<Network>,
    inbox: Weak<dyn Inbox>,
}

impl Inbox for Link {
    fn deliver(&self, push: Push) {
        if !self.network.is_down.load(Ordering::SeqCst)
            && let Some(inbox) = self.inbox.upgrade()
        {
            inbox.deliver(push);
        }
    }

    fn reconnected(&self, _concerns: &dyn Fn(&Resource) -> bool) {}
}

/// The store as one client reaches it. The memory store knows the client for as long as this exists.
struct Linked {
    memory: Arc<Memory>,
    link: Arc<Link>,
}

impl Linked {
    fn check(&self) -> Result<(), StoreError> {
        if self.link.network.is_down.load(Ordering::SeqCst) {
            let message = "the test has made the store unreachable".to_owned();
            return Err(StoreError::new(Failure::NotSent, message));
        }
        #[cfg(test)]
        if let Some(failure) = *self.link.network.refusal.lock().unwrap() {
            return Err(StoreError::new(failure, "the store's own word"));
        }
        Ok(())
    }

    fn run(&self, resource: &Resource, command: &Command) -> CallResult {
        self.check()?;
        self.memory.call_inline(resource, command)
    }
}

impl Store for Linked {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult> {
        Some(self.run(resource, command))
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        Box::pin(ready(self.run(&call.resource, &call.command)))
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let results =
            batch.iter().map(|Call { resource, command }| self.run(resource, command)).collect::<Vec<_>>();
        Box::pin(ready(results))
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        match self.check() {
            Ok(()) => self.memory.acquire_all(attempts),
            Err(error) => {
                let results: Vec<CallResult> = attempts.iter().map(|_| Err(error.clone())).collect();
                Some(Box::pin(ready(results)))
            }
        }
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        match self.check() {
            Ok(()) => self.memory.list(),
            Err(error) => Box::pin(ready(Err(error))),
        }
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        Some(self)
    }
}

impl Diagnose for Linked {
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        match self.check() {
            Ok(()) => self.memory.diagnose(),
            Err(error) => Box::pin(ready(Err(error))),
        }
    }
}

#[cfg(test)]
mod tests;
