//! Releases leases and attempts at all nodes.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use leasehold_core::{
    Acquisition, Command, Effect, Failure, NodeReplies, NodeReply, Release, Reply, Resource, TOMBSTONE_TTL,
    Tally, quorum_of,
};
use leasehold_store::{Call, CallResult, StoreError};

use super::acquire::failure_without_quorum;
use super::attempts::{NodeAttempt, RequestCounts};
use super::counted_servers::CountedServers;
use super::gather::gather;
use super::limits::{SETTLE_INTERVAL, SETTLE_LIMIT};
use super::node::PendingRelease;
use super::{Quorum, STRAGGLER_GRACE, answer};

impl Quorum {
    pub(super) async fn release(self: &Arc<Self>, resource: Arc<Resource>, release: Release) -> CallResult {
        let until = (!release.tombstone.is_zero()).then(|| self.now() + release.tombstone);
        if until.is_some() {
            self.releases_pending.notify_one();
        }
        let Some(known) = self.attempts.release(release.acquisition, self.now()) else {
            self.attempts.released(release.acquisition, until);
            // No try has left anything at the nodes. NotHeld still needs a quorum that answers.
            self.call_all(&resource, Command::Inspect).await?;
            return answer(self.now(), Reply::NotHeld);
        };
        if known.request.wait.is_some() {
            // Other clients may wait, as this one did.
            self.note_contended(&known.resource);
        }
        let responses = FuturesUnordered::new();
        for node in 0..self.nodes.len() {
            let release = self.clone().release_node(node, &known, release.min_hold, false);
            responses.push(async move { (node, release.await) });
        }
        let mut replies = [NodeReplies::new(self.nodes.len())];
        let limit = self.node_timeout(known.request.ttl);
        let (mut servers, mut errors) = (CountedServers::default(), vec![None; self.nodes.len()]);
        let late = gather(&self.runtime, responses, limit, &mut replies, |replies, node, reply| {
            let not_counted = |why| StoreError::new(Failure::Unknown, why);
            let counted = reply.and_then(|reply: NodeReply| {
                let is_counted = reply != NodeReply::Failed;
                is_counted.then(|| servers.record(&self.nodes, node)).transpose().map_err(not_counted)?;
                Ok(reply)
            });
            replies[0].handle_reply(node, *counted.as_ref().unwrap_or(&NodeReply::Failed));
            errors[node] = counted.err();
        });
        self.runtime.drain(late.await);
        let [replies] = replies;
        let reply = match replies.poll_tally() {
            Some(Tally::Held { .. }) => Reply::Released,
            Some(Tally::NotHeld) if known.token.is_none() => Reply::Dequeued,
            Some(Tally::NotHeld) => Reply::NotHeld,
            // So few nodes have the lease that the lock is free. A minimum hold needs a majority that retains it.
            Some(Tally::Unknown) if replies.has_quorum() && release.min_hold.is_zero() => Reply::Released,
            // The release is sent again to nodes that did not answer, until the lease has expired there.
            Some(Tally::Unknown) | None => {
                let message = self.release_failure(&replies, &errors);
                self.releases_pending.notify_one();
                let failure = match failure_without_quorum(&errors) {
                    // Other nodes may have released it.
                    Failure::Transient(_) => Failure::Transient(Effect::Possible),
                    Failure::Permanent(_) => Failure::Permanent(Effect::Possible),
                    _ => Failure::Unknown,
                };
                return Err(StoreError::new(failure, message));
            }
        };
        self.attempts.released(release.acquisition, until);
        answer(self.now(), reply)
    }

    /// Waits until so few releases are outstanding that every other attempt can get a majority, and repeats the outstanding ones. Returns
    /// false at the limit.
    pub(super) async fn settle(self: Arc<Self>) -> bool {
        let settled = async {
            while self.keeps_a_lock() {
                self.runtime.sleep(SETTLE_INTERVAL).await;
            }
        };
        // A node that does not answer delays no other.
        let repeated = join_all(self.nodes.iter().map(async |node| {
            while self.keeps_a_lock() {
                node.clone().retry_pending_releases().await;
                self.runtime.sleep(SETTLE_INTERVAL).await;
            }
        }));
        let work = async {
            tokio::select! {
                biased;
                () = settled => {}
                _ = repeated => {}
            }
        };
        let _ = self.runtime.timeout(SETTLE_LIMIT, work).await;
        !self.keeps_a_lock()
    }

    pub(super) fn keeps_a_lock(&self) -> bool {
        let mut outstanding: BTreeSet<(Acquisition, usize)> = self.releasing().keys().copied().collect();
        for (node, to) in self.nodes.iter().enumerate() {
            outstanding.extend(to.unreleased().into_iter().map(|acquisition| (acquisition, node)));
        }
        let spare = self.nodes.len() - quorum_of(self.nodes.len());
        let mut nodes = BTreeMap::<Acquisition, usize>::new();
        for (acquisition, _) in outstanding {
            *nodes.entry(acquisition).or_default() += 1;
        }
        nodes.into_values().any(|nodes| nodes > spare)
    }

