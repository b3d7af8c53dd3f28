//! The clocks of this machine.

use leasehold_core::{LocalTime, Now, StoreTime};
use rustix::time::{ClockId, Timespec, clock_gettime};

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

/// Where the time comes from: the kernel, but in tests, which can't let the machine sleep.
trait Kernel: Copy {
    fn read(self, id: ClockId) -> Timespec;
}

impl<F: Fn(ClockId) -> Timespec + Copy> Kernel for F {
    fn read(self, id: ClockId) -> Timespec {
        self(id)
    }
}

fn micros(kernel: impl Kernel, id: ClockId) -> u64 {
    let time = kernel.read(id);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000 + u64::try_from(time.tv_nsec / 1_000).unwrap_or(0)
}

/// What bounds this process's trust.
pub(crate) fn local() -> LocalTime {
    local_by(clock_gettime)
}

fn local_by(kernel: impl Kernel) -> LocalTime {
    LocalTime::from_micros(micros(kernel, LOCAL))
}

/// What a store of this process decides by. Its tokens need not outlive it, so they may follow a clock that is read
/// at a quarter of the cost and moves in steps of some milliseconds: they rise in any case.
pub(crate) fn in_memory() -> Now {
    now_by(clock_gettime, COARSE)
}

/// What an embedded store decides by: expiries on the boot clock, which nobody can step, and tokens on
/// the wall clock, which outlives a reboot.
pub(crate) fn embedded() -> Now {
    now_by(clock_gettime, ClockId::Realtime)
}

fn now_by(kernel: impl Kernel, wall: ClockId) -> Now {
    Now {
        time: StoreTime::from_micros(micros(kernel, LOCAL)),
        wall: StoreTime::from_micros(micros(kernel, wall)),
        floor: None,
    }
}

#[cfg(all(test, any(target_os = "linux", target_os = "android")))]
mod tests {
    use std::time::Duration;

    use super::*;

    const AWAKE: Duration = Duration::from_secs(5);
    const SLEPT: Duration = Duration::from_secs(60);

    /// A machine that was started at zero, was awake for 5 s, and slept for a minute: what its kernel's clocks show, as
    /// `clock_gettime(2)` says.
    fn machine_that_slept(id: ClockId) -> Timespec {
        let up = match id {
            ClockId::Monotonic => AWAKE,
            ClockId::Boottime => AWAKE + SLEPT,
            // The wall clock knows of it too, and can be set.
            _ => Duration::from_secs(1_000_000) + AWAKE + SLEPT,
        };
        Timespec { tv_sec: up.as_secs().try_into().unwrap(), tv_nsec: 0 }
    }

    #[test]
    fn suspend_counts_for_local_and_embedded_leases() {
        assert_eq!(local_by(machine_that_slept), LocalTime::ZERO + (AWAKE + SLEPT));
        for wall in [COARSE, ClockId::Realtime] {
            assert_eq!(now_by(machine_that_slept, wall).time, StoreTime::ZERO + (AWAKE + SLEPT));
        }
    }

    #[test]
    fn local_time_matches_the_kernel_clock() {
        let before = micros(clock_gettime, ClockId::Boottime);
        let (local, memory, embedded) = (local(), in_memory().time, embedded().time);
        let after = micros(clock_gettime, ClockId::Boottime);
        for now in [local.as_micros(), memory.as_micros(), embedded.as_micros()] {
            assert!((before..=after).contains(&now), "{before} <= {now} <= {after}");
        }
    }
}
