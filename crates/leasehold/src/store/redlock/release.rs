//! Releases leases and attempts at all nodes.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{
    Command, Failure, LocalTime, NodeReplies, NodeReply, Release, Reply, Resource, TOMBSTONE_TTL, Tally,
};
use tokio::time::{sleep, timeout};

use super::attempts::{NodeAttempt, RequestCounts};
use super::{Quorum, STRAGGLER_GRACE, answer};
use crate::engine::clock;
use crate::store::{CallResult, StoreError};

impl Quorum {
    pub(super) async fn release(self: &Arc<Self>, resource: Arc<Resource>, release: Release) -> CallResult {
        let until = (!release.tombstone.is_zero()).then(|| clock::local() + release.tombstone);
        if until.is_some() {
            self.releases_pending.notify_one();
        }
        let Some(known) = self.attempts.give_back(release.acquisition, until) else {
            // No try of it has left anything. Whoever gave up wants to know whether that is the word of a quorum.
            self.call_all(&resource, Command::Inspect).await?;
            return answer(clock::local(), Reply::NotHeld);
        };
        if known.request.wait.is_some() {
            // Others may wait as this client did.
            self.note_contended(&known.resource);
        }
        let mut replies = NodeReplies::new(self.nodes.len());
        let mut responses = FuturesUnordered::new();
        for node in 0..self.nodes.len() {
            let giving = self.clone().release_node(node, &known, release.min_hold, false);
            responses.push(async move { (node, giving.await) });
        }
        let mut limit = pin!(sleep(self.node_timeout(known.request.ttl)));
        let tally = loop {
            if let Some(tally) = replies.poll_tally() {
                break tally;
            }
            tokio::select! {
                biased;
                Some((node, reply)) = responses.next() => replies.handle_reply(node, reply),
                () = &mut limit => replies.handle_timeout(),
            }
        };
        if !responses.is_empty() {
            tokio::spawn(async move { while responses.next().await.is_some() {} });
        }
        let now = clock::local();
        match tally {
            Tally::Held { .. } => answer(now, Reply::Released),
            Tally::NotHeld => answer(now, Reply::NotHeld),
            Tally::Unknown if replies.has_quorum() => answer(now, Reply::Released),
            // Nodes that did not answer are told again until the lease is over there.
            Tally::Unknown => {
                let message = self.release_failure(&replies);
                Err(StoreError::new(Failure::Unknown, message))
            }
        }
    }

    /// Tells one node, and remembers it if it does not answer. If it may have nothing, that is waited for first.
    pub(super) fn release_node(
        self: Arc<Self>,
        node: usize,
        known: &NodeAttempt,
        min_hold: Duration,
        may_have_nothing: bool,
    ) -> impl Future<Output = NodeReply> + Send + use<> {
        let (resource, requests) = (known.resource.clone(), known.requests.clone());
        let release = Release { acquisition: known.acquisition, min_hold, tombstone: Duration::ZERO };
        // Nothing that was asked for before can last longer.
        let until = clock::local() + known.request.ttl + TOMBSTONE_TTL;
        // Dropped before it is answered, it is owed too.
        let mut guard =
            ReleaseGuard { quorum: self.clone(), node, resource, release, until, is_confirmed: false };
        if requests[node].get().unanswered > 0 {
            guard.release.tombstone = TOMBSTONE_TTL;
        }
        async move {
            if may_have_nothing {
                let _ = timeout(STRAGGLER_GRACE, requests[node].all_answered()).await;
                if matches!(requests[node].get(), RequestCounts { unanswered: 0, keeps_something: false, .. })
                {
                    guard.confirm();
                    return NodeReply::NotHeld;
                }
            }
            let counts = requests[node].get();
            // What is not answered yet mostly is on its way, ahead of this. A tombstone, which the store would have to keep,
            // is for what is not.
            let first = guard.send(Duration::ZERO).await;
            let is_over = match first {
                NodeReply::Failed => return first,
                // What the node gave back is what it was asked for, and it was asked only once.
                NodeReply::Held { .. } => counts.unanswered == 0 || counts.sent == 1,
                NodeReply::NotHeld => counts.unanswered == 0,
            };
            if counts.unanswered > 0 {
                let _ = timeout(STRAGGLER_GRACE, requests[node].all_answered()).await;
            }
            if is_over && requests[node].get().unanswered == 0 {
                guard.confirm();
                return first;
            }
            // It may have been granted since.
            let tombstone = if requests[node].get().unanswered > 0 { TOMBSTONE_TTL } else { Duration::ZERO };
            let second = guard.send(tombstone).await;
            if second != NodeReply::Failed {
                guard.confirm();
            }
            if second == NodeReply::NotHeld { first } else { second }
        }
    }
}

/// A release that is owed unless the node has answered it.
struct ReleaseGuard {
    quorum: Arc<Quorum>,
    node: usize,
    resource: Arc<Resource>,
    release: Release,
    until: LocalTime,
    is_confirmed: bool,
}

impl ReleaseGuard {
    fn confirm(&mut self) {
        self.is_confirmed = true;
    }

    async fn send(&self, tombstone: Duration) -> NodeReply {
        let command = Command::Release(Release { tombstone, ..self.release.clone() });
        match self.quorum.nodes[self.node].clone().call_one(self.resource.clone(), command, None).await {
            Ok(answer) if answer.reply == Reply::Released => NodeReply::Held { valid_for: Duration::ZERO },
            Ok(_) => NodeReply::NotHeld,
            Err(_) => NodeReply::Failed,
        }
    }
}

impl Drop for ReleaseGuard {
    fn drop(&mut self) {
        if !self.is_confirmed {
            self.quorum.nodes[self.node].add_pending_release(
                self.resource.clone(),
                self.release.clone(),
                self.until,
            );
            self.quorum.releases_pending.notify_one();
        }
    }
}
