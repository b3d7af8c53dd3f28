//! The admission queue of each lock, at one node: its head may queue at all nodes. Admission is not a lock.

use std::sync::{Arc, MutexGuard, PoisonError};

use futures_util::future::join_all;
use leasehold_core::{Acquire, Acquisition, Command, Failure, Release, Renew, Resource, TOMBSTONE_TTL};
use leasehold_redis_protocol::slot_of;
use leasehold_store::{Call, CallResult, StoreError};

use super::Quorum;
use super::admission_state::{AdmissionNodes, ContendedLocks, is_admission_queue};
use super::limits::{ADMISSION_CHECK_INTERVAL, POLL_INTERVALS};
use super::node::PendingRelease;

impl Quorum {
    /// Records that other clients hold this lock or may wait for it.
    pub(super) fn note_contended(&self, resource: &Arc<Resource>) {
        self.contended().note(resource, self.now());
    }

    pub(super) fn is_contended(&self, resource: &Resource) -> bool {
        self.contended().has(resource, self.now())
    }

    fn contended(&self) -> MutexGuard<'_, ContendedLocks> {
        self.contended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a command of the admission queue, at the first node in the order that the lock's name decides which is not passed over.
    ///
    /// A waiter whose node is passed over queues where the others do; a release goes to the node that granted.
    pub(super) async fn call_admission_queue(
        self: &Arc<Self>,
        resource: Arc<Resource>,
        command: Command,
    ) -> CallResult {
        let attempt = match &command {
            Command::Acquire(acquire) => acquire.acquisition,
            Command::Renew(renew) => renew.acquisition,
            Command::Release(release) => release.acquisition,
            Command::Inspect | Command::ForceRelease => {
                let node = self.admission_node(&resource);
                return self.nodes[node].clone().call(Call::new(resource, command), None).await;
            }
        };
        // An attempt moves on at most once to each node.
        for _ in 1..self.nodes.len() {
            let answered = self.call_queue_of(attempt, &resource, &command).await;
            if let (Command::Acquire(_), Err(error)) = (&command, &answered)
                && error.failure == Failure::Unknown
                && self.has_to_leave(attempt, &resource)
            {
                continue;
            }
            return answered;
        }
        self.call_queue_of(attempt, &resource, &command).await
    }

    /// Sends a command to the node at which the attempt is, or goes. An error if the node is passed over before it has answered.
    async fn call_queue_of(
        self: &Arc<Self>,
        attempt: Acquisition,
        resource: &Arc<Resource>,
        command: &Command,
    ) -> CallResult {
        let known = self.admission_nodes().route(attempt).map(|route| (route.node, route.acquisition));
        let (node, acquisition) = match (command, known) {
            (Command::Acquire(_), known) => {
                let stays = known.filter(|(node, _)| !self.is_passed_over(*node));
                let node = stays.map_or_else(|| self.admission_node(resource), |(node, _)| node);
                (node, self.send_to(attempt, node, resource))
            }
            (_, Some(route)) => route,
            (_, None) => (self.admission_node(resource), attempt),
        };
        let sent = with_acquisition(command.clone(), acquisition);
        let call = self.nodes[node].clone().call(Call::new(resource.clone(), sent), None);
        let answered = self.unless_passed_over(node, resource, call).await;
        self.admission_nodes().handle_answered(attempt, (node, acquisition), command, &answered, self.now());
        answered
    }

    /// The answer of an admission queue's node; an error if the node is silent and there is another one. The node may have received the
    /// command.
    async fn unless_passed_over(
        &self,
        node: usize,
        resource: &Resource,
        call: impl Future<Output = CallResult> + Send + 'static,
    ) -> CallResult {
        let mut call = Box::pin(call);
        loop {
            match self.runtime.timeout(self.patience(), &mut call).await {
                Some(answered) => return answered,
                None if self.is_passed_over(node) && self.admission_node(resource) != node => {
                    // Its answer shows whether the node is still silent.
                    self.runtime.spawn_here(async move { drop(call.await) });
                    let message = format!("{}: it does not answer", self.nodes[node].name);
                    return Err(StoreError::new(Failure::Unknown, message));
                }
                None => {}
            }
        }
    }

    /// Whether an attempt is at a node that is passed over, and can go to another one.
    fn has_to_leave(&self, attempt: Acquisition, resource: &Resource) -> bool {
        let node = self.admission_nodes().route(attempt).map(|route| route.node);
        node.is_some_and(|node| self.is_passed_over(node) && self.admission_node(resource) != node)
    }

