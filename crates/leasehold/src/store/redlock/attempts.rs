//! What this client has at the nodes: a try at a lease, or a lease.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_core::{Acquire, Acquisition, ClientId, LocalTime, Resource, Token};
use tokio::sync::watch;

/// The nodes hear of each try by a number of its own, since what is given back after an answer was lost leaves a tombstone.
/// It can't be one of the numbers by which the session knows its attempts.
const TRIES: u64 = 1 << 63;

/// One attempt's try, or its lease.
#[derive(Clone, Debug)]
pub(super) struct Try {
    pub(super) resource: Arc<Resource>,
    /// As the nodes know it.
    pub(super) acquisition: Acquisition,
    /// Which try it is, from 1.
    pub(super) tries: u32,
    /// What it asks for.
    pub(super) wanted: Arc<Acquire>,
    /// Of the lease, once a quorum has granted it.
    pub(super) token: Option<Token>,
    /// Since when it has been granted by some nodes, but not by a quorum.
    pub(super) partial_since: Option<LocalTime>,
    /// Nodes that have told that they granted it to this waiter.
    granted_by: Vec<usize>,
    /// Some node's was taken away by force: no other node is asked to join any more.
    is_revoked: bool,
    /// By node: the `Acquire`s that have no answer.
    pub(super) asked: Arc<[Asked]>,
}

/// The `Acquire`s of one try that a node was sent. What those come to that are not answered may still arrive, so this
/// outlives the try.
#[derive(Debug)]
pub(super) struct Asked(watch::Sender<Asks>);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asks {
    pub(super) sent: u32,
    pub(super) unanswered: u32,
    /// By some answer the node keeps something.
    pub(super) has_something: bool,
}

impl Asked {
    fn new() -> Self {
        Self(watch::Sender::new(Asks::default()))
    }

    fn ask(&self) {
        self.0.send_modify(|asks| {
            asks.sent += 1;
            asks.unanswered += 1;
        });
    }

    pub(super) fn answered(&self, has_something: bool) {
        self.0.send_modify(|asks| {
            asks.unanswered = asks.unanswered.saturating_sub(1);
            asks.has_something |= has_something;
        });
    }

    pub(super) fn get(&self) -> Asks {
        *self.0.borrow()
    }

    /// Waits until all are answered.
    pub(super) async fn all_answered(&self) {
        // It can't fail as long as this is there.
        let _ = self.0.subscribe().wait_for(|asks| asks.unanswered == 0).await;
    }
}

impl Try {
    fn new(resource: Arc<Resource>, wanted: Arc<Acquire>, acquisition: Acquisition, nodes: usize) -> Self {
        Self {
            resource,
            acquisition,
            tries: 0,
            wanted,
            token: None,
            partial_since: None,
            granted_by: Vec::new(),
            is_revoked: false,
            asked: (0..nodes).map(|_| Asked::new()).collect(),
        }
    }
}

/// What became of an attempt.
enum Fate {
    /// Nothing is at the nodes; so many tries have come to nothing.
    Resting {
        tries: u32,
    },
    Under(Try),
    /// It was given back before it was asked for, as it seems here; this is forgotten then.
    Cancelled {
        until: LocalTime,
    },
}

/// Everything that one client has at the nodes.
pub(super) struct Leases {
    client: ClientId,
    nodes: usize,
    next: AtomicU64,
    fates: Mutex<Fates>,
}

/// Attempts by their numbers, and the attempts whose tries these are.
#[derive(Default)]
struct Fates {
    by_attempt: HashMap<Acquisition, Fate>,
    attempts: HashMap<Acquisition, Acquisition>,
}

impl Fates {
    fn try_of(&mut self, attempt: Acquisition, acquisition: Acquisition) -> Option<&mut Try> {
        match self.by_attempt.get_mut(&attempt) {
            Some(Fate::Under(known)) if known.acquisition == acquisition => Some(known),
            _ => None,
        }
    }

    fn put(&mut self, attempt: Acquisition, fate: Option<Fate>) -> Option<Try> {
        if let Some(Fate::Under(known)) = &fate {
            self.attempts.insert(known.acquisition, attempt);
        }
        let before = match fate {
            Some(fate) => self.by_attempt.insert(attempt, fate),
            None => self.by_attempt.remove(&attempt),
        };
        match before {
            Some(Fate::Under(known)) => {
                self.attempts.remove(&known.acquisition);
                Some(known)
            }
            _ => None,
        }
    }
}

impl Leases {
    pub(super) fn new(client: ClientId, nodes: usize) -> Self {
        Self { client, nodes, next: AtomicU64::new(TRIES), fates: Mutex::default() }
    }

    fn fates(&self) -> MutexGuard<'_, Fates> {
        self.fates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is the number of a try.
    pub(super) fn is_try(acquisition: Acquisition) -> bool {
        acquisition.sequence >= TRIES
    }

