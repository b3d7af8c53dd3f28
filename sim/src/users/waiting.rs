//! What the world knows of the tasks that wait.

use crate::world::{try_with, with};

/// Counts a task as one that waits.
pub(super) struct Waiting {
    lock: usize,
    task: usize,
}

impl Waiting {
    pub(super) fn new(lock: usize, task: usize) -> Self {
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
pub(super) struct SetAttempt(usize);

impl SetAttempt {
    pub(super) fn new(lock: usize) -> Self {
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
