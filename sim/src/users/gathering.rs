//! Latches and barriers: users that wait for each other, and what is checked of them.

use leasehold::{Barrier, Error, Latch};

use super::locks::name;
use super::until;
use super::user::{User, span};
use crate::checks::Promise;
use crate::executor::ProcessId;
use crate::plan::{LockKind, MS, Micros, Mode, Op, SECOND, Share};
use crate::planted::Planted;
use crate::transport::Sleep;
use crate::world::{Ended, Wait, WaitEnd, World, try_with, with};

/// A wait that ends when this is dropped.
struct Waiting {
    lock: usize,
    process: ProcessId,
    number: usize,
}

impl Waiting {
    fn new(lock: usize, process: ProcessId) -> Self {
        let number = with(|world| {
            let (begun_at, stalled) = (world.life_for(process), world.processes[process].stalled);
            let wait = Wait { began: world.now, begun_at, stalled, ended: None };
            let waits = &mut world.gatherings.entry(lock).or_default().waits;
            waits.push(wait);
            waits.len() - 1
        });
        Self { lock, process, number }
    }

    fn end(&self, end: WaitEnd) {
        try_with(|world| {
            let (now, life, stalled) =
                (world.now, world.life_for(self.process), world.processes[self.process].stalled);
            let wait = world.gatherings.get_mut(&self.lock).and_then(|all| all.waits.get_mut(self.number));
            if let Some(wait) = wait {
                let by = life.filter(|_| stalled == wait.stalled);
                wait.ended.get_or_insert(Ended { now, end, by });
            }
        });
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.end(WaitEnd::Unknown);
    }
}

impl User {
    pub(super) fn is_gathering(&self, lock: usize) -> bool {
        with(|world| matches!(world.plan.locks[lock].kind, LockKind::Latch(_) | LockKind::Barrier(_)))
    }

    /// One operation on a latch or a barrier.
    pub(super) async fn gather(&self, op: &Op) {
        let kind = with(|world| world.plan.locks[op.lock].kind);
        let limit = match op.mode {
            Mode::Timeout(limit) => limit,
            _ => SECOND,
        };
        let work = async {
            match (kind, op.share) {
                (LockKind::Latch(count), Share::Read) => self.wait_for_latch(op.lock, count, limit).await,
                (LockKind::Latch(count), _) => self.count_down(op.lock, count).await,
                (LockKind::Barrier(parties), _) => self.wait_at_barrier(op.lock, parties, limit).await,
                _ => Ok(()),
            }
        };
        let done = match op.drop_after {
            None => work.await,
            Some(limit) => until(work, Sleep::span(self.process, limit)).await.unwrap_or(Ok(())),
        };
        if let Err(error) = done {
            self.check_gathering(op.lock, &error);
        }
    }

    /// After the faults every task counts, so the latch opens.
    pub(super) async fn last_gathering(&self, lock: usize) {
        let LockKind::Latch(count) = with(|world| world.plan.locks[lock].kind) else { return };
        while let Err(error) = self.count_down(lock, count).await {
            self.check_gathering(lock, &error);
            self.sleep(100 * MS).await;
        }
        // Absent clients count never.
        if with(|world| world.present_tasks() < count as usize) {
            return;
        }
        loop {
            let limit = 10 * SECOND;
            match self.latch(lock, count).wait_timeout(span(limit)).await {
                Ok(true) => return self.check_open(lock, count),
                Ok(false) => {}
                Err(error) => {
                    self.check_gathering(lock, &error);
                    self.sleep(100 * MS).await;
                }
            }
        }
    }

    fn latch(&self, lock: usize, count: u32) -> Latch {
        self.client.latch(name(lock), shortened(Planted::LatchShort, count))
    }

    fn barrier(&self, lock: usize, parties: u32) -> Barrier {
        let ttl = with(|world| world.plan.locks[lock].ttl);
        self.client.barrier(name(lock), shortened(Planted::BarrierShort, parties)).ttl(span(ttl))
    }

    /// Counts once for this task, however often it is called: also after an answer that was lost.
    async fn count_down(&self, lock: usize, count: u32) -> Result<(), Error> {
        with(|world| world.gatherings.entry(lock).or_default().counted.insert(self.task));
        let left = self.latch(lock, count).count_down_as(format!("task-{}", self.task)).await?;
        self.say(60, || format!("counts r{lock} down, {left} are left"));
        if left == 0 {
            self.check_open(lock, count);
        }
        Ok(())
    }

    async fn wait_for_latch(&self, lock: usize, count: u32, limit: Micros) -> Result<(), Error> {
        if self.latch(lock, count).wait_timeout(span(limit)).await? {
            self.say(61, || format!("finds r{lock} open"));
            self.check_open(lock, count);
        }
        Ok(())
    }

    /// The latch is open, so all counts have begun.
    fn check_open(&self, lock: usize, count: u32) {
        with(|world| {
            let counted = world.gatherings.get(&lock).map_or(0, |gathering| gathering.counted.len());
            if counted < count as usize {
                world.broken(Promise::Gathered, || {
                    format!("the latch r{lock} is open after {counted} of {count} counts")
                });
            }
        });
    }

