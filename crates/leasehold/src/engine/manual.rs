//! A clock that a test moves, and what it moves with it.
//!
//! Clients of such a clock have no thread. What their drivers would do is done by the task that moves the clock, or that
//! wakes a driver: so everything that is due has been done when that call returns, and a test is deterministic.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::LocalTime;

/// A driver without a thread.
pub(crate) trait Driven: Send + Sync {
    /// Does everything that is due. Returns when something is due again; `None` if the driver has ended.
    fn run_due(&self, now: LocalTime) -> Option<LocalTime>;
}

pub(crate) struct ManualClock {
    micros: AtomicU64,
    /// Each with the time at which it is due again.
    drivers: Mutex<Vec<(Arc<dyn Driven>, LocalTime)>>,
    /// One task at a time runs the drivers.
    is_running: AtomicBool,
    /// A driver was woken since it was run.
    is_woken: AtomicBool,
    /// Taken by the task that moves the clock.
    moving: Mutex<()>,
}

impl ManualClock {
    /// It starts at an hour, so that no time before the start is needed.
    pub(crate) fn new() -> Self {
        Self {
            micros: AtomicU64::new(3_600_000_000),
            drivers: Mutex::default(),
            is_running: AtomicBool::new(false),
            is_woken: AtomicBool::new(false),
            moving: Mutex::default(),
        }
    }

    pub(crate) fn now(&self) -> LocalTime {
        LocalTime::from_micros(self.micros.load(Ordering::SeqCst))
    }

    /// How many drivers have not ended.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.drivers().len()
    }

    pub(crate) fn add(&self, driver: Arc<dyn Driven>) {
        self.drivers().push((driver, LocalTime::NEVER));
        self.run_drivers();
    }

    /// Moves the clock from one due time to the next, and runs the drivers at each.
    pub(crate) fn advance(&self, by: Duration) {
        let _moving = lock(&self.moving);
        let target = self.after(by);
        self.run_drivers();
        loop {
            let next = self.drivers().iter().map(|(_, due)| *due).min();
            let Some(next) = next.filter(|next| *next <= target) else { break };
            self.set(next.max(self.now()));
            self.run_drivers();
        }
        self.set(target);
        self.run_drivers();
    }

    /// Moves the clock at once, as for a process that was suspended, and runs the drivers after that.
    pub(crate) fn jump(&self, by: Duration) {
        let _moving = lock(&self.moving);
        self.set(self.after(by));
        self.run_drivers();
    }

    /// Never `NEVER`, when everything would be due for ever.
    fn after(&self, by: Duration) -> LocalTime {
        (self.now() + by).min(LocalTime::from_micros(LocalTime::NEVER.as_micros() - 1))
    }

    /// Runs the drivers until none has anything to do. If this is called while they run, from them or from another thread,
    /// they are run again.
    pub(crate) fn run_drivers(&self) {
        self.is_woken.store(true, Ordering::SeqCst);
        while self.is_woken.load(Ordering::SeqCst) {
            if self.is_running.swap(true, Ordering::SeqCst) {
                return;
            }
            let _running = Running(&self.is_running);
            if self.is_woken.swap(false, Ordering::SeqCst) {
                self.run_once();
            }
        }
    }

    fn run_once(&self) {
        let drivers: Vec<_> = self.drivers().iter().map(|(driver, _)| driver.clone()).collect();
        for driver in drivers {
            let due = driver.run_due(self.now());
            let mut known = self.drivers();
            let Some(at) = known.iter().position(|(other, _)| Arc::ptr_eq(other, &driver)) else { continue };
            match due {
                Some(due) => known[at].1 = due,
                None => drop(known.swap_remove(at)),
            }
        }
    }

    fn set(&self, time: LocalTime) {
        self.micros.store(time.as_micros(), Ordering::SeqCst);
    }

    fn drivers(&self) -> MutexGuard<'_, Vec<(Arc<dyn Driven>, LocalTime)>> {
        lock(&self.drivers)
    }
}

/// The drivers run no longer when this is dropped, also by a panic.
struct Running<'a>(&'a AtomicBool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
