//! The users of the locks: tasks that do what their plan says, with the library's own types.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use leasehold::simulation::LeaseProbe;
use leasehold::{Client, Error, Guard, Mutex};

use super::books::Record;
use super::event::Event;
use super::host::Sleep;
use super::plan::Op;
use super::world::{run_as, try_with, with};
use crate::checks::Promise;
use crate::executor::ProcessId;
use crate::plan::{MS, Micros, Mode, SECOND};

/// How much later than its limit `lock_timeout` may end: it asks the nodes once more, with up to three tries.
const TIMEOUT_EXTRA: Micros = 5 * SECOND;

/// How long `try_lock` may last, beside 4 round trips.
const TRY_LIMIT: Micros = 60 * MS;

/// A user's task, from where an earlier process of its client was killed.
pub(super) async fn run_task(process: ProcessId, client: Client, task: usize) {
    let plan = with(|world| world.plan.clone());
    let user = User { process, client, task };
    while let Some(op) = with(|world| {
        let at = world.progress[task];
        plan.tasks[task].ops.get(at).copied().filter(|_| !world.is_healed)
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
            let left = with(|world| world.healthy_from.saturating_sub(world.now));
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

/// A record that exists as long as this. It ends before the guard: a user that releases no longer relies on it.
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
            if let Some(record) = removed.as_ref().filter(|_| is_trusted) {
                world.demand[record.lock].busy_at = world.now;
            }
            removed
        });
        drop(removed);
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

    fn mutex(&self, lock: usize) -> Mutex {
        let ttl = with(|world| world.plan.ttl);
        self.client.mutex(format!("r{lock}")).ttl(Duration::from_micros(ttl))
    }

    async fn operate(&self, op: Op) {
        let attempt = self.attempt(op);
        let got = match op.drop_after {
            None => attempt.await,
            Some(limit) => match until(attempt, Sleep::span(self.process, limit)).await {
                Some(got) => got,
                None => return self.say(1, || "drops the attempt".to_owned()),
            },
        };
        match got {
            Ok(Some((registration, guard))) => self.section(op, registration, guard).await,
            Ok(None) => self.say(2, || format!("r{} is not free", op.lock)),
            Err(error) if op.mode != Mode::Wait && self.may_be_split(&error) => {
                self.say(2, || format!("r{}: {error}", op.lock));
            }
            Err(error) => self.failed(&error),
        }
    }

    /// Whether this may be the answer of an attempt with a limit: some nodes granted it, some refused it, and the others did not answer.
    fn may_be_split(&self, error: &Error) -> bool {
        let is_split = error.is_unavailable() && error.to_string().contains("have to agree");
        is_split && with(|world| world.plan.slow_minority_from().is_some())
    }

    /// An operation failed on a guard that exists since then.
    fn failed_with(&self, since: Micros, error: &Error) {
        if error.is_lost() {
            self.lost(since);
        } else {
            self.failed(error);
        }
    }

    /// The lease of a guard was lost that exists since then.
    fn lost(&self, since: Micros) {
        let task = self.task;
        with(|world| {
            let is_fast = 8 * (world.slowest() + world.plan.slowest_node()) <= world.plan.ttl;
            if is_fast && since >= world.calm_from {
                world.broken(Promise::Kept, || format!("task {task} has lost its lease"));
            }
        });
    }

    fn failed(&self, error: &Error) {
        self.say(3, || format!("error: {error}"));
        let (task, process) = (self.task, self.process);
        with(|world| {
            // Until enough nodes vote again, and a second for connections that are still being made.
            let abstention = world.plan.max_ttl.unwrap_or(0);
            let recovered = (world.plan.heal_at + 20 * SECOND + abstention).min(world.calm_from);
            if world.now > recovered && world.now > world.processes[process].resumed_at + SECOND {
                world.broken(Promise::NoError, || format!("task {task}: {error}"));
            }
        });
    }

    async fn attempt(&self, op: Op) -> Result<Option<(Registration, Guard)>, Error> {
        let _waiting = (op.mode == Mode::Wait).then(|| Waiting::new(op.lock, self.task));
        let started = self.moment();
        self.say(4, || format!("wants r{} ({:?})", op.lock, op.mode));
        let mutex = self.mutex(op.lock);
        let guard = match op.mode {
            Mode::Wait => mutex.lock().await.map(Some),
            Mode::Try => mutex.try_lock().await,
            Mode::Timeout(limit) => mutex.lock_timeout(Duration::from_micros(limit)).await,
        };
        match op.mode {
            Mode::Timeout(limit) => self.check_time(started, limit + TIMEOUT_EXTRA),
            Mode::Try => {
                let limit = with(|world| {
                    let is_promised = world.plan.has_healthy_majority() && world.now > world.calm_from;
                    is_promised.then(|| TRY_LIMIT + 8 * world.slowest())
                });
                if let Some(limit) = limit {
                    self.check_time(started, limit);
                }
            }
            Mode::Wait => {}
        }
        Ok(guard?.map(|guard| (self.register(op.lock, &guard), guard)))
    }

    /// Now, by the process's clock, and since when it has run without being stalled.
    fn moment(&self) -> (u64, u64, bool) {
        with(|world| {
            let known = &world.processes[self.process];
            (world.local(self.process).as_micros(), known.stalled, known.stalls == [0, 0])
        })
    }

    fn check_time(&self, (started, stalls, was_running): (u64, u64, bool), limit: Micros) {
        let (now, stalls_now, _) = self.moment();
        let took = now - started;
        if was_running && stalls == stalls_now && took > limit {
            let task = self.task;
            with(|world| {
                world.broken(Promise::InTime, || {
                    format!("task {task}: a wait with a limit took {took} µs, not {limit}")
                });
            });
        }
    }

    /// A guard exists from now on.
    fn register(&self, lock: usize, guard: &Guard) -> Registration {
        let (process, task) = (self.process, self.task);
        let record = Record {
            lock,
            process,
            probe: LeaseProbe::of(guard),
            token: guard.token().get(),
            order: 0,
            is_watched: false,
        };
        let is_trusted = |process, probe: &LeaseProbe| run_as(process, || !probe.remaining().is_zero());
        let is_own_trusted = is_trusted(process, &record.probe);
        let others: Vec<(u64, ProcessId, LeaseProbe, bool)> = with(|world| {
            let others = world.books.records.iter().filter(|(_, other)| other.lock == lock);
            others
                .map(|(number, other)| (*number, other.process, other.probe.clone(), other.is_watched))
                .collect()
        });
        let mut trusted = Vec::new();
        for (number, process, probe, is_watched) in &others {
            if is_trusted(*process, probe) {
                trusted.push(*number);
            } else if *is_watched {
                // Its loss is being reported at this moment, or never.
                with(|world| world.after(MS, Event::CheckReported(*number)));
            }
        }
        Registration(with(|world| {
            let stall = world.overdue(lock, task).filter(|_| trusted.is_empty());
            let token = record.token;
            let column = world.column(process);
            world.say(column, &[50, lock as u64, task as u64, token], || {
                format!("task {task} holds r{lock}, token {token}")
            });
            let number = world.guard_created(record, is_own_trusted, &trusted);
            if let Some(what) = stall {
                world.broken(Promise::Liveness, || what);
            }
            world.demand[lock].busy_at = world.now;
            number
        }))
    }

    fn watch(&self, registration: &Registration, is_watched: bool) {
        with(|world| {
            if let Some(record) = world.books.records.get_mut(&registration.0) {
                record.is_watched = is_watched;
            }
        });
    }

    async fn section(&self, op: Op, registration: Registration, guard: Guard) {
        let since = with(|world| world.now);
        let body = async {
            with(|world| world.write(registration.0));
            self.sleep(op.hold).await;
        };
        if op.is_watched {
            self.watch(&registration, true);
            if guard.run(body).await.is_err() {
                self.say(5, || format!("has lost r{}", op.lock));
                self.lost(since);
                with(|world| world.demand[op.lock].busy_at = world.now);
            }
            self.watch(&registration, false);
        } else {
            body.await;
        }
        // Also a user that has not looked: this is what tokens are for.
        with(|world| world.write(registration.0));
        drop(registration);
        self.say(8, || format!("gives up r{}", op.lock));
        if op.drops_guard {
            drop(guard);
        } else if let Err(error) = guard.release().await {
            self.say(7, || format!("release: {error}"));
            self.failed_with(since, &error);
        }
    }

    /// After the faults: waits until the lock is granted, uses it and releases it.
    async fn last(&self, lock: usize, hold: Micros) {
        let op = Op {
            think: 0,
            lock,
            mode: Mode::Wait,
            drop_after: None,
            hold,
            is_watched: false,
            drops_guard: false,
        };
        let (registration, guard) = loop {
            match self.attempt(op).await {
                Ok(Some(got)) => break got,
                Ok(None) => {}
                Err(error) => self.failed(&error),
            }
            self.sleep(100 * MS).await;
        };
        let since = with(|world| {
            world.write(registration.0);
            world.now
        });
        self.sleep(hold).await;
        drop(registration);
        self.say(8, || format!("gives up r{lock}"));
        if let Err(error) = guard.release().await {
            self.failed_with(since, &error);
        }
    }
}
