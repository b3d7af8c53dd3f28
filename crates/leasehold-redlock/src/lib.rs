//! Redlock: several independent servers vote; a lease needs a majority.
//!
//! Every command goes to all nodes at once, and completes as soon as no further reply can change the result
//! (`leasehold_core::Round`, `leasehold_core::NodeReplies`). No command waits for a slow node, but its late reply still counts.
//! A failed try is released at all nodes before the next one. Each try of an attempt has another id at the nodes
//! (`attempts`), and unconfirmed releases are repeated (`node`).
//!
//! A waiter has a queue entry at each node, and re-checks once more than half of them have pushed a grant. Two nodes may see
//! two waiters in different orders, so that each gets a part of the grants. Therefore only one waiter at a time queues at the
//! nodes, and the others queue at one node for admission (`Kind::Admission`, `admission_queue`). That queue decides nothing,
//! so it may be lost: a waiter with a part of the grants soon releases it, and retries after a random pause.

#![forbid(unsafe_code)]

mod acquire;
mod admission_queue;
mod admission_state;
mod attempts;
mod counted_servers;
mod gather;
mod inspect;
mod limits;
mod node;
mod opening;
mod release;
mod renew;
pub mod runtime;
mod url;
mod votes;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::{AbortHandle, join_all};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Failure, LocalTime, Push, PushKind, Reply, Resource,
    StoreTime, Token, quorum_of,
};
use leasehold_redis_protocol::slot_of;
use leasehold_store::clock::Clock;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, ClientRecords, Diagnose, Diagnosis, ForeignKeys, Inbox,
    QuorumNode, Store, StoreError, VotedAttempts, missing_response, only,
};
use tokio::sync::{Notify, oneshot};

use admission_state::{AdmissionNodes, ContendedLocks, is_admission_queue};
use attempts::Attempts;
use limits::{
    GATHER_WINDOW, MAX_NODE_TIMEOUT, MIN_NODE_TIMEOUT, MIN_PATIENCE, POLL_INTERVALS, RELEASE_RETRY_INTERVAL,
    SHARDS, SLOW_ROUND_TRIPS, STRAGGLER_GRACE,
};
use node::Node;
use runtime::Runtime;
pub use url::RedlockUrl;

/// Checks the nodes, and whether they are independent of each other.
/// How soon a node is connected to again that is the same server as another one.
const RECONNECT_PAUSE: Duration = Duration::from_secs(5);

type Diagnoser = Box<dyn Fn() -> BoxFuture<Diagnosis> + Send + Sync>;

/// A quorum store.
pub struct Redlock {
    quorum: Arc<Quorum>,
    diagnose: Diagnoser,
    release_retrier: AbortHandle,
    admission_checker: AbortHandle,
}

/// Shared state of all commands.
struct Quorum {
    clock: Clock,
    nodes: Vec<Arc<Node>>,
    /// Receive the nodes' pushes; the nodes hold them weakly.
    _inboxes: Vec<Arc<dyn Inbox>>,
    attempts: Attempts,
    options: VoteOptions,
    inbox: Weak<dyn Inbox>,
    runtime: Runtime,
    admission_nodes: Mutex<AdmissionNodes>,
    contended: Mutex<ContendedLocks>,
    /// Signals that an attempt may be queued for admission.
    admission_used: Notify,
    /// Signals that a node may not have received a release.
    releases_pending: Notify,
    /// How many releases of an attempt are in flight at a node, by the attempt's id there and the node.
    releasing: Mutex<BTreeMap<(Acquisition, usize), usize>>,
    /// Too many nodes abstain until then, by the local clock in microseconds.
    restart_grace_until: AtomicU64,
}

/// The options of the vote.
#[derive(Clone, Copy)]
pub struct VoteOptions {
    /// Whether a token counts only once a quorum knows it.
    pub is_fenced: bool,
    /// Max time for a node to answer, if the caller has set it.
    pub node_timeout: Option<Duration>,
    /// Max ttl, if nodes abstain after they may have lost leases.
    pub max_ttl: Option<Duration>,
}

/// Receives the pushes of one node.
struct NodeInbox {
    quorum: Weak<Quorum>,
    node: usize,
}

