//! Redlock: several independent servers vote; a lease needs a majority.
//!
//! Every command goes to all nodes at once, and completes as soon as no further reply can change the result
//! (`leasehold_core::Round`, `leasehold_core::Words`); nobody waits for a slow node, whose late word is still heard. A try that
//! fails is given back at all nodes before the next one. An attempt is known to the nodes by another number in each try
//! (`leases`), and what a node may not have heard of is told it again (`node`).
//!
//! Whoever waits has a place in the queue of each node, and looks again once more than half of them have told it that it is
//! granted. Two nodes may see two waiters in two orders, and each waiter would be granted a part; so only one waits there
//! at a time, and the others wait for their turn to do so, in a queue that one node has (`Kind::Admission`, and `crate::lock`).
//! That queue decides nothing, so it may be lost: whoever comes to have a part gives it back before long, and tries again
//! after a random pause.

mod acquire;
mod admission_queue;
mod admission_state;
mod attempts;
mod doctor;
mod inspect;
mod limits;
mod node;
mod release;
mod renew;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::{
    Acquisition, Answer, ClientId, Command, LocalTime, Push, PushKind, Reply, Resource, StoreTime, quorum_of,
};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::redis::{Redis, Voting, runtime_ended, slot_of};
use super::{Batch, BoxFuture, CallResult, Capabilities, Inbox, Store, StoreError, missing_response, only};
use crate::diagnostics::Diagnosis;
use crate::engine::clock;
use crate::error::{Error, ErrorKind};
use crate::url::RedlockUrl;
use admission_state::{AdmissionNodes, ContendedLocks, is_admission_queue};
use attempts::Attempts;
use limits::{
    GATHER_WINDOW, MAX_NODE_TIMEOUT, MIN_NODE_TIMEOUT, POLL_INTERVALS, RELEASE_RETRY_INTERVAL, SHARDS,
    SLOW_ROUND_TRIPS, STRAGGLER_GRACE,
};
use node::Node;

/// A quorum store.
pub(crate) struct Redlock {
    quorum: Arc<Quorum>,
    release_retrier: AbortHandle,
}

/// Shared state of all commands.
struct Quorum {
    nodes: Vec<Arc<Node>>,
    /// What the nodes tell comes here, for as long as they are there.
    _inboxes: Vec<Arc<dyn Inbox>>,
    attempts: Attempts,
    /// Whether a token has to be known to a quorum before it counts.
    is_fenced: bool,
    /// How long a node may take, where the caller has said that.
    node_timeout: Option<Duration>,
    /// The longest ttl, where nodes abstain after they may have forgotten something.
    max_ttl: Option<Duration>,
    inbox: Weak<dyn Inbox>,
    /// The client's own.
    runtime: Handle,
    admission_nodes: Mutex<AdmissionNodes>,
    contended: Mutex<ContendedLocks>,
    /// Some node may not have heard of a release.
    releases_pending: Notify,
    /// By the local clock, in microseconds: until then too many nodes abstain.
    restart_grace_until: AtomicU64,
}

/// What one node tells this client unasked.
struct NodeInbox {
    quorum: Weak<Quorum>,
    node: usize,
}

