//! This client's attempts and leases at the nodes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, ClientId, Grant, GrantProof, GrantSecret, LocalTime, NodeReply, Reply, Resource,
    StoreTime, TOMBSTONE_TTL, Token,
};
use tokio::sync::watch;

/// First sequence number of node attempts. Each try uses a new number, because a release after a lost answer leaves a
/// tombstone. The range is disjoint from the session's attempt numbers.
const FIRST_NODE_SEQUENCE: u64 = 1 << 63;

/// For how long no further node may join a lease after a push has said that a node revoked it: a forced release may be on its way to
/// the others. Anybody may send such a push, so they count at long intervals only.
const REVOCATION: Duration = Duration::from_secs(2);
const REVOCATION_INTERVAL: Duration = Duration::from_secs(20);

/// One try of an attempt, or its lease.
#[derive(Clone, Debug)]
pub(super) struct NodeAttempt {
    pub(super) resource: Arc<Resource>,
    /// The id of this try at the nodes.
    pub(super) acquisition: Acquisition,
    /// Number of the try, from 1.
    pub(super) tries: u32,
    /// The original request.
    pub(super) request: Arc<Acquire>,
    /// The lease's token, once a quorum has granted it.
    pub(super) token: Option<Token>,
    /// Since when some nodes, but no quorum, have granted it.
    pub(super) partial_since: Option<LocalTime>,
    /// When a push last said that a node has revoked the lease, and counted.
    revoked_at: Option<LocalTime>,
    /// The secret of the last `Acquire`, from which those of the nodes are derived.
    secret: GrantSecret,
    /// How many guards of this client it has: an id can be attached more than once.
    guards: u32,
    /// Another client acquired it. An `Acquire` of that client may still be on its way to a node.
    pub(super) is_attached: bool,
    /// By node: the `Acquire`s that it was sent, and what it has pushed.
    pub(super) requests: Arc<[NodeRequests]>,
}

/// The `Acquire`s of one try that were sent to a node. Unanswered ones may still arrive, so this outlives the try.
#[derive(Debug)]
pub(super) struct NodeRequests(watch::Sender<RequestCounts>);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestCounts {
    pub(super) sent: u32,
    pub(super) unanswered: u32,
    /// The node answered that it has a lease or a queue entry.
    pub(super) keeps_something: bool,
    /// The node has released the lease.
    pub(super) is_released: bool,
    /// The node has pushed a grant since it was last asked.
    pub(super) has_pushed: bool,
    /// The node has removed the queue entry.
    pub(super) is_dequeued: bool,
}

/// The grants of a try that no quorum has granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Partial {
    Nothing,
    /// Some nodes have granted it, the first of them then.
    Since(LocalTime),
    /// The attempt was released, or has another try.
    Ended,
}

/// Why a round can't end its try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outlived {
    /// A later round was granted, and has the same leases at the nodes.
    Granted,
    /// The attempt was released, or has another try.
    Ended,
}

impl NodeRequests {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(RequestCounts::default()))
    }

    fn ask(&self) {
        self.0.send_modify(|counts| {
            counts.sent += 1;
            counts.unanswered += 1;
            // What it pushed before is over, or is in its answer: it may grant it again later.
            counts.has_pushed = false;
        });
    }

    /// Waits until the node has pushed a grant since it was last asked.
    pub(super) async fn pushed(&self) {
        // It can't fail as long as this is there.
        let _ = self.0.subscribe().wait_for(|counts| counts.has_pushed).await;
    }

    pub(super) fn answered(&self, keeps_something: bool) {
        self.0.send_modify(|counts| {
            counts.unanswered = counts.unanswered.saturating_sub(1);
            counts.keeps_something |= keeps_something;
        });
    }

    /// Records the answer to a release, and returns what it means: a node that has released the lease before has none any more.
    pub(super) fn handle_release(&self, reply: &Reply) -> NodeReply {
        self.0.send_modify(|counts| {
            counts.is_released |= *reply == Reply::Released;
            counts.is_dequeued |= *reply == Reply::Dequeued;
        });
        if self.get().is_released {
            NodeReply::Held { valid_for: Duration::ZERO }
        } else {
            NodeReply::NotHeld
        }
    }

    pub(super) fn get(&self) -> RequestCounts {
        *self.0.borrow()
    }

    /// Waits until all are answered.
    pub(super) async fn all_answered(&self) {
        // It can't fail as long as this is there.
        let _ = self.0.subscribe().wait_for(|counts| counts.unanswered == 0).await;
    }
}