impl Redlock {
    fn of(quorum: Arc<Quorum>, diagnose: Diagnoser) -> Self {
        let release_retrier = quorum.runtime.spawn_abortable(quorum.clone().retry_releases());
        let admission_checker = quorum.runtime.spawn_abortable(quorum.clone().check_admission_nodes());
        Self { quorum, diagnose, release_retrier, admission_checker }
    }
}

#[cfg(feature = "_simulation")]
impl Redlock {
    /// A quorum of these nodes, each with its name, and what receives their pushes.
    pub fn over(
        nodes: Vec<(Arc<dyn QuorumNode>, String)>,
        client: ClientId,
        options: VoteOptions,
        inbox: Weak<dyn Inbox>,
        runtime: Runtime,
    ) -> (Arc<Self>, Vec<Arc<dyn Inbox>>) {
        let numbers = 0..nodes.len();
        let quorum = Quorum::over(nodes, &Clock::System, client, options, inbox, runtime, |node, _| node);
        let inbox = |node| Arc::new(NodeInbox { quorum: Arc::downgrade(&quorum), node }) as Arc<dyn Inbox>;
        let inboxes = numbers.map(inbox).collect();
        let diagnose = || Box::pin(std::future::ready(Diagnosis::default())) as BoxFuture<_>;
        (Arc::new(Self::of(quorum, Box::new(diagnose))), inboxes)
    }
}

impl Drop for Redlock {
    fn drop(&mut self) {
        self.release_retrier.abort();
        self.admission_checker.abort();
    }
}

impl Quorum {
    /// Opens each of these nodes, with the inbox for its pushes. Each has a name.
    fn over<N>(
        nodes: impl IntoIterator<Item = N>,
        clock: &Clock,
        client: ClientId,
        options: VoteOptions,
        inbox: Weak<dyn Inbox>,
        runtime: Runtime,
        mut open: impl FnMut(N, Weak<dyn Inbox>) -> (Arc<dyn QuorumNode>, String),
    ) -> Arc<Self> {
        Arc::new_cyclic(|quorum: &Weak<Self>| {
            let mut inboxes = Vec::new();
            let open_node = |(node, what)| {
                let inbox: Arc<dyn Inbox> = Arc::new(NodeInbox { quorum: quorum.clone(), node });
                let (store, name) = open(what, Arc::downgrade(&inbox));
                inboxes.push(inbox);
                Arc::new(Node::new(store, name, clock.clone(), runtime.clone()))
            };
            let nodes: Vec<Arc<Node>> = nodes.into_iter().enumerate().map(open_node).collect();
            Self {
                clock: clock.clone(),
                attempts: Attempts::new(client, nodes.len()),
                nodes,
                _inboxes: inboxes,
                options,
                inbox,
                runtime,
                admission_nodes: Mutex::default(),
                contended: Mutex::default(),
                admission_used: Notify::new(),
                releases_pending: Notify::new(),
                releasing: Mutex::default(),
                restart_grace_until: AtomicU64::new(0),
            }
        })
    }

    /// The time by the client's clock.
    fn now(&self) -> LocalTime {
        self.clock.local()
    }

    /// The records of the nodes that keep them.
    fn records(&self) -> impl Iterator<Item = &dyn ClientRecords> {
        self.nodes.iter().filter_map(|node| node.store.client_records())
    }

    /// By node: an error if it is the same server as an earlier one. This can change at any reconnect, also of the earlier one.
    fn duplicate_nodes(&self) -> Vec<Option<String>> {
        let run_ids: Vec<Option<Arc<str>>> = self.nodes.iter().map(|node| node.store.run_id()).collect();
        let duplicate = |index: usize| {
            let mut same = (0..run_ids.len())
                .filter(|other| run_ids[index].is_some() && run_ids[*other] == run_ids[index]);
            let first = same.next().unwrap_or(index);
            // Either of them may be connected to the wrong one. The first one votes, so it comes second.
            if first != index {
                self.nodes[index].is_duplicate(RECONNECT_PAUSE);
            } else if same.next().is_some() {
                self.nodes[index].is_duplicate(RECONNECT_PAUSE * 3 / 2);
            } else if run_ids.iter().all(Option::is_some) {
                self.nodes[index].is_no_duplicate();
            }
            (first != index).then(|| same_server(&self.nodes[first]))
        };
        (0..run_ids.len()).map(duplicate).collect()
    }

