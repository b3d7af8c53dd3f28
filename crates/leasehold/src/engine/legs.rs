//! The second legs of bridged leases: when they are trusted, and that the client does not end before they have.

use leasehold_core::LocalTime;
use leasehold_store::StoreError;

use super::entry::Entry;
use super::session::Session;
use super::table::Effects;

impl Session {
    /// A leg begins. The client's thread does not end before the leg has.
    pub(crate) fn begin_leg(&self) {
        self.table().open_legs += 1;
    }

    /// A leg has ended. `is_confirmed`: it has no lock of the other library any more.
    pub(crate) fn end_leg(&self, is_confirmed: bool) {
        let mut effects = Effects::default();
        {
            let mut table = self.table();
            table.open_legs -= 1;
            table.unconfirmed += u64::from(!is_confirmed);
            table.check_settled(&mut effects);
        }
        self.apply_effects(effects);
    }

    /// The second leg of this lease is trusted until then.
    pub(crate) fn trust_bridge(&self, sequence: u64, until: LocalTime, now: LocalTime) {
        self.step(sequence, now, |entry: &mut Entry| entry.trust_bridge(until, now));
    }

    /// The second leg of this lease was not renewed.
    pub(crate) fn fail_bridge(&self, sequence: u64, error: &StoreError) {
        if let Some(entry) = self.table().entries.get_mut(&sequence) {
            entry.leg_error = Some(error.clone());
        }
    }

    /// The second leg of this lease is about to be released. If it is not lost yet, it can't be lost any more by its expiry.
    pub(crate) fn release_bridge(&self, sequence: u64, now: LocalTime) {
        self.step(sequence, now, |entry: &mut Entry| entry.release_bridge(now));
    }

    /// The second leg of this lease is lost.
    pub(crate) fn lose_bridge(&self, sequence: u64, now: LocalTime) {
        self.step(sequence, now, Entry::lose_bridge);
    }
}
