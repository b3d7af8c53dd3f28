//! Calibration: a fixed workload on every core before and after each run shows whether the machine is slow.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

/// Tolerated ratio to the best time.
const TOLERANCE: f64 = 1.25;
const STEPS: u64 = 4_000_000;

/// The best time seen.
#[derive(Debug)]
pub struct Calibration {
    cores: usize,
    best: Duration,
}

impl Calibration {
    /// Measures the machine's speed.
    #[must_use]
    pub fn new(cores: usize) -> Self {
        let best = (0..9).map(|_| work(cores)).min().unwrap_or_default();
        Self { cores, best }
    }

    /// Whether the machine is slower now than at its best.
    pub fn is_slow(&mut self) -> bool {
        let now = work(self.cores);
        self.best = self.best.min(now);
        self.judges_slow(now)
    }

    fn judges_slow(&self, now: Duration) -> bool {
        now > self.best.mul_f64(TOLERANCE)
    }
}

/// Runs on all cores at once, to detect other programs on any of them.
fn work(cores: usize) -> Duration {
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| (0..STEPS).fold(1_u64, |state, step| black_box(state.rotate_left(7) ^ step)));
        }
    });
    began.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_takes_a_third_longer_is_slow() {
        let calibration = Calibration { cores: 1, best: Duration::from_millis(30) };
        assert!(!calibration.judges_slow(Duration::from_millis(33)));
        assert!(calibration.judges_slow(Duration::from_millis(40)));
    }
}
