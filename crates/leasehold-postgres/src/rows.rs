//! The model's interface to the rows of a transaction.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use leasehold_core::model::{Header, Lease, Rows, Waiter};
use leasehold_core::{Acquisition, ClientId, Owner, StoreTime};

use super::base::{is_absent, new_header};
use super::cache::{CachedRows, FirstRow, Found, Missing, first_of};
use super::query::Query;

impl Rows for CachedRows {
    type Error = Missing;

    fn header(&mut self) -> Found<Option<Header>> {
        if self.is_removed {
            return Ok(None);
        }
        if let Some(header) = &self.changes.header {
            return Ok(Some(header.clone()));
        }
        // A row that counts as absent is removed by the sweep, some time later.
        Ok(self.base.header().filter(|header| !is_absent(header)).cloned())
    }

    fn put_header(&mut self, header: &Header) -> Found<()> {
        self.require_row()?;
        self.is_removed = false;
        self.changes.header = Some(header.clone());
        Ok(())
    }

    fn remove_header(&mut self) -> Found<()> {
        self.is_removed = true;
        self.changes.header = self.base.header().map(|_| new_header());
        Ok(())
    }

    fn lease(&mut self, acquisition: Acquisition) -> Found<Option<Lease>> {
        if let Some(lease) = self.slot().filter(|lease| lease.acquisition == acquisition) {
            return Ok(Some(lease.clone()));
        }
        if let Some(changed) = self.changes.leases.get(&acquisition) {
            return Ok(changed.clone());
        }
        match self.base.lease(acquisition) {
            Some(known) => Ok(known.cloned()),
            None => self.lack(Query::Lease(acquisition)),
        }
    }

    fn put_lease(&mut self, lease: Lease) -> Found<()> {
        self.require_row()?;
        let is_in_slot = match self.slot() {
            Some(held) => held.acquisition == lease.acquisition,
            // One that is elsewhere stays there.
            None => {
                let changed = self.changes.leases.get(&lease.acquisition).map(Option::is_some);
                match changed.or_else(|| self.base.lease(lease.acquisition).map(|known| known.is_some())) {
                    Some(is_elsewhere) => !is_elsewhere,
                    None => return self.lack(Query::Lease(lease.acquisition)),
                }
            }
        };
        if is_in_slot {
            self.changes.slot = Some(Some(lease));
        } else {
            self.changes.leases.insert(lease.acquisition, Some(lease));
        }
        Ok(())
    }

    fn remove_lease(&mut self, acquisition: Acquisition) -> Found<()> {
        if self.slot().is_some_and(|lease| lease.acquisition == acquisition) {
            self.changes.slot = Some(None);
        } else {
            self.changes.leases.insert(acquisition, None);
        }
        Ok(())
    }

    fn first_expiring_lease(&mut self) -> Found<Option<Lease>> {
        let is_untouched = |lease: &Lease| !self.changes.leases.contains_key(&lease.acquisition);
        let base = &self.base;
        let unchanged =
            match first_of(base.expiring.as_ref(), base.has_no_leases(), is_untouched, Query::Expiring) {
                FirstRow::Some(lease) => Some(lease),
                FirstRow::None => None,
                FirstRow::Lacks(query) => return self.lack(query),
            };
        let all = unchanged.iter().chain(self.changed_leases());
        Ok(all.min_by_key(|lease| (lease.expires_at, lease.acquisition)).cloned())
    }

