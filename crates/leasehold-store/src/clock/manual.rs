//! A clock that a test moves, and what it moves with it.
//!
//! Clients of such a clock have no thread. What their drivers would do is done by the task that moves the clock, or that
//! wakes a driver: so everything that is due has been done when that call returns, and a test is deterministic.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use leasehold_core::LocalTime;

/// A driver without a thread.
pub trait Driven: Send + Sync {
    /// Does everything that is due. Returns when something is due again; `None` if the driver has ended.
    fn run_due(&self, now: LocalTime) -> Option<LocalTime>;
}

/// Shows the time that a test has set, and runs what is due at each time.
pub struct ManualClock {
    micros: AtomicU64,
    /// Each with the time at which it is due again.
    drivers: Mutex<Vec<(Arc<dyn Driven>, LocalTime)>>,
    /// Taken by the thread that runs the drivers.
    running: Mutex<()>,
    /// A driver was woken since it was run.
    is_woken: AtomicBool,
    /// Taken by the task that moves the clock.
    moving: Mutex<()>,
}

impl Default for ManualClock {
    /// It starts at an hour, so that no time before the start is needed.
    fn default() -> Self {
        Self {
            micros: AtomicU64::new(3_600_000_000),
            drivers: Mutex::default(),
            running: Mutex::default(),
            is_woken: AtomicBool::new(false),
            moving: Mutex::default(),
        }
    }
}

impl ManualClock {
    /// The time that it shows.
    pub fn now(&self) -> LocalTime {
        LocalTime::from_micros(self.micros.load(Ordering::SeqCst))
    }

    /// How many drivers have not ended.
    pub fn driver_count(&self) -> usize {
        self.drivers().len()
    }

    /// Runs a driver by this clock from now on.
    pub fn add(&self, driver: Arc<dyn Driven>) {
        self.drivers().push((driver, LocalTime::NEVER));
        self.run_drivers();
    }

    /// Moves the clock from one due time to the next, and runs the drivers at each.
    pub fn advance(&self, by: Duration) {
        let _moving = lock(&self.moving);
        let target = self.after(by);
        loop {
            let at_rest = self.run_to_rest();
            let next = self.drivers().iter().map(|(_, due)| *due).min();
            let Some(next) = next.filter(|next| *next <= target) else {
                self.set(target);
                break;
            };
            self.set(next.max(self.now()));
            drop(at_rest);
            self.run_drivers();
        }
        drop(self.run_to_rest());
    }

    /// Moves the clock at once, as for a process that was suspended, and runs the drivers after that.
    pub fn jump(&self, by: Duration) {
        let _moving = lock(&self.moving);
        self.set(self.after(by));
        self.run_drivers();
        drop(self.run_to_rest());
    }

    /// Never `NEVER`, because everything would then be due.
    fn after(&self, by: Duration) -> LocalTime {
        (self.now() + by).min(LocalTime::from_micros(LocalTime::NEVER.as_micros() - 1))
    }

    /// Runs the drivers until none has anything to do. If this is called while they run, from them or from another thread,
    /// they are run again.
    pub fn run_drivers(&self) {
        self.is_woken.store(true, Ordering::SeqCst);
        self.run_woken();
    }

    fn run_woken(&self) {
        while self.is_woken.load(Ordering::SeqCst) {
            let _running = match self.running.try_lock() {
                Ok(running) => running,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            if self.is_woken.swap(false, Ordering::SeqCst) {
                self.run_once();
            }
        }
    }

    /// Waits until no driver runs, also on another thread, and none has anything to do. No driver runs until the result is
    /// dropped.
    fn run_to_rest(&self) -> MutexGuard<'_, ()> {
        loop {
            self.run_woken();
            let at_rest = lock(&self.running);
            if !self.is_woken.load(Ordering::SeqCst) {
                return at_rest;
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    use super::*;

    const STEP: Duration = Duration::from_secs(5);

    /// Due every five seconds. Its first run lasts until the test lets it end.
    struct Slow {
        begun: SyncSender<()>,
        may_end: Mutex<Option<Receiver<()>>>,
        ran_at: Mutex<Vec<LocalTime>>,
    }

    impl Driven for Slow {
        fn run_due(&self, now: LocalTime) -> Option<LocalTime> {
            if let Some(may_end) = lock(&self.may_end).take() {
                self.begun.send(()).unwrap();
                may_end.recv().unwrap();
            }
            lock(&self.ran_at).push(now);
            Some(now + STEP)
        }
    }

    #[test]
    fn clock_waits_for_a_driver_that_another_thread_runs() {
        let ((begun, has_begun), (let_end, may_end)) = (sync_channel(1), sync_channel(1));
        let slow = Arc::new(Slow { begun, may_end: Mutex::new(Some(may_end)), ran_at: Mutex::default() });
        let clock = ManualClock::default();
        let start = clock.now();
        std::thread::scope(|threads| {
            threads.spawn(|| clock.add(slow.clone()));
            has_begun.recv().unwrap();
            let (end, ended) = sync_channel(1);
            let clock = &clock;
            threads.spawn(move || {
                clock.advance(2 * STEP);
                end.send(()).unwrap();
            });
            assert!(
                ended.recv_timeout(Duration::from_millis(50)).is_err(),
                "the clock was moved beside a driver"
            );
            let_end.send(()).unwrap();
            ended.recv().unwrap();
        });
        assert!(lock(&slow.ran_at).contains(&(start + STEP)), "what was due in between ran at its time");
        assert_eq!(clock.now(), start + 2 * STEP);
    }
}
