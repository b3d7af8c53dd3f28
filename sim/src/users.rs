//! The users of the locks: tasks that do what their plan says, with the library's own types.

mod detached;
mod gathering;
mod holding;
mod judging;
mod locks;
mod program;
mod user;
mod waiting;

use std::pin::pin;
use std::task::Poll;

use leasehold::simulation::LeaseProbe;
use leasehold::{Client, Error, Kind, MutexSet, RwLock, SetGuard};

use crate::executor::ProcessId;
use crate::plan::{End, LockKind, LockPlan, MS, Micros, Mode, Op, SECOND, Share};
use crate::planted::Planted;
use crate::transport::Sleep;
use crate::world::with;
use holding::{Got, Held, Registration};
use locks::{Forcing, name};
pub(crate) use program::{check_notified, run_program};
use user::{User, span};
use waiting::{SetAttempt, Waiting};

/// How long an attempt without waiting may take: two requests, each of which may wait for a connection and for an answer, and
/// between them the time until a silent connection has been replaced.
const TRY_LIMIT: Micros = 6 * SECOND;

/// How much longer a bridged lock may take: two tries of the other library's lock, and the release of the own lease.
const BRIDGE_LIMIT: Micros = 6 * SECOND;

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
    if plan.detaches {
        // A detached lease is not released when its client is closed.
        let left = with(|world| world.books.healthy_from.saturating_sub(world.now));
        user.sleep(left).await;
    }
    with(|world| world.finished[task] = true);
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

    /// Whether one of the locks of an operation is bridged.
    fn is_bridged(&self, op: &Op) -> bool {
        let locks = op.lock..=op.lock + usize::from(op.share == Share::Set);
        with(|world| world.plan.locks[locks].iter().any(|lock| lock.is_bridged))
    }

    // --- One operation ---------------------------------------------------------------------------

    async fn operate(&self, op: &Op) {
        if self.is_gathering(op.lock) {
            return self.gather(op).await;
        }
        let began = with(|world| world.now);
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
            Ok(None) => {
                self.say(2, || format!("r{} is not free", op.lock));
                self.check_refused(op, began);
            }
            Err(error) => self.refused(op, began, &error),
        }
    }

    async fn attempt(&self, op: &Op) -> Result<Option<Held>, Error> {
        let _waiting = (op.mode == Mode::Wait).then(|| Waiting::new(op.lock, self.task));
        let _set = (op.share == Share::Set).then(|| SetAttempt::new(op.lock));
        let plan = with(|world| world.plan.clone());
        let started = self.moment();
        self.say(4, || format!("wants r{} ({:?}, {:?})", op.lock, op.share, op.mode));
        let got = self.take(&plan.locks, op).await;
        let is_bridged = self.is_bridged(op);
        let bridge = if is_bridged { BRIDGE_LIMIT } else { 0 };
        match op.mode {
            Mode::Timeout(limit) => {
                let extra = if op.share == Share::Set { 5 * SECOND } else { 2 * SECOND };
                self.check_time(started, limit + extra + bridge, "a wait with a limit");
            }
            Mode::Try => {
                self.check_time(started, TRY_LIMIT + bridge, "an attempt that does not wait");
            }
            Mode::Wait => {}
        }
        let permits = if op.share == Share::More { plan.locks[op.lock].permits().div_ceil(2) } else { 1 };
        Ok(got?.map(|got| self.hold(op.lock, got, permits)))
    }

    async fn take(&self, locks: &[LockPlan], op: &Op) -> Result<Option<Got>, Error> {
        let lock = &locks[op.lock];
        Ok(match (lock.kind, op.share) {
            (LockKind::Mutex, Share::Set) => self.set(locks, op).await?.map(Got::Set),
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
            (LockKind::Election, _) => {
                let election = self.election(lock, op.lock);
                let got = match op.mode {
                    Mode::Wait => Some(election.campaign().await?),
                    Mode::Try => election.try_campaign().await?,
                    Mode::Timeout(limit) => election.campaign_timeout(span(limit)).await?,
                };
                got.map(Got::Guard)
            }
            (LockKind::OncePer(retention), _) => {
                self.once_per(lock, op.lock, retention).start().await?.map(Got::Guard)
            }
            (LockKind::Latch(_) | LockKind::Barrier(_), _) => None,
            (LockKind::Reentrant, _) => {
                let mutex = self.reentrant(lock, op.lock);
                let got = match op.mode {
                    Mode::Wait => Some(mutex.lock().await?),
                    Mode::Try => mutex.try_lock().await?,
                    Mode::Timeout(limit) => mutex.lock_timeout(span(limit)).await?,
                };
                got.map(Got::Guard)
            }
        })
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
                    if let Err(error) = guard.renew().await {
                        self.failed(&held.leases(), &error);
                    }
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
                self.lost(&held.leases());
                with(|world| world.note_busy(&held.numbers()));
            }
            self.watch(&held, false);
        } else {
            body.await;
        }
        self.check_held(&held);
        // Also a user that has not looked: this is what tokens are for.
        self.write(&held);
        self.finish(op, held).await;
    }

    async fn upgrade(&self, op: &Op, held: Held) -> Option<Held> {
        let leases = held.leases();
        let Held { records, got: Got::Upgradable(guard) } = held else { return Some(held) };
        with(|world| {
            for Registration(number) in &records {
                if let Some(record) = world.books.records.get_mut(number) {
                    record.is_exchanged = true;
                }
            }
        });
        let (started, limit) = (self.moment().0, op.hold.max(MS) * 4);
        let upgraded = match op.mode {
            Mode::Try => guard.try_upgrade().await,
            _ => guard.upgrade_timeout(span(limit)).await,
        };
        drop(records);
        match upgraded {
            Ok(Ok(writer)) => Some(self.hold(op.lock, Got::Writer(writer), 1)),
            Ok(Err(reader)) => {
                // The guard that goes on is checked like a new one, but it is no hand-off.
                with(|world| world.books.begin_anew(LeaseProbe::of(&reader).acquisition()));
                let held = self.hold(op.lock, Got::Upgradable(reader), 1);
                self.sleep(op.hold / 4).await;
                self.check_held(&held);
                None
            }
            Err(error) => {
                // An upgrade that was granted at its limit is released, and the reader has ended.
                if !error.is_lost() || op.mode == Mode::Try || self.moment().0 < started + limit {
                    self.failed(&leases, &error);
                }
                None
            }
        }
    }

    async fn finish(&self, op: &Op, held: Held) {
        if let End::Detach(next) = op.end {
            return self.detach(op, held, next).await;
        }
        let leases = held.leases();
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
                match reader {
                    Ok(reader) => {
                        let held = self.hold(op.lock, Got::Guard(reader), 1);
                        self.sleep(op.hold / 4).await;
                        self.check_held(&held);
                    }
                    Err(error) => self.failed(&leases, &error),
                }
            }
            End::Force => {
                let kind = match with(|world| world.plan.locks[op.lock].kind) {
                    LockKind::Mutex | LockKind::Reentrant | LockKind::OncePer(_) => Kind::Mutex,
                    LockKind::Election => Kind::Election,
                    LockKind::Latch(_) => Kind::Latch,
                    LockKind::Barrier(_) => Kind::Barrier,
                    LockKind::ReadWrite => Kind::ReadWrite,
                    LockKind::Semaphore(_) => Kind::Semaphore,
                };
                if let Err(error) = self.client.force_release(kind, name(op.lock)).await {
                    self.failed(&[], &error);
                }
                drop(records);
                drop(got);
            }
            End::ReleaseAll => {
                let owner = self.owner_name();
                let forcing = Forcing::begin(op.lock, &owner);
                drop(records);
                let plan = with(|world| world.plan.locks[op.lock].clone());
                let released = self.reentrant(&plan, op.lock).release_all().await;
                drop(forcing);
                // A guard of another task that is being released keeps the owner from entering again until its release is over.
                with(|world| world.books.lost_by.insert((op.lock, self.owner()), world.now));
                match released {
                    // Another task of this owner was faster, or the lease was lost.
                    Err(error) if error.is_not_owner() => {}
                    Err(error) => self.failed(&leases, &error),
                    Ok(released) => self.say(6, || format!("releases {released} acquisitions of {owner}")),
                }
                drop(got);
            }
            End::ReleaseTimeout(limit) if !matches!(got, Got::Set(_)) => {
                drop(records);
                let started = self.moment();
                let released = match got {
                    Got::Guard(guard) => guard.release_timeout(span(limit)).await,
                    Got::Writer(guard) => guard.release_timeout(span(limit)).await,
                    Got::Upgradable(guard) => guard.release_timeout(span(limit)).await,
                    Got::Set(set) => set.release().await,
                };
                self.check_time(started, limit, "release_timeout");
                if let Err(error) = released
                    && !error.is_timeout()
                {
                    self.failed(&leases, &error);
                }
            }
            End::ReleaseDropped(limit) => {
                drop(records);
                let _ = until(got.release(), Sleep::span(self.process, limit)).await;
            }
            _ => {
                drop(records);
                if let Err(error) = got.release().await {
                    self.failed(&leases, &error);
                }
            }
        }
    }

    /// After the faults: waits until the lock is granted, uses it and releases it.
    async fn last(&self, lock: usize, hold: Micros) {
        if self.is_gathering(lock) {
            return self.last_gathering(lock).await;
        }
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
                Err(error) => self.refused(&op, 0, &error),
            }
            self.sleep(100 * MS).await;
        };
        self.write(&held);
        self.sleep(hold).await;
        self.check_held(&held);
        let leases = held.leases();
        let Held { records, got } = held;
        drop(records);
        if with(|world| world.planted == Some(Planted::GuardKept) && world.rng.chance(100)) {
            std::mem::forget(got);
        } else if let Err(error) = got.release().await {
            self.failed(&leases, &error);
        }
    }
}
