//! What a transaction has read of one resource, with the changes of the model.
//!
//! The model asks for single rows, and a server cannot answer each question in a round trip of its own. So the usual ones are
//! read beforehand. A question that they do not answer fails with [`Missing`]: the transaction reads what is missing, and the
//! model runs again from the start, since it depends on the rows alone. Its changes are kept here until it has run through.

use std::collections::BTreeMap;

use leasehold_core::model::{Header, Lease, Waiter};
use leasehold_core::{Acquisition, ClientId, StoreTime};

use super::base::{Base, ResourceRow, Window};
use super::query::{Query, WINDOW};

/// The rows do not answer a question of the model. [`CachedRows::missing`] has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Missing;

pub(super) type Found<T> = Result<T, Missing>;

/// The changes of the model, by key. `None` removes a row.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    pub(super) header: Option<Header>,
    /// The lease in the resource's row, if it changes.
    pub(super) slot: Option<Option<Lease>>,
    pub(super) leases: BTreeMap<Acquisition, Option<Lease>>,
    pub(super) waiters: BTreeMap<Acquisition, ChangedWaiter>,
    /// Clients whose entries are all parked or unparked.
    pub(super) parked: BTreeMap<ClientId, bool>,
    pub(super) tombstones: BTreeMap<Acquisition, StoreTime>,
    /// Tombstones that end until then are removed.
    pub(super) tombstones_until: Option<StoreTime>,
}

/// A queue entry that changes.
#[derive(Clone, Debug)]
pub(super) struct ChangedWaiter {
    /// The client that speaks for the entry that is stored; `None` for a new one.
    pub(super) stored_inbox: Option<ClientId>,
    pub(super) now: Option<Waiter>,
}

impl Changes {
    /// The clients whose entries change in number. An entry may go from one client to another.
    pub(super) fn clients_of_waiters(&self) -> impl Iterator<Item = ClientId> {
        let inboxes =
            |changed: &ChangedWaiter| [changed.stored_inbox, changed.now.as_ref().map(Waiter::inbox)];
        self.waiters.values().flat_map(inboxes).flatten()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.header.is_none()
            && self.slot.is_none()
            && self.leases.is_empty()
            && self.waiters.is_empty()
            && self.parked.is_empty()
            && self.tombstones.is_empty()
            && self.tombstones_until.is_none()
    }
}

/// One resource in one transaction.
pub(super) struct CachedRows {
    pub(super) base: Base,
    pub(super) changes: Changes,
    /// What the last run lacked.
    pub(super) missing: Option<Query>,
    /// The model has removed the header.
    pub(super) is_removed: bool,
}

impl CachedRows {
    pub(super) fn new() -> Self {
        Self { base: Base::default(), changes: Changes::default(), missing: None, is_removed: false }
    }

    /// Forgets the changes of a run, for the next one.
    pub(super) fn begin(&mut self) {
        self.changes = Changes::default();
        self.missing = None;
        self.is_removed = false;
    }

    /// The last token that is stored.
    pub(super) fn last_token(&self) -> u64 {
        self.base.header().map_or(0, |header| header.last_token)
    }

    /// The row that is stored, for the changes to it.
    pub(super) fn stored(&self) -> Option<&ResourceRow> {
        self.base.resource.as_ref()
    }

    pub(super) fn lack<T>(&mut self, query: Query) -> Found<T> {
        self.missing = Some(query);
        Err(Missing)
    }

    /// The resource's row must exist before anything else of it is stored.
    pub(super) fn require_row(&mut self) -> Found<()> {
        if self.base.resource.is_some() { Ok(()) } else { self.lack(Query::Create) }
    }

    pub(super) fn slot(&self) -> Option<&Lease> {
        self.changes.slot.as_ref().map_or_else(|| self.base.slot(), Option::as_ref)
    }

