//! The users of the locks: tasks that do what their plan says, with the library's own types.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use leasehold::simulation::LeaseProbe;
use leasehold::{
    Client, Error, Guard, Kind, Mutex, MutexSet, ReentrantMutex, RwLock, Semaphore, SetGuard,
    UpgradableGuard, WriteGuard,
};

use crate::checks::{Promise, Record};
use crate::executor::ProcessId;
use crate::network::{Sleep, short};
use crate::plan::{End, Fault, LockKind, LockPlan, MS, Micros, Mode, Op, SECOND, Share};
use crate::planted::Planted;
use crate::world::{Event, World, run_as, try_with, with};

/// The weight of a writer, which is the capacity of a read-write lock.
const WRITER: u32 = leasehold_core::weight::WRITER;

/// A user's task, from where an earlier process of its client was killed.
pub(crate) async fn run_task(process: ProcessId, client: Client, task: usize) {
    let plan = with(|world| world.plan.clone());
    let user = User { process, client, task };
    while let Some(op) = with(|world| {
        let at = world.progress[task];
        plan.tasks[task].ops.get(at).filter(|_| !world.is_healed)
    }) {
        user.sleep(op.think).await;
        if op.drop_after != Some(0) && !with(|world| world.is_healed) {
            user.operate(op).await;
        }
        with(|world| world.progress[task] += 1);
    }
    while !with(|world| world.is_healed) {
        let left = with(|world| plan.heal_at - world.now);
        user.sleep(left + MS).await;
    }
    for (number, (lock, hold)) in plan.tasks[task].last.iter().enumerate() {
        if number > 0 {
            // All leases of the time of the faults have ended by then.
            let left = with(|world| world.books.healthy_from.saturating_sub(world.now));
            user.sleep(left + hold / 2).await;
        }
        user.last(*lock, *hold).await;
    }
    with(|world| world.finished[task] = true);
}

struct User {
    process: ProcessId,
    client: Client,
    task: usize,
}

/// What an attempt returned.
enum Got {
    Guard(Guard),
    Writer(WriteGuard),
    Upgradable(UpgradableGuard),
    Set(SetGuard),
}

/// A guard and its records. The records end before the guard: a user that releases no longer relies on it.
struct Held {
    records: Vec<Registration>,
    got: Got,
}

/// A record that exists as long as this.
struct Registration(u64);

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
                // A loss that was reported has just happened; one that was not may have, unless the lease is renewed.
                if is_trusted || !world.plan.locks[resource].renews {
                    world.demand[resource].busy_at = world.now;
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

/// Counts a task as one that waits.
struct Waiting {
    lock: usize,
    task: usize,
}

impl Waiting {
    fn new(lock: usize, task: usize) -> Self {
        with(|world| world.demand[lock].waiting.insert(task, world.now));
        Self { lock, task }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        try_with(|world| world.demand[self.lock].waiting.remove(&self.task));
    }
}

/// Counts an attempt for two locks, which may hold the first while it waits for the second.
struct SetAttempt(usize);

impl SetAttempt {
    fn new(lock: usize) -> Self {
        with(|world| world.demand[lock..lock + 2].iter_mut().for_each(|demand| demand.sets += 1));
        Self(lock)
    }
}

impl Drop for SetAttempt {
    fn drop(&mut self) {
        try_with(|world| {
            let now = world.now;
            for demand in &mut world.demand[self.0..self.0 + 2] {
                demand.sets -= 1;
                demand.busy_at = now;
            }
        });
    }
}

/// Whichever ends first; `None` if that is the limit. The future is dropped in any case.
async fn until<T>(work: impl Future<Output = T>, limit: Sleep) -> Option<T> {
    let (mut work, mut limit) = (pin!(work), pin!(limit));
    std::future::poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => limit.as_mut().poll(context).map(|()| None),
    })
    .await
}

fn span(micros: Micros) -> Duration {
    Duration::from_micros(micros)
}

impl User {
    async fn sleep(&self, span: Micros) {
        Sleep::span(self.process, span).await;
    }

    fn say(&self, number: u64, text: impl FnOnce() -> String) {
        with(|world| {
            let column = world.column(self.process);
            let task = self.task;
            world.say(column, &[49, number, task as u64], || format!("task {task}: {}", text()));
        });
    }

    // --- One operation ---------------------------------------------------------------------------