    fn heaviest_lease_of(&mut self, owner: &Owner) -> Found<Option<Lease>> {
        let is_untouched = |lease: &Lease| !self.changes.leases.contains_key(&lease.acquisition);
        let heaviest = |lease: &&Lease| Reverse((lease.weight, lease.acquisition));
        let is_own = |lease: &&Lease| lease.owner.as_ref() == Some(owner);
        // If all leases are known, no look-up is needed for each owner.
        if let Some(every) = self.base.every_lease() {
            let all = every.iter().filter(|lease| is_untouched(lease)).chain(self.changed_leases());
            return Ok(all.filter(is_own).min_by_key(heaviest).cloned());
        }
        let query = |limit| Query::OfOwner(owner.clone(), limit);
        let window = self.base.owned.get(owner);
        let unchanged = match first_of(window, self.base.has_no_leases(), is_untouched, query) {
            FirstRow::Some(lease) => Some(lease),
            FirstRow::None => None,
            FirstRow::Lacks(query) => return self.lack(query),
        };
        let all = unchanged.iter().chain(self.changed_leases());
        Ok(all.filter(is_own).min_by_key(heaviest).cloned())
    }

    fn each_lease(&mut self, see: &mut dyn FnMut(Lease)) -> Found<()> {
        if !self.base.has_no_leases() && self.base.all_leases.is_none() {
            return self.lack(Query::AllLeases);
        }
        let unchanged = self.base.all_leases.iter().flatten();
        unchanged
            .filter(|lease| !self.changes.leases.contains_key(&lease.acquisition))
            .chain(self.changed_leases())
            .cloned()
            .for_each(see);
        Ok(())
    }

    fn waiter(&mut self, acquisition: Acquisition) -> Found<Option<Waiter>> {
        let waiter = match self.changes.waiters.get(&acquisition) {
            Some(changed) => changed.now.clone(),
            None => self.known_waiter(acquisition)?,
        };
        Ok(waiter.map(|waiter| self.current(&waiter)))
    }

    fn put_waiter(&mut self, waiter: Waiter) -> Found<()> {
        self.require_row()?;
        // All entries of a client are parked together, so those that were parked otherwise before are gone.
        let client = waiter.inbox();
        if self.changes.parked.get(&client).is_some_and(|parked| *parked != waiter.parked) {
            self.changes.parked.remove(&client);
        }
        self.change_waiter(waiter.acquisition, Some(waiter))
    }

    fn remove_waiter(&mut self, acquisition: Acquisition) -> Found<()> {
        self.change_waiter(acquisition, None)
    }

    fn first_ready_waiter(&mut self) -> Found<Option<Waiter>> {
        let is_as_before =
            |waiter: &Waiter| self.is_untouched(waiter) && !self.changes.parked.contains_key(&waiter.inbox());
        let base = &self.base;
        let mut first = match first_of(base.ready.as_ref(), base.has_no_waiters(), is_as_before, Query::Ready)
        {
            FirstRow::Some(waiter) => Some(waiter),
            FirstRow::None => None,
            FirstRow::Lacks(query) => return self.lack(query),
        };
        let unparked = self.changes.parked.iter().filter(|(_, parked)| !**parked).map(|(client, _)| *client);
        for client in unparked.collect::<Vec<_>>() {
            match self.first_unparked(client) {
                FirstRow::Some(waiter) => first = earlier(first, waiter),
                FirstRow::None => {}
                FirstRow::Lacks(query) => return self.lack(query),
            }
        }
        for waiter in self.changed_waiters().map(|waiter| self.current(waiter)) {
            if !waiter.parked {
                first = earlier(first, waiter);
            }
        }
        Ok(first)
    }

    fn first_expiring_waiter(&mut self) -> Found<Option<Waiter>> {
        let is_untouched = |waiter: &Waiter| self.is_untouched(waiter);
        let base = &self.base;
        let unchanged =
            match first_of(base.deadlines.as_ref(), base.has_no_waiters(), is_untouched, Query::Deadlines) {
                FirstRow::Some(waiter) => Some(waiter),
                FirstRow::None => None,
                FirstRow::Lacks(query) => return self.lack(query),
            };
        let all = unchanged.iter().chain(self.changed_waiters());
        Ok(all.min_by_key(|waiter| (waiter.deadline, waiter.place)).map(|waiter| self.current(waiter)))
    }

