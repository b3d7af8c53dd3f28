//! The seam for the simulation of a quorum.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{LocalTime, Resource, Token};
use leasehold_redlock::runtime::Host;
use leasehold_store::clock::Clock;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, QuorumNode, SharedBatch, Store, StoreError, only,
};

use super::answer::{Answered, Pending, call_result};

/// What the quorum store of a simulated process stands on.
pub trait QuorumHost: Send + Sync {
    /// The number of nodes.
    fn nodes(&self) -> usize;

    /// Whether there is a connection to a node now.
    fn is_connected(&self, node: usize) -> bool;

    /// A node's run id, if it is connected.
    fn run_id(&self, node: usize) -> Option<Arc<str>>;

    /// Sends commands together to a node, which grants no token below `floor`. One answer for each.
    fn call(&self, node: usize, batch: Vec<Call>, floor: Option<Token>) -> Pending<Vec<Answered>>;

    /// Runs a task of the process.
    fn spawn(&self, task: Pending<()>);

    /// Ends when the local clock of the process reaches `time`.
    fn sleep_until(&self, time: LocalTime) -> Pending<()>;

    /// A random number, for pauses.
    fn random(&self) -> u32;
}

/// The options of a simulated quorum.
#[derive(Clone, Copy, Debug)]
pub struct QuorumOptions {
    /// Whether a token counts only once a quorum knows it.
    pub is_fenced: bool,
    /// The longest ttl, if nodes abstain after they may have lost leases.
    pub max_ttl: Option<Duration>,
}

/// A node of a simulated quorum.
pub(super) struct SimulatedNode {
    pub(super) host: Arc<dyn QuorumHost>,
    pub(super) node: usize,
}

impl Store for SimulatedNode {
    fn capabilities(&self) -> Capabilities {
        leasehold_redlock::capabilities(None)
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        self.vote(call, None)
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        self.vote_batch(batch.into())
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        Box::pin(ready(Ok(Vec::new())))
    }
}

impl QuorumNode for SimulatedNode {
    fn await_connected(&self) -> BoxFuture<Result<(), StoreError>> {
        Box::pin(ready(Ok(())))
    }

    fn is_connected(&self) -> bool {
        self.host.is_connected(self.node)
    }

    fn run_id(&self) -> Option<Arc<str>> {
        self.host.run_id(self.node)
    }

    /// Each address leads to its own server.
    fn reconnect(&self) {}

    fn vote(&self, call: Call, floor: Option<Token>) -> BoxFuture<CallResult> {
        let answered = self.host.call(self.node, vec![call], floor);
        Box::pin(async move { only(answered.await.into_iter().map(call_result).collect()) })
    }

    fn vote_batch(&self, batch: SharedBatch) -> BoxFuture<Vec<CallResult>> {
        let answered = self.host.call(self.node, batch.to_vec(), None);
        Box::pin(async move { answered.await.into_iter().map(call_result).collect() })
    }

    fn runs_on_caller(&self) -> bool {
        true
    }

    fn run_on_runtime(&self, work: BoxFuture<()>) -> BoxFuture<()> {
        work
    }
}

/// What the tasks of a simulated quorum run on.
pub(super) struct SimulatedHost(pub(super) Arc<dyn QuorumHost>);

impl Host for SimulatedHost {
    fn spawn(&self, task: BoxFuture<()>) {
        self.0.spawn(task);
    }

    fn spawn_here(&self, task: BoxFuture<()>) {
        self.0.spawn(task);
    }

    fn sleep(&self, span: Duration) -> BoxFuture<()> {
        let host = self.0.clone();
        Box::pin(async move { host.sleep_until(Clock::System.local() + span).await })
    }

    fn random(&self) -> u32 {
        self.0.random()
    }
}
