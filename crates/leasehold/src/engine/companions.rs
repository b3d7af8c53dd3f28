//! Companions of leases, such as the locks of other libraries: until when they are trusted, and that the client does not end before they
//! have.

use leasehold_core::LocalTime;
use leasehold_store::StoreError;

use super::entry::Entry;
use super::ids::EntryId;
use super::session::Session;

impl Session {
    /// A companion begins. The client's thread does not end before it has.
    pub(crate) fn begin_companion(&self) {
        self.table().companions += 1;
    }

    /// A companion has ended. `is_confirmed`: nothing of it is left.
    pub(crate) fn end_companion(&self, is_confirmed: bool) {
        self.act(|table, effects| {
            table.companions -= 1;
            if table.companions == 0 {
                table.refused_companion = None;
            }
            table.unconfirmed += u64::from(!is_confirmed);
            table.check_settled(effects);
        });
    }

    /// The companion of this lease was confirmed until then.
    pub(crate) fn limit_trust(&self, entry_id: EntryId, until: LocalTime, now: LocalTime) {
        self.step(entry_id, now, |entry: &mut Entry| entry.limit_trust(until, now));
    }

    /// The store refuses the release of this lease's companion.
    pub(crate) fn refuse_companion(&self, entry_id: EntryId, error: &StoreError) {
        let mut table = self.table();
        if let Some(entry) = table.entries.get(&entry_id) {
            let refused = (entry.resource.clone(), error.clone());
            table.refused_companion = Some(refused);
        }
    }

    /// The companion of this lease was not renewed.
    pub(crate) fn fail_companion(&self, entry_id: EntryId, error: &StoreError) {
        if let Some(entry) = self.table().entries.get_mut(&entry_id) {
            entry.companion_error = Some(error.clone());
        }
    }

    /// The companion of this lease is about to be released. If it is not lost yet, it can't be lost any more by its expiry.
    pub(crate) fn lift_trust_limit(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, |entry: &mut Entry| entry.lift_trust_limit(now));
    }

    /// The companion of this lease is lost.
    pub(crate) fn lose_companion(&self, entry_id: EntryId, now: LocalTime) {
        self.step(entry_id, now, Entry::lose_companion);
    }
}
