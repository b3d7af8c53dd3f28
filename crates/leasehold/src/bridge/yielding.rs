//! When the programs with leasehold yield a bridged lock to the other programs.
//!
//! A release wakes the next leasehold client within a round trip, while a waiter of the other library polls or is woken and has to
//! ask first. Without more the other programs would seldom find the lock free. So a client that has held the foreign leg for
//! some time yields: it leaves the leg free for half of that time before it takes it again, a third of the time. The client
//! still holds its own leg then, so no other leasehold client takes the foreign one. If no program takes it, the time until the client
//! yields again doubles.
//!
//! A client without a history of its own, for example a command that takes the lock once, counts the time for which it has waited for
//! its own leg: other leasehold clients had the lock then.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::foreign::{Foreign, Protocol};

/// Locks whose state is remembered. More than that are forgotten together, which only delays the next yield.
const MAX_LOCKS: usize = 1_000;

/// A client yields this many times as rarely, at most.
const MAX_FACTOR: u32 = 16;

/// How long a client holds the foreign leg between two yields, and how long it yields.
struct Terms {
    hold: Duration,
    yields_for: Duration,
}

/// For waiters that poll, every 50 ms to 250 ms by default in the libraries that are known.
const POLLING: Terms = Terms { hold: Duration::from_millis(100), yields_for: Duration::from_millis(50) };

/// For waiters that a message, or a change of the key, wakes.
const WOKEN: Terms = Terms { hold: Duration::from_millis(20), yields_for: Duration::from_millis(10) };

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
struct YieldState {
    /// How long the foreign leg was held since the client last yielded.
    held: Duration,
    factor: u32,
}

/// What one client has held and yielded, by the key of the foreign lock.
#[derive(Default)]
pub(super) struct YieldTable(Mutex<BTreeMap<String, YieldState>>);

impl YieldTable {
    fn table(&self) -> MutexGuard<'_, BTreeMap<String, YieldState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The foreign leg was held for this long.
    pub(super) fn record_hold(&self, foreign: &Foreign, held: Duration) {
        self.change(foreign, |state| state.held += held);
    }

    fn change(&self, foreign: &Foreign, change: impl FnOnce(&mut YieldState)) {
        let mut table = self.table();
        if table.len() >= MAX_LOCKS && !table.contains_key(foreign.key()) {
            table.clear();
        }
        change(
            table.entry(foreign.key().to_owned()).or_insert(YieldState { held: Duration::ZERO, factor: 1 }),
        );
    }

    /// How long a client that has waited for its own leg yields to other programs now; none if it does not.
    pub(super) fn yield_time(&self, foreign: &Foreign, waited: Duration) -> Option<Duration> {
        let known = self.table().get(foreign.key()).copied();
        let state = known.unwrap_or(YieldState { held: waited, factor: 1 });
        let terms = foreign.terms();
        (state.held >= terms.hold * state.factor).then_some(terms.yields_for)
    }

    /// The client has yielded, or another program has had the lock.
    pub(super) fn record_yield(&self, foreign: &Foreign, was_taken: bool) {
        self.change(foreign, |state| {
            let factor = if was_taken { 1 } else { (state.factor * 2).min(MAX_FACTOR) };
            *state = YieldState { held: Duration::ZERO, factor };
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_time_is_offered_and_less_while_nobody_takes_it() {
        let (table, foreign) = (YieldTable::default(), Foreign::set_nx_px("jobs"));
        assert_eq!(table.yield_time(&foreign, Duration::ZERO), None);
        table.record_hold(&foreign, Duration::from_millis(99));
        assert_eq!(table.yield_time(&foreign, Duration::ZERO), None);
        table.record_hold(&foreign, Duration::from_millis(1));
        assert_eq!(table.yield_time(&foreign, Duration::ZERO), Some(Duration::from_millis(50)));
        table.record_yield(&foreign, false);
        table.record_hold(&foreign, Duration::from_millis(199));
        assert_eq!(table.yield_time(&foreign, Duration::ZERO), None);
        table.record_hold(&foreign, Duration::from_millis(1));
        assert!(table.yield_time(&foreign, Duration::ZERO).is_some());
        table.record_yield(&foreign, true);
        table.record_hold(&foreign, Duration::from_millis(100));
        assert!(table.yield_time(&foreign, Duration::ZERO).is_some());
    }

    #[test]
    fn client_without_history_counts_the_time_for_which_it_has_waited() {
        let (table, foreign) = (YieldTable::default(), Foreign::set_nx_px("jobs"));
        let waited = Duration::from_millis(100);
        assert_eq!(table.yield_time(&foreign, waited / 2), None);
        assert_eq!(table.yield_time(&foreign, waited), Some(Duration::from_millis(50)));
        // It has a history now.
        table.record_yield(&foreign, true);
        assert_eq!(table.yield_time(&foreign, waited), None);
    }
}
