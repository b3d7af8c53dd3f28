//! The seam for the simulation of the engine (the crate in `sim/`): a client whose clock, timer and connection to a store are
//! the simulation's. It is no part of the public API.
//!
//! The engine is the real one, with the real driver. Only what it stands on is replaced: [`set_clock`] is the clock of the
//! thread, and [`Transport`] is the timer and the way to the store. [`instant_client`] has a store that answers at once, for
//! measurements of what the engine itself costs.

mod answer;
mod foreign;
#[cfg(feature = "redlock")]
mod host;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

mod instant;

use leasehold_core::Failure;
use leasehold_core::{Acquire, Acquisition, ClientId, LocalTime, Push, Resource, SecretKey};
#[cfg(feature = "redlock")]
use leasehold_redlock::runtime::Runtime;
#[cfg(feature = "redlock")]
use leasehold_redlock::{Redlock, VoteOptions};
pub use leasehold_store::Call;
#[cfg(feature = "redlock")]
use leasehold_store::QuorumNode;
use leasehold_store::clock::Clock;
pub use leasehold_store::clock::simulated::{ThreadClock, set_clock};
use leasehold_store::{
    Batch, BoxFuture, CallResult, Capabilities, HolderMetadata, Inbox as _, PollIntervals, Store, StoreError,
};
use leasehold_store::{ForeignKeys, Watchers};

use crate::client::Client;
use crate::engine::Session;
use crate::engine::driver::{DriverTimer, drive};
use crate::guard::Guard;
use crate::handle::{ClientOptions, Handle};
use crate::telemetry::ClientTelemetry;
use answer::call_result;
pub use answer::{Answered, CallFailed, Pending};
use foreign::SimulatedKeys;
pub use foreign::{KeyAnswer, KeyAnswered, KeyCommand, KeyHost};
#[cfg(feature = "redlock")]
pub use host::{QuorumHost, QuorumOptions};
#[cfg(feature = "redlock")]
use host::{SimulatedHost, SimulatedNode};
pub use instant::instant_client;

/// What a simulated process stands on.
pub trait Transport: Send + Sync {
    /// Sends commands together, from a caller's task or from the driver. One answer for each. Grants and renewals count only if so many
    /// replicas have them.
    fn call(&self, batch: Vec<Call>, by_driver: bool, replicas: u32) -> Pending<Vec<Answered>>;

    /// Attempts that are granted together or not at all.
    fn acquire_all(&self, attempts: Vec<(Arc<Resource>, Arc<Acquire>)>) -> Pending<Vec<Answered>>;

    /// Ends when the local clock of the process reaches `time`.
    fn sleep_until(&self, time: LocalTime) -> Pending<()>;

    /// The store's interval between re-checks of a queue's head, and the lifetime of a queue entry.
    fn poll_intervals(&self) -> (Duration, Duration);

    /// What bridges stand on; none if the server has no keys of other libraries.
    fn key_host(&self) -> Option<Arc<dyn KeyHost>> {
        None
    }
}

/// A simulated client from the side of its store.
#[derive(Clone)]
pub struct SimulatedInbox {
    session: Arc<Session>,
    /// Who waits for changes of keys of other libraries.
    watchers: Arc<Watchers>,
}

impl SimulatedInbox {
    /// Delivers a push.
    pub fn deliver(&self, push: Push) {
        self.session.deliver(push);
    }

    /// The connection was re-established.
    pub fn reconnected(&self) {
        self.session.reconnected(&|_| true);
    }

    /// How many attempts, leases and releases the client knows.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.session.len()
    }

    /// The server reports that this key of another library has changed.
    pub fn key_changed(&self, key: &str) {
        self.watchers.notify(key);
    }

    /// Changes of keys of another library may have been missed.
    pub fn keys_missed(&self) {
        self.watchers.notify_all();
    }
}

/// A simulated client from the side of its quorum.
#[cfg(feature = "redlock")]
#[derive(Clone)]
pub struct SimulatedQuorum {
    session: Arc<Session>,
    inboxes: Vec<Arc<dyn leasehold_store::Inbox>>,
}

#[cfg(feature = "redlock")]
impl SimulatedQuorum {
    /// Delivers a node's push.
    pub fn deliver(&self, node: usize, push: Push) {
        self.inboxes[node].deliver(push);
    }

    /// The connection to a node was re-established.
    pub fn reconnected(&self, node: usize) {
        self.inboxes[node].reconnected(&|_| true);
    }

    /// How many attempts, leases and releases the client knows.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.session.len()
    }
}

/// Simulated clients are the same in every run of a seed.
fn secret_key(id: ClientId) -> SecretKey {
    SecretKey::new(!id.get())
}

