//! Broken stores: shows that each check can fail.

use leasehold_core::Owner;
use leasehold_core::model::{Header, Lease, Waiter};

use super::*;
use crate::checks::{Op, check};

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    LastComesFirst,
    ForgetsTokens,
    LosesWeight,
    KeepsDeadWaiters,
    ForgetsLeases,
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
    fn put_lease(&mut self, lease: Lease) -> Result<(), Infallible> {
        self.table.put_lease(lease)
    }
    fn remove_lease(&mut self, acquisition: Acquisition) -> Result<(), Infallible> {
        self.table.remove_lease(acquisition)
    }
    fn first_expiring_lease(&mut self) -> Result<Option<Lease>, Infallible> {
        self.table.first_expiring_lease()
    }
    fn heaviest_lease_of(&mut self, owner: &Owner) -> Result<Option<Lease>, Infallible> {
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
        if self.fault != Fault::LastComesFirst {
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
