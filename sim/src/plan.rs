//! What happens in one run, decided before it begins: clients, tasks, locks and faults, all from the seed.
//!
//! A plan is data, so a failing run can be made smaller by leaving parts of it out.

mod bridging;
mod case;
mod faults;
mod gathering;
mod lock;
mod micros;
mod network;
mod replicating;

use crate::rng::Rng;
pub use bridging::{BridgePlan, ProgramEnd, ProgramPlan, ProgramSection};
pub use case::{Case, Part};
pub use faults::{Fault, FaultPlan};
pub use lock::{LockKind, LockPlan};
pub use micros::{MS, Micros, SECOND};
pub use network::NetworkPlan;

/// What happens in one run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The machines that clients run on.
    pub clients: Vec<ClientPlan>,
    /// The users' tasks.
    pub tasks: Vec<TaskPlan>,
    /// The locks, by the number in their name.
    pub locks: Vec<LockPlan>,
    /// What goes wrong, and when.
    pub faults: Vec<FaultPlan>,
    /// From then on nothing goes wrong any more.
    pub heal_at: Micros,
    /// The network without faults.
    pub network: NetworkPlan,
    /// By how many millionths the server's clock is faster than true time.
    pub server_ppm: i64,
    /// The store's interval between re-checks of a queue's head.
    pub repoll_interval: Micros,
    /// Ready tasks run in a random order, not in the order in which they were woken.
    pub shuffles: bool,
    /// Some sections end with a detached lease.
    pub detaches: bool,
    /// Locks of another library.
    pub bridges: BridgePlan,
}

/// A client's machine.
#[derive(Clone, Debug)]
pub struct ClientPlan {
    /// What its clock shows at the start, beyond an hour.
    pub offset: Micros,
    /// By how many millionths its clock is faster than true time.
    pub ppm: i64,
    /// It is left out.
    pub is_absent: bool,
    /// It runs a program with another library.
    pub is_program: bool,
}

/// A task and what it does, one operation after the other.
#[derive(Clone, Debug)]
pub struct TaskPlan {
    /// On which client.
    pub client: usize,
    /// Until the network heals.
    pub ops: Vec<Op>,
    /// After that: these locks, each waited for without a limit.
    pub last: Vec<(usize, Micros)>,
    /// It is left out.
    pub is_absent: bool,
}

/// How a lock is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Without a limit.
    Wait,
    /// Without waiting.
    Try,
    /// With a time limit.
    Timeout(Micros),
}

/// Which part of a lock is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// The mutex, the writer, one permit.
    Whole,
    /// A reader.
    Read,
    /// An upgradable reader, which becomes a writer.
    Upgradable,
    /// More than one permit, or a second entry of the same owner.
    More,
    /// This mutex and the next one together.
    Set,
}

/// One thing that a task does with a lock.
#[derive(Clone, Debug)]
pub struct Op {
    /// How long it does something else before.
    pub think: Micros,
    /// Which lock.
    pub lock: usize,
    /// How much of it.
    pub share: Share,
    /// How it waits.
    pub mode: Mode,
    /// The future is dropped after this time, if it has not ended.
    pub drop_after: Option<Micros>,
    /// How long the section takes.
    pub hold: Micros,
    /// The guard is renewed in the middle of the section.
    pub renews: bool,
    /// The section runs under `Guard::run`, which ends it when the lease is lost.
    pub is_watched: bool,
    /// How the section ends.
    pub end: End,
}

/// How a section ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// `release().await`.
    Release,
    /// `release_timeout(limit).await`.
    ReleaseTimeout(Micros),
    /// The future of `release()` is dropped after this time.
    ReleaseDropped(Micros),
    /// The guard is dropped.
    Drop,
    /// A writer becomes a reader, which is released.
    Downgrade,
    /// The lock is released by force, by its holder or another.
    Force,
    /// All acquisitions of the owner of a reentrant mutex are released, also those of other tasks.
    ReleaseAll,
    /// The guard is detached. Then this is done with the lease that was detached first, by any client.
    Detach(Next),
}

/// What is done with a detached lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing: another task finds it, or it expires.
    Leave,
    /// `renew_lease`.
    Renew,
    /// `attach`, and `release`.
    Release,
    /// `attach`, a section, and `detach`.
    Attach,
    /// `attach`, a section, and the guard is dropped.
    Drop,
}

impl Plan {
    /// The plan of this case.
    #[must_use]
    pub fn new(case: &Case) -> Self {
        let mut plan = Self::complete(case);
        for part in &case.without {
            match *part {
                Part::Client(client) => {
                    if let Some(client) = plan.clients.get_mut(client) {
                        client.is_absent = true;
                    }
                }
                Part::Task(task) => {
                    if let Some(task) = plan.tasks.get_mut(task) {
                        task.is_absent = true;
                    }
                }
                // Another operation in its place would make the rest a different run: this one takes no time.
                Part::Op(task, op) => {
                    if let Some(op) = plan.tasks.get_mut(task).and_then(|task| task.ops.get_mut(op)) {
                        op.drop_after = Some(0);
                    }
                }
                Part::Fault(_) => {}
            }
        }
        let without = |fault: usize| case.without.contains(&Part::Fault(fault));
        let faults = std::mem::take(&mut plan.faults).into_iter().enumerate();
        plan.faults = faults.filter(|(fault, _)| !without(*fault)).map(|(_, plan)| plan).collect();
        plan
    }

