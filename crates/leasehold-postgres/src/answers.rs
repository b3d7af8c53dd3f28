//! What the answers to look-ups add to the rows that the model has.

use std::collections::{BTreeMap, HashMap, HashSet};

use leasehold_core::{Acquisition, ClientId, StoreTime};
use leasehold_store::StoreError;
use tokio_postgres::Row;

use super::base::{Base, ResourceRow, Window, new_header};
use super::error;
use super::params::Reader;
use super::query::Query;

/// Keeps the answer to a look-up, and which clients listen.
pub(super) fn keep(
    base: &mut Base,
    present: &mut HashMap<ClientId, bool>,
    query: &Query,
    rows: &[Row],
) -> Result<(), StoreError> {
    let lease = |row: &Row| Reader::new(row).lease();
    let leases = || rows.iter().map(lease).collect::<Result<Vec<_>, _>>();
    let mut waiters = |polling: &mut HashSet<ClientId>| {
        let mut found = Vec::new();
        for row in rows {
            let mut reader = Reader::new(row);
            let (waiter, polls) = reader.waiter()?;
            let client = waiter.inbox();
            if polls {
                polling.insert(client);
            }
            if matches!(query, Query::Ready(_)) {
                present.insert(client, reader.flag()?);
            }
            found.push(waiter);
        }
        Ok::<_, StoreError>(found)
    };
    match query {
        Query::Lease(key) => drop(base.leases.insert(*key, leases()?.pop())),
        Query::Expiring(limit) => base.expiring = Some(Window::new(leases()?, *limit)),
        Query::OfOwner(owner, limit) => {
            base.owned.insert(owner.clone(), Window::new(leases()?, *limit));
        }
        Query::AllLeases => base.all_leases = Some(leases()?),
        Query::Waiter(key) => {
            let found = waiters(&mut base.polling)?.pop();
            base.waiters.insert(*key, found);
        }
        Query::Ready(limit) => base.ready = Some(Window::new(waiters(&mut base.polling)?, *limit)),
        Query::Deadlines(limit) => base.deadlines = Some(Window::new(waiters(&mut base.polling)?, *limit)),
        Query::OfClient(client, limit) => {
            let found = Window::new(waiters(&mut base.polling)?, *limit);
            base.of_client.insert(*client, found);
        }
        Query::AllWaiters => base.all_waiters = Some(waiters(&mut base.polling)?),
        Query::CountOf(client) => {
            let mut reader = Reader::new(one(rows)?);
            base.counts.insert(*client, (reader.count()?, reader.flag()?));
        }
        Query::ReadyClients => base.ready_clients = Some(Reader::new(one(rows)?).count()?),
        Query::Tombstone(key) => {
            base.tombstone.insert(*key, tombstones(rows)?.remove(key));
        }
        Query::AllTombstones => base.all_tombstones = Some(tombstones(rows)?),
        Query::Present(client) => drop(present.insert(*client, Reader::new(one(rows)?).flag()?)),
        Query::Create => {
            let id = Reader::new(one(rows)?).id()?;
            base.resource = Some(ResourceRow { id, header: new_header(), slot: None });
        }
    }
    Ok(())
}

fn one(rows: &[Row]) -> Result<&Row, StoreError> {
    rows.first().ok_or_else(|| error::damaged("an empty answer"))
}

fn tombstones(rows: &[Row]) -> Result<BTreeMap<Acquisition, StoreTime>, StoreError> {
    let read = |row| {
        let mut reader = Reader::new(row);
        Ok((reader.key()?, reader.time()?))
    };
    rows.iter().map(read).collect()
}
