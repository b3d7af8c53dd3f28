//! The lease table of one resource in memory.

use alloc::collections::{BTreeMap, BTreeSet};
use core::convert::Infallible;

use super::rows::{Header, Lease, Rows, Waiter};
use crate::id::{Acquisition, ClientId, Owner};
use crate::time::StoreTime;

/// A resource's lease table in memory. Every look-up and every change is O(log n).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    header: Option<Header>,
    leases: BTreeMap<Acquisition, Lease>,
    lease_expiries: BTreeSet<(StoreTime, Acquisition)>,
    /// Leases of named owners, the heaviest last.
    owners: BTreeSet<(Owner, u32, Acquisition)>,
    queue: BTreeMap<u64, Waiter>,
    /// The first place of each client that is not parked.
    ready: BTreeSet<u64>,
    clients: BTreeMap<ClientId, ClientEntries>,
    places: BTreeMap<Acquisition, u64>,
    deadlines: BTreeSet<(StoreTime, u64)>,
    tombstones: BTreeMap<Acquisition, StoreTime>,
    tombstone_expiries: BTreeSet<(StoreTime, Acquisition)>,
}

/// The queue entries of one client, at least one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClientEntries {
    places: BTreeSet<u64>,
    parked: bool,
}

impl ClientEntries {
    /// The client's first place, by which it is ordered among the other clients.
    fn ready(&self) -> Option<u64> {
        self.places.first().copied().filter(|_| !self.parked)
    }
}

impl Table {
    /// An unused resource.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            header: None,
            leases: BTreeMap::new(),
            lease_expiries: BTreeSet::new(),
            owners: BTreeSet::new(),
            queue: BTreeMap::new(),
            ready: BTreeSet::new(),
            clients: BTreeMap::new(),
            places: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            tombstones: BTreeMap::new(),
            tombstone_expiries: BTreeSet::new(),
        }
    }

    /// Whether nothing is stored, not even a last token.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.header.is_none()
    }

    /// The header; `None` if nothing is stored. A sweep can remove something at its `next_expiry`, or, if
    /// only the last token is left, at its `remember_until` by the wall clock.
    #[must_use]
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    fn unindex_lease(&mut self, lease: &Lease) {
        self.lease_expiries.remove(&(lease.expires_at, lease.acquisition));
        if let Some(owner) = &lease.owner {
            self.owners.remove(&(owner.clone(), lease.weight, lease.acquisition));
        }
    }

    /// Changes a client's queue entries, and updates its first place.
    fn update_entries<T>(&mut self, client: ClientId, change: impl FnOnce(&mut ClientEntries) -> T) -> T {
        let entries = self.clients.entry(client).or_default();
        let before = entries.ready();
        let result = change(entries);
        let after = entries.ready();
        if entries.places.is_empty() {
            self.clients.remove(&client);
        }
        if before != after {
            if let Some(place) = before {
                self.ready.remove(&place);
            }
            self.ready.extend(after);
        }
        result
    }

    /// An entry with its current parked state, which is stored once per client.
    fn entry(&self, waiter: &Waiter) -> Waiter {
        let entries = self.clients.get(&waiter.inbox());
        Waiter { parked: entries.is_some_and(|entries| entries.parked), ..waiter.clone() }
    }
}

impl Rows for Table {
    type Error = Infallible;

    fn header(&mut self) -> Result<Option<Header>, Infallible> {
        Ok(self.header.clone())
    }

    fn put_header(&mut self, header: &Header) -> Result<(), Infallible> {
        self.header = Some(header.clone());
        Ok(())
    }

    fn remove_header(&mut self) -> Result<(), Infallible> {
        assert!(
            self.leases.is_empty() && self.queue.is_empty() && self.tombstones.is_empty(),
            "a table in use was forgotten"
        );
        self.header = None;
        Ok(())
    }

    fn lease(&mut self, acquisition: Acquisition) -> Result<Option<Lease>, Infallible> {
        Ok(self.leases.get(&acquisition).cloned())
    }

    fn put_lease(&mut self, lease: Lease) -> Result<(), Infallible> {
        self.lease_expiries.insert((lease.expires_at, lease.acquisition));
        if let Some(owner) = &lease.owner {
            self.owners.insert((owner.clone(), lease.weight, lease.acquisition));
        }
        let (acquisition, expires_at, weight) = (lease.acquisition, lease.expires_at, lease.weight);
        if let Some(old) = self.leases.insert(acquisition, lease) {
            assert!(old.weight == weight, "a lease changed its weight");
            if old.expires_at != expires_at {
                self.lease_expiries.remove(&(old.expires_at, acquisition));
            }
        }
        Ok(())
    }

    fn remove_lease(&mut self, acquisition: Acquisition) -> Result<(), Infallible> {
        if let Some(lease) = self.leases.remove(&acquisition) {
            self.unindex_lease(&lease);
        }
        Ok(())
    }