    /// The plan, with the parts that are left out.
    fn complete(case: &Case) -> Self {
        let mut plan = Drawing { rng: Rng::new(case.seed, 1) }.plan();
        if case.detaches {
            plan.detach_some(&mut Rng::new(case.seed, 3));
        }
        if case.replicates {
            plan.replicate(&mut Rng::new(case.seed, 5));
        }
        if case.gathers {
            plan.gather(&mut Rng::new(case.seed, 4));
        }
        if case.bridges {
            plan.bridge(&mut Rng::new(case.seed, 6));
        }
        plan
    }

    /// Lets some sections end with a detached lease.
    fn detach_some(&mut self, rng: &mut Rng) {
        self.detaches = true;
        let locks = &self.locks;
        for op in self.tasks.iter_mut().flat_map(|task| &mut task.ops) {
            // The checks know the owner of a reentrant mutex by its task.
            let is_eligible = op.share != Share::Set && locks[op.lock].kind != LockKind::Reentrant;
            if rng.chance(300) && is_eligible && matches!(op.end, End::Release | End::Drop) {
                let next = rng.pick(&[Next::Leave, Next::Renew, Next::Release, Next::Attach, Next::Drop]);
                op.end = End::Detach(next);
            }
        }
    }

    /// The parts that could be left out of this case, large ones first.
    #[must_use]
    pub fn parts(case: &Case) -> Vec<Part> {
        let plan = Self::complete(case);
        let clients = (0..plan.clients.len()).map(Part::Client);
        let tasks = (0..plan.tasks.len()).map(Part::Task);
        let faults = (0..plan.faults.len()).map(Part::Fault);
        let ops = plan.tasks.iter().enumerate();
        let ops = ops.flat_map(|(task, plan)| (0..plan.ops.len()).map(move |op| Part::Op(task, op)));
        clients.chain(tasks).chain(faults).chain(ops).filter(|part| !case.without.contains(part)).collect()
    }

    /// How many answers an attempt needs at least: mutexes of a set that want replicas are acquired one after the other.
    #[must_use]
    pub fn round_trips(&self, op: &Op) -> u64 {
        let is_set = op.share == Share::Set;
        let wants_replicas = |lock: &LockPlan| lock.replicas > 0;
        if is_set && self.locks[op.lock..=op.lock + 1].iter().any(wants_replicas) { 2 } else { 1 }
    }

    /// When the last fault ends; zero without faults.
    #[must_use]
    pub fn faults_end(&self) -> Micros {
        if self.faults.is_empty() { 0 } else { self.heal_at }
    }

    /// How long the rows of any lock stay after their last use: a latch's counts for a day, a barrier's rounds for a minute longer than
    /// the oldest of their waits.
    #[must_use]
    pub fn longest_row(&self) -> Micros {
        let gathered = |lock: &LockPlan| match lock.kind {
            LockKind::Latch(_) => 86_400 * SECOND,
            LockKind::Barrier(_) => 2 * lock.ttl + 600 * SECOND,
            _ => 0,
        };
        let longest = self.locks.iter().map(gathered).max().unwrap_or(0).max(self.longest_ttl());
        // By the clock of the server, which may be slow.
        longest + longest / 100
    }

    /// The case of a fresh seed without all faults but the pauses of clients.
    #[must_use]
    pub fn case_with_pauses(seed: u64) -> Case {
        let case = Case::fresh(seed);
        let faults = Self::new(&case).faults.into_iter().enumerate();
        let others = faults.filter(|(_, planned)| !planned.is_pause());
        Case { without: others.map(|(number, _)| Part::Fault(number)).collect(), ..case }
    }

    /// Whether nothing goes wrong but pauses of clients.
    #[must_use]
    pub fn only_pauses(&self) -> bool {
        !self.faults.iter().any(|planned| !planned.is_pause())
    }

    /// The longest ttl, or minimum hold, of any lock.
    #[must_use]
    pub fn longest_ttl(&self) -> Micros {
        self.locks.iter().map(|lock| lock.ttl.max(lock.min_hold)).max().unwrap_or(0)
    }
}

struct Drawing {
    rng: Rng,
}