    async fn operate(&self, op: &Op) {
        let attempt = self.attempt(op);
        let held = match op.drop_after {
            None => attempt.await,
            Some(limit) => match until(attempt, Sleep::span(self.process, limit)).await {
                Some(held) => held,
                None => {
                    self.say(1, || "drops the attempt".to_owned());
                    return;
                }
            },
        };
        match held {
            Ok(Some(held)) => self.section(op, held).await,
            Ok(None) => self.say(2, || format!("r{} is not free", op.lock)),
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&self, error: &Error) {
        self.say(3, || format!("error: {error}"));
        if error.is_lost() {
            return;
        }
        let (task, process) = (self.task, self.process);
        with(|world| {
            // A second for connections that are still being made.
            if world.now > world.plan.heal_at + 20 * SECOND
                && world.now > world.processes[process].resumed_at + SECOND
            {
                world.broken(Promise::NoError, || format!("task {task}: {error}"));
            }
        });
    }

    async fn attempt(&self, op: &Op) -> Result<Option<Held>, Error> {
        let _waiting = (op.mode == Mode::Wait).then(|| Waiting::new(op.lock, self.task));
        let _set = (op.share == Share::Set).then(|| SetAttempt::new(op.lock));
        let plan = with(|world| world.plan.clone());
        let (lock, started) = (&plan.locks[op.lock], self.moment());
        self.say(4, || format!("wants r{} ({:?}, {:?})", op.lock, op.share, op.mode));
        let got = match (lock.kind, op.share) {
            (LockKind::Mutex, Share::Set) => self.set(&plan.locks, op).await?.map(Got::Set),
            (LockKind::Mutex, _) => {
                let mutex = self.mutex(lock, op.lock);
                let got = match op.mode {
                    Mode::Wait => Some(mutex.lock().await?),
                    Mode::Try => mutex.try_lock().await?,
                    Mode::Timeout(limit) => mutex.lock_timeout(span(limit)).await?,
                };
                got.map(Got::Guard)
            }
            (LockKind::ReadWrite, share) => self.share(&self.rw_lock(lock, op.lock), share, op.mode).await?,
            (LockKind::Semaphore(permits), share) => {
                let semaphore = self.semaphore(lock, op.lock, permits);
                let wanted = if share == Share::More { permits.div_ceil(2) } else { 1 };
                let got = match op.mode {
                    Mode::Wait => Some(semaphore.acquire(wanted).await?),
                    Mode::Try => semaphore.try_acquire(wanted).await?,
                    Mode::Timeout(limit) => semaphore.acquire_timeout(wanted, span(limit)).await?,
                };
                got.map(Got::Guard)
            }
            (LockKind::Reentrant, _) => {
                let mutex = self.reentrant(lock, op.lock);
                let got = match op.mode {
                    Mode::Wait => Some(mutex.lock().await?),
                    Mode::Try => mutex.try_lock().await?,
                    Mode::Timeout(limit) => mutex.lock_timeout(span(limit)).await?,
                };
                got.map(Got::Guard)
            }
        };
        if let Mode::Timeout(limit) = op.mode {
            let extra = if op.share == Share::Set { 5 * SECOND } else { 2 * SECOND };
            self.check_time(started, limit + extra, "a wait with a limit");
        }
        let permits = if op.share == Share::More { lock.permits().div_ceil(2) } else { 1 };
        Ok(got.map(|got| self.hold(op.lock, got, permits)))
    }

    /// Now, by the process's clock, and since when it has run without being stalled.
    fn moment(&self) -> (u64, u64, bool) {
        with(|world| {
            let known = &world.processes[self.process];
            (world.local(self.process).as_micros(), known.stalled, known.stalls == [0, 0])
        })
    }

    /// Section "Timeouts".
    fn check_time(&self, (started, stalls, was_running): (u64, u64, bool), limit: Micros, what: &str) {
        let (now, stalls_now, _) = self.moment();
        let took = now - started;
        if was_running && stalls == stalls_now && took > limit + 5 * MS {
            let task = self.task;
            with(|world| {
                world.broken(Promise::InTime, || format!("task {task}: {what} took {took} µs, not {limit}"));
            });
        }
    }

    async fn share(&self, lock: &RwLock, share: Share, mode: Mode) -> Result<Option<Got>, Error> {
        Ok(match share {
            Share::Read => match mode {
                Mode::Wait => Some(lock.read().await?),
                Mode::Try => lock.try_read().await?,
                Mode::Timeout(limit) => lock.read_timeout(span(limit)).await?,
            }
            .map(Got::Guard),
            Share::Upgradable => match mode {
                Mode::Wait => Some(lock.upgradable_read().await?),
                Mode::Try => lock.try_upgradable_read().await?,
                Mode::Timeout(limit) => lock.upgradable_read_timeout(span(limit)).await?,
            }
            .map(Got::Upgradable),
            _ => match mode {
                Mode::Wait => Some(lock.write().await?),
                Mode::Try => lock.try_write().await?,
                Mode::Timeout(limit) => lock.write_timeout(span(limit)).await?,
            }
            .map(Got::Writer),
        })
    }

    async fn set(&self, locks: &[LockPlan], op: &Op) -> Result<Option<SetGuard>, Error> {
        let both = [op.lock, op.lock + 1].map(|lock| self.mutex(&locks[lock], lock));
        let set = MutexSet::new(both);
        match op.mode {
            Mode::Wait => set.lock().await.map(Some),
            Mode::Try => set.try_lock().await,
            Mode::Timeout(limit) => set.lock_timeout(span(limit)).await,
        }
    }

    // --- The section -----------------------------------------------------------------------------

    async fn section(&self, op: &Op, mut held: Held) {
        if let Got::Upgradable(_) = held.got {
            let Some(upgraded) = self.upgrade(op, held).await else { return };
            held = upgraded;
        }
        let body = async {
            self.write(&held);
            self.sleep(op.hold / 2).await;
            if op.renews {
                for guard in held.guards() {
                    let acquisition = LeaseProbe::of(guard).acquisition();
                    with(|world| world.books.excuse_renewal(acquisition));
                    let _ = guard.renew().await;
                }
            }
            self.sleep(op.hold / 2).await;
        };
        if op.is_watched {
            self.watch(&held, true);
            let is_lost = match &held.got {
                Got::Set(set) => set.run(body).await.is_err(),
                _ => held.guards()[0].run(body).await.is_err(),
            };
            if is_lost {
                self.say(5, || format!("has lost r{}", op.lock));
                with(|world| world.note_busy(&held.numbers()));
            }
            self.watch(&held, false);
        } else {
            body.await;
        }
        // Also a user that has not looked: this is what tokens are for.
        self.write(&held);
        self.finish(op, held).await;
    }

    async fn upgrade(&self, op: &Op, held: Held) -> Option<Held> {
        let Held { records, got: Got::Upgradable(guard) } = held else { return Some(held) };
        with(|world| {
            for Registration(number) in &records {
                if let Some(record) = world.books.records.get_mut(number) {
                    record.is_exchanged = true;
                }
            }
        });
        let upgraded = guard.upgrade_timeout(span(op.hold.max(MS) * 4)).await;
        drop(records);
        match upgraded {
            Ok(Ok(writer)) => Some(self.hold(op.lock, Got::Writer(writer), 1)),
            Ok(Err(reader)) => {
                drop(reader);
                None
            }
            Err(error) => {
                self.say(6, || format!("upgrade: {error}"));
                None
            }
        }
    }

    async fn finish(&self, op: &Op, held: Held) {
        let Held { records, got } = held;
        match op.end {
            End::Drop => {
                drop(records);
                drop(got);
            }
            End::Downgrade if matches!(got, Got::Writer(_)) => {
                let Got::Writer(writer) = got else { return };
                // Other readers may begin as soon as the server has run the command.
                with(|world| {
                    for Registration(number) in &records {
                        if let Some(record) = world.books.records.get_mut(number) {
                            record.weight = 1;
                        }
                    }
                });
                let reader = writer.downgrade().await;
                drop(records);
                if let Ok(reader) = reader {
                    let held = self.hold(op.lock, Got::Guard(reader), 1);
                    self.sleep(op.hold / 4).await;
                    drop(held);
                }
            }
            End::Force => {
                let kind = match with(|world| world.plan.locks[op.lock].kind) {
                    LockKind::Mutex | LockKind::Reentrant => Kind::Mutex,
                    LockKind::ReadWrite => Kind::ReadWrite,
                    LockKind::Semaphore(_) => Kind::Semaphore,
                };
                let _ = self.client.force_release(kind, name(op.lock)).await;
                drop(records);
                drop(got);
            }
            End::ReleaseTimeout(limit) if !matches!(got, Got::Set(_)) => {
                drop(records);
                let started = self.moment();
                let _ = match got {
                    Got::Guard(guard) => guard.release_timeout(span(limit)).await,
                    Got::Writer(guard) => guard.release_timeout(span(limit)).await,
                    Got::Upgradable(guard) => guard.release_timeout(span(limit)).await,
                    Got::Set(set) => set.release().await,
                };
                self.check_time(started, limit, "release_timeout");
            }
            End::ReleaseDropped(limit) => {
                drop(records);
                let _ = until(got.release(), Sleep::span(self.process, limit)).await;
            }
            _ => {
                drop(records);
                if let Err(error) = got.release().await {
                    self.say(7, || format!("release: {error}"));
                }
            }
        }
    }

    /// After the faults: waits until the lock is granted, uses it and releases it.
    async fn last(&self, lock: usize, hold: Micros) {
        let plan = with(|world| world.plan.clone());
        let share = if plan.locks[lock].kind == LockKind::ReadWrite && hold.is_multiple_of(2) {
            Share::Read
        } else {
            Share::Whole
        };
        let op = Op {
            think: 0,
            lock,
            share,
            mode: Mode::Wait,
            drop_after: None,
            hold,
            renews: false,
            is_watched: false,
            end: End::Release,
        };
        let held = loop {
            match self.attempt(&op).await {
                Ok(Some(held)) => break held,
                Ok(None) => {}
                Err(error) => self.failed(&error),
            }
            self.sleep(100 * MS).await;
        };
        self.write(&held);
        self.sleep(hold).await;
        let Held { records, got } = held;
        drop(records);
        if let Err(error) = got.release().await.map_err(|error| (error.is_lost(), error)) {
            // A section longer than a lease that is not renewed ends with a loss.
            let may_be_lost = !plan.locks[lock].renews || plan.locks[lock].max_hold.is_some();
            if !(error.0 && may_be_lost) {
                self.failed(&error.1);
            }
        }
    }

    // --- Checks ----------------------------------------------------------------------------------

    /// A guard exists from now on.
    fn hold(&self, lock: usize, got: Got, permits: u32) -> Held {
        let kinds: Vec<LockKind> = with(|world| world.plan.locks.iter().map(|lock| lock.kind).collect());
        let guards: Vec<(&Guard, usize)> = match &got {
            Got::Set(set) => set.guards().iter().map(|guard| (guard, lock_of(guard.name()))).collect(),
            got => got.guard().into_iter().map(|guard| (guard, lock)).collect(),
        };
        let records = guards.iter().map(|(guard, lock)| {
            let kind = kinds[*lock];
            let (weight, capacity) = match (kind, &got) {
                (LockKind::ReadWrite, Got::Guard(_)) => (1, WRITER),
                (LockKind::ReadWrite, Got::Upgradable(_)) => (leasehold_core::weight::UPGRADABLE, WRITER),
                (LockKind::ReadWrite, _) => (WRITER, WRITER),
                (LockKind::Semaphore(capacity), _) => (permits, capacity),
                _ => (1, 1),
            };
            let owner = (kind == LockKind::Reentrant).then_some(self.owner());
            let record = Record {
                resource: *lock,
                weight,
                owner,
                process: self.process,
                task: self.task,
                probe: LeaseProbe::of(guard),
                token: guard.token().get(),
                is_exchanged: false,
                is_watched: false,
            };
            self.register(record, capacity)
        });
        let records = records.collect();
        Held { records, got }
    }

    /// The named owner of a reentrant mutex: two tasks of a client may share one.
    fn owner(&self) -> u64 {
        (self.process * 2 + self.task % 2) as u64
    }

    fn register(&self, record: Record, capacity: u32) -> Registration {
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
                with(|world| world.after(at, Event::CheckReported(number)));
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
            }
            if let Some(what) = stall.filter(|_| trusted.is_empty()) {
                world.broken(Promise::Liveness, || what);
            }
            world.demand[resource].busy_at = world.now;
            world.books.records.insert(number, record);
            number
        });
        Registration(number)
    }

    fn watch(&self, held: &Held, is_watched: bool) {
        with(|world| {
            for Registration(number) in &held.records {
                if let Some(record) = world.books.records.get_mut(number) {
                    record.is_watched = is_watched;
                }
            }
        });
    }

    /// Writes with the guard's token to a resource that compares tokens.
    fn write(&self, held: &Held) {
        with(|world| {
            let is_fenced = world.planted != Some(Planted::Unfenced);
            for Registration(number) in &held.records {
                let Some(record) = world.books.records.get(number) else { continue };
                let plan = &world.plan.locks[record.resource];
                let is_exclusive = match plan.kind {
                    LockKind::Mutex => true,
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

    // --- Locks -----------------------------------------------------------------------------------

    fn mutex(&self, plan: &LockPlan, lock: usize) -> Mutex {
        let mut mutex = self.client.mutex(name(lock)).ttl(span(plan.ttl)).auto_renew(plan.renews);
        if let Some(hold) = plan.max_hold {
            mutex = mutex.max_hold(span(hold));
        }
        if plan.min_hold > 0 {
            mutex = mutex.min_hold(span(plan.min_hold));
        }
        if let Some((handoffs, limit)) = plan.handoff {
            mutex = mutex.local_handoff(handoffs, span(limit));
        }
        if plan.global_fifo { mutex.global_fifo() } else { mutex }
    }

    fn rw_lock(&self, plan: &LockPlan, lock: usize) -> RwLock {
        let mut rw_lock = self.client.rw_lock(name(lock)).ttl(span(plan.ttl)).auto_renew(plan.renews);
        if let Some(hold) = plan.max_hold {
            rw_lock = rw_lock.max_hold(span(hold));
        }
        if plan.min_hold > 0 { rw_lock.min_hold(span(plan.min_hold)) } else { rw_lock }
    }

    fn semaphore(&self, plan: &LockPlan, lock: usize, permits: u32) -> Semaphore {
        self.client.semaphore(name(lock), permits).ttl(span(plan.ttl)).auto_renew(plan.renews)
    }

    fn reentrant(&self, plan: &LockPlan, lock: usize) -> ReentrantMutex {
        let owner = format!("owner-{}", self.owner());
        self.client.reentrant_mutex(name(lock), owner).ttl(span(plan.ttl)).auto_renew(plan.renews)
    }
}

impl Got {
    fn guard(&self) -> Option<&Guard> {
        match self {
            Self::Guard(guard) => Some(guard),
            Self::Writer(guard) => Some(guard),
            Self::Upgradable(guard) => Some(guard),
            Self::Set(_) => None,
        }
    }

    async fn release(self) -> Result<(), Error> {
        match self {
            Self::Guard(guard) => guard.release().await,
            Self::Writer(guard) => guard.release().await,
            Self::Upgradable(guard) => guard.release().await,
            Self::Set(set) => set.release().await,
        }
    }
}

impl Held {
    fn numbers(&self) -> Vec<u64> {
        self.records.iter().map(|Registration(number)| *number).collect()
    }

    fn guards(&self) -> Vec<&Guard> {
        match &self.got {
            Got::Set(set) => set.guards().iter().collect(),
            got => got.guard().into_iter().collect(),
        }
    }
}

fn name(lock: usize) -> String {
    format!("r{lock}")
}

fn lock_of(name: &str) -> usize {
    name.trim_start_matches('r').parse().unwrap_or(0)
}

impl World {
    /// Whether a process's clock is within the stated bound (section "Clocks").
    fn is_sound(&self, process: ProcessId) -> bool {
        let known = &self.processes[process];
        known.is_alive && self.machines[known.client].tainted <= self.now
    }

    /// These guards were held until now.
    fn note_busy(&mut self, records: &[u64]) {
        for record in records.iter().filter_map(|number| self.books.records.get(number)) {
            self.demand[record.resource].busy_at = self.now;
        }
    }

    /// Another guard exists, so the loss of this one must have been reported.
    pub(crate) fn check_reported(&mut self, number: u64) {
        let Some(record) = self.books.records.get(&number).filter(|record| record.is_watched) else { return };
        let (process, resource) = (record.process, record.resource);
        let known = &self.processes[process];
        let has_run = known.stalls == [0, 0] && known.resumed_at + MS < self.now;
        if has_run && self.is_sound(process) {
            self.broken(Promise::LossReported, || {
                format!("r{resource} has a new holder, and the loss of guard {number} of process {process} was not reported")
            });
        }
    }

    /// What is wrong with the time that the lock was free while this task waited for it.
    fn overdue(&self, lock: usize, task: usize) -> Option<String> {
        let since = *self.demand[lock].waiting.get(&task)?;
        let free = self.demand[lock].busy_at.max(since).max(self.plan.heal_at);
        let stall = if self.demand[lock].sets > 0 { 0 } else { self.now.saturating_sub(free) };
        let plan = &self.plan.locks[lock];
        // A lease that ends by itself may do so at any time. If it is as short as a claim window, its client looks frozen then, and
        // the client's other waiters are skipped until one of them asks again.
        let ends_by_itself = !plan.renews || plan.max_hold.is_some();
        // A replica that is behind knows waiters that have given up. Each is granted, and costs a claim window.
        let is_behind =
            self.plan.faults.iter().any(|fault| matches!(fault.fault, Fault::Failover { lag: 1.., .. }));
        let bound = if free < self.books.healthy_from || ends_by_itself || is_behind {
            self.takeover_bound()
        } else {
            // A hand-off: a few messages, and what a minimum hold retains.
            self.plan.locks[lock].min_hold
                + SECOND
                + 40 * (self.plan.network.base + 20 * self.plan.network.jitter)
        };
        (stall > bound).then(|| {
            format!("r{lock} was free for {stall} µs while task {task} waited; the bound is {bound} µs")
        })
    }
}