    /// Whether a node is not used for admission: it is not connected, silent, or much slower than the others.
    pub(super) fn is_passed_over(&self, node: usize) -> bool {
        let to = &self.nodes[node];
        !to.store.is_connected()
            || to.silent_for(self.now()) > self.patience()
            || to.is_slow(self.round_trip())
    }

    /// While attempts of this client are queued for admission, checks that the nodes of their queues answer, because a waiter sends
    /// nothing by itself. Attempts at a node that is passed over are sent again, and go to another one.
    pub(super) async fn check_admission_nodes(self: Arc<Self>) {
        loop {
            self.admission_used.notified().await;
            loop {
                self.runtime.sleep(ADMISSION_CHECK_INTERVAL).await;
                let used = self.admission_nodes().nodes();
                if used.is_empty() {
                    break;
                }
                join_all(used.into_iter().map(|node| self.check_admission_node(node))).await;
            }
        }
    }

    async fn check_admission_node(&self, node: usize) {
        let to = &self.nodes[node];
        if to.store.is_connected() {
            let asked = to.clone().learn_clock();
            let _ = self.runtime.timeout(self.patience(), asked).await;
        }
        if let Some(inbox) = self.inbox.upgrade().filter(|_| self.is_passed_over(node)) {
            inbox.reconnected(&|resource| {
                is_admission_queue(resource)
                    && self.admission_nodes().is_at(node, resource)
                    && self.admission_node(resource) != node
            });
        }
    }

    /// Sends an attempt to a node, and returns its id there. The node that it leaves releases its entry as soon as possible:
    /// once granted, an entry that no client claims would block the queue for a claim window.
    fn send_to(&self, attempt: Acquisition, node: usize, resource: &Arc<Resource>) -> Acquisition {
        let now = self.now();
        let (acquisition, left) = self.admission_nodes().send_to(attempt, node, resource, now);
        self.admission_used.notify_one();
        if let Some(left) = left {
            let tombstone = TOMBSTONE_TTL;
            let release = Release { tombstone, ..Release::now(left.acquisition) };
            // Later the entry has expired, also that of an acquire which is in flight now.
            let until = now + TOMBSTONE_TTL + POLL_INTERVALS.entry_ttl;
            let (node, resource) = (left.node, left.resource);
            self.nodes[node].add_pending_release(PendingRelease { resource, release, until, requests: None });
            self.releases_pending.notify_one();
        }
        acquisition
    }

    /// The attempt that a push of a node's admission queue is for, unless it is queued at another node now.
    pub(super) fn admission_attempt(&self, node: usize, acquisition: Acquisition) -> Option<Acquisition> {
        self.admission_nodes().attempt_at(node, acquisition)
    }

    /// Whether a reconnect to a node concerns attempts at an admission queue: those that are there, and those that would go there.
    pub(super) fn admits_at(&self, node: usize, resource: &Resource) -> bool {
        self.admission_nodes().is_at(node, resource) || self.admission_node(resource) == node
    }

    fn admission_nodes(&self) -> MutexGuard<'_, AdmissionNodes> {
        self.admission_nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn admission_node(&self, resource: &Resource) -> usize {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        // By address, so that all clients agree whatever the order of their lists.
        order.sort_by(|a, b| self.nodes[*a].name.cmp(&self.nodes[*b].name));
        let first = usize::from(slot_of(resource)) % order.len();
        order.rotate_left(first);
        let usable = order.iter().find(|node| !self.is_passed_over(**node));
        let connected = || order.iter().find(|node| self.nodes[**node].store.is_connected());
        usable.or_else(connected).copied().unwrap_or(order[0])
    }
}

/// The same command for another id of the attempt.
fn with_acquisition(command: Command, acquisition: Acquisition) -> Command {
    match command {
        Command::Acquire(acquire) if acquire.acquisition == acquisition => Command::Acquire(acquire),
        Command::Acquire(acquire) => {
            Command::from(Acquire { acquisition, inbox: None, ..(*acquire).clone() })
        }
        Command::Renew(renew) => Command::Renew(Renew { acquisition, ..renew }),
        Command::Release(release) => Command::Release(Release { acquisition, ..release }),
        other => other,
    }
}
