//! What this client has at the nodes: a try at a lease, or a lease.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_core::{Acquire, Acquisition, ClientId, LocalTime, Resource, Token};

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
    /// By node: how many `Acquire`s have no answer. What they come to may still arrive.
    pub(super) unanswered: Vec<u32>,
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
    fates: Mutex<HashMap<Acquisition, Fate>>,
}

impl Leases {
    pub(super) fn new(client: ClientId, nodes: usize) -> Self {
        Self { client, nodes, next: AtomicU64::new(TRIES), fates: Mutex::default() }
    }

    fn fates(&self) -> MutexGuard<'_, HashMap<Acquisition, Fate>> {
        self.fates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is the number of a try.
    pub(super) fn is_try(acquisition: Acquisition) -> bool {
        acquisition.sequence >= TRIES
    }

    /// The attempt asks all nodes: what it is called there. None if it was given back meanwhile.
    pub(super) fn ask(&self, resource: &Arc<Resource>, wanted: &Arc<Acquire>) -> Option<Acquisition> {
        let mut fates = self.fates();
        let fate = fates.entry(wanted.acquisition).or_insert(Fate::Resting { tries: 0 });
        match fate {
            Fate::Cancelled { .. } => None,
            Fate::Under(known) => {
                known.unanswered.iter_mut().for_each(|count| *count += 1);
                Some(known.acquisition)
            }
            Fate::Resting { tries } => {
                let tries = *tries + 1;
                let sequence = self.next.fetch_add(1, Ordering::Relaxed);
                let acquisition = Acquisition { client: self.client, sequence };
                *fate = Fate::Under(Try {
                    resource: resource.clone(),
                    acquisition,
                    tries,
                    wanted: wanted.clone(),
                    token: None,
                    unanswered: vec![1; self.nodes],
                });
                Some(acquisition)
            }
        }
    }

    /// One more node is asked for a lease that the others gave; not if it is over.
    pub(super) fn join(&self, attempt: Acquisition, acquisition: Acquisition, node: usize) -> bool {
        self.with(attempt, acquisition, |known| known.unanswered[node] += 1).is_some()
    }

    /// The node has answered an `Acquire`.
    pub(super) fn answered(&self, attempt: Acquisition, acquisition: Acquisition, node: usize) {
        self.with(attempt, acquisition, |known| {
            known.unanswered[node] = known.unanswered[node].saturating_sub(1);
        });
    }

    /// A quorum has granted it. False if it was given back meanwhile.
    pub(super) fn granted(&self, attempt: Acquisition, acquisition: Acquisition, token: Token) -> bool {
        self.with(attempt, acquisition, |known| known.token = Some(token)).is_some()
    }

    fn with<T>(
        &self,
        attempt: Acquisition,
        acquisition: Acquisition,
        act: impl FnOnce(&mut Try) -> T,
    ) -> Option<T> {
        match self.fates().get_mut(&attempt) {
            Some(Fate::Under(known)) if known.acquisition == acquisition => Some(act(known)),
            _ => None,
        }
    }

    pub(super) fn get(&self, attempt: Acquisition) -> Option<Try> {
        match self.fates().get(&attempt) {
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
        let fate = fates.get_mut(&attempt)?;
        let known = match fate {
            Fate::Under(known) if known.acquisition == acquisition => known.clone(),
            _ => return None,
        };
        if goes_on {
            *fate = Fate::Resting { tries: known.tries };
        } else {
            fates.remove(&attempt);
        }
        Some(known)
    }

    /// The attempt or its lease is given back. `until` says how long it stays known that it was, if that may be needed.
    pub(super) fn give_back(&self, attempt: Acquisition, until: Option<LocalTime>) -> Option<Try> {
        let mut fates = self.fates();
        let fate = fates.remove(&attempt);
        if let Some(until) = until {
            fates.insert(attempt, Fate::Cancelled { until });
        }
        match fate {
            Some(Fate::Under(known)) => Some(known),
            _ => None,
        }
    }

    /// Whether it was given back before it was asked for.
    pub(super) fn is_cancelled(&self, attempt: Acquisition) -> bool {
        matches!(self.fates().get(&attempt), Some(Fate::Cancelled { .. }))
    }

    /// Whose try this is.
    pub(super) fn attempt_of(&self, acquisition: Acquisition) -> Option<Acquisition> {
        let fates = self.fates();
        let found = fates
            .iter()
            .find(|(_, fate)| matches!(fate, Fate::Under(known) if known.acquisition == acquisition));
        found.map(|(attempt, _)| *attempt)
    }

    /// Forgets what need not be known any more.
    pub(super) fn sweep(&self, now: LocalTime) {
        self.fates().retain(|_, fate| !matches!(fate, Fate::Cancelled { until } if *until <= now));
    }

    /// Whether there is something to sweep, sooner or later.
    pub(super) fn is_to_be_swept(&self) -> bool {
        self.fates().values().any(|fate| matches!(fate, Fate::Cancelled { .. }))
    }
}
