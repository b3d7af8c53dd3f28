//! Mutexes and elections that are bridged to the locks of another library, and programs that use that library.

use super::{
    ClientPlan, End, Fault, FaultPlan, LockKind, LockPlan, MS, Micros, Mode, Op, Plan, SECOND, Share,
};
use crate::rng::Rng;

/// The bridges of a run.
#[derive(Clone, Debug, Default)]
pub struct BridgePlan {
    /// The programs with the other library.
    pub programs: Vec<ProgramPlan>,
    /// The server reports changes of keys.
    pub has_tracking: bool,
}

/// A program that uses the other library, and what it does, one section after the other.
#[derive(Clone, Debug)]
pub struct ProgramPlan {
    /// Its machine, which has no client of leasehold.
    pub client: usize,
    /// Until the network heals.
    pub sections: Vec<ProgramSection>,
}

/// One section of such a program.
#[derive(Clone, Debug)]
pub struct ProgramSection {
    /// How long it does something else before.
    pub think: Micros,
    /// Which lock.
    pub lock: usize,
    /// The expiry that it asks for.
    pub ttl: Micros,
    /// How long it tries to take the lock.
    pub patience: Micros,
    /// The pause between two tries.
    pub pause: Micros,
    /// How long the section takes.
    pub hold: Micros,
    /// It renews the lock meanwhile.
    pub renews: bool,
    /// How the section ends.
    pub end: ProgramEnd,
}

/// How a section of such a program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramEnd {
    /// It releases the lock.
    Release,
    /// It leaves the lock, which expires.
    Leave,
    /// There is no section: an operator deletes the key, also while a program holds the lock.
    Delete,
}

impl BridgePlan {
    /// The longest expiry that a program asks for.
    #[must_use]
    pub fn longest_ttl(&self) -> Micros {
        let sections = self.programs.iter().flat_map(|program| &program.sections);
        sections.map(|section| section.ttl).max().unwrap_or(0)
    }
}

impl Plan {
    /// Bridges most mutexes and elections, or an added mutex, and adds one to three programs with the other library and faults of theirs.
    pub(super) fn bridge(&mut self, rng: &mut Rng) {
        let is_eligible = |lock: &&mut LockPlan| matches!(lock.kind, LockKind::Mutex | LockKind::Election);
        for lock in self.locks.iter_mut().filter(is_eligible) {
            if rng.chance(700) {
                lock.bridge();
            }
        }
        if !self.locks.iter().any(|lock| lock.is_bridged) {
            self.add_bridged_lock(rng);
        }
        let locks = &self.locks;
        for op in self.tasks.iter_mut().flat_map(|task| &mut task.ops) {
            // A bridged lease can't be detached.
            if matches!(op.end, End::Detach(_)) && locks[op.lock].is_bridged {
                op.end = End::Release;
            }
        }
        self.bridges.has_tracking = rng.chance(800);
        for _ in 0..rng.between(1, 3) {
            self.add_program(rng);
        }
        if !self.faults.is_empty() {
            self.add_faults_of_keys(rng);
        }
    }

    fn add_bridged_lock(&mut self, rng: &mut Rng) {
        let lock = self.locks.len();
        let ttl = rng.pick(&[300 * MS, SECOND, 3 * SECOND, 10 * SECOND, 30 * SECOND]);
        let mut plan = LockPlan {
            kind: LockKind::Mutex,
            ttl,
            renews: true,
            max_hold: None,
            min_hold: 0,
            global_fifo: rng.chance(200),
            handoff: None,
            replicas: 0,
            is_bridged: false,
        };
        plan.bridge();
        self.locks.push(plan);
        for task in &mut self.tasks {
            for _ in 0..rng.between(1, 6) {
                let at = rng.index(task.ops.len() + 1);
                task.ops.insert(at, bridged_op(rng, lock));
            }
            task.last.push((lock, rng.scaled(MS, 800 * MS)));
        }
    }