    /// The attempt asks all nodes: what it is called there. None if it was given back meanwhile.
    pub(super) fn ask(
        &self,
        resource: &Arc<Resource>,
        wanted: &Arc<Acquire>,
    ) -> Option<(Acquisition, Arc<[Asked]>)> {
        let mut fates = self.fates();
        let tries = match fates.by_attempt.get_mut(&wanted.acquisition) {
            Some(Fate::Cancelled { .. }) => return None,
            Some(Fate::Under(known)) => {
                known.asked.iter().for_each(Asked::ask);
                return Some((known.acquisition, known.asked.clone()));
            }
            Some(Fate::Resting { tries }) => *tries + 1,
            None => 1,
        };
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let acquisition = Acquisition { client: self.client, sequence };
        let mut under = Try::new(resource.clone(), wanted.clone(), acquisition, self.nodes);
        under.tries = tries;
        under.asked.iter().for_each(Asked::ask);
        let asked = under.asked.clone();
        fates.put(wanted.acquisition, Some(Fate::Under(under)));
        Some((acquisition, asked))
    }

    /// A try that is not under way any more.
    pub(super) fn past(
        &self,
        resource: Arc<Resource>,
        wanted: Arc<Acquire>,
        acquisition: Acquisition,
        asked: Arc<[Asked]>,
    ) -> Try {
        Try { asked, ..Try::new(resource, wanted, acquisition, self.nodes) }
    }

    /// One more node is asked for a lease that the others gave; not if it is over.
    pub(super) fn join(&self, attempt: Acquisition, acquisition: Acquisition, node: usize) -> bool {
        let join = |known: &mut Try| {
            if !known.is_revoked {
                known.asked[node].ask();
            }
            !known.is_revoked
        };
        self.with(attempt, acquisition, join).unwrap_or(false)
    }

    /// A quorum has granted it. False if it was given back meanwhile.
    pub(super) fn granted(&self, attempt: Acquisition, acquisition: Acquisition, token: Token) -> bool {
        self.with(attempt, acquisition, |known| known.token = Some(token)).is_some()
    }

    /// A waiter is granted it by this node: by how many so far. None if that is known, or does not matter any more.
    pub(super) fn granted_by(&self, acquisition: Acquisition, node: usize) -> Option<usize> {
        let mut fates = self.fates();
        let attempt = *fates.attempts.get(&acquisition)?;
        let known = fates.try_of(attempt, acquisition)?;
        if known.token.is_some() || known.granted_by.contains(&node) {
            return None;
        }
        known.granted_by.push(node);
        Some(known.granted_by.len())
    }

    /// A node says that it was taken away there.
    pub(super) fn revoked(&self, acquisition: Acquisition) {
        if let Some(attempt) = self.attempt_of(acquisition) {
            self.with(attempt, acquisition, |known| known.is_revoked = true);
        }
    }

    /// Some nodes grant it, but no quorum does: since when that is so. Whoever is granted nothing waits.
    pub(super) fn partial(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        is_partial: bool,
        now: LocalTime,
    ) -> Option<LocalTime> {
        self.with(attempt, acquisition, |known| {
            known.partial_since = is_partial.then(|| *known.partial_since.get_or_insert(now));
            known.partial_since.unwrap_or(now)
        })
    }

    fn with<T>(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        act: impl FnOnce(&mut Try) -> T,
    ) -> Option<T> {
        self.fates().try_of(attempt, acquisition).map(act)
    }

    pub(super) fn get(&self, attempt: Acquisition) -> Option<Try> {
        match self.fates().by_attempt.get(&attempt) {
            Some(Fate::Under(known)) => Some(known.clone()),
            _ => None,
        }
    }

    /// The try came to nothing, and is given back; the attempt goes on or not. None if it was given back meanwhile.
    pub(super) fn failed(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        goes_on: bool,
    ) -> Option<Try> {
        let mut fates = self.fates();
        let tries = fates.try_of(attempt, acquisition)?.tries;
        fates.put(attempt, goes_on.then_some(Fate::Resting { tries }))
    }

    /// Whether this is at least the attempt's try of that number.
    pub(super) fn has_tried(&self, attempt: Acquisition, times: u32) -> bool {
        matches!(self.fates().by_attempt.get(&attempt), Some(Fate::Under(known)) if known.tries >= times)
    }

    /// The attempt or its lease is given back. `until` says how long it stays known that it was, if that may be needed.
    pub(super) fn give_back(&self, attempt: Acquisition, until: Option<LocalTime>) -> Option<Try> {
        self.fates().put(attempt, until.map(|until| Fate::Cancelled { until }))
    }

    /// Whether it was given back before it was asked for.
    pub(super) fn is_cancelled(&self, attempt: Acquisition) -> bool {
        matches!(self.fates().by_attempt.get(&attempt), Some(Fate::Cancelled { .. }))
    }

    /// Whose try this is.
    pub(super) fn attempt_of(&self, acquisition: Acquisition) -> Option<Acquisition> {
        self.fates().attempts.get(&acquisition).copied()
    }

    /// Forgets what need not be known any more.
    pub(super) fn sweep(&self, now: LocalTime) {
        self.fates().by_attempt.retain(|_, fate| !matches!(fate, Fate::Cancelled { until } if *until <= now));
    }

    /// Whether there is something to sweep, sooner or later.
    pub(super) fn is_to_be_swept(&self) -> bool {
        self.fates().by_attempt.values().any(|fate| matches!(fate, Fate::Cancelled { .. }))
    }
}
