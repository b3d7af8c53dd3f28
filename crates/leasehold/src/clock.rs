//! The clocks of this machine.

use leasehold_core::{LocalTime, Now, StoreTime};
use rustix::time::{ClockId, clock_gettime};

/// The clock that never steps and also runs while the machine sleeps.
#[cfg(any(target_os = "linux", target_os = "android"))]
const LOCAL: ClockId = ClockId::Boottime;
/// Elsewhere (macOS) the monotonic clock runs during sleep.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const LOCAL: ClockId = ClockId::Monotonic;

#[cfg(any(target_os = "linux", target_os = "android"))]
const COARSE: ClockId = ClockId::RealtimeCoarse;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const COARSE: ClockId = ClockId::Realtime;

fn micros(id: ClockId) -> u64 {
    let time = clock_gettime(id);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000 + u64::try_from(time.tv_nsec / 1_000).unwrap_or(0)
}

/// What bounds this process's trust.
pub(crate) fn local() -> LocalTime {
    LocalTime::from_micros(micros(LOCAL))
}

/// What a store of this process decides by. Its tokens need not outlive it, so they may follow a clock that is read
/// at a quarter of the cost and moves in steps of some milliseconds: they rise in any case.
pub(crate) fn in_memory() -> Now {
    Now {
        time: StoreTime::from_micros(micros(LOCAL)),
        wall: StoreTime::from_micros(micros(COARSE)),
        floor: None,
    }
}

/// What an embedded store decides by: expiries on the boot clock, which nobody can step, and tokens on
/// the wall clock, which outlives a reboot.
pub(crate) fn embedded() -> Now {
    Now {
        time: StoreTime::from_micros(micros(LOCAL)),
        wall: StoreTime::from_micros(micros(ClockId::Realtime)),
        floor: None,
    }
}