impl NodeAttempt {
    fn new(resource: Arc<Resource>, request: Arc<Acquire>, acquisition: Acquisition, nodes: usize) -> Self {
        let secret = request.secret;
        Self {
            resource,
            acquisition,
            tries: 0,
            request,
            token: None,
            partial_since: None,
            revoked_at: None,
            secret,
            guards: 1,
            is_attached: false,
            requests: (0..nodes).map(|_| NodeRequests::new()).collect(),
        }
    }
}

/// State of an attempt.
enum AttemptState {
    /// Nothing is at the nodes; `tries` have failed.
    Idle {
        tries: u32,
    },
    Active(NodeAttempt),
    /// Released before its acquire arrived; forgotten at `until`.
    Cancelled {
        until: LocalTime,
    },
    /// A release was not confirmed by a quorum, and may be sent again. Forgotten at `until`, when the lease has expired.
    Unreleased {
        known: NodeAttempt,
        until: LocalTime,
    },
}

impl AttemptState {
    fn forgotten_at(&self) -> Option<LocalTime> {
        match self {
            Self::Cancelled { until } | Self::Unreleased { until, .. } => Some(*until),
            Self::Idle { .. } | Self::Active(_) => None,
        }
    }
}

/// All attempts and leases of one client.
pub(super) struct Attempts {
    client: ClientId,
    nodes: usize,
    next: AtomicU64,
    table: Mutex<AttemptTable>,
}

/// State by attempt, and attempt by node attempt.
#[derive(Default)]
struct AttemptTable {
    by_attempt: HashMap<Acquisition, AttemptState>,
    attempts: HashMap<Acquisition, Acquisition>,
}

impl AttemptTable {
    fn attempt_mut(&mut self, attempt: Acquisition, acquisition: Acquisition) -> Option<&mut NodeAttempt> {
        match self.by_attempt.get_mut(&attempt) {
            Some(AttemptState::Active(known)) if known.acquisition == acquisition => Some(known),
            _ => None,
        }
    }

    fn put(&mut self, attempt: Acquisition, state: Option<AttemptState>) -> Option<NodeAttempt> {
        if let Some(AttemptState::Active(known)) = &state {
            self.attempts.insert(known.acquisition, attempt);
        }
        let before = match state {
            Some(state) => self.by_attempt.insert(attempt, state),
            None => self.by_attempt.remove(&attempt),
        };
        match before {
            Some(AttemptState::Active(known)) => {
                self.attempts.remove(&known.acquisition);
                Some(known)
            }
            Some(AttemptState::Unreleased { known, .. }) => Some(known),
            _ => None,
        }
    }
}

impl Attempts {
    pub(super) fn new(client: ClientId, nodes: usize) -> Self {
        Self { client, nodes, next: AtomicU64::new(FIRST_NODE_SEQUENCE), table: Mutex::default() }
    }

    fn table(&self) -> MutexGuard<'_, AttemptTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this id is a node attempt's.
    pub(super) fn is_node_attempt(acquisition: Acquisition) -> bool {
        acquisition.sequence >= FIRST_NODE_SEQUENCE
    }

    /// Starts a round at all nodes, and returns the attempt's id there. `None` if it was released meanwhile.
    pub(super) fn ask(
        &self,
        resource: &Arc<Resource>,
        request: &Arc<Acquire>,
    ) -> Option<(Acquisition, Arc<[NodeRequests]>)> {
        let mut table = self.table();
        let tries = match table.by_attempt.get_mut(&request.acquisition) {
            Some(AttemptState::Cancelled { .. } | AttemptState::Unreleased { .. }) => return None,
            Some(AttemptState::Active(known)) => {
                known.secret = request.secret;
                known.requests.iter().for_each(NodeRequests::ask);
                return Some((known.acquisition, known.requests.clone()));
            }
            Some(AttemptState::Idle { tries }) => *tries + 1,
            None => 1,
        };
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let acquisition = Acquisition { client: self.client, sequence };
        let mut active = NodeAttempt::new(resource.clone(), request.clone(), acquisition, self.nodes);
        active.tries = tries;
        active.requests.iter().for_each(NodeRequests::ask);
        let requests = active.requests.clone();
        table.put(request.acquisition, Some(AttemptState::Active(active)));
        Some((acquisition, requests))
    }

