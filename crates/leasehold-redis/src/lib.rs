//! Redis: one server, the master that Sentinels name, or a cluster.
//!
//! A command is one script call (`leasehold_redis_protocol`), so an uncontended lock is one round trip, and a release is another.
//! A waiter receives its grant through its client's push channel, the *inbox*. A single server has one inbox per client, a
//! cluster has one per client and hash slot.
//!
//! If the client was created in the caller's runtime, the caller's task sends its commands itself (`caller_conn`). Otherwise
//! the client's thread sends them, and the caller's future only waits for the answer, on any executor. After a reconnect all
//! waiters re-check and all leases are renewed, because pushes may have been missed.

#![forbid(unsafe_code)]

mod answer_times;
mod call_pool;
mod caller_conn;
mod client_record;
mod cluster;
mod connect;
mod connections;
mod contended;
mod deletes;
mod doctor;
mod endpoint;
mod error;
mod foreign;
mod foreign_voters;
mod handshake;
mod limits;
mod listing;
mod nodes;
mod opening;
mod own_connection;
mod place;
mod pushes;
mod records;
mod restriction;
mod rights;
mod send;
mod sentinel;
mod shared_keeper;
mod slot_map;
mod subscriber;
mod subscriptions;
mod url;
mod wire;

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use leasehold_core::Token;
use leasehold_core::{Acquire, Answer, Command, Resource};
use leasehold_redis_protocol::slot_of;
use leasehold_store::credentials::CredentialCache;
use leasehold_store::tasks::Tasks;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, ClientRecords, Diagnose, Diagnosis, ForeignKeys,
    ListResult, QuorumNode, SharedBatch, Store, StoreError, only,
};

use call_pool::CallPool;
use caller_conn::Caller;
use doctor::Address;
use foreign::ServerKeys;
use foreign_voters::Voters;
use limits::POLL_INTERVALS;
use nodes::Nodes;
pub use nodes::Voting;
use send::pipeline::Mode;
#[cfg(feature = "_fuzzing")]
pub use slot_map::fuzz as fuzz_cluster_slots;
pub use url::RedisUrl;
pub use wire::SharedConnection;
#[cfg(feature = "_fuzzing")]
pub use wire::fuzz as fuzz_connection_info;

/// The lease tables of one server, of the master that Sentinels name, or of a cluster, for one client.
pub struct Redis {
    nodes: Arc<Nodes>,
    calls: Arc<CallPool>,
    /// For bridges.
    foreign: ServerKeys,
    /// For `diagnose`, which opens connections of its own.
    address: Arc<Address>,
    /// Of the program's, for the servers of bridges, too.
    credentials: Option<CredentialCache>,
    /// On the client's thread.
    tasks: Tasks,
    caller: Option<Caller>,
    /// Detects when the caller's runtime ends.
    watch: Option<tokio::task::AbortHandle>,
    warnings: Arc<Mutex<BTreeSet<String>>>,
    /// Refreshes a cluster's slot map.
    refresher: Option<tokio::task::AbortHandle>,
    /// Keeps the client's record.
    record_keeper: tokio::task::AbortHandle,
}

impl Redis {
    /// Does this where timers and sockets work: in the caller's own task, or else on the client's thread. The answer is
    /// waited for on any executor.
    fn run_on_runtime<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        ended: impl Fn() -> T + Send + 'static,
    ) -> BoxFuture<T> {
        let Some(caller) = self.caller.clone().filter(Caller::is_here) else {
            // The driver sends its batches itself.
            return self.tasks.run(work, ended);
        };
        let mut work = Box::pin(work);
        // A future may be moved to another executor half way, or its runtime be shut down: it would panic.
        Box::pin(poll_fn(move |context| {
            if caller.is_still_here() { work.as_mut().poll(context) } else { Poll::Ready(ended()) }
        }))
    }

    /// The same for work that may fail.
    fn answer<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> BoxFuture<Result<T, StoreError>> {
        self.run_on_runtime(work, || Err(StoreError::runtime_ended()))
    }

    fn send(&self, batch: Batch, mode: Mode) -> BoxFuture<Vec<CallResult>> {
        let (nodes, count) = (self.nodes.clone(), batch.len());
        let ended = move || (0..count).map(|_| Err(StoreError::runtime_ended())).collect();
        self.run_on_runtime(async move { nodes.send(&batch, mode).await }, ended)
    }
}

/// Checks the nodes of a quorum, and whether they are independent of each other.
pub async fn diagnose_voters(voters: &[(&str, &Redis)], abstains_for: Option<Duration>) -> Diagnosis {
    let voters: Vec<_> = voters.iter().map(|(name, voter)| (*name, &*voter.address, &*voter.nodes)).collect();
    doctor::diagnose_voters(&voters, abstains_for).await
}

/// What sets a Redis store apart, whether it is open or not.
pub const fn capabilities() -> Capabilities {
    Capabilities::new(POLL_INTERVALS).with_replicas().with_foreign_keys(true)
}

