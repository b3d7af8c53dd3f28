//! Redlock: several servers that know nothing of each other vote, and a lease is what more than half of them have granted.
//!
//! Every command goes to all nodes at the same time, and has its answer as soon as no further word could change it
//! (`leasehold_core::Round`, `leasehold_core::Words`); nobody waits for a slow node, whose late word is still heard. A try that
//! fails is given back at all nodes before the next one. An attempt is known to the nodes by another number in each try
//! (`leases`), and what a node may not have heard of is told it again (`node`).
//!
//! Whoever waits has a place in the queue of each node, and looks again once more than half of them have told it that it is
//! granted. Two nodes may see two waiters in two orders, and each waiter would be granted a part; so only one waits there
//! at a time, and the others wait for their turn to do so, in a queue that one node has (`Kind::Queue`, and `crate::lock`).
//! That queue decides nothing, so it may be lost: whoever comes to have a part gives it back before long, and tries again
//! after a random pause.

mod acquire;
mod admission_queue;
mod attempts;
mod doctor;
mod inspect;
mod node;
mod renew;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::{
    Acquisition, Answer, ClientId, Command, Failure, Kind, LocalTime, Push, PushKind, Reply, Resource,
    StoreTime, quorum_of,
};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::redis::{Redis, Voting, slot_of};
use super::{Answered, Inbox, Pending, Rhythm, Store, StoreError};
use crate::diagnostics::Diagnosis;
use crate::engine::clock;
use crate::error::{Error, ErrorKind};
use crate::url::RedlockUrl;
use admission_queue::{Contended, Turns, is_queue};
use attempts::Leases;
use node::Node;

/// The shortest time that a node is given to answer.
const SHORTEST_LIMIT: Duration = Duration::from_millis(100);

/// The longest, as long as nothing else is known of it.
const LONGEST_LIMIT: Duration = Duration::from_secs(1);

/// A node that takes this many of its usual round trips is slow.
const ROUND_TRIPS: u32 = 8;

/// How long after the first node's word the others' are waited for.
const MUSTER: Duration = Duration::from_millis(20);

/// So much later than the others a node may be for no reason: longer than the answers on one connection are apart.
const LATE_BY: Duration = Duration::from_millis(10);

/// How often a release that was not answered is sent again.
const SETTLE_EVERY: Duration = Duration::from_millis(200);

/// Over so many batches attempts at different locks are spread.
const SHARDS: u64 = 64;

const RHYTHM: Rhythm = Rhythm { look_again: Duration::from_secs(5), entry_ttl: Duration::from_secs(20) };

/// Several servers that vote.
pub(crate) struct Redlock {
    quorum: Arc<Quorum>,
    settler: AbortHandle,
}

/// What the commands under way share.
struct Quorum {
    nodes: Vec<Arc<Node>>,
    /// What the nodes tell comes here, for as long as they are there.
    _inboxes: Vec<Arc<dyn Inbox>>,
    leases: Leases,
    /// Whether a token has to be known to a quorum before it counts.
    is_fenced: bool,
    /// How long a node may take, where the caller has said that.
    node_timeout: Option<Duration>,
    /// The longest ttl, where nodes abstain after they may have forgotten something.
    max_ttl: Option<Duration>,
    inbox: Weak<dyn Inbox>,
    /// The client's own.
    runtime: Handle,
    turns: Mutex<Turns>,
    contended: Mutex<Contended>,
    /// Some node may not have heard of a release.
    in_debt: Notify,
    /// By the local clock, in microseconds: until then too many nodes abstain.
    young_until: AtomicU64,
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
                leases: Leases::new(client, nodes.len()),
                nodes,
                _inboxes: inboxes,
                is_fenced: url.is_fenced,
                node_timeout: url.node_timeout,
                max_ttl: url.max_ttl,
                inbox,
                runtime: Handle::current(),
                turns: Mutex::default(),
                contended: Mutex::default(),
                in_debt: Notify::new(),
                young_until: AtomicU64::new(0),
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        quorum.connect(url).await?;
        let settler = tokio::spawn(quorum.clone().keep_settling()).abort_handle();
        Ok(Arc::new(Self { quorum, settler }))
    }
}

