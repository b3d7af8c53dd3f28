//! The locks of a plan.

use std::time::Duration;

use leasehold::bridge::Foreign;
use leasehold::{Election, Mutex, OncePer, ReentrantMutex, RwLock, Semaphore};

use super::user::{User, span};
use crate::plan::{LockPlan, Micros};
use crate::planted::Planted;
use crate::world::{key_name, try_with, with};

impl User {
    pub(super) fn mutex(&self, plan: &LockPlan, lock: usize) -> Mutex {
        let mutex = self.client.mutex(name(lock)).ttl(span(plan.ttl)).auto_renew(plan.renews);
        let mut mutex = mutex.replicas(plan.replicas);
        if let Some(hold) = plan.max_hold {
            mutex = mutex.max_hold(span(hold));
        }
        if plan.min_hold > 0 {
            mutex = mutex.min_hold(span(plan.min_hold));
        }
        if with(|world| world.planted) == Some(Planted::EndlessHandoff) {
            mutex = mutex.local_handoff(u32::MAX, Duration::from_secs(3600));
        } else if let Some((handoffs, limit)) = plan.handoff {
            mutex = mutex.local_handoff(handoffs, span(limit));
        }
        if plan.global_fifo {
            mutex = mutex.global_fifo();
        }
        if plan.is_bridged { mutex.bridge(Foreign::set_nx_px(key_name(lock))) } else { mutex }
    }

    pub(super) fn rw_lock(&self, plan: &LockPlan, lock: usize) -> RwLock {
        let rw_lock = self.client.rw_lock(name(lock)).ttl(span(plan.ttl)).auto_renew(plan.renews);
        let mut rw_lock = rw_lock.replicas(plan.replicas);
        if let Some(hold) = plan.max_hold {
            rw_lock = rw_lock.max_hold(span(hold));
        }
        if plan.min_hold > 0 { rw_lock.min_hold(span(plan.min_hold)) } else { rw_lock }
    }

    pub(super) fn semaphore(&self, plan: &LockPlan, lock: usize, permits: u32) -> Semaphore {
        let semaphore = self.client.semaphore(name(lock), permits).ttl(span(plan.ttl));
        semaphore.auto_renew(plan.renews).replicas(plan.replicas)
    }

    pub(super) fn election(&self, plan: &LockPlan, lock: usize) -> Election {
        let election = self.client.election(name(lock)).ttl(span(plan.ttl));
        if plan.is_bridged { election.bridge(Foreign::set_nx_px(key_name(lock))) } else { election }
    }

    pub(super) fn once_per(&self, plan: &LockPlan, lock: usize, retention: Micros) -> OncePer {
        let is_short = with(|world| world.planted == Some(Planted::PeriodShort));
        let period = retention / 9 * if is_short { 5 } else { 10 };
        self.client.once_per(name(lock), span(period)).ttl(span(plan.ttl))
    }

    pub(super) fn owner_name(&self) -> String {
        format!("owner-{}", self.owner())
    }

    pub(super) fn reentrant(&self, plan: &LockPlan, lock: usize) -> ReentrantMutex {
        self.client.reentrant_mutex(name(lock), self.owner_name()).ttl(span(plan.ttl)).auto_renew(plan.renews)
    }
}

pub(super) fn name(lock: usize) -> String {
    format!("r{lock}")
}

pub(super) fn lock_of(name: &str) -> usize {
    name.trim_start_matches('r').parse().unwrap_or(0)
}

/// All acquisitions of an owner are being released, also those that are granted meanwhile.
pub(super) struct Forcing(usize, String);

impl Forcing {
    pub(super) fn begin(lock: usize, owner: &str) -> Self {
        with(|world| world.books.note_forced(lock, owner));
        Self(lock, owner.to_owned())
    }
}

impl Drop for Forcing {
    fn drop(&mut self) {
        let _ = try_with(|world| world.books.end_forced(self.0, &self.1));
    }
}