    /// Repeats unanswered releases until they are answered or the lease has expired.
    async fn retry_releases(self: Arc<Self>) {
        loop {
            self.releases_pending.notified().await;
            loop {
                self.runtime.sleep(RELEASE_RETRY_INTERVAL).await;
                self.attempts.sweep(self.now());
                let releases_pending: Vec<Arc<Node>> =
                    self.nodes.iter().filter(|node| node.has_pending_releases()).cloned().collect();
                if releases_pending.is_empty() && !self.attempts.is_to_be_swept() {
                    break;
                }
                // A node that does not answer delays no other for longer than one answer may take.
                join_all(releases_pending.into_iter().map(Node::retry_pending_releases)).await;
            }
        }
    }

    /// A node has pushed a grant to a waiter: it re-checks once a quorum has, or after [`GATHER_WINDOW`].
    fn granted_by(self: &Arc<Self>, node: usize, acquisition: Acquisition) {
        match self.attempts.granted_by(acquisition, node) {
            Some(count) if count >= quorum_of(self.nodes.len()) => self.request_recheck(acquisition),
            Some(1) => {
                let quorum = self.clone();
                self.runtime.spawn(async move {
                    quorum.runtime.sleep(GATHER_WINDOW).await;
                    // A lease needs no re-check, which would be a renewal.
                    if quorum.attempts.waits(acquisition) {
                        quorum.request_recheck(acquisition);
                    }
                });
            }
            _ => {}
        }
    }

    /// Lets a waiter re-check: the push of one node decides nothing.
    fn request_recheck(&self, acquisition: Acquisition) {
        if let (Some(inbox), Some(attempt)) = (self.inbox.upgrade(), self.attempts.attempt_of(acquisition)) {
            inbox.recheck(attempt);
        }
    }

    /// A push that anybody may have sent: the attempt or the lease asks the nodes, at most once a second.
    fn handle_hint(&self, acquisition: Acquisition) {
        if let (Some(inbox), Some(attempt)) = (self.inbox.upgrade(), self.attempts.attempt_of(acquisition)) {
            let at = StoreTime::from_micros(self.now().as_micros());
            inbox.deliver(Push::new(attempt, at, PushKind::Revoked));
        }
    }

    /// Max time for the nodes to answer.
    fn node_timeout(&self, ttl: Duration) -> Duration {
        self.options.node_timeout.unwrap_or_else(|| {
            let usual = self.round_trip() * SLOW_ROUND_TRIPS;
            let share = (ttl / 10).clamp(MIN_NODE_TIMEOUT, MAX_NODE_TIMEOUT);
            share.max(usual).min(ttl / 3)
        })
    }

    /// Usual round trip of the fastest majority.
    fn round_trip(&self) -> Duration {
        self.of_fastest_majority(Node::round_trip)
    }

    /// How long a command waits for a minority whose answer may still decide, after a majority has answered.
    fn patience(&self) -> Duration {
        MIN_PATIENCE.max(SLOW_ROUND_TRIPS * self.of_fastest_majority(Node::long_round_trip))
    }

    /// The longest of these spans within the fastest majority; zero if no majority has answered yet.
    fn of_fastest_majority(&self, span: impl Fn(&Node) -> Duration) -> Duration {
        let mut spans: Vec<_> =
            self.nodes.iter().map(|node| span(node)).filter(|span| !span.is_zero()).collect();
        spans.sort_unstable();
        spans.get(quorum_of(self.nodes.len()) - 1).copied().unwrap_or_default()
    }

