//! Elections, work that is started once per period, latches and barriers, beside the locks of a plan; and `release_all`.

use super::{End, LockKind, LockPlan, MS, Mode, Op, Plan, SECOND, Share};
use crate::rng::Rng;

impl Plan {
    /// Adds one or two of them, which some tasks use between their other operations. Each task uses the latches at the end, too.
    pub(super) fn gather(&mut self, rng: &mut Rng) {
        let locks = &self.locks;
        for op in self.tasks.iter_mut().flat_map(|task| &mut task.ops) {
            let is_reentrant = locks[op.lock].kind == LockKind::Reentrant;
            if is_reentrant && matches!(op.end, End::Release | End::Drop) && rng.chance(300) {
                op.end = End::ReleaseAll;
            }
        }
        for _ in 0..rng.between(1, 2) {
            let lock = self.locks.len();
            let plan = gathering_lock(rng, self.tasks.len() as u64);
            for task in &mut self.tasks {
                for _ in 0..rng.below(4) {
                    let at = rng.index(task.ops.len() + 1);
                    task.ops.insert(at, gathering_op(rng, lock, &plan));
                }
                let is_used_at_end = matches!(plan.kind, LockKind::Election | LockKind::Latch(_));
                if is_used_at_end {
                    task.last.push((lock, rng.scaled(MS, 800 * MS)));
                }
            }
            self.locks.push(plan);
        }
    }
}

fn gathering_lock(rng: &mut Rng, tasks: u64) -> LockPlan {
    let count = |count: u64| u32::try_from(count).unwrap_or(1);
    let kind = match rng.below(4) {
        0 => LockKind::Election,
        1 => LockKind::OncePer(rng.between(2, 10) * 900 * MS),
        2 => LockKind::Latch(count(rng.between(1, tasks))),
        _ => LockKind::Barrier(count(rng.between(1, tasks.min(4)))),
    };
    LockPlan {
        kind,
        ttl: rng.pick(&[SECOND, 3 * SECOND, 10 * SECOND]),
        renews: true,
        max_hold: None,
        min_hold: if let LockKind::OncePer(retention) = kind { retention } else { 0 },
        global_fifo: false,
        handoff: None,
        replicas: 0,
        is_bridged: false,
    }
}

fn gathering_op(rng: &mut Rng, lock: usize, plan: &LockPlan) -> Op {
    let mode = match (plan.kind, rng.below(3)) {
        (LockKind::Election, 0) => Mode::Wait,
        // Nothing waits for the next period.
        (LockKind::OncePer(_), _) | (_, 1) => Mode::Try,
        _ => Mode::Timeout(rng.scaled(10 * MS, 10 * SECOND)),
    };
    Op {
        think: rng.scaled(10, SECOND),
        lock,
        share: if rng.chance(500) { Share::Read } else { Share::Whole },
        mode,
        drop_after: rng.chance(120).then(|| rng.scaled(10, 10 * SECOND)),
        hold: rng.scaled(10, 2 * SECOND),
        renews: false,
        is_watched: rng.chance(600),
        end: if rng.chance(500) { End::Release } else { End::Drop },
    }
}
