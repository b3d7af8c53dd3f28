//! What is due: the timers of the table's entries, its sleepers, and the renewals that are sent together.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Command, LocalTime, Resource};

use super::entry::Transmit;
use super::ids::EntryId;
use super::table::{Effects, Table};

/// The largest number of commands in one batch.
pub(super) const MAX_BATCH: usize = 512;

/// A renewal that is due within this fraction of its ttl is sent together with one that is due now.
const EARLY_RENEWAL_PART: u32 = 20;

/// Max time before its due time at which a renewal is sent, for any ttl.
const EARLY_RENEWAL_MAX: Duration = Duration::from_millis(500);

/// What the driver must do.
pub(crate) struct DueWork {
    pub(crate) transmits: Vec<(Arc<Resource>, Transmit)>,
    /// When to ask again.
    pub(crate) next: LocalTime,
    /// The client has ended and nothing is left to release.
    pub(crate) is_over: bool,
}

impl Table {
    pub(super) fn due(&mut self, now: LocalTime, effects: &mut Effects) -> DueWork {
        while let Some(sleeper) = self.sleepers.first_entry()
            && sleeper.key().0 <= now
        {
            effects.wakers.push(sleeper.remove());
        }
        let mut transmits = Vec::new();
        while transmits.len() < MAX_BATCH
            && let Some(&(time, entry_id)) = self.timers.first()
            && time <= now
        {
            transmits.extend(self.fire(entry_id, now, effects));
        }
        if transmits.iter().any(|(_, transmit)| matches!(transmit.command, Command::Renew(_))) {
            self.renew_early(now, &mut transmits, effects);
        }
        let timer = self.timers.first().map_or(LocalTime::NEVER, |(time, _)| *time);
        let sleeper = self.sleepers.first_key_value().map_or(LocalTime::NEVER, |((time, _), _)| *time);
        self.driver_wakes_at = timer.min(sleeper);
        let is_over = self.is_settled() && (self.is_closed || self.has_no_handles);
        DueWork { transmits, next: self.driver_wakes_at, is_over }
    }

    fn fire(
        &mut self,
        entry_id: EntryId,
        now: LocalTime,
        effects: &mut Effects,
    ) -> Option<(Arc<Resource>, Transmit)> {
        let entry = self.entries.get_mut(&entry_id)?;
        if let Some(set) = entry.timer.take() {
            self.timers.remove(&(set, entry_id));
        }
        let transmit = entry.poll_transmit(entry_id, now).map(|transmit| (entry.resource.clone(), transmit));
        self.reconcile(entry_id, now, effects);
        transmit
    }

    /// Sends renewals that are due soon together with those that are due now. Leases with equal ttls therefore come to be
    /// renewed in one batch, whenever they were granted.
    fn renew_early(
        &mut self,
        now: LocalTime,
        transmits: &mut Vec<(Arc<Resource>, Transmit)>,
        effects: &mut Effects,
    ) {
        let soon = self.timers.range(..=(now + EARLY_RENEWAL_MAX, EntryId::LAST));
        let early: Vec<EntryId> = soon
            .map(|(_, entry_id)| *entry_id)
            .filter(|entry_id| {
                self.entries.get(entry_id).is_some_and(|entry| entry.renews_within(now, EARLY_RENEWAL_PART))
            })
            .take(MAX_BATCH.saturating_sub(transmits.len()))
            .collect();
        for entry_id in early {
            if let Some(entry) = self.entries.get_mut(&entry_id) {
                entry.renew_now(now);
            }
            transmits.extend(self.fire(entry_id, now, effects));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestStore;

    #[test]
    fn driver_gets_a_bounded_number_of_commands_at_once() {
        const REST: usize = 10;
        let client = TestStore::new().client().unwrap();
        let guards: Vec<_> = (0..MAX_BATCH + REST)
            .map(|number| pollster::block_on(client.mutex(number.to_string()).try_lock()).unwrap().unwrap())
            .collect();
        let session = &client.handle.session;
        let renewal = session.now() + Duration::from_secs(5);
        let batches = [(); 3].map(|()| session.due(renewal).transmits.len());
        assert_eq!(batches, [MAX_BATCH, REST, 0]);
        drop(guards);
    }

    #[test]
    fn renewals_that_are_due_soon_are_sent_together() {
        let store = TestStore::new();
        let client = store.client().unwrap();
        let lock = |name: &str, ttl| {
            let mutex = client.mutex(name).ttl(Duration::from_secs(ttl));
            pollster::block_on(mutex.try_lock()).unwrap().unwrap()
        };
        let (granted, first) = (client.handle.session.now(), lock("first", 9));
        store.advance(Duration::from_millis(440));
        let soon = lock("soon", 9);
        store.advance(Duration::from_millis(20));
        let later = lock("later", 9);
        let long = lock("long", 60);
        store.advance(Duration::from_millis(510));
        let long_later = lock("later than long", 60);
        let sent = |after| client.handle.session.due(granted + after).transmits.len();
        assert_eq!(sent(Duration::from_millis(2_999)), 0);
        assert_eq!(sent(Duration::from_secs(3)), 2);
        assert_eq!(sent(Duration::from_millis(3_459)), 0);
        assert_eq!(sent(Duration::from_millis(3_460)), 1);
        // Half a second early at most, though a twentieth of this ttl is longer.
        assert_eq!(sent(Duration::from_millis(20_460)), 1);
        drop([first, soon, later, long, long_later]);
    }
}
