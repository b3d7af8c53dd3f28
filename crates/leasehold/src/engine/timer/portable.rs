//! A timer for systems without timerfd.

use std::io;
use std::time::Duration;

use leasehold_core::LocalTime;
use leasehold_store::clock::Clock;

/// The timers of one thread.
#[derive(Clone)]
pub(crate) struct Timers;

/// Sleeps in steps short enough that a suspend is noticed soon after it.
pub(crate) struct Timer;

const STEP: Duration = Duration::from_secs(1);

impl Timers {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self)
    }

    pub(crate) fn timer(&self) -> Timer {
        Timer
    }

    /// The runtime does all of it.
    pub(crate) async fn run(self) {}
}

impl Timer {
    /// Ends at this point of the local clock or later. Cancel safe.
    pub(crate) async fn until(&mut self, time: LocalTime) -> io::Result<()> {
        if time == LocalTime::NEVER {
            return std::future::pending().await;
        }
        loop {
            let left = time.since(Clock::System.local());
            if left.is_zero() {
                return Ok(());
            }
            tokio::time::sleep(left.min(STEP)).await;
        }
    }
}
