//! The guards that users hold, and what is checked while they do.

use leasehold::simulation::LeaseProbe;
use leasehold::{Error, Guard, SetGuard, UpgradableGuard, WriteGuard};

use super::locks::lock_of;
use super::user::{User, WRITER};
use crate::checks::{Promise, Record};
use crate::executor::ProcessId;
use crate::plan::{LockKind, MS, SECOND};
use crate::planted::Planted;
use crate::serving::short;
use crate::world::{Event, World, run_as, try_with, with};

/// What an attempt returned.
pub(super) enum Got {
    Guard(Guard),
    Writer(WriteGuard),
    Upgradable(UpgradableGuard),
    Set(SetGuard),
}

/// A guard and its records. The records end before the guard: a user that releases no longer relies on it.
pub(super) struct Held {
    pub(super) records: Vec<Registration>,
    pub(super) got: Got,
}

/// A record that exists as long as this.
pub(super) struct Registration(pub(super) u64);

impl Drop for Registration {
    fn drop(&mut self) {
        let found = try_with(|world| {
            world.books.records.get(&self.0).map(|record| (record.process, record.probe.clone()))
        });
        let Some(Some((process, probe))) = found else { return };
        let is_trusted = run_as(process, || !probe.remaining().is_zero());
        let removed = with(|world| {
            let removed = world.books.records.remove(&self.0);
            if let Some(record) = &removed {
                let (resource, task) = (record.resource, record.task as u64);
                let lock = &world.plan.locks[resource];
                // A loss that was reported has just happened; one that was not may have, unless the lease is renewed. The own lease of a
                // bridged lock is renewed as long as its guard exists, also if the other library's lock is lost.
                if is_trusted || !lock.renews || lock.is_bridged {
                    world.demand[resource].busy_at = world.now;
                }
                if let Some(owner) = record.owner.filter(|_| !is_trusted) {
                    world.books.lost_by.insert((resource, owner), world.now);
                }
                let column = world.column(process);
                world.say(column, &[48, resource as u64, task], || {
                    format!("task {task} gives up r{resource}")
                });
            }
            removed
        });
        drop(removed);
    }
}

impl User {
    /// A guard exists from now on.
    pub(super) fn hold(&self, lock: usize, got: Got, permits: u32) -> Held {
        let locks: Vec<usize> = match &got {
            Got::Set(set) => set.guards().iter().map(|guard| lock_of(guard.name())).collect(),
            _ => vec![lock],
        };
        let kinds: Vec<LockKind> = with(|world| world.plan.locks.iter().map(|lock| lock.kind).collect());
        let weight = match (kinds[lock], &got) {
            (LockKind::ReadWrite, Got::Guard(_)) => 1,
            (LockKind::ReadWrite, Got::Upgradable(_)) => leasehold_core::weight::UPGRADABLE,
            (LockKind::ReadWrite, _) => WRITER,
            (LockKind::Semaphore(_), _) => permits,
            _ => 1,
        };
        self.hold_all(&locks, &kinds, got, weight, false)
    }

    /// As `hold`, for a lease that was detached.
    pub(super) fn hold_attached(&self, lock: usize, guard: Guard, weight: u32) -> Held {
        let kinds: Vec<LockKind> = with(|world| world.plan.locks.iter().map(|lock| lock.kind).collect());
        self.hold_all(&[lock], &kinds, Got::Guard(guard), weight, true)
    }

    fn hold_all(
        &self,
        locks: &[usize],
        kinds: &[LockKind],
        got: Got,
        weight: u32,
        is_attached: bool,
    ) -> Held {
        let guards: Vec<&Guard> = match &got {
            Got::Set(set) => set.guards().iter().collect(),
            got => got.guard().into_iter().collect(),
        };
        let records = guards.iter().zip(locks).map(|(guard, lock)| {
            let capacity = match kinds[*lock] {
                LockKind::ReadWrite => WRITER,
                LockKind::Semaphore(capacity) => capacity,
                _ => 1,
            };
            let acquisition = LeaseProbe::of(guard).acquisition();
            let token = with(|world| match world.planted {
                Some(Planted::HandoffTokenRepeated) => world.books.first_token(acquisition),
                _ => None,
            });
            let owner = (kinds[*lock] == LockKind::Reentrant).then_some(self.owner());
            let record = Record {
                resource: *lock,
                weight,
                owner,
                process: self.process,
                task: self.task,
                probe: LeaseProbe::of(guard),
                token: token.unwrap_or(guard.token().get()),
                since: with(|world| world.now),
                is_exchanged: false,
                is_watched: false,
                is_attached,
            };
            self.register(record, capacity)
        });
        let records = records.collect();
        Held { records, got }
    }

