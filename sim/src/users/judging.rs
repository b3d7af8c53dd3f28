//! What is wrong with the result of an operation.

use leasehold::Error;
use leasehold::simulation::LeaseProbe;
use leasehold_core::Acquisition;

use super::holding::{Held, Registration};
use super::user::User;
use crate::checks::{Promise, Record};
use crate::plan::{LockKind, MS, Micros, Mode, Op, SECOND, Share};
use crate::world::{World, with};

/// The lease of a guard.
#[derive(Clone, Copy)]
pub(super) struct Lease {
    lock: usize,
    acquisition: Acquisition,
    /// Since when the guard exists.
    since: Micros,
    /// It was attached, perhaps shortly before the lease would have expired.
    is_attached: bool,
}

impl Lease {
    fn of(record: &Record) -> Self {
        let acquisition = record.probe.acquisition();
        Self { lock: record.resource, acquisition, since: record.since, is_attached: record.is_attached }
    }
}

impl Held {
    pub(super) fn leases(&self) -> Vec<Lease> {
        with(|world| {
            let known = |Registration(number): &Registration| world.books.records.get(number);
            self.records.iter().filter_map(known).map(Lease::of).collect()
        })
    }

    fn has_lost(&self) -> bool {
        self.guards().into_iter().any(|guard| LeaseProbe::of(guard).remaining().is_zero())
    }
}

impl User {
    /// An attempt failed that began then.
    pub(super) fn refused(&self, op: &Op, began: Micros, error: &Error) {
        self.say(3, || format!("error: {error}"));
        let mut locks = op.lock..=op.lock + usize::from(op.share == Share::Set);
        let had_lost_guard = self.had_lost_guard(op.lock, began);
        let is_bridged = with(|world| world.plan.locks[op.lock].is_bridged);
        let may_be_lost = with(|world| match world.plan.locks[op.lock].kind {
            // The lease of one may end while the set waits for the other, and that of a bridged lock while it waits for the other library's.
            // A lease that was ended by force is handed on to other tasks of its client until the client knows, at the next renewal at
            // the latest.
            _ if op.share == Share::Set || is_bridged => locks.clone().any(|lock| {
                let forced_at = world.demand[lock].forced_at;
                let is_forced = forced_at != 0 && forced_at + world.plan.locks[lock].ttl >= began;
                !world.lasts(lock) || is_forced || world.was_deleted(lock, began)
            }),
            // An owner that has not yet dropped a guard of a lost lease can't enter again.
            LockKind::Reentrant => had_lost_guard,
            _ => false,
        });
        let may_be_late = locks.any(|lock| self.may_be_late(lock));
        if !(error.is_lost() && may_be_lost || error.is_unavailable() && may_be_late) {
            self.check_error(error);
            self.check_pause(op, error);
        }
    }

    /// The store is well, and the attempt has no limit: however its process was paused, it asks again.
    fn check_pause(&self, op: &Op, error: &Error) {
        with(|world| {
            if op.mode == Mode::Wait && error.is_unavailable() && world.plan.only_pauses() {
                let task = self.task;
                world.broken(Promise::NoError, || format!("task {task} fails after a pause: {error}"));
            }
        });
    }

    /// Whether the task's owner of a reentrant lock has had a guard since then whose lease may have been lost, or was releasing it.
    fn had_lost_guard(&self, lock: usize, since: Micros) -> bool {
        let owner = self.owner();
        with(|world| {
            let records = world.books.records.values();
            let mut theirs = records.filter(|record| record.resource == lock && record.owner == Some(owner));
            let given_up_at = world.books.lost_by.get(&(lock, owner));
            theirs.any(|record| !world.must_last(&Lease::of(record)))
                || world.books.is_forced(lock, &self.owner_name())
                || given_up_at.is_some_and(|at| at + 2 * SECOND >= since)
        })
    }

