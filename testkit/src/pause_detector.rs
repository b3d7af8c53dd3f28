//! Detects pauses of the whole machine: a virtual machine may stall for seconds, and then a test of deadlines says nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of the watcher's sleeps, each of which it compares with the clock.
const TICK: Duration = Duration::from_millis(20);

/// Records pauses of the whole machine until it is dropped.
pub struct PauseDetector {
    longest: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

impl PauseDetector {
    /// Starts to record.
    #[must_use]
    pub fn watch() -> Self {
        let (longest, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (noted, ended) = (longest.clone(), is_over.clone());
        let watcher = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let began = Instant::now();
                std::thread::sleep(TICK);
                let late = began.elapsed().saturating_sub(TICK);
                noted.fetch_max(u64::try_from(late.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
        });
        Self { longest, is_over, watcher: Some(watcher) }
    }

    /// The longest pause so far.
    #[must_use]
    pub fn longest(&self) -> Duration {
        Duration::from_millis(self.longest.load(Ordering::Relaxed))
    }
}

impl Drop for PauseDetector {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Repeats a failed attempt, a few times, if the machine paused for longer than `allowed` meanwhile. A failure without such a
/// pause is final.
///
/// # Panics
///
/// With the attempt's error, or if the machine paused during every attempt.
pub async fn retry_if_paused(allowed: Duration, mut attempt: impl AsyncFnMut() -> Result<(), String>) {
    for _ in 0..6 {
        let pauses = PauseDetector::watch();
        match attempt().await {
            Ok(()) => return,
            Err(what) if pauses.longest() <= allowed => panic!("{what}"),
            Err(what) => {
                eprintln!(
                    "the machine paused for {:?}, so this failure does not count: {what}",
                    pauses.longest()
                );
            }
        }
    }
    panic!("the machine paused for longer than {allowed:?} during every attempt");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "it went wrong")]
    fn a_failure_without_a_pause_is_final() {
        let attempt = async || Err("it went wrong".to_owned());
        let mut attempts = std::pin::pin!(retry_if_paused(Duration::from_secs(60), attempt));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = attempts.as_mut().poll(&mut context);
    }
}
