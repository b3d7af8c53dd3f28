//! Broken stores: shows that each check can fail.

use leasehold_core::Owner;
use leasehold_core::model::{Header, Lease, Waiter};

use super::*;
use crate::checks::{Op, check};

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// When the lock is free.
    LastComesFirst,
    ForgetsTokens,
    LosesWeight,
    KeepsDeadWaiters,
    ForgetsLeases,
    ForgetsOwners,
    ForgetsTombstones,
    /// At each renewal the hold begins anew.
    ForgetsGrantTimes,
    RetainsForEver,
    /// The second waiter counts as told that it is the head.
    NotifiesNoHead,
}

/// A store with a fault in its rows.
struct BrokenStore {
    table: Table,
    fault: Fault,
}

impl Rows for BrokenStore {
    type Error = Infallible;

    fn header(&mut self) -> Result<Option<Header>, Infallible> {
        let mut header = Rows::header(&mut self.table)?;
        if let Some(header) = &mut header {
            match self.fault {
                Fault::ForgetsTokens => header.last_token = 0,
                Fault::LosesWeight if header.leases == 1 => header.in_use = 0,
                Fault::NotifiesNoHead => {
                    let mut places = Vec::new();
                    self.table.each_waiter(&mut |waiter| places.push(waiter.place))?;
                    header.head = places.get(1).copied().unwrap_or(header.head);
                }
                _ => {}
            }
        }
        Ok(header)
    }
    fn put_header(&mut self, header: &Header) -> Result<(), Infallible> {
        self.table.put_header(header)
    }
    fn remove_header(&mut self) -> Result<(), Infallible> {
        self.table.remove_header()
    }
    fn lease(&mut self, acquisition: Acquisition) -> Result<Option<Lease>, Infallible> {
        if self.fault == Fault::ForgetsLeases {
            return Ok(None);
        }
        self.table.lease(acquisition)
    }
    fn put_lease(&mut self, mut lease: Lease) -> Result<(), Infallible> {
        match self.fault {
            Fault::ForgetsGrantTimes => lease.granted_at = lease.expires_at.saturating_sub(TTL),
            Fault::RetainsForEver if lease.retained => lease.expires_at = StoreTime::NEVER,
            _ => {}
        }
        self.table.put_lease(lease)
    }
    fn remove_lease(&mut self, acquisition: Acquisition) -> Result<(), Infallible> {
        self.table.remove_lease(acquisition)
    }
    fn first_expiring_lease(&mut self) -> Result<Option<Lease>, Infallible> {
        self.table.first_expiring_lease()
    }
    fn heaviest_lease_of(&mut self, owner: &Owner) -> Result<Option<Lease>, Infallible> {
        if self.fault == Fault::ForgetsOwners {
            return Ok(None);
        }
        self.table.heaviest_lease_of(owner)
    }
    fn each_lease(&mut self, see: &mut dyn FnMut(Lease)) -> Result<(), Infallible> {
        self.table.each_lease(see)
    }
    fn waiter(&mut self, acquisition: Acquisition) -> Result<Option<Waiter>, Infallible> {
        self.table.waiter(acquisition)
    }
    fn put_waiter(&mut self, waiter: Waiter) -> Result<(), Infallible> {
        self.table.put_waiter(waiter)
    }
    fn remove_waiter(&mut self, acquisition: Acquisition) -> Result<(), Infallible> {
        self.table.remove_waiter(acquisition)
    }
    fn first_ready_waiter(&mut self) -> Result<Option<Waiter>, Infallible> {
        if self.fault != Fault::LastComesFirst || self.table.first_expiring_lease()?.is_some() {
            return self.table.first_ready_waiter();
        }
        let mut last = None;
        self.table.each_waiter(&mut |waiter| {
            if !waiter.parked {
                last = Some(waiter);
            }
        })?;
        Ok(last)
    }
    fn first_expiring_waiter(&mut self) -> Result<Option<Waiter>, Infallible> {
        if self.fault == Fault::KeepsDeadWaiters {
            return Ok(None);
        }
        self.table.first_expiring_waiter()
    }
    fn set_parked(&mut self, client: ClientId, parked: bool) -> Result<u32, Infallible> {
        self.table.set_parked(client, parked)
    }
    fn ready_clients(&mut self) -> Result<u32, Infallible> {
        self.table.ready_clients()
    }
    fn waiters_of(&mut self, client: ClientId) -> Result<u32, Infallible> {
        self.table.waiters_of(client)
    }
    fn each_waiter(&mut self, see: &mut dyn FnMut(Waiter)) -> Result<(), Infallible> {
        self.table.each_waiter(see)
    }
    fn tombstone(&mut self, acquisition: Acquisition) -> Result<Option<StoreTime>, Infallible> {
        if self.fault == Fault::ForgetsTombstones {
            return Ok(None);
        }
        self.table.tombstone(acquisition)
    }
    fn put_tombstone(&mut self, acquisition: Acquisition, until: StoreTime) -> Result<(), Infallible> {
        self.table.put_tombstone(acquisition, until)
    }
    fn remove_tombstones(&mut self, now: StoreTime) -> Result<(u32, Option<StoreTime>), Infallible> {
        self.table.remove_tombstones(now)
    }
}