    /// A try without its present state.
    pub(super) fn past(
        &self,
        resource: Arc<Resource>,
        request: Arc<Acquire>,
        acquisition: Acquisition,
        requests: Arc<[NodeRequests]>,
    ) -> NodeAttempt {
        NodeAttempt { requests, ..NodeAttempt::new(resource, request, acquisition, self.nodes) }
    }

    /// Records one more acquire at a node, of an attempt that the node has granted meanwhile, or of a lease that it does not have. False if
    /// the attempt or the lease has ended.
    pub(super) fn join(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        node: usize,
        now: LocalTime,
    ) -> bool {
        let join = |known: &mut NodeAttempt| {
            let may_join = known.revoked_at.is_none_or(|at| now >= at + REVOCATION);
            if may_join {
                known.requests[node].ask();
            }
            may_join
        };
        self.with(attempt, acquisition, join).unwrap_or(false)
    }

    /// Records a quorum's grant. False if the attempt was released meanwhile.
    pub(super) fn granted(&self, attempt: Acquisition, acquisition: Acquisition, token: Token) -> bool {
        self.with(attempt, acquisition, |known| known.token = Some(token)).is_some()
    }

    /// Whether a node's push of this grant proves the secret that the last `Acquire` has at that node.
    pub(super) fn is_proven(
        &self,
        acquisition: Acquisition,
        node: usize,
        at: StoreTime,
        (grant, proof): (&Grant, GrantProof),
    ) -> bool {
        let secret = |attempt| self.with(attempt, acquisition, |known| known.secret);
        let secret = self.attempt_of(acquisition).and_then(secret);
        secret.is_some_and(|secret| at_node(secret, node).prove(at, grant) == proof)
    }

    /// Records a node's grant push, and returns the number of nodes so far. `None` if it is known or has no effect.
    pub(super) fn granted_by(&self, acquisition: Acquisition, node: usize) -> Option<usize> {
        let mut table = self.table();
        let attempt = *table.attempts.get(&acquisition)?;
        let known = table.attempt_mut(attempt, acquisition)?;
        if known.token.is_some() || known.requests[node].get().has_pushed {
            return None;
        }
        known.requests[node].0.send_modify(|counts| counts.has_pushed = true);
        Some(known.requests.iter().filter(|requests| requests.get().has_pushed).count())
    }

    /// A push says that a node has revoked the lease.
    pub(super) fn revoked(&self, acquisition: Acquisition, now: LocalTime) {
        if let Some(attempt) = self.attempt_of(acquisition) {
            self.with(attempt, acquisition, |known| {
                if known.revoked_at.is_none_or(|at| now >= at + REVOCATION_INTERVAL) {
                    known.revoked_at = Some(now);
                }
            });
        }
    }

    /// Records whether some nodes, but no quorum, have granted it, and returns what it has. `None` if a node may have granted it,
    /// and none is known to have: then it is as before.
    pub(super) fn partial(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        is_partial: Option<bool>,
        now: LocalTime,
    ) -> Partial {
        let since = self.with(attempt, acquisition, |known| {
            match is_partial {
                Some(true) => known.partial_since = known.partial_since.or(Some(now)),
                Some(false) => known.partial_since = None,
                None => {}
            }
            known.partial_since
        });
        since.map_or(Partial::Ended, |since| since.map_or(Partial::Nothing, Partial::Since))
    }

    /// Whether no quorum has granted it yet.
    pub(super) fn waits(&self, acquisition: Acquisition) -> bool {
        let waits = |attempt| self.with(attempt, acquisition, |known| known.token.is_none());
        self.attempt_of(acquisition).and_then(waits).unwrap_or(false)
    }

    fn with<T>(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        act: impl FnOnce(&mut NodeAttempt) -> T,
    ) -> Option<T> {
        self.table().attempt_mut(attempt, acquisition).map(act)
    }

    pub(super) fn get(&self, attempt: Acquisition) -> Option<NodeAttempt> {
        match self.table().by_attempt.get(&attempt) {
            Some(AttemptState::Active(known)) => Some(known.clone()),
            _ => None,
        }
    }