    fn set_parked(&mut self, client: ClientId, parked: bool) -> Found<u32> {
        let (count, is_parked) = self.count_of(client)?;
        if count == 0 || is_parked == parked {
            return Ok(0);
        }
        self.changes.parked.insert(client, parked);
        let own = self.changes.waiters.values_mut().filter_map(|changed| changed.now.as_mut());
        own.filter(|waiter| waiter.inbox() == client).for_each(|waiter| waiter.parked = parked);
        Ok(count)
    }

    fn ready_clients(&mut self) -> Found<u32> {
        let mut count = if self.base.has_no_waiters() {
            0
        } else {
            match self.base.ready_clients {
                Some(count) => count,
                None => return self.lack(Query::ReadyClients),
            }
        };
        let changed = self.changes.clients_of_waiters();
        let changed: BTreeSet<_> = changed.chain(self.changes.parked.keys().copied()).collect();
        for client in changed {
            let (now, is_parked) = self.count_of(client)?;
            let before = self.base.counts.get(&client).copied().unwrap_or_default();
            count += u32::from(now > 0 && !is_parked);
            count -= u32::from(before.0 > 0 && !before.1);
        }
        Ok(count)
    }

    fn waiters_of(&mut self, client: ClientId) -> Found<u32> {
        Ok(self.count_of(client)?.0)
    }

    fn each_waiter(&mut self, see: &mut dyn FnMut(Waiter)) -> Found<()> {
        if !self.base.has_no_waiters() && self.base.all_waiters.is_none() {
            return self.lack(Query::AllWaiters);
        }
        let unchanged = self.base.all_waiters.iter().flatten().filter(|waiter| self.is_untouched(waiter));
        let mut all: Vec<_> =
            unchanged.chain(self.changed_waiters()).map(|waiter| self.current(waiter)).collect();
        all.sort_by_key(|waiter| waiter.place);
        all.into_iter().for_each(see);
        Ok(())
    }

    fn tombstone(&mut self, acquisition: Acquisition) -> Found<Option<StoreTime>> {
        if let Some(until) = self.changes.tombstones.get(&acquisition) {
            return Ok(Some(*until));
        }
        let known = if self.base.has_no_tombstones() {
            Some(None)
        } else {
            let all = self.base.all_tombstones.as_ref();
            all.map(|all| all.get(&acquisition).copied())
                .or_else(|| self.base.tombstone.get(&acquisition).copied())
        };
        let Some(known) = known else { return self.lack(Query::Tombstone(acquisition)) };
        Ok(known.filter(|until| self.changes.tombstones_until.is_none_or(|removed| *until > removed)))
    }

    fn put_tombstone(&mut self, acquisition: Acquisition, until: StoreTime) -> Found<()> {
        self.require_row()?;
        self.changes.tombstones.insert(acquisition, until);
        Ok(())
    }

    fn remove_tombstones(&mut self, now: StoreTime) -> Found<(u32, Option<StoreTime>)> {
        if !self.base.has_no_tombstones() && self.base.all_tombstones.is_none() {
            return self.lack(Query::AllTombstones);
        }
        let removed_before = self.changes.tombstones_until;
        let mut all = self.base.all_tombstones.clone().unwrap_or_default();
        all.retain(|_, until| removed_before.is_none_or(|removed| *until > removed));
        all.append(&mut self.changes.tombstones.clone());
        let removed = all.values().filter(|until| **until <= now).count();
        let next = all.values().filter(|until| **until > now).min().copied();
        self.changes.tombstones.retain(|_, until| *until > now);
        self.changes.tombstones_until = Some(removed_before.map_or(now, |before| before.max(now)));
        Ok((u32::try_from(removed).unwrap_or(u32::MAX), next))
    }
}

fn earlier(first: Option<Waiter>, other: Waiter) -> Option<Waiter> {
    match first {
        Some(first) if first.place <= other.place => Some(first),
        _ => Some(other),
    }
}