    /// The named owner of a reentrant mutex: two tasks of a client may share one.
    pub(super) fn owner(&self) -> u64 {
        (self.process * 2 + self.task % 2) as u64
    }

    pub(super) fn register(&self, record: Record, capacity: u32) -> Registration {
        let resource = record.resource;
        let process = self.process;
        let is_trusted = |process, probe: &LeaseProbe| run_as(process, || !probe.remaining().is_zero());
        let is_own_trusted = is_trusted(process, &record.probe);
        let others: Vec<(u64, ProcessId, LeaseProbe, bool)> = with(|world| {
            let others = world.books.records.iter().filter(|(_, other)| other.resource == resource);
            others
                .map(|(number, other)| (*number, other.process, other.probe.clone(), other.is_watched))
                .collect()
        });
        let is_sound = |process: ProcessId| with(|world| world.is_sound(process));
        let mut trusted = Vec::new();
        for (number, process, probe, is_watched) in &others {
            if !is_sound(*process) {
                continue;
            }
            if is_trusted(*process, probe) {
                trusted.push(*number);
            } else if *is_watched {
                // Its loss is being reported at this moment, or never.
                let (at, number) = (MS, *number);
                let check = Event::CheckReported { guard: number, is_program: false };
                with(|world| world.after(at, check));
            }
        }
        let is_own_sound = is_sound(process);
        let stall = with(|world| world.overdue(resource, self.task));
        let number = with(|world| {
            let number = world.number();
            let (task, token) = (self.task, record.token);
            let column = world.column(process);
            world.say(column, &[50, resource as u64, task as u64, token], || {
                format!("task {task} holds r{resource}, token {}", short(token))
            });
            if is_own_trusted && is_own_sound {
                world.books.guard_created(world.now, &record, capacity, &trusted);
                world.check_programs(resource, process);
            }
            if let Some(what) = stall.filter(|_| trusted.is_empty()) {
                world.broken(Promise::Liveness, || what);
            }
            world.demand[resource].busy_at = world.now;
            world.check_handoff(&record);
            world.books.records.insert(number, record);
            number
        });
        Registration(number)
    }

    pub(super) fn watch(&self, held: &Held, is_watched: bool) {
        with(|world| {
            for Registration(number) in &held.records {
                if let Some(record) = world.books.records.get_mut(number) {
                    record.is_watched = is_watched;
                }
            }
        });
    }

    /// Writes with the guard's token to a resource that compares tokens.
    pub(super) fn write(&self, held: &Held) {
        with(|world| {
            let is_fenced = world.planted != Some(Planted::Unfenced);
            for Registration(number) in &held.records {
                let Some(record) = world.books.records.get(number) else { continue };
                let plan = &world.plan.locks[record.resource];
                let is_exclusive = match plan.kind {
                    kind if kind.is_exclusive() => true,
                    LockKind::ReadWrite => record.weight == WRITER,
                    _ => false,
                };
                if is_exclusive {
                    let (resource, token) = (record.resource, record.token);
                    let acquisition = record.probe.acquisition();
                    let is_accepted = world.books.write(world.now, resource, acquisition, token, is_fenced);
                    let column = world.column(self.process);
                    world.say(column, &[51, u64::from(is_accepted), token], || {
                        let what = if is_accepted { "writes" } else { "is refused to write" };
                        format!("task {} {what} with {}", self.task, short(token))
                    });
                }
            }
        });
    }
}

impl Got {
    pub(super) fn guard(&self) -> Option<&Guard> {
        match self {
            Self::Guard(guard) => Some(guard),
            Self::Writer(guard) => Some(guard),
            Self::Upgradable(guard) => Some(guard),
            Self::Set(_) => None,
        }
    }

    pub(super) async fn release(self) -> Result<(), Error> {
        match self {
            Self::Guard(guard) => guard.release().await,
            Self::Writer(guard) => guard.release().await,
            Self::Upgradable(guard) => guard.release().await,
            Self::Set(set) => set.release().await,
        }
    }
}

impl Held {
    pub(super) fn numbers(&self) -> Vec<u64> {
        self.records.iter().map(|Registration(number)| *number).collect()
    }