    /// Ends a failed try; the attempt continues if it `retries`.
    pub(super) fn failed(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        retries: bool,
    ) -> Result<NodeAttempt, Outlived> {
        let mut table = self.table();
        let known = table.attempt_mut(attempt, acquisition).ok_or(Outlived::Ended)?;
        if known.token.is_some() {
            return Err(Outlived::Granted);
        }
        let tries = known.tries;
        table.put(attempt, retries.then_some(AttemptState::Idle { tries })).ok_or(Outlived::Ended)
    }

    /// How many tries the attempt has had; zero if it has ended.
    pub(super) fn tries(&self, attempt: Acquisition) -> u32 {
        match self.table().by_attempt.get(&attempt) {
            Some(AttemptState::Active(known)) => known.tries,
            _ => 0,
        }
    }

    /// Begins to end an attempt or its lease. Until `released`, a repeated release is sent to the nodes again: without this, it would
    /// find no lease, which means that it was released.
    pub(super) fn release(&self, attempt: Acquisition, now: LocalTime) -> Option<NodeAttempt> {
        let mut table = self.table();
        let known = table.put(attempt, None)?;
        let until = now + known.request.ttl + TOMBSTONE_TTL;
        table.put(attempt, Some(AttemptState::Unreleased { known: known.clone(), until }));
        Some(known)
    }

    /// Records that nothing is left to release. `until` is how long that is remembered, if a late acquire may follow.
    pub(super) fn released(&self, attempt: Acquisition, until: Option<LocalTime>) {
        self.table().put(attempt, until.map(|until| AttemptState::Cancelled { until }));
    }

    /// Adds a lease that another client has acquired at the nodes. Here it has the same id as there.
    pub(super) fn attach(&self, resource: &Arc<Resource>, request: Arc<Acquire>, token: Token) {
        let acquisition = request.acquisition;
        if let Some(AttemptState::Active(known)) = self.table().by_attempt.get_mut(&acquisition) {
            known.guards += 1;
            return;
        }
        let known = NodeAttempt::new(resource.clone(), request, acquisition, self.nodes);
        let active = NodeAttempt { token: Some(token), tries: 1, is_attached: true, ..known };
        self.table().put(acquisition, Some(AttemptState::Active(active)));
    }

    /// Forgets a lease for one of its guards. Returns the id that the nodes know.
    pub(super) fn detach(&self, attempt: Acquisition) -> Acquisition {
        let mut table = self.table();
        if let Some(AttemptState::Active(known)) = table.by_attempt.get_mut(&attempt)
            && known.guards > 1
        {
            known.guards -= 1;
            return known.acquisition;
        }
        table.put(attempt, None).map_or(attempt, |known| known.acquisition)
    }

    /// Whether it was released before its acquire arrived.
    pub(super) fn is_cancelled(&self, attempt: Acquisition) -> bool {
        let table = self.table();
        let state = table.by_attempt.get(&attempt);
        matches!(state, Some(AttemptState::Cancelled { .. } | AttemptState::Unreleased { .. }))
    }

    /// The attempt of a try.
    pub(super) fn attempt_of(&self, acquisition: Acquisition) -> Option<Acquisition> {
        self.table().attempts.get(&acquisition).copied()
    }

    /// Removes old entries.
    pub(super) fn sweep(&self, now: LocalTime) {
        self.table().by_attempt.retain(|_, state| state.forgotten_at().is_none_or(|until| until > now));
    }

    /// Whether there are entries that a later sweep will remove.
    pub(super) fn is_to_be_swept(&self) -> bool {
        self.table().by_attempt.values().any(|state| state.forgotten_at().is_some())
    }
}