    fn add_program(&mut self, rng: &mut Rng) {
        let ppm = i64::try_from(rng.below(9_000)).unwrap_or(0) - 4_500;
        let client = self.clients.len();
        let offset = rng.scaled(1, 1_000_000 * SECOND);
        self.clients.push(ClientPlan { offset, ppm, is_absent: false, is_program: true });
        let is_bridged = |lock: &usize| self.locks[*lock].is_bridged;
        let locks: Vec<usize> = (0..self.locks.len()).filter(is_bridged).collect();
        let (mut sections, mut passed) = (Vec::new(), 0);
        let pace = rng.pick(&[20 * MS, 200 * MS, 2 * SECOND]);
        let deletions = if rng.chance(250) { 60 } else { 0 };
        while passed < self.heal_at && sections.len() < 60 {
            let lock = rng.pick(&locks);
            let section = program_section(rng, lock, pace, deletions);
            passed += section.think + section.hold;
            sections.push(section);
        }
        self.bridges.programs.push(ProgramPlan { client, sections });
    }

    fn add_faults_of_keys(&mut self, rng: &mut Rng) {
        for _ in 0..rng.below(8) {
            let at = rng.below(self.heal_at);
            let client = rng.index(self.clients.len());
            let user = rng.index(self.clients.len() - self.bridges.programs.len());
            let lasts = rng.scaled(MS, 20 * SECOND);
            let late = rng.chance(400).then(|| rng.scaled(MS, 8 * SECOND));
            let fault = match rng.below(16) {
                0..3 => Fault::CutKeys { client, late },
                3..6 => Fault::SilenceKeys { client, lasts },
                6 => Fault::Pause { client, callers: true, driver: true, lasts },
                7 => Fault::Crash { client, restarts_after: lasts, closes_after: 0 },
                8 => Fault::Partition { client, lasts },
                9..12 => Fault::LateKeys {
                    client: user,
                    by: rng.between(200 * MS, 950 * MS),
                    during: rng.between(SECOND, 8 * SECOND),
                    lasts,
                },
                _ => {
                    let late = rng.scaled(20 * MS, 1_300 * MS);
                    Fault::LateTake { client: user, late, deleted_after: rng.between(late / 8, late) }
                }
            };
            self.faults.push(FaultPlan { at, fault });
        }
        self.faults.sort_by_key(|fault| fault.at);
    }
}

impl LockPlan {
    /// With the options that a bridged lock may have.
    fn bridge(&mut self) {
        self.is_bridged = true;
        self.renews = true;
        self.min_hold = 0;
        self.handoff = None;
    }
}

fn bridged_op(rng: &mut Rng, lock: usize) -> Op {
    let mode = match rng.below(5) {
        0..3 => Mode::Wait,
        3 => Mode::Try,
        _ => Mode::Timeout(rng.scaled(MS, 20 * SECOND)),
    };
    Op {
        think: rng.scaled(10, 2 * SECOND),
        lock,
        share: Share::Whole,
        mode,
        drop_after: rng.chance(120).then(|| rng.scaled(10, 10 * SECOND)),
        hold: if rng.chance(200) { rng.between(SECOND, 10 * SECOND) } else { rng.scaled(10, 2 * SECOND) },
        renews: rng.chance(100),
        is_watched: rng.chance(600),
        end: match rng.below(10) {
            0..6 => End::Release,
            6 => End::ReleaseTimeout(rng.scaled(MS, 5 * SECOND)),
            7 => End::ReleaseDropped(rng.scaled(1, 20 * MS)),
            _ => End::Drop,
        },
    }
}

/// `deletions`: how many of a thousand delete the key.
fn program_section(rng: &mut Rng, lock: usize, pace: Micros, deletions: u64) -> ProgramSection {
    let ttl = rng.pick(&[300 * MS, SECOND, 2 * SECOND, 10 * SECOND]);
    let renews = rng.chance(400);
    let hold = if rng.chance(100) { rng.between(ttl / 2, 2 * ttl) } else { rng.scaled(10, pace) };
    ProgramSection {
        think: rng.scaled(10, 2 * pace),
        lock,
        ttl,
        patience: if rng.chance(200) { 0 } else { rng.scaled(MS, 10 * SECOND) },
        pause: rng.pick(&[10 * MS, 50 * MS, 100 * MS]),
        hold,
        renews,
        end: match (rng.chance(50), rng.chance(deletions)) {
            (_, true) => ProgramEnd::Delete,
            (true, false) => ProgramEnd::Leave,
            (false, false) => ProgramEnd::Release,
        },
    }
}