impl Drawing {
    fn plan(mut self) -> Plan {
        let is_crowded = self.rng.chance(10);
        let clients = if is_crowded { self.rng.between(20, 150) } else { self.rng.between(2, 5) };
        let clients: Vec<ClientPlan> = (0..clients).map(|_| self.client()).collect();
        let locks: Vec<LockPlan> =
            (0..self.rng.between(1, if is_crowded { 1 } else { 3 })).map(|_| self.lock()).collect();
        let heal_at = self.rng.between(10, 60) * SECOND;
        let pace = self.rng.pick(&[200 * MS, SECOND, 4 * SECOND]) * if is_crowded { 10 } else { 1 };
        let mut tasks = Vec::new();
        for client in 0..clients.len() {
            for _ in 0..if is_crowded { 1 } else { self.rng.between(1, 3) } {
                tasks.push(self.task(client, &locks, heal_at, pace));
            }
        }
        let faults = self.faults(clients.len(), heal_at);
        let repoll_interval = self.rng.pick(&[2, 25]) * SECOND;
        let network = NetworkPlan {
            base: self.rng.scaled(20, 10 * MS),
            jitter: self.rng.scaled(10, 20 * MS),
            waits_for_connection: self.rng.chance(500),
        };
        Plan {
            clients,
            tasks,
            locks,
            faults,
            heal_at,
            network,
            server_ppm: self.ppm(),
            repoll_interval,
            shuffles: self.rng.chance(500),
            detaches: false,
            bridges: Default::default(),
        }
    }

    /// Two clocks within these bounds are less than 1 % apart.
    fn ppm(&mut self) -> i64 {
        let ppm = self.rng.pick(&[0, 50, 500, 4_500]);
        if self.rng.chance(500) { ppm } else { -ppm }
    }

    fn client(&mut self) -> ClientPlan {
        ClientPlan {
            offset: self.rng.scaled(1, 1_000_000 * SECOND),
            ppm: self.ppm(),
            is_absent: false,
            is_program: false,
        }
    }

    fn lock(&mut self) -> LockPlan {
        let kind = match self.rng.below(10) {
            0..5 => LockKind::Mutex,
            5..8 => LockKind::ReadWrite,
            8 => LockKind::Semaphore(u32::try_from(self.rng.between(1, 4)).unwrap_or(1)),
            _ => LockKind::Reentrant,
        };
        let ttl = self.rng.pick(&[300 * MS, SECOND, 3 * SECOND, 10 * SECOND, 30 * SECOND]);
        let is_plain = self.rng.chance(600);
        LockPlan {
            kind,
            ttl,
            renews: is_plain || self.rng.chance(700),
            max_hold: (!is_plain && self.rng.chance(200)).then(|| self.rng.scaled(200 * MS, 20 * SECOND)),
            min_hold: if !is_plain && self.rng.chance(200) {
                self.rng.scaled(100 * MS, 5 * SECOND)
            } else {
                0
            },
            global_fifo: self.rng.chance(200),
            handoff: self
                .rng
                .chance(300)
                .then(|| (u32::try_from(self.rng.below(4)).unwrap_or(0), self.rng.scaled(MS, SECOND))),
            replicas: 0,
            is_bridged: false,
        }
    }

    fn task(&mut self, client: usize, locks: &[LockPlan], heal_at: Micros, pace: Micros) -> TaskPlan {
        let mut ops = Vec::new();
        let mut passed = 0;
        while passed < heal_at && ops.len() < 40 {
            let op = self.op(locks, pace);
            passed += op.think + op.hold;
            ops.push(op);
        }
        let last =
            (0..self.rng.between(1, 3)).map(|_| (self.rng.index(locks.len()), self.rng.scaled(MS, 800 * MS)));
        TaskPlan { client, ops, last: last.collect(), is_absent: false }
    }

    fn op(&mut self, locks: &[LockPlan], pace: Micros) -> Op {
        let lock = self.rng.index(locks.len());
        let LockPlan { kind, ttl, .. } = locks[lock];
        let share = match kind {
            LockKind::Mutex => {
                let has_next = locks.get(lock + 1).is_some_and(|next| next.kind == LockKind::Mutex);
                if has_next && self.rng.chance(300) { Share::Set } else { Share::Whole }
            }
            LockKind::ReadWrite => {
                self.rng.pick(&[Share::Whole, Share::Read, Share::Read, Share::Upgradable])
            }
            _ => {
                if self.rng.chance(300) {
                    Share::More
                } else {
                    Share::Whole
                }
            }
        };
        let mode = match self.rng.below(10) {
            0..6 => Mode::Wait,
            6 => Mode::Try,
            _ => Mode::Timeout(self.rng.scaled(MS, 20 * SECOND)),
        };
        let is_long = self.rng.chance(100);
        Op {
            think: self.rng.scaled(10, 2 * pace),
            lock,
            share,
            mode,
            drop_after: self.rng.chance(120).then(|| self.rng.scaled(10, 10 * SECOND)),
            hold: if is_long { self.rng.between(ttl / 2, ttl * 2) } else { self.rng.scaled(10, pace) },
            renews: self.rng.chance(100),
            is_watched: self.rng.chance(600),
            end: match self.rng.below(20) {
                0..10 => End::Release,
                10 => End::ReleaseTimeout(self.rng.scaled(MS, 5 * SECOND)),
                11 | 12 => End::ReleaseDropped(self.rng.scaled(1, 20 * MS)),
                13 | 14 if share == Share::Whole => End::Downgrade,
                15 if self.rng.chance(300) => End::Force,
                _ => End::Drop,
            },
        }
    }
}