impl Store for Redis {
    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn call(&self, call: Call, replicas: u32) -> BoxFuture<CallResult> {
        if let Some(caller) = self.caller.as_ref().filter(|caller| caller.is_here()) {
            return Box::pin(self.calls.call(caller, call, replicas));
        }
        let nodes = self.nodes.clone();
        self.answer(async move { nodes.call(&call, replicas).await })
    }

    fn call_batch(&self, batch: Batch, replicas: u32) -> BoxFuture<Vec<CallResult>> {
        self.send(batch, Mode::of_replicas(replicas))
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        if self.nodes.is_restricted() {
            // The scripts for one lock declare keys that one for several does not.
            return None;
        }
        if let Nodes::Cluster { .. } = &*self.nodes {
            let mut slots = attempts.iter().map(|(resource, _)| slot_of(resource));
            let first = slots.next();
            if slots.any(|slot| Some(slot) != first) {
                return None;
            }
        }
        let payload = |(resource, acquire): &(Arc<Resource>, Arc<Acquire>)| {
            Call::new(resource.clone(), Command::Acquire(acquire.clone()))
        };
        Some(self.send(attempts.iter().map(payload).collect(), Mode::Atomic))
    }

    fn foreign_keys(&self, servers: &[String]) -> Result<Arc<dyn ForeignKeys>, StoreError> {
        if !servers.is_empty() {
            return Ok(Arc::new(Voters::new(servers, self.tasks.clone(), self.credentials.as_ref())?));
        }
        match &*self.nodes {
            Nodes::Server { voting: None, .. } => Ok(Arc::new(self.foreign.clone())),
            Nodes::Server { .. } | Nodes::Cluster { .. } => Err(foreign::no_cluster()),
        }
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        let nodes = self.nodes.clone();
        self.answer(async move { nodes.list().await })
    }

    fn inspect_all(&self) -> Option<BoxFuture<ListResult>> {
        let nodes = self.nodes.clone();
        Some(self.answer(async move { nodes.inspect_all().await }))
    }

    fn shard(&self, resource: &Resource, _command: &Command) -> u64 {
        let Nodes::Cluster { cluster, .. } = &*self.nodes else { return 0 };
        let mut hasher = DefaultHasher::new();
        cluster.master_of(slot_of(resource)).hash(&mut hasher);
        hasher.finish()
    }

    fn client_records(&self) -> Option<&dyn ClientRecords> {
        Some(self)
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        Some(self)
    }
}

impl ClientRecords for Redis {
    fn publish(&self, metadata: Arc<str>) {
        self.nodes.record().publish(metadata);
    }

    fn await_published(&self, limit: Duration) -> BoxFuture<()> {
        let nodes = self.nodes.clone();
        self.run_on_runtime(async move { nodes.await_record(limit).await }, || ())
    }

    fn add_to(&self, answers: Vec<Answer>) -> BoxFuture<Vec<Answer>> {
        let (nodes, unchanged) = (self.nodes.clone(), answers.clone());
        let work = async move {
            let mut answers = answers;
            nodes.add_clients(answers.iter_mut()).await;
            answers
        };
        self.run_on_runtime(work, move || unchanged.clone())
    }
}

impl Diagnose for Redis {
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        let (nodes, address) = (self.nodes.clone(), self.address.clone());
        self.answer(async move { doctor::diagnose(&nodes, &address).await })
    }

    fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl QuorumNode for Redis {
    fn await_connected(&self) -> BoxFuture<Result<(), StoreError>> {
        let nodes = self.nodes.clone();
        Box::pin(async move {
            match &*nodes {
                Nodes::Server { endpoint, .. } => endpoint.connections().await.map(drop),
                Nodes::Cluster { .. } => Ok(()),
            }
        })
    }

    fn is_connected(&self) -> bool {
        match &*self.nodes {
            Nodes::Server { endpoint, .. } => endpoint.current().is_some(),
            Nodes::Cluster { .. } => true,
        }
    }

    fn run_id(&self) -> Option<Arc<str>> {
        let Nodes::Server { endpoint, .. } = &*self.nodes else { return None };
        let run_id = endpoint.current()?.run_id().clone();
        // Empty if the user may not read it.
        (!run_id.is_empty()).then_some(run_id)
    }

    fn reconnect(&self) {
        if let Nodes::Server { endpoint, .. } = &*self.nodes
            && let Some(connections) = endpoint.current()
        {
            connections.close();
        }
    }

    fn vote(&self, call: Call, floor: Option<Token>) -> BoxFuture<CallResult> {
        let nodes = self.nodes.clone();
        let mode = floor.map_or(Mode::Each, Mode::AtLeast);
        Box::pin(async move { only(nodes.send(&[call], mode).await) })
    }

    fn vote_batch(&self, batch: SharedBatch) -> BoxFuture<Vec<CallResult>> {
        let nodes = self.nodes.clone();
        Box::pin(async move { nodes.send(&batch, Mode::Each).await })
    }

    fn runs_on_caller(&self) -> bool {
        self.caller.as_ref().is_some_and(Caller::is_here)
    }

    fn run_on_runtime(&self, work: BoxFuture<()>) -> BoxFuture<()> {
        Self::run_on_runtime(self, work, || ())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.record_keeper.abort();
        for task in [&self.refresher, &self.watch].into_iter().flatten() {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests;