    fn first_expiring_lease(&mut self) -> Result<Option<Lease>, Infallible> {
        let first = self.lease_expiries.first();
        Ok(first.and_then(|(_, acquisition)| self.leases.get(acquisition)).cloned())
    }

    fn heaviest_lease_of(&mut self, owner: &Owner) -> Result<Option<Lease>, Infallible> {
        let least = Acquisition { client: ClientId::new(0), sequence: 0 };
        let most = Acquisition { client: ClientId::new(u128::MAX), sequence: u64::MAX };
        let range = (owner.clone(), 0, least)..=(owner.clone(), u32::MAX, most);
        let heaviest = self.owners.range(range).next_back();
        Ok(heaviest.and_then(|(_, _, acquisition)| self.leases.get(acquisition)).cloned())
    }

    fn each_lease(&mut self, see: &mut dyn FnMut(Lease)) -> Result<(), Infallible> {
        self.leases.values().cloned().for_each(see);
        Ok(())
    }

    fn waiter(&mut self, acquisition: Acquisition) -> Result<Option<Waiter>, Infallible> {
        let place = self.places.get(&acquisition);
        Ok(place.and_then(|place| self.queue.get(place)).map(|waiter| self.entry(waiter)))
    }

    fn put_waiter(&mut self, waiter: Waiter) -> Result<(), Infallible> {
        if let Some(old) = self.queue.get(&waiter.place) {
            self.deadlines.remove(&(old.deadline, old.place));
        }
        self.update_entries(waiter.inbox(), |entries| {
            assert!(
                entries.places.is_empty() || entries.parked == waiter.parked,
                "an entry is parked, and others of its client are not"
            );
            entries.parked = waiter.parked;
            entries.places.insert(waiter.place)
        });
        self.deadlines.insert((waiter.deadline, waiter.place));
        self.places.insert(waiter.acquisition, waiter.place);
        self.queue.insert(waiter.place, waiter);
        Ok(())
    }

    fn remove_waiter(&mut self, acquisition: Acquisition) -> Result<(), Infallible> {
        let place = self.places.remove(&acquisition);
        if let Some(waiter) = place.and_then(|place| self.queue.remove(&place)) {
            self.deadlines.remove(&(waiter.deadline, waiter.place));
            self.update_entries(waiter.inbox(), |entries| entries.places.remove(&waiter.place));
        }
        Ok(())
    }

    fn first_ready_waiter(&mut self) -> Result<Option<Waiter>, Infallible> {
        let first = self.ready.first().and_then(|place| self.queue.get(place));
        Ok(first.map(|waiter| self.entry(waiter)))
    }

    fn first_expiring_waiter(&mut self) -> Result<Option<Waiter>, Infallible> {
        let first = self.deadlines.first().and_then(|(_, place)| self.queue.get(place));
        Ok(first.map(|waiter| self.entry(waiter)))
    }

    fn set_parked(&mut self, client: ClientId, parked: bool) -> Result<u32, Infallible> {
        if self.clients.get(&client).is_none_or(|entries| entries.parked == parked) {
            return Ok(0);
        }
        Ok(self.update_entries(client, |entries| {
            entries.parked = parked;
            u32::try_from(entries.places.len()).unwrap_or(u32::MAX)
        }))
    }

    fn ready_clients(&mut self) -> Result<u32, Infallible> {
        Ok(u32::try_from(self.ready.len()).unwrap_or(u32::MAX))
    }

    fn waiters_of(&mut self, client: ClientId) -> Result<u32, Infallible> {
        let places = self.clients.get(&client).map_or(0, |entries| entries.places.len());
        Ok(u32::try_from(places).unwrap_or(u32::MAX))
    }

    fn each_waiter(&mut self, see: &mut dyn FnMut(Waiter)) -> Result<(), Infallible> {
        self.queue.values().map(|waiter| self.entry(waiter)).for_each(see);
        Ok(())
    }

    fn tombstone(&mut self, acquisition: Acquisition) -> Result<Option<StoreTime>, Infallible> {
        Ok(self.tombstones.get(&acquisition).copied())
    }

    fn put_tombstone(&mut self, acquisition: Acquisition, until: StoreTime) -> Result<(), Infallible> {
        if let Some(old) = self.tombstones.insert(acquisition, until) {
            self.tombstone_expiries.remove(&(old, acquisition));
        }
        self.tombstone_expiries.insert((until, acquisition));
        Ok(())
    }

    fn remove_tombstones(&mut self, now: StoreTime) -> Result<(u32, Option<StoreTime>), Infallible> {
        let mut removed = 0;
        while let Some(&(until, acquisition)) = self.tombstone_expiries.first() {
            if until > now {
                return Ok((removed, Some(until)));
            }
            self.tombstone_expiries.pop_first();
            self.tombstones.remove(&acquisition);
            removed += 1;
        }
        Ok((removed, None))
    }
}
