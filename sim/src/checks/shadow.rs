//! The queue of a resource, as it follows from the server's answers.

use leasehold_core::{Acquire, Acquisition, ClientId, StoreTime};

/// The queue of a resource, from the server's answers. It is copied with the server's data.
#[derive(Clone, Debug, Default)]
pub struct Shadow {
    pub(super) queue: Vec<ShadowEntry>,
    /// Grants that were pushed and that the server has not heard of since.
    pub(super) unclaimed: Vec<Unclaimed>,
    /// Until then a minimum hold keeps an exclusive lock from others.
    pub(super) retained_until: StoreTime,
}

#[derive(Clone, Debug)]
pub(super) struct Unclaimed {
    pub(super) acquisition: Acquisition,
    pub(super) until: StoreTime,
    /// Its claim window has lapsed, unless the clock is set back: a server may have refused an attempt without a write since.
    pub(super) has_lapsed: bool,
}

#[derive(Clone, Debug)]
pub(super) struct ShadowEntry {
    pub(super) acquisition: Acquisition,
    pub(super) deadline: StoreTime,
    /// The server found its client unreachable, or a claim window lapsed, and has not heard of the client since.
    pub(super) is_excused: bool,
}

impl Shadow {
    pub(super) fn excuse(&mut self, client: ClientId, is_excused: bool) {
        let theirs = self.queue.iter_mut().filter(|entry| entry.acquisition.client == client);
        theirs.for_each(|entry| entry.is_excused = is_excused);
    }

    /// Excuses the clients whose claim windows have lapsed.
    pub(super) fn note_lapses(&mut self, clock: StoreTime) {
        let mut lapsed = Vec::new();
        for grant in &mut self.unclaimed {
            let had_lapsed = std::mem::replace(&mut grant.has_lapsed, grant.until <= clock);
            if grant.has_lapsed && !had_lapsed {
                lapsed.push(grant.acquisition.client);
            }
        }
        for client in lapsed {
            self.excuse(client, true);
        }
    }

    pub(super) fn enqueue(&mut self, acquire: &Acquire, clock: StoreTime) {
        let Some(wait) = acquire.wait else { return };
        let deadline = clock + wait.entry_ttl;
        match self.queue.iter_mut().find(|entry| entry.acquisition == acquire.acquisition) {
            Some(entry) => entry.deadline = deadline,
            None => {
                let entry = ShadowEntry { acquisition: acquire.acquisition, deadline, is_excused: false };
                // A holder that waits for an upgrade goes first.
                let at = if acquire.replaces.is_some() { 0 } else { self.queue.len() };
                self.queue.insert(at, entry);
            }
        }
    }

    /// One of these new grants, and an entry before it that has no excuse and was not granted in the same step.
    pub(super) fn overtaken(
        &self,
        new: &[Acquisition],
        granted: &[Acquisition],
    ) -> Option<(Acquisition, Acquisition)> {
        new.iter().find_map(|late| {
            let at =
                self.queue.iter().position(|entry| entry.acquisition == *late).unwrap_or(self.queue.len());
            let early = self.queue[..at]
                .iter()
                .find(|entry| !entry.is_excused && !granted.contains(&entry.acquisition));
            early.map(|early| (*late, early.acquisition))
        })
    }
}