    pub(super) fn guards(&self) -> Vec<&Guard> {
        match &self.got {
            Got::Set(set) => set.guards().iter().collect(),
            got => got.guard().into_iter().collect(),
        }
    }
}

impl World {
    /// Whether a process's clock is within the stated bound (section "Clocks").
    pub(crate) fn is_sound(&self, process: ProcessId) -> bool {
        let known = &self.processes[process];
        known.is_alive && self.machines[known.client].tainted <= self.now
    }

    /// These guards were held until now.
    pub(super) fn note_busy(&mut self, records: &[u64]) {
        for record in records.iter().filter_map(|number| self.books.records.get(number)) {
            self.demand[record.resource].busy_at = self.now;
        }
    }

    /// Another guard exists, so the loss of this one must have been reported.
    pub(crate) fn check_reported(&mut self, number: u64, is_program: bool) {
        let Some(record) = self.books.records.get(&number).filter(|record| record.is_watched) else { return };
        let (process, resource) = (record.process, record.resource);
        let known = &self.processes[process];
        let has_run = known.stalls == [0, 0] && known.resumed_at + MS < self.now;
        if has_run && self.is_sound(process) {
            let holder = if is_program { "holder with another library" } else { "holder" };
            self.broken(Promise::LossReported, || {
                format!("r{resource} has a new {holder}, and the loss of guard {number} of process {process} was not reported")
            });
        }
    }

    /// Section "Local hand-off": how long the tasks of a client go on once another client waits.
    fn check_handoff(&mut self, record: &Record) {
        let (now, calm_from, slowest) = (self.now, self.books.calm_from, self.plan.network.slowest());
        let (most, limit) = self.plan.locks[record.resource].handoff.unwrap_or((64, 10 * MS));
        let Some(attempt) = self.books.attempts.get_mut(&record.probe.acquisition()) else { return };
        let is_handoff = std::mem::replace(&mut attempt.has_begun, true) && !record.is_attached;
        // The guards of a set exist as soon as it has all leases.
        if !is_handoff || self.demand[record.resource].sets > 0 {
            return;
        }
        // The client learns of it by a push.
        let known = attempt.contended_at.filter(|at| *at >= calm_from).map(|at| at + slowest);
        let Some(known) = known.filter(|known| *known < now) else { return };
        attempt.handoffs += 1;
        let handoffs = attempt.handoffs;
        if handoffs > most || now > known + limit + limit / 100 + MS {
            let resource = record.resource;
            self.broken(Promise::Fifo, || {
                let waits = now - known;
                format!("hand-off {handoffs} of r{resource}, {waits} µs after another client began to wait")
            });
        }
    }

    /// What is wrong with the time that the lock was free while this task waited for it.
    pub(super) fn overdue(&self, lock: usize, task: usize) -> Option<String> {
        let since = *self.demand[lock].waiting.get(&task)?;
        let free = self.demand[lock].busy_at.max(since).max(self.plan.faults_end());
        let stall = if self.demand[lock].sets > 0 { 0 } else { self.now.saturating_sub(free) };
        let plan = &self.plan.locks[lock];
        // A lease that ends by itself may do so at any time. If it is as short as a claim window, its client looks frozen then, and
        // the client's other waiters are skipped until one of them asks again.
        let ends_by_itself = !plan.renews || plan.max_hold.is_some();
        // A replica that is behind knows waiters that have given up, and so does a new master of what is released at the former one. Each
        // is granted, and costs a claim window, after which its client's other waiters are skipped until one of them asks again.
        let stale_at = self.books.stale_grants.get(&lock);
        let is_behind = stale_at.is_some_and(|at| at + self.takeover_bound() >= free);
        let bound = if free < self.books.calm_from
            || ends_by_itself
            || is_behind
            || self.books.was_detached(lock, free)
        {
            self.takeover_bound()
        } else {
            // A hand-off: a few messages, and what a minimum hold retains.
            self.plan.locks[lock].min_hold
                + SECOND
                + 40 * (self.plan.network.base + 20 * self.plan.network.jitter)
                // A waiter for the other library's lock tries at least every second.
                + if plan.is_bridged { 2 * SECOND } else { 0 }
        };
        (stall > bound).then(|| {
            format!("r{lock} was free for {stall} µs while task {task} waited; the bound is {bound} µs")
        })
    }
}