    /// A row as the changes leave it: all entries of a client are parked together.
    pub(super) fn current(&self, waiter: &Waiter) -> Waiter {
        let parked = self.changes.parked.get(&waiter.inbox()).copied().unwrap_or(waiter.parked);
        Waiter { parked, ..waiter.clone() }
    }

    /// A queue entry as it is stored.
    pub(super) fn known_waiter(&mut self, acquisition: Acquisition) -> Found<Option<Waiter>> {
        match self.base.waiter(acquisition) {
            Some(known) => Ok(known.cloned()),
            None => self.lack(Query::Waiter(acquisition)),
        }
    }

    /// Changes a queue entry, or removes it.
    pub(super) fn change_waiter(&mut self, acquisition: Acquisition, now: Option<Waiter>) -> Found<()> {
        // The numbers of the entries of the clients depend on it.
        let stored_inbox = self.known_waiter(acquisition)?.map(|stored| stored.inbox());
        self.changes.waiters.insert(acquisition, ChangedWaiter { stored_inbox, now });
        Ok(())
    }

    /// The number of a client's entries, and whether they are parked.
    pub(super) fn count_of(&mut self, client: ClientId) -> Found<(u32, bool)> {
        let (mut count, mut parked) = if self.base.has_no_waiters() {
            (0, false)
        } else {
            match self.base.counts.get(&client) {
                Some(known) => *known,
                None => return self.lack(Query::CountOf(client)),
            }
        };
        for changed in self.changes.waiters.values() {
            let was_there = changed.stored_inbox == Some(client);
            match changed.now.as_ref().filter(|waiter| waiter.inbox() == client) {
                // It may be one that has expired, and is in the queue again.
                Some(waiter) => {
                    count += u32::from(!was_there);
                    parked = waiter.parked;
                }
                None => count -= u32::from(was_there),
            }
        }
        let parked = self.changes.parked.get(&client).copied().unwrap_or(parked);
        Ok((count, parked && count > 0))
    }

    /// Whether the changes say nothing about this row.
    pub(super) fn is_untouched(&self, waiter: &Waiter) -> bool {
        !self.changes.waiters.contains_key(&waiter.acquisition)
    }

    pub(super) fn changed_waiters(&self) -> impl Iterator<Item = &Waiter> {
        self.changes.waiters.values().filter_map(|changed| changed.now.as_ref())
    }

    pub(super) fn changed_leases(&self) -> impl Iterator<Item = &Lease> {
        self.changes.leases.values().filter_map(Option::as_ref).chain(self.slot())
    }

    /// The first entry of a client that was unparked here, and which is therefore not among the rows that were ready.
    pub(super) fn first_unparked(&self, client: ClientId) -> FirstRow<Waiter> {
        if self.base.has_no_waiters() {
            return FirstRow::None;
        }
        let Some(window) = self.base.of_client.get(&client) else {
            return FirstRow::Lacks(Query::OfClient(client, WINDOW));
        };
        match window.rows.iter().find(|waiter| self.is_untouched(waiter)) {
            Some(waiter) => FirstRow::Some(self.current(waiter)),
            None if window.is_complete => FirstRow::None,
            None => FirstRow::Lacks(Query::OfClient(client, window.larger())),
        }
    }
}

/// The first row among those that no change concerns.
pub(super) enum FirstRow<T> {
    Some(T),
    None,
    Lacks(Query),
}

/// The first row of a window that no change concerns.
pub(super) fn first_of<T: Clone>(
    window: Option<&Window<T>>,
    is_empty: bool,
    is_untouched: impl Fn(&T) -> bool,
    query: impl Fn(i64) -> Query,
) -> FirstRow<T> {
    if is_empty {
        return FirstRow::None;
    }
    let Some(window) = window else { return FirstRow::Lacks(query(WINDOW)) };
    match window.rows.iter().find(|row| is_untouched(row)) {
        Some(row) => FirstRow::Some(row.clone()),
        None if window.is_complete => FirstRow::None,
        None => FirstRow::Lacks(query(window.larger())),
    }
}
