//! Locks that want a replica for each grant and renewal, and failovers to it.

use super::{End, Fault, FaultPlan, LockKind, MS, Plan, SECOND};
use crate::rng::Rng;

impl Plan {
    /// Lets most locks want a replica, and adds failovers if the run has faults: without a leap of the clock, which ends leases early.
    pub(super) fn replicate(&mut self, rng: &mut Rng) {
        for lock in self.locks.iter_mut().filter(|lock| lock.kind != LockKind::Reentrant) {
            lock.replicas = u32::from(rng.chance(700));
        }
        // A lease that goes on by its id wants no replica.
        for op in self.tasks.iter_mut().flat_map(|task| &mut task.ops) {
            if matches!(op.end, End::Detach(_)) && self.locks[op.lock].replicas > 0 {
                op.end = End::Release;
            }
        }
        if self.faults.is_empty() {
            return;
        }
        for _ in 0..rng.between(1, 3) {
            let lag = if rng.chance(300) { 0 } else { rng.scaled(MS, 3 * SECOND) };
            let skew = if rng.chance(500) { 0 } else { -i64::try_from(rng.scaled(MS, SECOND)).unwrap_or(0) };
            let overlaps = if rng.chance(500) { 0 } else { rng.scaled(MS, 20 * SECOND) };
            let fault = Fault::Failover { lag, skew, overlaps };
            self.faults.push(FaultPlan { at: rng.below(self.heal_at), fault });
        }
        self.faults.sort_by_key(|fault| fault.at);
    }
}