    /// Runs commands, in the caller's runtime or that of the client's thread.
    async fn run(self: Arc<Self>, batch: Vec<Call>) -> Vec<CallResult> {
        if let [call] = &batch[..] {
            return vec![self.run_one(call.clone()).await];
        }
        let renewals: Vec<usize> = (0..batch.len())
            .filter(|at| {
                matches!(batch[*at].command, Command::Renew(_)) && !is_admission_queue(&batch[*at].resource)
            })
            .collect();
        let renewed = async {
            if renewals.is_empty() {
                Vec::new()
            } else {
                self.renew(renewals.iter().map(|at| batch[*at].clone()).collect()).await
            }
        };
        let others: Vec<usize> = (0..batch.len()).filter(|at| !renewals.contains(at)).collect();
        let answered = join_all(others.iter().map(|at| self.run_one(batch[*at].clone())));
        let (renewed, answered) = futures_util::future::join(renewed, answered).await;
        let mut answers: Vec<Option<CallResult>> = batch.iter().map(|_| None).collect();
        for (at, answer) in renewals.into_iter().zip(renewed).chain(others.into_iter().zip(answered)) {
            answers[at] = Some(answer);
        }
        answers.into_iter().map(|answer| answer.unwrap_or_else(missing_response)).collect()
    }

    async fn run_one(self: &Arc<Self>, call: Call) -> CallResult {
        let Call { resource, command } = call;
        if is_admission_queue(&resource) {
            return self.call_admission_queue(resource, command).await;
        }
        match command {
            Command::Acquire(acquire) => self.acquire(resource, acquire).await,
            Command::Renew(_) => only(self.renew(vec![Call { resource, command }]).await),
            Command::Release(release) => self.release(resource, release).await,
            Command::Inspect => self.inspect(resource).await,
            Command::ForceRelease => self.force_release(resource).await,
        }
    }
}

/// An answer by the local clock, which stands for the store's: the nodes have clocks of their own.
fn answer(now: LocalTime, reply: Reply) -> CallResult {
    Ok(Answer { at: StoreTime::from_micros(now.as_micros()), reply })
}

impl Inbox for NodeInbox {
    fn deliver(&self, push: Push) {
        let Some(quorum) = self.quorum.upgrade() else { return };
        let Some(inbox) = quorum.inbox.upgrade() else { return };
        if !Attempts::is_node_attempt(push.acquisition) {
            if let Some(acquisition) = quorum.admission_attempt(self.node, push.acquisition) {
                inbox.deliver(Push { acquisition, ..push });
            }
            return;
        }
        match push.kind {
            PushKind::Granted(grant, proof) => {
                let Push { acquisition, at, .. } = push;
                if quorum.attempts.is_proven(acquisition, self.node, at, (&grant, proof)) {
                    quorum.granted_by(self.node, acquisition);
                } else {
                    quorum.handle_hint(acquisition);
                }
            }
            PushKind::Revoked => {
                quorum.attempts.revoked(push.acquisition, quorum.now());
                quorum.handle_hint(push.acquisition);
            }
            PushKind::Next(_) | PushKind::Contended => {}
        }
    }

    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool) {
        let Some(quorum) = self.quorum.upgrade() else { return };
        let Some(inbox) = quorum.inbox.upgrade() else { return };
        let is_elsewhere =
            |resource: &Resource| is_admission_queue(resource) && !quorum.admits_at(self.node, resource);
        inbox.reconnected(&|resource| concerns(resource) && !is_elsewhere(resource));
    }

    fn is_idle(&self) -> bool {
        let quorum = self.quorum.upgrade();
        quorum.and_then(|quorum| quorum.inbox.upgrade()).is_none_or(|inbox| inbox.is_idle())
    }

    fn shortest_ttl(&self) -> Option<Duration> {
        self.quorum.upgrade()?.inbox.upgrade()?.shortest_ttl()
    }
}

impl Redlock {
    /// A node whose caller connection can be used. Each node has one, or soon will; any of them shows whether the caller's
    /// runtime can be used.
    fn node_on_caller(&self) -> &dyn QuorumNode {
        let first = self.quorum.nodes.iter().find(|node| node.store.runs_on_caller());
        &*first.unwrap_or(&self.quorum.nodes[0]).store
    }

    fn first_node(&self) -> &dyn QuorumNode {
        &*self.quorum.nodes[0].store
    }
}

/// What sets a quorum apart, whether it is open or not.
pub const fn capabilities(max_ttl: Option<Duration>) -> Capabilities {
    Capabilities::new(POLL_INTERVALS).of_a_quorum(max_ttl)
}

impl Store for Redlock {
    fn capabilities(&self) -> Capabilities {
        capabilities(self.quorum.options.max_ttl)
    }