impl Redlock {
    /// Connects to all nodes, and waits until it is known whether there is a quorum of them. Runs on the client's own
    /// runtime.
    pub(crate) async fn open(
        url: &RedlockUrl,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, Error> {
        let mut failed = None;
        let quorum = Arc::new_cyclic(|quorum: &Weak<Quorum>| {
            let (mut nodes, mut inboxes) = (Vec::new(), Vec::new());
            for (index, place) in url.nodes.iter().enumerate() {
                let inbox: Arc<dyn Inbox> = Arc::new(NodeInbox { quorum: quorum.clone(), node: index });
                let voting = Voting { abstains_for: url.max_ttl };
                let weak = Arc::downgrade(&inbox);
                inboxes.push(inbox);
                match Redis::open_voter(place, voting, client, weak, caller.clone()) {
                    Ok(store) => nodes.push(Arc::new(Node::new(store, place.to_string()))),
                    Err(error) => failed = failed.take().or(Some(error)),
                }
            }
            Quorum {
                attempts: Attempts::new(client, nodes.len()),
                nodes,
                _inboxes: inboxes,
                is_fenced: url.is_fenced,
                node_timeout: url.node_timeout,
                max_ttl: url.max_ttl,
                inbox,
                runtime: Handle::current(),
                admission_nodes: Mutex::default(),
                contended: Mutex::default(),
                releases_pending: Notify::new(),
                restart_grace_until: AtomicU64::new(0),
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        quorum.connect(url).await?;
        let release_retrier = tokio::spawn(quorum.clone().retry_releases()).abort_handle();
        Ok(Arc::new(Self { quorum, release_retrier }))
    }
}

impl Drop for Redlock {
    fn drop(&mut self) {
        self.release_retrier.abort();
    }
}

impl Quorum {
    /// Waits until a quorum is there, or can't be. The others have as long again, so that the first lease does not stand on a
    /// bare quorum, and its waiters do not queue elsewhere, only because a node was a little later.
    async fn connect(self: &Arc<Self>, url: &RedlockUrl) -> Result<(), Error> {
        let began = clock::local();
        let mut waiting = futures_util::stream::FuturesUnordered::new();
        for (index, node) in self.nodes.iter().enumerate() {
            waiting.push(async move {
                let connected = node.store.await_connected().await;
                if connected.is_ok() {
                    node.clone().learn_clock().await;
                }
                (index, connected)
            });
        }
        let (mut there, mut errors) = (0, Vec::new());
        while let Some((index, connected)) = futures_util::StreamExt::next(&mut waiting).await {
            match connected {
                Ok(()) => there += 1,
                Err(error) => errors.push(format!("{}: {}", self.nodes[index].name, error.message)),
            }
            if there >= quorum_of(self.nodes.len()) {
                break;
            }
        }
        let as_long_again = clock::local().since(began).max(STRAGGLER_GRACE);
        let others = futures_util::StreamExt::count(&mut waiting);
        let _ = tokio::time::timeout(as_long_again, others).await;
        drop(waiting);
        if there < quorum_of(self.nodes.len()) {
            let (nodes, needed) = (self.nodes.len(), quorum_of(self.nodes.len()));
            let what =
                format!("{there} of {nodes} nodes are there, {needed} are needed: {}", errors.join("; "));
            return Err(Error::new(ErrorKind::Unavailable, format!("{url}: {what}")));
        }
        for (node, duplicate) in self.nodes.iter().zip(self.duplicate_nodes()) {
            if let Some(what) = duplicate {
                return Err(Error::new(ErrorKind::Invalid, format!("{url}: {}: {what}", node.name)));
            }
        }
        Ok(())
    }

    /// By node: what is wrong with it where it is the same server as one before it. That may turn out at any time, since nodes
    /// may come later, or lead elsewhere when they are connected anew.
    fn duplicate_nodes(&self) -> Vec<Option<String>> {
        let run_ids: Vec<Option<Arc<str>>> = self.nodes.iter().map(|node| node.store.run_id()).collect();
        let duplicate = |index: usize| {
            let first = run_ids[..index].iter().position(|life| life.is_some() && *life == run_ids[index])?;
            let first = &self.nodes[first].name;
            Some(format!("it is the same server as {first}, whose votes would count twice"))
        };
        (0..run_ids.len()).map(duplicate).collect()
    }

    /// Repeats what nodes have not answered, until they have or it does not matter any more.
    async fn retry_releases(self: Arc<Self>) {
        loop {
            self.releases_pending.notified().await;
            loop {
                tokio::time::sleep(RELEASE_RETRY_INTERVAL).await;
                self.attempts.sweep(clock::local());
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

    /// A node has granted a lease to an attempt that waits for it: once a quorum has, or soon, it looks again.
    fn granted_by(self: &Arc<Self>, node: usize, acquisition: Acquisition) {
        match self.attempts.granted_by(acquisition, node) {
            Some(count) if count >= quorum_of(self.nodes.len()) => self.request_recheck(acquisition),
            Some(1) => {
                let quorum = self.clone();
                self.runtime.spawn(async move {
                    tokio::time::sleep(GATHER_WINDOW).await;
                    quorum.request_recheck(acquisition);
                });
            }
            _ => {}
        }
    }

    /// What one node tells decides nothing, but is a reason to look.
    fn request_recheck(&self, acquisition: Acquisition) {
        if let (Some(inbox), Some(attempt)) = (self.inbox.upgrade(), self.attempts.attempt_of(acquisition)) {
            let at = StoreTime::from_micros(clock::local().as_micros());
            inbox.deliver(Push { acquisition: attempt, at, kind: PushKind::Revoked });
        }
    }

    /// How long the nodes are waited for.
    fn node_timeout(&self, ttl: Duration) -> Duration {
        self.node_timeout.unwrap_or_else(|| {
            let usual = self.round_trip() * SLOW_ROUND_TRIPS;
            let share = (ttl / 10).clamp(MIN_NODE_TIMEOUT, MAX_NODE_TIMEOUT);
            share.max(usual).min(ttl / 3)
        })
    }

    /// How long a majority takes to answer.
    fn round_trip(&self) -> Duration {
        let mut round_trips: Vec<_> = self.nodes.iter().map(|node| node.round_trip()).collect();
        round_trips.sort_unstable();
        round_trips[quorum_of(self.nodes.len()) - 1]
    }

    /// The runtime of the caller, or of the client's thread, where this runs.
    async fn run(self: Arc<Self>, batch: Vec<(Arc<Resource>, Command)>) -> Vec<CallResult> {
        if let [(resource, command)] = &batch[..] {
            return vec![self.run_one(resource.clone(), command.clone()).await];
        }
        let renewals: Vec<usize> = (0..batch.len())
            .filter(|at| matches!(batch[*at].1, Command::Renew(_)) && !is_admission_queue(&batch[*at].0))
            .collect();
        let renewed = async {
            if renewals.is_empty() {
                Vec::new()
            } else {
                self.renew(renewals.iter().map(|at| batch[*at].clone()).collect()).await
            }
        };
        let others: Vec<usize> = (0..batch.len()).filter(|at| !renewals.contains(at)).collect();
        let answered =
            join_all(others.iter().map(|at| self.run_one(batch[*at].0.clone(), batch[*at].1.clone())));
        let (renewed, answered) = futures_util::future::join(renewed, answered).await;
        let mut answers: Vec<Option<CallResult>> = batch.iter().map(|_| None).collect();
        for (at, answer) in renewals.into_iter().zip(renewed).chain(others.into_iter().zip(answered)) {
            answers[at] = Some(answer);
        }
        answers.into_iter().map(|answer| answer.unwrap_or_else(missing_response)).collect()
    }

    async fn run_one(self: &Arc<Self>, resource: Arc<Resource>, command: Command) -> CallResult {
        if is_admission_queue(&resource) {
            return self.call_admission_queue(resource, command).await;
        }
        match command {
            Command::Acquire(acquire) => self.acquire(resource, acquire).await,
            Command::Renew(_) => only(self.renew(vec![(resource, command)]).await),
            Command::Release(release) => self.release(resource, release).await,
            Command::Inspect => self.inspect(resource).await,
            Command::ForceRelease => self.force_release(resource).await,
        }
    }
}

/// By a clock that all commands to this store are answered by, though the nodes have others.
fn answer(now: LocalTime, reply: Reply) -> CallResult {
    Ok(Answer { at: StoreTime::from_micros(now.as_micros()), reply })
}

impl Inbox for NodeInbox {
    fn deliver(&self, push: Push) {
        let Some(quorum) = self.quorum.upgrade() else { return };
        let Some(inbox) = quorum.inbox.upgrade() else { return };
        if !Attempts::is_node_attempt(push.acquisition) {
            return inbox.deliver(push);
        }
        match push.kind {
            PushKind::Granted(_) => quorum.granted_by(self.node, push.acquisition),
            PushKind::Revoked => {
                quorum.attempts.revoked(push.acquisition);
                quorum.request_recheck(push.acquisition);
            }
            PushKind::Next(_) | PushKind::Contended => {}
        }
    }

    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool) {
        let Some(quorum) = self.quorum.upgrade() else { return };
        let Some(inbox) = quorum.inbox.upgrade() else { return };
        let is_elsewhere = |resource: &Resource| {
            is_admission_queue(resource) && quorum.admission_node(resource) != self.node
        };
        inbox.reconnected(&|resource| concerns(resource) && !is_elsewhere(resource));
    }

    fn shortest_ttl(&self) -> Option<Duration> {
        self.quorum.upgrade()?.inbox.upgrade()?.shortest_ttl()
    }
}

impl Redlock {
    /// Each node has a connection of the caller's, or soon will; any of them says whether its runtime can be used.
    fn node_on_caller(&self) -> &Redis {
        let first = self.quorum.nodes.iter().find(|node| node.store.runs_on_caller());
        &first.unwrap_or(&self.quorum.nodes[0]).store
    }
}

impl Store for Redlock {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            // Two permits over three nodes could have three holders, and what a reader knows, or an owner's other task,
            // another one may not.
            is_exclusive_only: true,
            needs_admission_queue: true,
            max_ttl: self.quorum.max_ttl,
            ..Capabilities::new(POLL_INTERVALS)
        }
    }

    fn call(&self, resource: Arc<Resource>, command: Command, _replicas: u32) -> BoxFuture<CallResult> {
        let quorum = self.quorum.clone();
        self.node_on_caller()
            .run_on_runtime(async move { quorum.run_one(resource, command).await }, || Err(runtime_ended()))
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let count = batch.len();
        let ended = move || vec![Err(runtime_ended()); count];
        self.node_on_caller().run_on_runtime(self.quorum.clone().run(batch), ended)
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        let quorum = self.quorum.clone();
        self.quorum.nodes[0].store.run_on_runtime(async move { quorum.list().await }, || Err(runtime_ended()))
    }

    fn is_contended(&self, resource: &Resource) -> bool {
        self.quorum.is_contended(resource)
    }

    fn in_restart_grace(&self) -> bool {
        self.quorum.restart_grace_until.load(Ordering::Relaxed) > clock::local().as_micros()
    }

    fn shard(&self, resource: &Resource, command: &Command) -> u64 {
        match command {
            _ if is_admission_queue(resource) => 0,
            Command::Renew(_) => 1,
            // An attempt that is undecided until a node's time is over delays no other lock's.
            _ => 2 + u64::from(slot_of(resource)) % SHARDS,
        }
    }

    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        let quorum = self.quorum.clone();
        self.quorum.nodes[0]
            .store
            .run_on_runtime(async move { Ok(quorum.diagnose().await) }, || Err(runtime_ended()))
    }

    fn warnings(&self) -> Vec<String> {
        self.quorum.nodes.iter().flat_map(|node| node.warnings()).collect()
    }
}

#[cfg(test)]
mod tests;