fn failure(fault: Fault, ops: &[Op]) -> String {
    check(BrokenStore { table: Table::new(), fault }, 1, ops).expect_err("the check failed")
}

fn take(client: u128) -> Op {
    Op::Acquire { client, sequence: 0, weight: 1, wait: true, owner: None }
}

fn give(client: u128) -> Op {
    Op::Release { client, sequence: 0, at_least_s: 0, tombstone_s: 0 }
}

/// The faults below are not in the store that passes the same sequence.
fn passes(ops: &[Op]) {
    check(Table::new(), 1, ops).expect("the check passes with a right store");
}

#[test]
fn store_that_serves_the_last_waiter_first_fails_the_check() {
    let ops = [take(0), take(1), take(2), give(0)];
    let failure = failure(Fault::LastComesFirst, &ops);
    assert!(failure.contains("overtook"), "{failure}");
}

#[test]
fn store_that_forgets_the_last_token_fails_the_check() {
    let ops = [take(0), give(0), take(1)];
    let failure = failure(Fault::ForgetsTokens, &ops);
    assert!(failure.contains("came after"), "{failure}");
}

#[test]
fn store_that_loses_weight_fails_the_check() {
    let ops = [take(0), take(1)];
    let failure = failure(Fault::LosesWeight, &ops);
    assert!(failure.contains("is held"), "{failure}");
}

#[test]
fn store_that_keeps_dead_waiters_fails_the_check() {
    let ops = [take(0), take(1)];
    let failure = failure(Fault::KeepsDeadWaiters, &ops);
    assert!(failure.contains("dead clients still hold or wait"), "{failure}");
}

#[test]
fn store_that_forgets_leases_fails_the_check() {
    let ops = [take(0)];
    let failure = failure(Fault::ForgetsLeases, &ops);
    assert!(failure.contains("then"), "{failure}");
}

#[test]
fn store_that_forgets_owners_fails_the_check() {
    let enter = |sequence| Op::Acquire { client: 0, sequence, weight: 1, wait: false, owner: Some(1) };
    let ops = [enter(0), enter(1)];
    passes(&ops);
    let failure = failure(Fault::ForgetsOwners, &ops);
    assert!(failure.contains("was answered Busy instead of"), "{failure}");
}

#[test]
fn store_that_forgets_tombstones_fails_the_check() {
    let ops = [Op::Release { client: 0, sequence: 0, at_least_s: 0, tombstone_s: 5 }, take(0)];
    passes(&ops);
    let failure = failure(Fault::ForgetsTombstones, &ops);
    assert!(failure.contains("instead of Answer(Cancelled)"), "{failure}");
}

#[test]
fn store_that_forgets_the_time_of_a_grant_fails_the_check() {
    let ops = [take(0), Op::Pass { ms: 1_000 }, Op::Renew { client: 0, sequence: 0, reserve: 0 }];
    passes(&ops);
    let failure = failure(Fault::ForgetsGrantTimes, &ops);
    assert!(failure.contains("counts from"), "{failure}");
}

#[test]
fn store_that_retains_a_lease_for_ever_fails_the_check() {
    let ops = [take(0), Op::Release { client: 0, sequence: 0, at_least_s: 5, tombstone_s: 0 }];
    passes(&ops);
    let failure = failure(Fault::RetainsForEver, &ops);
    assert!(failure.contains("retains"), "{failure}");
}

#[test]
fn store_that_notifies_no_head_fails_the_check() {
    let ops = [take(0), take(1), take(2), take(3), give(1)];
    passes(&ops);
    let failure = failure(Fault::NotifiesNoHead, &ops);
    assert!(failure.contains("was told that it is"), "{failure}");
}