    /// An attempt that began then was told that the lock is not free.
    pub(super) fn check_refused(&self, op: &Op, began: Micros) {
        let (task, process) = (self.task, self.process);
        with(|world| {
            let client = world.processes[process].client;
            // Another task of the client may hold the lock.
            let is_only_task = world.plan.tasks.iter().filter(|task| task.client == client).count() == 1;
            let known = &world.processes[process];
            let was_refused = match op.mode {
                // An attempt may reach its limit before its first answer. It is given up then, and the answer to that counts.
                Mode::Timeout(limit) => {
                    let round_trips = world.plan.round_trips(op);
                    let must_be_answered = began >= world.books.calm_from
                        && limit > 2 * round_trips * world.plan.network.slowest();
                    if must_be_answered { known.refused_at >= began } else { known.answered_at >= began }
                }
                _ => known.refused_at >= began,
            };
            if is_only_task && !was_refused {
                world.broken(Promise::Refused, || {
                    format!("task {task}: r{} is not free, but no server said so", op.lock)
                });
            }
        });
    }

    /// An operation failed on the guard of these leases.
    pub(super) fn failed(&self, leases: &[Lease], error: &Error) {
        self.say(7, || format!("error with a guard: {error}"));
        if error.is_lost() {
            self.lost(leases);
        } else if !(error.is_unavailable() && leases.iter().any(|lease| self.may_be_late(lease.lock))) {
            self.check_error(error);
        }
    }

    /// Whether an answer may take longer than the lease lasts, which then has expired.
    fn may_be_late(&self, lock: usize) -> bool {
        with(|world| {
            let plan = &world.plan.locks[lock];
            world.plan.network.slowest() >= plan.ttl.min(plan.max_hold.unwrap_or(Micros::MAX)) / 2
        })
    }

    pub(super) fn check_error(&self, error: &Error) {
        let (task, process) = (self.task, self.process);
        with(|world| {
            // A second for connections that are still being made.
            if world.now > world.recovered_at() && world.now > world.processes[process].resumed_at + SECOND {
                world.broken(Promise::NoError, || format!("task {task}: {error}"));
            }
        });
    }

    /// One of these leases was lost.
    pub(super) fn lost(&self, leases: &[Lease]) {
        let task = self.task;
        with(|world| {
            if leases.iter().all(|lease| world.must_last(lease)) {
                let locks: Vec<usize> = leases.iter().map(|lease| lease.lock).collect();
                world.broken(Promise::Kept, || format!("task {task} has lost a lease of r{locks:?}"));
            }
        });
    }

    /// At the end of a section the leases are still held.
    pub(super) fn check_held(&self, held: &Held) {
        if held.has_lost() {
            self.lost(&held.leases());
        }
    }

    /// Now, by the process's clock, and since when it has run without being stalled.
    pub(super) fn moment(&self) -> (u64, u64, bool) {
        with(|world| {
            let known = &world.processes[self.process];
            (world.local(self.process).as_micros(), known.stalled, known.stalls == [0, 0])
        })
    }

    /// Section "Timeouts".
    pub(super) fn check_time(
        &self,
        (started, stalls, was_running): (u64, u64, bool),
        limit: Micros,
        what: &str,
    ) {
        let (now, stalls_now, _) = self.moment();
        let took = now - started;
        let is_sound = with(|world| world.is_sound(self.process));
        if is_sound && was_running && stalls == stalls_now && took > limit + 5 * MS {
            let task = self.task;
            with(|world| {
                world.broken(Promise::InTime, || format!("task {task}: {what} took {took} µs, not {limit}"));
            });
        }
    }
}

impl World {
    /// Whether a lease of this lock lasts on a healthy network: each renewal arrives well before the lease would expire.
    pub(super) fn lasts(&self, lock: usize) -> bool {
        let plan = &self.plan.locks[lock];
        plan.renews && plan.max_hold.is_none() && self.plan.network.slowest() * 8 <= plan.ttl
    }

    /// Whether the key of a bridged lock was deleted by hand since then, or shortly before.
    fn was_deleted(&self, lock: usize, since: Micros) -> bool {
        let longest = SECOND + 4 * self.plan.network.slowest();
        self.demand[lock].deleted_at.is_some_and(|at| at + longest >= since)
    }

    /// Whether a lease lasts as long as its guard: nothing has gone wrong since the guard exists.
    fn must_last(&self, lease: &Lease) -> bool {
        let is_forced = self.books.attempts.get(&lease.acquisition).is_some_and(|attempt| attempt.is_forced);
        let is_calm = lease.since >= self.books.calm_from;
        let is_deleted = self.was_deleted(lease.lock, lease.since);
        self.lasts(lease.lock) && is_calm && !is_forced && !is_deleted && !lease.is_attached
    }
}
