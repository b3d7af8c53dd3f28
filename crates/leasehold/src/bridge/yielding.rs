//! How the programs with leasehold let the other programs have turns.
//!
//! A release wakes the next leasehold client within a round trip, while a waiter of the other library polls or is woken and has to
//! ask first. Without more the other programs would seldom find the lock free. So a client that has held the foreign leg for
//! some time leaves it free for half of that time before its next turn: a third of the time is offered to the others. The client
//! still holds its own leg then, so the offer is not taken by another leasehold client. An offer that no program takes doubles the time
//! until the next one.
//!
//! A client without a history of its own, for example a command that takes the lock once, counts the time for which it has waited for
//! its own leg: other leasehold clients had the lock then.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::foreign::{Foreign, Protocol};

/// Locks whose turns are remembered. More than that are forgotten together, which only delays an offer.
const MAX_LOCKS: usize = 1_000;

/// An offer becomes this many times as rare, at most.
const MAX_FACTOR: u32 = 16;

/// How long a client holds the foreign leg between two offers, and how long an offer lasts.
struct Terms {
    hold: Duration,
    offer: Duration,
}

/// For waiters that poll, every 50 ms to 250 ms by default in the libraries that are known.
const POLLING: Terms = Terms { hold: Duration::from_millis(100), offer: Duration::from_millis(50) };

/// For waiters that a message, or a change of the key, wakes.
const WOKEN: Terms = Terms { hold: Duration::from_millis(20), offer: Duration::from_millis(10) };

impl Foreign {
    fn terms(&self) -> &'static Terms {
        match self.protocol {
            // Spring's waiters poll by default.
            Protocol::SetNxPx | Protocol::SpringIntegration => &POLLING,
            _ => &WOKEN,
        }
    }
}

#[derive(Clone, Copy)]
struct Turns {
    /// How long the foreign leg was held since the last offer.
    held: Duration,
    factor: u32,
}

/// The turns of one client, by the key of the foreign lock.
#[derive(Default)]
pub(super) struct TurnTable(Mutex<BTreeMap<String, Turns>>);

impl TurnTable {
    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Turns>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The foreign leg was held for this long.
    pub(super) fn add(&self, foreign: &Foreign, held: Duration) {
        self.change(foreign, |turns| turns.held += held);
    }

    fn change(&self, foreign: &Foreign, change: impl FnOnce(&mut Turns)) {
        let mut table = self.table();
        if table.len() >= MAX_LOCKS && !table.contains_key(foreign.key()) {
            table.clear();
        }
        change(table.entry(foreign.key().to_owned()).or_insert(Turns { held: Duration::ZERO, factor: 1 }));
    }

    /// How long the next turn is offered to other programs by a client that has waited for its own leg; none if it is not.
    pub(super) fn offer(&self, foreign: &Foreign, waited: Duration) -> Option<Duration> {
        let known = self.table().get(foreign.key()).copied();
        let turns = known.unwrap_or(Turns { held: waited, factor: 1 });
        let terms = foreign.terms();
        (turns.held >= terms.hold * turns.factor).then_some(terms.offer)
    }

    /// An offer is over, or another program has had a turn.
    pub(super) fn offered(&self, foreign: &Foreign, was_taken: bool) {
        self.change(foreign, |turns| {
            let factor = if was_taken { 1 } else { (turns.factor * 2).min(MAX_FACTOR) };
            *turns = Turns { held: Duration::ZERO, factor };
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_time_is_offered_and_less_while_nobody_takes_it() {
        let (turns, foreign) = (TurnTable::default(), Foreign::set_nx_px("jobs"));
        assert_eq!(turns.offer(&foreign, Duration::ZERO), None);
        turns.add(&foreign, Duration::from_millis(99));
        assert_eq!(turns.offer(&foreign, Duration::ZERO), None);
        turns.add(&foreign, Duration::from_millis(1));
        assert_eq!(turns.offer(&foreign, Duration::ZERO), Some(Duration::from_millis(50)));
        turns.offered(&foreign, false);
        turns.add(&foreign, Duration::from_millis(199));
        assert_eq!(turns.offer(&foreign, Duration::ZERO), None);
        turns.add(&foreign, Duration::from_millis(1));
        assert!(turns.offer(&foreign, Duration::ZERO).is_some());
        turns.offered(&foreign, true);
        turns.add(&foreign, Duration::from_millis(100));
        assert!(turns.offer(&foreign, Duration::ZERO).is_some());
    }

    #[test]
    fn client_without_history_counts_the_time_for_which_it_has_waited() {
        let (turns, foreign) = (TurnTable::default(), Foreign::set_nx_px("jobs"));
        let waited = Duration::from_millis(100);
        assert_eq!(turns.offer(&foreign, waited / 2), None);
        assert_eq!(turns.offer(&foreign, waited), Some(Duration::from_millis(50)));
        // It has a history now.
        turns.offered(&foreign, true);
        assert_eq!(turns.offer(&foreign, waited), None);
    }
}