    fn foreign_keys(&self, servers: &[String]) -> Result<Arc<dyn ForeignKeys>, StoreError> {
        if servers.is_empty() {
            let what = "a lock on a quorum can only be bridged to a lock on several servers";
            return Err(StoreError::new(Failure::NotSent, what));
        }
        // The servers are others than those of the quorum.
        self.first_node().foreign_keys(servers)
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        let quorum = self.quorum.clone();
        let work = async move { quorum.run_one(call).await };
        run_on_runtime(self.node_on_caller(), work, || Err(StoreError::runtime_ended()))
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let count = batch.len();
        let ended = move || vec![Err(StoreError::runtime_ended()); count];
        run_on_runtime(self.node_on_caller(), self.quorum.clone().run(batch), ended)
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        let quorum = self.quorum.clone();
        run_on_runtime(self.first_node(), async move { quorum.list().await }, || {
            Err(StoreError::runtime_ended())
        })
    }

    fn shard(&self, resource: &Resource, command: &Command) -> u64 {
        match command {
            _ if is_admission_queue(resource) => 0,
            Command::Renew(_) => 1,
            // An attempt that waits for a slow node must not delay other locks.
            _ => 2 + u64::from(slot_of(resource)) % SHARDS,
        }
    }

    fn client_records(&self) -> Option<&dyn ClientRecords> {
        let is_kept = self.quorum.records().count() == self.quorum.nodes.len();
        is_kept.then_some(self)
    }

    fn voted_attempts(&self) -> Option<&dyn VotedAttempts> {
        Some(self)
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        Some(self)
    }
}

impl ClientRecords for Redlock {
    fn publish(&self, metadata: Arc<str>) {
        self.quorum.records().for_each(|records| records.publish(metadata.clone()));
    }

    fn await_published(&self, limit: Duration) -> BoxFuture<()> {
        let quorum = self.quorum.clone();
        let work = async move {
            join_all(quorum.records().map(|records| records.await_published(limit))).await;
        };
        self.node_on_caller().run_on_runtime(Box::pin(work))
    }

    fn add_to(&self, answers: Vec<Answer>) -> BoxFuture<Vec<Answer>> {
        let (quorum, unchanged) = (self.quorum.clone(), answers.clone());
        let work = async move { quorum.add_clients(answers).await };
        run_on_runtime(self.node_on_caller(), work, move || unchanged)
    }
}

impl VotedAttempts for Redlock {
    fn detach(&self, acquisition: Acquisition) -> Acquisition {
        self.quorum.attempts.detach(acquisition)
    }

    fn attach(&self, resource: &Arc<Resource>, request: Arc<Acquire>, token: Token) {
        self.quorum.attempts.attach(resource, request, token);
    }

    fn is_contended(&self, resource: &Resource) -> bool {
        self.quorum.is_contended(resource)
    }

    fn settle(&self) -> BoxFuture<bool> {
        Box::pin(self.quorum.clone().settle())
    }

    fn in_restart_grace(&self) -> bool {
        self.quorum.restart_grace_until.load(Ordering::Relaxed) > self.quorum.now().as_micros()
    }
}

impl Diagnose for Redlock {
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        let diagnosis = (self.diagnose)();
        run_on_runtime(self.first_node(), async move { Ok(diagnosis.await) }, || {
            Err(StoreError::runtime_ended())
        })
    }

    fn warnings(&self) -> Vec<String> {
        self.quorum.nodes.iter().flat_map(|node| node.warnings()).collect()
    }
}

/// Does this where the node's timers and sockets work, or returns something else if that runtime ends.
fn run_on_runtime<T: Send + 'static>(
    node: &dyn QuorumNode,
    work: impl Future<Output = T> + Send + 'static,
    otherwise: impl FnOnce() -> T + Send + 'static,
) -> BoxFuture<T> {
    let (tell, mut result) = oneshot::channel();
    let ended = node.run_on_runtime(Box::pin(async move { drop(tell.send(work.await)) }));
    Box::pin(async move {
        ended.await;
        result.try_recv().unwrap_or_else(|_| otherwise())
    })
}

fn same_server(first: &Node) -> String {
    format!("it is the same server as {}, whose votes would count twice", first.name)
}

#[cfg(test)]
mod tests;