/// The secret that an `Acquire` has at a node.
pub(super) fn at_node(secret: GrantSecret, node: usize) -> GrantSecret {
    secret.for_node(u32::try_from(node).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_core::{Kind, Name};

    use super::*;

    #[test]
    fn grant_that_a_node_pushes_again_after_a_round_counts() {
        let attempts = Attempts::new(ClientId::new(1), 3);
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let attempt = Acquisition { client: ClientId::new(1), sequence: 1 };
        let request = Arc::new(Acquire::exclusive(attempt, Duration::from_secs(10)));
        let (acquisition, _) = attempts.ask(&resource, &request).unwrap();
        assert_eq!([0, 0, 1].map(|node| attempts.granted_by(acquisition, node)), [Some(1), None, Some(2)]);
        // None of these grants was used, and they have lapsed.
        assert_eq!(attempts.ask(&resource, &request).unwrap().0, acquisition);
        assert_eq!([0, 1].map(|node| attempts.granted_by(acquisition, node)), [Some(1), Some(2)]);
    }

    fn active(attempts: &Attempts) -> (Acquisition, Acquisition, Arc<[NodeRequests]>) {
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let attempt = Acquisition { client: ClientId::new(1), sequence: 1 };
        let request = Arc::new(Acquire::exclusive(attempt, Duration::from_secs(10)));
        let (acquisition, requests) = attempts.ask(&resource, &request).unwrap();
        (attempt, acquisition, requests)
    }

    #[test]
    fn revoked_lease_is_acquired_at_no_further_node_for_a_while() {
        let attempts = Attempts::new(ClientId::new(1), 3);
        let (attempt, acquisition, requests) = active(&attempts);
        assert!(attempts.granted(attempt, acquisition, Token::new(1).unwrap()));
        let at = |seconds| LocalTime::ZERO + Duration::from_secs(seconds);
        assert!(attempts.join(attempt, acquisition, 2, at(0)));
        assert_eq!(requests[2].get().sent, 2);
        attempts.revoked(acquisition, at(1));
        assert!(!attempts.join(attempt, acquisition, 2, at(1)));
        assert_eq!(requests[2].get().sent, 2);
        // Anybody may send such a push, again and again: the lease does not stay at fewer nodes for that.
        let joins = (3..43).filter(|seconds| {
            attempts.revoked(acquisition, at(*seconds));
            attempts.join(attempt, acquisition, 2, at(*seconds))
        });
        assert_eq!(joins.count(), 36);
        assert!(attempts.release(attempt, LocalTime::ZERO).is_some());
        assert!(!attempts.join(attempt, acquisition, 1, at(50)), "it is being released");
    }

    #[test]
    fn unconfirmed_release_can_be_repeated_until_the_lease_has_expired() {
        let attempts = Attempts::new(ClientId::new(1), 3);
        let (attempt, acquisition, _) = active(&attempts);
        assert!(attempts.granted(attempt, acquisition, Token::new(1).unwrap()));
        let at = |ms: u64| LocalTime::ZERO + Duration::from_millis(ms);
        let known = attempts.release(attempt, at(0)).unwrap();
        let expires_at = at(0) + known.request.ttl + TOMBSTONE_TTL;
        for now in [at(0), at(200), at(9_900), at(60_000)] {
            attempts.sweep(now);
            assert!(attempts.is_to_be_swept() && attempts.is_cancelled(attempt));
        }
        assert!(attempts.release(attempt, at(60_000)).is_some(), "it is sent again");
        attempts.sweep(expires_at + Duration::from_secs(60));
        assert!(!attempts.is_to_be_swept() && attempts.release(attempt, expires_at).is_none());
    }

    #[test]
    fn round_without_all_votes_does_not_end_the_time_of_a_partial_grant() {
        let attempts = Attempts::new(ClientId::new(1), 3);
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let attempt = Acquisition { client: ClientId::new(1), sequence: 1 };
        let request = Arc::new(Acquire::exclusive(attempt, Duration::from_secs(10)));
        let (acquisition, _) = attempts.ask(&resource, &request).unwrap();
        let at = |ms: u64| LocalTime::from_micros(ms * 1_000);
        let partial = |is_partial, ms: u64| attempts.partial(attempt, acquisition, is_partial, at(ms));
        assert_eq!(partial(None, 1), Partial::Nothing);
        assert_eq!(partial(Some(true), 2), Partial::Since(at(2)));
        assert_eq!(partial(None, 3), Partial::Since(at(2)));
        assert_eq!(partial(Some(true), 4), Partial::Since(at(2)));
        assert_eq!(partial(Some(false), 5), Partial::Nothing);
        assert_eq!(partial(Some(true), 6), Partial::Since(at(6)));
        assert!(attempts.waits(acquisition));
        assert!(attempts.granted(attempt, acquisition, Token::new(1).unwrap()));
        assert!(!attempts.waits(acquisition));
        assert!(attempts.release(attempt, at(7)).is_some());
        assert_eq!(partial(Some(true), 7), Partial::Ended);
        assert!(!attempts.waits(acquisition));
        // A repeated release is sent too, until one is confirmed.
        assert!(attempts.release(attempt, at(8)).is_some());
        attempts.released(attempt, None);
        assert!(attempts.release(attempt, at(9)).is_none());
    }
}
