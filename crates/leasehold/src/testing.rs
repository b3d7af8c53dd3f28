//! Tests of programs that use locks: a store in memory whose time a test moves.
//!
//! No real time passes: leases are renewed and expire, waiters are granted, and losses are reported when the test moves the
//! clock. The engine is the real one, so what a test sees is what the program will see on a store elsewhere.
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

use crate::client::Client;
use crate::diagnostics::Diagnosis;
use crate::engine::clock::Clock;
use crate::engine::manual::ManualClock;
use crate::error::Error;
use crate::store::memory::Memory;
use crate::store::{Batch, BoxFuture, CallResult, Capabilities, Inbox, Store, StoreError};

/// A store in memory whose time a test moves. Clones share it. Its clients are as many as the test wants, each for a process
/// of its own.
///
/// When a call that moves the clock returns, the store and its clients have done everything that was due. Futures that were
/// woken by it run when the test's executor next polls them: await something, or move the clock in several steps, where a
/// task has to act before the next thing is due.
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
    links: Mutex<Vec<Weak<Link>>>,
}

impl TestStore {
    /// A store without locks, at a time that only [`Self::advance`] and [`Self::suspend`] move.
    ///
    /// ```
    /// let store = leasehold::testing::TestStore::new();
    /// assert!(store.elapsed().is_zero());
    /// ```
    #[must_use]
    pub fn new() -> Self {
        let clock = Arc::new(ManualClock::new());
        let memory = Arc::new(Memory::with_clock(Clock::Manual(clock.clone())));
        let network = Arc::new(Network { is_down: AtomicBool::new(false), links: Mutex::default() });
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
        let network = self.network.clone();
        Client::with_manual_clock(&self.clock, |id, inbox| {
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

    /// Moves the clock by this much. On the way it stops wherever something is due: renewals, expiries, timeouts and retries
    /// happen at their time and in their order.
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

    /// Moves the clock by this much at once, as if all clients were suspended meanwhile: no lease is renewed in between.
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

    /// Whether commands and notifications get through. While they don't, commands fail with `is_unavailable`, renewals among
    /// them, and leases are lost when their time is over. When they do again, clients ask at once what they have missed.
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

    /// How much the clock was moved since the store was created.
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

    fn call(&self, resource: Arc<Resource>, command: Command, _replicas: u32) -> BoxFuture<CallResult> {
        Box::pin(ready(self.run(&resource, &command)))
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let results = batch.iter().map(|(resource, command)| self.run(resource, command)).collect::<Vec<_>>();
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

    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        match self.check() {
            Ok(()) => self.memory.diagnose(),
            Err(error) => Box::pin(ready(Err(error))),
        }
    }
}

#[cfg(test)]
mod tests;
