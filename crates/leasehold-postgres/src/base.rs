//! The rows of one resource as far as a transaction has read them, before the model changes any.

use std::collections::{BTreeMap, HashMap, HashSet};

use leasehold_core::model::{Header, Lease, Waiter};
use leasehold_core::{Acquisition, ClientId, Owner, StoreTime};

/// The first rows of an order.
#[derive(Clone, Debug)]
pub(super) struct Window<T> {
    pub(super) rows: Vec<T>,
    /// There are no further ones.
    pub(super) is_complete: bool,
}

impl<T> Window<T> {
    /// What a look-up for so many rows found.
    pub(super) fn new(rows: Vec<T>, limit: i64) -> Self {
        let is_complete = i64::try_from(rows.len()).is_ok_and(|count| count < limit);
        Self { rows, is_complete }
    }

    /// The window to look for, if this one was too small.
    pub(super) fn larger(&self) -> i64 {
        4 * i64::try_from(self.rows.len().max(1)).unwrap_or(1)
    }
}

/// The resource's row: the header, and one lease, so that a lock with one holder is one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResourceRow {
    pub(super) id: i64,
    pub(super) header: Header,
    pub(super) slot: Option<Lease>,
}

/// What was read. Look-ups that were not made are absent.
#[derive(Clone, Debug, Default)]
pub(super) struct Base {
    pub(super) resource: Option<ResourceRow>,
    pub(super) leases: HashMap<Acquisition, Option<Lease>>,
    pub(super) expiring: Option<Window<Lease>>,
    pub(super) owned: BTreeMap<Owner, Window<Lease>>,
    pub(super) all_leases: Option<Vec<Lease>>,
    pub(super) waiters: HashMap<Acquisition, Option<Waiter>>,
    pub(super) ready: Option<Window<Waiter>>,
    pub(super) deadlines: Option<Window<Waiter>>,
    pub(super) of_client: HashMap<ClientId, Window<Waiter>>,
    /// The number of a client's entries, and whether they are parked.
    pub(super) counts: HashMap<ClientId, (u32, bool)>,
    pub(super) ready_clients: Option<u32>,
    pub(super) all_waiters: Option<Vec<Waiter>>,
    pub(super) tombstone: HashMap<Acquisition, Option<StoreTime>>,
    pub(super) all_tombstones: Option<BTreeMap<Acquisition, StoreTime>>,
    /// Clients that wait without notifications, because they are behind a pooler.
    pub(super) polling: HashSet<ClientId>,
}

impl Base {
    pub(super) fn header(&self) -> Option<&Header> {
        self.resource.as_ref().map(|resource| &resource.header)
    }

    pub(super) fn slot(&self) -> Option<&Lease> {
        self.resource.as_ref().and_then(|resource| resource.slot.as_ref())
    }

    /// Whether no lease is outside of the resource's row.
    pub(super) fn has_no_leases(&self) -> bool {
        self.header().map_or(0, |header| header.leases) <= u32::from(self.slot().is_some())
    }

    pub(super) fn has_no_waiters(&self) -> bool {
        self.header().is_none_or(|header| header.waiters == 0)
    }

    pub(super) fn has_no_tombstones(&self) -> bool {
        self.header().is_none_or(|header| header.tombstones == 0)
    }

    /// All leases outside of the resource's row, if they were read.
    pub(super) fn every_lease(&self) -> Option<&Vec<Lease>> {
        let of_window =
            || self.expiring.as_ref().filter(|window| window.is_complete).map(|window| &window.rows);
        self.all_leases.as_ref().or_else(of_window)
    }

    /// A lease outside of the resource's row. `None`: it was not looked for.
    pub(super) fn lease(&self, acquisition: Acquisition) -> Option<Option<&Lease>> {
        if self.has_no_leases() {
            return Some(None);
        }
        if let Some(known) = self.leases.get(&acquisition) {
            return Some(known.as_ref());
        }
        if let Some(all) = self.every_lease() {
            return Some(all.iter().find(|lease| lease.acquisition == acquisition));
        }
        let windows = self.expiring.iter().chain(self.owned.values());
        windows.flat_map(|window| &window.rows).find(|lease| lease.acquisition == acquisition).map(Some)
    }

    /// A queue entry. `None`: it was not looked for.
    pub(super) fn waiter(&self, acquisition: Acquisition) -> Option<Option<&Waiter>> {
        if self.has_no_waiters() {
            return Some(None);
        }
        if let Some(known) = self.waiters.get(&acquisition) {
            return Some(known.as_ref());
        }
        if let Some(all) = &self.all_waiters {
            return Some(all.iter().find(|waiter| waiter.acquisition == acquisition));
        }
        let windows = self.ready.iter().chain(&self.deadlines).chain(self.of_client.values());
        windows.flat_map(|window| &window.rows).find(|waiter| waiter.acquisition == acquisition).map(Some)
    }
}

/// Whether the model knows nothing of this row: it was just inserted, or the model has removed it.
pub(super) fn is_absent(header: &Header) -> bool {
    header.is_idle() && header.remember_until == StoreTime::ZERO
}

/// The header of a row that counts as absent.
pub(super) fn new_header() -> Header {
    Header {
        capacity: 0,
        in_use: 0,
        last_token: 0,
        next_place: 1,
        head: 0,
        leases: 0,
        waiters: 0,
        parked: 0,
        tombstones: 0,
        next_expiry: StoreTime::NEVER,
        remember_until: StoreTime::ZERO,
    }
}