impl Drop for Redlock {
    fn drop(&mut self) {
        self.settler.abort();
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
                let is_there = node.store.is_there().await;
                if is_there.is_ok() {
                    node.clone().learn_clock().await;
                }
                (index, is_there)
            });
        }
        let (mut there, mut errors) = (0, Vec::new());
        while let Some((index, is_there)) = futures_util::StreamExt::next(&mut waiting).await {
            match is_there {
                Ok(()) => there += 1,
                Err(error) => errors.push(format!("{}: {}", self.nodes[index].name, error.message)),
            }
            if there >= quorum_of(self.nodes.len()) {
                break;
            }
        }
        let as_long_again = clock::local().since(began).max(LATE_BY);
        let others = futures_util::StreamExt::count(&mut waiting);
        let _ = tokio::time::timeout(as_long_again, others).await;
        drop(waiting);
        if there < quorum_of(self.nodes.len()) {
            let (nodes, needed) = (self.nodes.len(), quorum_of(self.nodes.len()));
            let what =
                format!("{there} of {nodes} nodes are there, {needed} are needed: {}", errors.join("; "));
            return Err(Error::new(ErrorKind::Unavailable, format!("{url}: {what}")));
        }
        for (node, double) in self.nodes.iter().zip(self.doubles()) {
            if let Some(what) = double {
                return Err(Error::new(ErrorKind::Invalid, format!("{url}: {}: {what}", node.name)));
            }
        }
        Ok(())
    }

    /// By node: what is wrong with it where it is the same server as one before it. That may turn out at any time, since nodes
    /// may come later, or lead elsewhere when they are connected anew.
    fn doubles(&self) -> Vec<Option<String>> {
        let lives: Vec<Option<Arc<str>>> = self.nodes.iter().map(|node| node.store.life()).collect();
        let double = |index: usize| {
            let first = lives[..index].iter().position(|life| life.is_some() && *life == lives[index])?;
            let first = &self.nodes[first].name;
            Some(format!("it is the same server as {first}, whose votes would count twice"))
        };
        (0..lives.len()).map(double).collect()
    }

    /// Repeats what nodes have not answered, until they have or it does not matter any more.
    async fn keep_settling(self: Arc<Self>) {
        loop {
            self.in_debt.notified().await;
            loop {
                tokio::time::sleep(SETTLE_EVERY).await;
                self.leases.sweep(clock::local());
                let in_debt: Vec<Arc<Node>> =
                    self.nodes.iter().filter(|node| node.is_in_debt()).cloned().collect();
                if in_debt.is_empty() && !self.leases.is_to_be_swept() {
                    break;
                }
                // A node that does not answer delays no other for longer than one answer may take.
                join_all(in_debt.into_iter().map(Node::settle)).await;
            }
        }
    }

    /// A node has granted a lease to an attempt that waits for it: once a quorum has, or soon, it looks again.
    fn granted_by(self: &Arc<Self>, node: usize, acquisition: Acquisition) {
        match self.leases.granted_by(acquisition, node) {
            Some(count) if count >= quorum_of(self.nodes.len()) => self.look(acquisition),
            Some(1) => {
                let quorum = self.clone();
                self.runtime.spawn(async move {
                    tokio::time::sleep(MUSTER).await;
                    quorum.look(acquisition);
                });
            }
            _ => {}
        }
    }

    /// What one node tells decides nothing, but is a reason to look.
    fn look(&self, acquisition: Acquisition) {
        if let (Some(inbox), Some(attempt)) = (self.inbox.upgrade(), self.leases.attempt_of(acquisition)) {
            let at = StoreTime::from_micros(clock::local().as_micros());
            inbox.deliver(Push { acquisition: attempt, at, kind: PushKind::Revoked });
        }
    }

    /// How long the nodes are waited for.
    fn limit(&self, ttl: Duration) -> Duration {
        self.node_timeout.unwrap_or_else(|| {
            let usual = self.round_trip() * ROUND_TRIPS;
            let share = (ttl / 10).clamp(SHORTEST_LIMIT, LONGEST_LIMIT);
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
    async fn run(self: Arc<Self>, batch: Vec<(Arc<Resource>, Command)>) -> Vec<Answered> {
        if let [(resource, command)] = &batch[..] {
            return vec![self.run_one(resource.clone(), command.clone()).await];
        }
        let renewals: Vec<usize> = (0..batch.len())
            .filter(|at| matches!(batch[*at].1, Command::Renew(_)) && !is_queue(&batch[*at].0))
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
        let mut answers: Vec<Option<Answered>> = batch.iter().map(|_| None).collect();
        for (at, answer) in renewals.into_iter().zip(renewed).chain(others.into_iter().zip(answered)) {
            answers[at] = Some(answer);
        }
        answers.into_iter().map(|answer| answer.unwrap_or_else(crate::handle::missing_response)).collect()
    }

    async fn run_one(self: &Arc<Self>, resource: Arc<Resource>, command: Command) -> Answered {
        if is_queue(&resource) {
            return self.call_queue(resource, command).await;
        }
        match command {
            Command::Acquire(acquire) => self.acquire(resource, acquire).await,
            Command::Renew(_) => self
                .renew(vec![(resource, command)])
                .await
                .pop()
                .unwrap_or_else(crate::handle::missing_response),
            Command::Release(release) => self.release(resource, release).await,
            Command::Inspect => self.inspect(resource).await,
            Command::ForceRelease => self.force_release(resource).await,
        }
    }
}

/// By a clock that all commands to this store are answered by, though the nodes have others.
fn answer(now: LocalTime, reply: Reply) -> Answered {
    Ok(Answer { at: StoreTime::from_micros(now.as_micros()), reply })
}

impl Inbox for NodeInbox {
    fn deliver(&self, push: Push) {
        let Some(quorum) = self.quorum.upgrade() else { return };
        let Some(inbox) = quorum.inbox.upgrade() else { return };
        if !Leases::is_try(push.acquisition) {
            return inbox.deliver(push);
        }
        match push.kind {
            PushKind::Granted(_) => quorum.granted_by(self.node, push.acquisition),
            PushKind::Revoked => {
                quorum.leases.revoked(push.acquisition);
                quorum.look(push.acquisition);
            }
            PushKind::Next(_) | PushKind::Wanted => {}
        }
    }

    fn reconnected(&self, concerns: &dyn Fn(&Resource) -> bool) {
        let Some(quorum) = self.quorum.upgrade() else { return };
        let Some(inbox) = quorum.inbox.upgrade() else { return };
        let is_elsewhere =
            |resource: &Resource| is_queue(resource) && quorum.queue_node(resource) != self.node;
        inbox.reconnected(&|resource| concerns(resource) && !is_elsewhere(resource));
    }

    fn shortest_ttl(&self) -> Option<Duration> {
        self.quorum.upgrade()?.inbox.upgrade()?.shortest_ttl()
    }
}

impl Store for Redlock {
    fn call_now(&self, _resource: &Resource, _command: &Command) -> Option<Answered> {
        None
    }

    fn call(&self, batch: Vec<(Arc<Resource>, Command)>) -> Pending<Vec<Answered>> {
        let (quorum, count) = (self.quorum.clone(), batch.len());
        let ended = move || {
            let message = "the runtime that the command was sent from has ended".to_owned();
            vec![Err(StoreError { failure: Failure::Unknown, message }); count]
        };
        // Each node has a connection of the caller's, or soon will; any of them says whether its runtime can be used.
        let first = self.quorum.nodes.iter().find(|node| node.store.is_callers());
        first.unwrap_or(&self.quorum.nodes[0]).store.perform(quorum.run(batch), ended)
    }

    fn list(&self) -> Pending<Result<Vec<Resource>, StoreError>> {
        let quorum = self.quorum.clone();
        self.quorum.nodes[0].store.perform(async move { quorum.list().await }, || {
            let message = "the runtime that the command was sent from has ended".to_owned();
            Err(StoreError { failure: Failure::Unknown, message })
        })
    }

    fn rhythm(&self) -> Rhythm {
        RHYTHM
    }

    fn has_turns(&self) -> bool {
        true
    }

    fn is_contended(&self, resource: &Resource) -> bool {
        self.quorum.is_contended(resource)
    }

    fn is_young(&self) -> bool {
        self.quorum.young_until.load(Ordering::Relaxed) > clock::local().as_micros()
    }

    fn bears(&self, kind: Kind, is_owned: bool) -> bool {
        // Two permits over three nodes could have three holders, and what a reader knows, or an owner's other task, another
        // one may not.
        matches!(kind, Kind::Mutex | Kind::Election | Kind::Queue) && !is_owned
    }

    fn max_ttl(&self) -> Option<Duration> {
        self.quorum.max_ttl
    }

    fn shard(&self, resource: &Resource, command: &Command) -> u64 {
        match command {
            _ if is_queue(resource) => 0,
            Command::Renew(_) => 1,
            // An attempt that is undecided until a node's time is over delays no other lock's.
            _ => 2 + u64::from(slot_of(resource)) % SHARDS,
        }
    }

    fn diagnose(&self) -> Pending<Result<Diagnosis, StoreError>> {
        let quorum = self.quorum.clone();
        self.quorum.nodes[0].store.perform(async move { Ok(quorum.diagnose().await) }, || {
            let message = "the runtime that the command was sent from has ended".to_owned();
            Err(StoreError { failure: Failure::Unknown, message })
        })
    }

    fn warnings(&self) -> Vec<String> {
        self.quorum.nodes.iter().flat_map(|node| node.warnings()).collect()
    }
}

#[cfg(test)]
mod tests;