    fn releasing(&self) -> MutexGuard<'_, BTreeMap<(Acquisition, usize), usize>> {
        self.releasing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases at one node, and leaves a pending release if the node does not answer. With `may_have_nothing`, first waits
    /// for the node's unanswered acquires.
    pub(super) fn release_node(
        self: Arc<Self>,
        node: usize,
        known: &NodeAttempt,
        min_hold: Duration,
        may_have_nothing: bool,
    ) -> impl Future<Output = Result<NodeReply, StoreError>> + Send + use<> {
        let (resource, requests) = (known.resource.clone(), known.requests.clone());
        let is_attached = known.is_attached;
        let release = Release { min_hold, ..Release::now(known.acquisition) };
        // If this future is dropped before the answer, the release stays pending too.
        // No earlier acquire can leave anything that lasts longer.
        let until = self.now() + known.request.ttl + TOMBSTONE_TTL;
        let pending = PendingRelease { resource, release, until, requests: Some((requests.clone(), node)) };
        let mut guard = ReleaseGuard::new(self.clone(), node, pending);
        // Acquires of an attached lease that another client sent may arrive after this release, at a node with the lease too.
        let may_follow = is_attached || requests[node].get().unanswered > 0;
        if may_follow {
            guard.pending.release.tombstone = TOMBSTONE_TTL;
        }
        async move {
            if may_have_nothing {
                let _ = guard.quorum.runtime.timeout(STRAGGLER_GRACE, requests[node].all_answered()).await;
                if matches!(requests[node].get(), RequestCounts { unanswered: 0, keeps_something: false, .. })
                {
                    guard.confirm();
                    return Ok(NodeReply::NotHeld);
                }
            }
            let counts = requests[node].get();
            // An unanswered acquire usually arrives before this release. Only otherwise is a tombstone needed, which the store
            // must keep.
            let first = guard.send(if is_attached { TOMBSTONE_TTL } else { Duration::ZERO }).await?;
            let is_over = match first {
                NodeReply::Failed => return Ok(first),
                _ if is_attached => true,
                // The node released what its only acquire was granted.
                NodeReply::Held { .. } => counts.unanswered == 0 || counts.sent == 1,
                NodeReply::NotHeld => {
                    // The same of a queue entry.
                    let is_dequeued = requests[node].get().is_dequeued;
                    counts.unanswered == 0 || is_dequeued && counts.sent == 1
                }
            };
            if counts.unanswered > 0 {
                let _ = guard.quorum.runtime.timeout(STRAGGLER_GRACE, requests[node].all_answered()).await;
            }
            if is_over && requests[node].get().unanswered == 0 {
                guard.confirm();
                return Ok(first);
            }
            // A late acquire may have been granted since.
            let may_follow = requests[node].get().unanswered > 0;
            let tombstone = if may_follow { TOMBSTONE_TTL } else { Duration::ZERO };
            let second = guard.send(tombstone).await?;
            if second != NodeReply::Failed {
                guard.confirm();
            }
            Ok(if second == NodeReply::NotHeld { first } else { second })
        }
    }
}

/// A release that becomes pending unless the node confirms it.
struct ReleaseGuard {
    quorum: Arc<Quorum>,
    node: usize,
    pending: PendingRelease,
    is_confirmed: bool,
}

impl ReleaseGuard {
    fn new(quorum: Arc<Quorum>, node: usize, pending: PendingRelease) -> Self {
        *quorum.releasing().entry((pending.release.acquisition, node)).or_default() += 1;
        Self { quorum, node, pending, is_confirmed: false }
    }

    fn confirm(&mut self) {
        self.is_confirmed = true;
    }

    async fn send(&self, tombstone: Duration) -> Result<NodeReply, StoreError> {
        let PendingRelease { resource, release, .. } = &self.pending;
        let command = Command::Release(Release { tombstone, ..release.clone() });
        let answer =
            self.quorum.nodes[self.node].clone().call(Call::new(resource.clone(), command), None).await?;
        Ok(self.pending.handle_answer(&answer.reply))
    }
}

impl Drop for ReleaseGuard {
    fn drop(&mut self) {
        let acquisition = self.pending.release.acquisition;
        if !self.is_confirmed {
            self.quorum.nodes[self.node].add_pending_release(self.pending.clone());
            self.quorum.releases_pending.notify_one();
        }
        if let Entry::Occupied(mut count) = self.quorum.releasing().entry((acquisition, self.node)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}
