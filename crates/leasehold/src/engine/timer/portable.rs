//! A timer for systems without timerfd.

use std::io;
use std::time::Duration;

use leasehold_core::LocalTime;

use crate::engine::clock::Clock;

/// Sleeps in steps short enough that a suspend is noticed soon after it.
pub(crate) struct Timer;

const STEP: Duration = Duration::from_secs(1);

impl Timer {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self)
    }

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
