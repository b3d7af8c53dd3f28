//! The clocks of systems without `clock_gettime`, in its terms.

use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockId {
    Monotonic,
    Realtime,
}

pub struct Timespec {
    pub tv_sec: i64,
    pub tv_nsec: i64,
}

/// The start of this process's monotonic clock. On Windows the clock behind `Instant` counts suspend.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

pub fn clock_gettime(id: ClockId) -> Timespec {
    let time = match id {
        ClockId::Monotonic => START.elapsed(),
        ClockId::Realtime => SystemTime::UNIX_EPOCH.elapsed().unwrap_or(Duration::ZERO),
    };
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}
