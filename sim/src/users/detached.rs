//! Detached leases: a task forgets its guard, and tasks of any client renew, attach and release the lease by its id.

use leasehold::simulation::LeaseProbe;
use leasehold::{Error, Guard};

use super::holding::{Got, Held, Registration};
use super::judging::Lease;
use super::user::User;
use crate::plan::{Next, Op};
use crate::world::{Detached, with};

impl User {
    /// Detaches a guard, and goes on with the lease that was detached first.
    pub(super) async fn detach(&self, op: &Op, held: Held, next: Next) {
        let leases = held.leases();
        let Held { records, got } = held;
        let guard = match got {
            // After the faults each lease is released, so that nothing is left at the end.
            Got::Guard(guard) if !with(|world| world.is_healed) => guard,
            Got::Writer(guard) if !with(|world| world.is_healed) => Guard::from(guard),
            got => {
                drop(records);
                if let Err(error) = got.release().await {
                    self.failed(&leases, &error);
                }
                return;
            }
        };
        let weight_of = |Registration(number): &Registration| {
            with(|world| world.books.records.get(number).map(|record| record.weight))
        };
        let weight = records.first().and_then(weight_of).unwrap_or(1);
        drop(records);
        self.forget(op.lock, weight, guard, &leases).await;
        self.sleep(op.hold / 4).await;
        let Some(lease) = with(|world| world.detached.pop_front()) else { return };
        match next {
            Next::Leave => with(|world| world.detached.push_front(lease)),
            Next::Renew => self.renew_by_id(lease).await,
            Next::Release | Next::Attach | Next::Drop => self.attach(op, &lease, next).await,
        }
    }

    /// The lease stays at the server without a guard.
    async fn forget(&self, lock: usize, weight: u32, guard: Guard, leases: &[Lease]) {
        let token = guard.token();
        let acquisition = LeaseProbe::of(&guard).acquisition();
        match guard.detach().await {
            Ok(id) => {
                with(|world| world.books.note_detached(acquisition));
                self.say(52, || format!("detaches r{lock}, token {token}"));
                with(|world| world.detached.push_back(Detached { lock, weight, id, since: world.now }));
            }
            Err(error) => self.failed(leases, &error),
        }
    }

    async fn renew_by_id(&self, lease: Detached) {
        if with(|world| world.is_healed) {
            return;
        }
        let lock = lease.lock;
        match self.client.renew_lease(&lease.id).await {
            Ok(()) => {
                self.say(53, || format!("renews r{lock} by its id"));
                with(|world| world.detached.push_back(Detached { since: world.now, ..lease }));
            }
            Err(error) => self.failed_by_id(&lease, &error),
        }
    }

    /// Takes a lease over, and uses it.
    async fn attach(&self, op: &Op, lease: &Detached, next: Next) {
        let Detached { lock, weight, ref id, .. } = *lease;
        let guard = match self.client.attach(id).await {
            Ok(guard) => guard,
            Err(error) => return self.failed_by_id(lease, &error),
        };
        self.say(54, || format!("attaches r{lock}, token {}", guard.token()));
        let held = self.hold_attached(lock, guard, weight);
        if next != Next::Release {
            self.write(&held);
            self.sleep(op.hold).await;
            self.check_held(&held);
            self.write(&held);
        }
        let leases = held.leases();
        let Held { records, got } = held;
        drop(records);
        match (next, got) {
            (Next::Attach, Got::Guard(guard)) if !with(|world| world.is_healed) => {
                self.forget(lock, weight, guard, &leases).await;
            }
            (Next::Drop, got) => drop(got),
            (_, got) => {
                if let Err(error) = got.release().await {
                    self.failed(&leases, &error);
                }
            }
        }
    }

    /// A detached lease is not renewed, and may have expired, or expire before the store has answered.
    fn failed_by_id(&self, lease: &Detached, error: &Error) {
        self.say(55, || format!("error with a lease: {error}"));
        let may_expire = with(|world| {
            let ttl = world.plan.locks[lease.lock].ttl;
            !world.lasts(lease.lock) || world.now > lease.since + ttl / 2
        });
        if !(error.is_lost() || error.is_unavailable() && may_expire) {
            self.check_error(error);
        }
    }
}