    async fn wait_at_barrier(&self, lock: usize, parties: u32, limit: Micros) -> Result<(), Error> {
        let waiting = Waiting::new(lock, self.process);
        self.say(62, || format!("waits at r{lock}"));
        let passed = self.barrier(lock, parties).wait_timeout(span(limit)).await?;
        let is_denied = with(|world| world.denies_pass(lock, waiting.number));
        match passed.filter(|_| !is_denied) {
            Some(leads) => {
                let leads = leads && with(|world| world.planted != Some(Planted::LeaderDenied));
                waiting.end(WaitEnd::Passed { leads });
                self.say(63, || format!("passes r{lock}{}", if leads { " as the leader" } else { "" }));
                with(|world| world.check_round(lock, parties, waiting.number));
            }
            None => {
                waiting.end(WaitEnd::Departed);
                self.say(64, || format!("leaves r{lock}"));
            }
        }
        Ok(())
    }

    /// A lease may be lost, and an answer late, where they may be for other locks.
    fn check_gathering(&self, lock: usize, error: &Error) {
        self.say(65, || format!("error at r{lock}: {error}"));
        let is_excused = with(|world| {
            !world.lasts(lock)
                || world.now < world.recovered_at()
                || error.is_lost() && world.now < world.books.calm_from
        });
        if !is_excused {
            self.check_error(error);
        }
    }
}

/// One less than declared, if that is the planted bug.
fn shortened(bug: Planted, count: u32) -> u32 {
    let is_planted = with(|world| world.planted == Some(bug));
    if is_planted && count > 1 { count - 1 } else { count }
}

impl World {
    /// The server that clients connect to, and which of its lives.
    fn epoch(&self) -> (usize, u32) {
        (self.master, self.servers[self.master].epoch)
    }

    /// How many tasks there are.
    fn present_tasks(&self) -> usize {
        let is_present =
            |task: &&crate::plan::TaskPlan| !task.is_absent && !self.plan.clients[task.client].is_absent;
        self.plan.tasks.iter().filter(is_present).count()
    }

    /// The life of the server that a process is connected to.
    fn life_for(&self, process: ProcessId) -> Option<(usize, u32)> {
        let connection = self.processes[process].slots.iter().find_map(|slot| slot.connection)?;
        let server = self.connections[&connection].server;
        Some((server, self.servers[server].epoch))
    }

    /// Whether a party that has passed says that it has left, by a planted bug.
    fn denies_pass(&mut self, lock: usize, number: usize) -> bool {
        match self.planted {
            Some(Planted::PassDenied) => self.rng.chance(700),
            Some(Planted::PassDeniedAtNewMaster) => {
                let master = self.epoch();
                self.gatherings[&lock].waits[number].begun_at.is_some_and(|at| at != master)
            }
            _ => false,
        }
    }

    /// A wait has passed: this many parties waited at the same time, and none of them has left instead.
    fn check_round(&mut self, lock: usize, parties: u32, number: usize) {
        let longest_lease = 3 * self.plan.locks[lock].ttl + self.set_back;
        let Some(gathering) = self.gatherings.get(&lock) else { return };
        let passed = &gathering.waits[number];
        let (began, by) = (passed.began, passed.ended.and_then(|ended| ended.by));
        // A server that has decided on all of a wait knows of the others what it was told. Another one may count a party that has left or
        // passed, because it lost data, or because that was at another master.
        let is_known = |wait: &Wait, ended: &Ended| {
            by.is_some() && ended.by == by && (passed.is_of_one_life() || wait.is_of_one_life())
        };
        let waited = gathering.waits.iter().filter(|wait| match wait.ended {
            None => true,
            Some(ended) if ended.end != WaitEnd::Unknown && is_known(wait, &ended) => {
                ended.end != WaitEnd::Departed && ended.now >= began
            }
            // A party that dies is counted until its lease has expired. Its last commands may arrive late.
            Some(ended) => ended.now + longest_lease >= began,
        });
        let waited = waited.count();
        if waited < parties as usize {
            self.broken(Promise::Gathered, || {
                format!("a wait at r{lock} passed beside {waited} waits; the barrier has {parties} parties")
            });
        }
    }

    /// At the end: the waits that passed make whole rounds, of which each has one leader, if no outcome is unknown and no server lost data.
    pub(crate) fn check_rounds(&mut self) {
        let first = (0, 0);
        let rounds = self.gatherings.iter().filter_map(|(lock, gathering)| {
            let LockKind::Barrier(parties) = self.plan.locks[*lock].kind else { return None };
            let ends: Vec<WaitEnd> =
                gathering.waits.iter().filter_map(|wait| Some(wait.ended?.end)).collect();
            let is_known = ends.len() == gathering.waits.len() && !ends.contains(&WaitEnd::Unknown);
            let passed = ends.iter().filter(|end| matches!(end, WaitEnd::Passed { .. })).count();
            let leaders = ends.iter().filter(|end| **end == WaitEnd::Passed { leads: true }).count();
            let is_whole = leaders * parties as usize == passed;
            (is_known && !is_whole).then_some((*lock, passed, leaders, parties))
        });
        let broken: Vec<_> = rounds.collect();
        if self.epoch() != first {
            return;
        }
        for (lock, passed, leaders, parties) in broken {
            self.broken(Promise::Gathered, || {
                format!("{passed} waits at r{lock} passed with {leaders} leaders; the barrier has {parties} parties")
            });
        }
    }
}
