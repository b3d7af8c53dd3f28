//! Pauses of the whole machine: a virtual machine may stall for seconds. Such a time says nothing about a lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_bench_peer::clock::now_ns;
use serde::{Deserialize, Serialize};

/// Nanoseconds of the machine's monotonic clock, which all processes share.
pub type Ns = u64;

/// Interval of the sleeps that are compared with the clock.
const TICK: Duration = Duration::from_millis(20);
/// One pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// The beginning, at most a tick too early.
    pub from: Ns,
    /// The end.
    pub to: Ns,
}

/// Records pauses until it is dropped.
pub struct Pauses {
    seen: Arc<Mutex<Vec<Pause>>>,
    is_over: Arc<AtomicBool>,
}

impl Pauses {
    /// Starts to record. A sleep that is longer than this is a pause.
    #[must_use]
    pub fn watch(limit: Duration) -> Self {
        let (seen, is_over) = (Arc::new(Mutex::default()), Arc::new(AtomicBool::new(false)));
        let (noted, ends): (Arc<Mutex<Vec<Pause>>>, _) = (Arc::clone(&seen), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let mut from = now_ns();
            while !ends.load(Ordering::Relaxed) {
                std::thread::sleep(TICK);
                let to = now_ns();
                if Duration::from_nanos(to - from) > limit {
                    noted.lock().unwrap_or_else(PoisonError::into_inner).push(Pause { from, to });
                }
                from = to;
            }
        });
        Self { seen, is_over }
    }

    /// Those so far.
    #[must_use]
    pub fn seen(&self) -> Vec<Pause> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Pauses {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}