/// A client of a quorum, its side towards the nodes, and its driver, which the simulation polls.
#[cfg(feature = "redlock")]
pub fn quorum_client(
    id: ClientId,
    host: Arc<dyn QuorumHost>,
    options: QuorumOptions,
) -> (Client, SimulatedQuorum, Pin<Box<dyn Future<Output = ()>>>) {
    let session =
        Arc::new(Session::new(id, secret_key(id), Clock::System, ClientTelemetry::new("simulated:")));
    let inbox: Arc<dyn leasehold_store::Inbox> = session.clone();
    let node = |node| {
        let simulated: Arc<dyn QuorumNode> = Arc::new(SimulatedNode { host: host.clone(), node });
        (simulated, format!("node-{node}"))
    };
    let nodes = (0..host.nodes()).map(node).collect();
    let QuorumOptions { is_fenced, max_ttl } = options;
    let options = VoteOptions { is_fenced, node_timeout: None, max_ttl };
    let runtime = Runtime::new(SimulatedHost(host.clone()));
    let (store, inboxes) = Redlock::over(nodes, id, options, Arc::downgrade(&inbox), runtime);
    let sleep = move |time| host.sleep_until(time);
    let (client, driver) = drive_client(session.clone(), store, sleep);
    (client, SimulatedQuorum { session, inboxes }, driver)
}

/// A client, its side towards the store, and its driver, which the simulation polls.
pub fn client(
    id: ClientId,
    transport: Arc<dyn Transport>,
) -> (Client, SimulatedInbox, Pin<Box<dyn Future<Output = ()>>>) {
    let session =
        Arc::new(Session::new(id, secret_key(id), Clock::System, ClientTelemetry::new("simulated:")));
    let inbox = SimulatedInbox { session: session.clone(), watchers: Arc::default() };
    let store = Arc::new(SimulatedStore {
        transport: transport.clone(),
        keys: transport.key_host().map(|host| {
            let keys: Arc<dyn ForeignKeys> =
                Arc::new(SimulatedKeys { host, watchers: inbox.watchers.clone() });
            keys
        }),
    });
    let (client, driver) = drive_client(session, store, move |time| transport.sleep_until(time));
    (client, inbox, driver)
}

/// A client of this store, and its driver.
fn drive_client(
    session: Arc<Session>,
    store: Arc<dyn Store>,
    sleep: impl Fn(LocalTime) -> Pending<()> + 'static,
) -> (Client, Pin<Box<dyn Future<Output = ()>>>) {
    // The host and the process id would differ from run to run.
    let options = ClientOptions { metadata: HolderMetadata::default(), ..ClientOptions::default() };
    let telemetry = ClientTelemetry::new("simulated:");
    let handle = Handle::new(session.clone(), store.clone(), "simulated:".to_owned(), options, telemetry);
    let client = Client { handle: Arc::new(handle) };
    let driver = Box::pin(async move {
        drive(&session, &*store, SimulatedTimer { sleep, set: None }).await;
        drop(store);
        session.driver_gone();
    });
    (client, driver)
}

/// A guard's lease, for checks that must not hold the guard.
#[derive(Clone)]
pub struct LeaseProbe {
    session: Arc<Session>,
    entry: crate::engine::EntryId,
    acquisition: Acquisition,
}

impl LeaseProbe {
    /// The lease of this guard.
    #[must_use]
    pub fn of(guard: &Guard) -> Self {
        let (session, entry) = (guard.session().clone(), guard.entry_id());
        let own = entry.acquisition(session.id);
        let acquisition = session.acquisition(entry).unwrap_or(own);
        Self { session, entry, acquisition }
    }

    /// The attempt that was granted; that of another client if the lease was attached.
    #[must_use]
    pub fn acquisition(&self) -> Acquisition {
        self.acquisition
    }

    /// As [`Guard::remaining`], by the clock of this thread.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.session.remaining(self.entry, self.session.now()).unwrap_or(Duration::ZERO)
    }
}

struct SimulatedTimer<S> {
    sleep: S,
    set: Option<(LocalTime, Pending<()>)>,
}

impl<S: Fn(LocalTime) -> Pending<()>> DriverTimer for SimulatedTimer<S> {
    async fn until(&mut self, time: LocalTime) -> io::Result<()> {
        if self.set.as_ref().is_none_or(|(set, _)| *set != time) {
            self.set = Some((time, (self.sleep)(time)));
        }
        if let Some((_, sleep)) = &mut self.set {
            sleep.await;
        }
        self.set = None;
        Ok(())
    }
}

struct SimulatedStore {
    transport: Arc<dyn Transport>,
    keys: Option<Arc<dyn ForeignKeys>>,
}

impl Store for SimulatedStore {
    fn capabilities(&self) -> Capabilities {
        let (repoll_interval, entry_ttl) = self.transport.poll_intervals();
        let intervals = PollIntervals::new(repoll_interval, entry_ttl);
        Capabilities::new(intervals).with_replicas().with_foreign_keys(self.keys.is_some())
    }

    fn call(&self, call: Call, replicas: u32) -> BoxFuture<CallResult> {
        let answered = self.transport.call(vec![call], false, replicas);
        Box::pin(async move { leasehold_store::only(answered.await.into_iter().map(call_result).collect()) })
    }

    fn call_batch(&self, batch: Batch, replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let answered = self.transport.call(batch, true, replicas);
        Box::pin(async move { answered.await.into_iter().map(call_result).collect() })
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        let answered = self.transport.acquire_all(attempts.to_vec());
        Some(Box::pin(async move { answered.await.into_iter().map(call_result).collect() }))
    }

    fn foreign_keys(&self, _servers: &[String]) -> Result<Arc<dyn ForeignKeys>, StoreError> {
        let missing = || StoreError::new(Failure::NotSent, "the simulated server has no such keys");
        self.keys.clone().ok_or_else(missing)
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
}
