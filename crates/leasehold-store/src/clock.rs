//! The clocks: this machine's, or one that a test moves.

use std::sync::Arc;
use std::time::Duration;

pub mod manual;
#[cfg(not(unix))]
mod portable;
#[cfg(feature = "_simulation")]
pub mod simulated;

use leasehold_core::{LocalTime, Now, StoreTime};
use manual::ManualClock;
#[cfg(not(unix))]
use portable::{ClockId, Timespec, clock_gettime};
#[cfg(unix)]
use rustix::time::{ClockId, Timespec, clock_gettime};

/// The clock of a client and its store.
#[derive(Clone, Default)]
pub enum Clock {
    #[default]
    /// This machine's.
    System,
    /// One that a test moves.
    Manual(Arc<ManualClock>),
}

impl Clock {
    /// The local clock, by which this process decides how long it may trust a lease.
    pub fn local(&self) -> LocalTime {
        match self {
            Self::System => local(),
            Self::Manual(clock) => clock.now(),
        }
    }

    /// The wall clock, to compare it with a server's.
    pub fn wall(&self) -> StoreTime {
        match self {
            Self::System => StoreTime::from_micros(micros(clock_gettime, ClockId::Realtime)),
            Self::Manual(clock) => manual(clock).wall,
        }
    }

    /// The clock of a store in this process's memory.
    pub(crate) fn in_memory(&self) -> Now {
        match self {
            Self::System => in_memory(),
            Self::Manual(clock) => manual(clock),
        }
    }

    /// The clock of a store in a file.
    pub fn embedded(&self) -> Now {
        match self {
            Self::System => embedded(),
            Self::Manual(clock) => manual(clock),
        }
    }
}

fn manual(clock: &ManualClock) -> Now {
    let since_start = Duration::from_micros(clock.now().as_micros());
    Now { wall: MANUAL_EPOCH + since_start, ..Now::same(StoreTime::ZERO + since_start) }
}

/// The wall clock's time when a manual clock shows zero: some day in 2023, so that tokens look as usual.
const MANUAL_EPOCH: StoreTime = StoreTime::from_micros(1_700_000_000_000_000);

/// The clock that never steps and also counts suspend.
#[cfg(any(target_os = "linux", target_os = "android"))]
const LOCAL: ClockId = ClockId::Boottime;
/// On macOS the monotonic clock counts suspend.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const LOCAL: ClockId = ClockId::Monotonic;

#[cfg(any(target_os = "linux", target_os = "android"))]
const COARSE: ClockId = ClockId::RealtimeCoarse;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const COARSE: ClockId = ClockId::Realtime;

/// The source of time: the kernel, or a test's clock, because a test can't suspend the machine.
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

/// The local clock, by which this process decides how long it may trust a lease.
fn local() -> LocalTime {
    #[cfg(feature = "_simulation")]
    if let Some(simulated) = simulated::local_time() {
        return simulated;
    }
    local_by(clock_gettime)
}

fn local_by(kernel: impl Kernel) -> LocalTime {
    LocalTime::from_micros(micros(kernel, LOCAL))
}

/// The clock of a store in this process's memory. Its tokens need not survive the process, so they follow a coarse wall clock
/// that moves in steps of some milliseconds and costs a quarter to read. Tokens rise in any case.
fn in_memory() -> Now {
    now_by(clock_gettime, COARSE)
}

/// The clock of an embedded store: expiries on the boot clock, which can't be set, and tokens on the wall clock, which
/// continues after a reboot.
fn embedded() -> Now {
    now_by(clock_gettime, ClockId::Realtime)
}

fn now_by(kernel: impl Kernel, wall: ClockId) -> Now {
    let wall = StoreTime::from_micros(micros(kernel, wall));
    Now { wall, ..Now::same(StoreTime::from_micros(micros(kernel, LOCAL))) }
}

#[cfg(all(test, any(target_os = "linux", target_os = "android")))]
mod tests {
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
    fn tokens_of_an_embedded_store_follow_the_wall_clock() {
        let expected = StoreTime::ZERO + (Duration::from_secs(1_000_000) + AWAKE + SLEPT);
        for wall in [COARSE, ClockId::Realtime] {
            assert_eq!(now_by(machine_that_slept, wall).wall, expected);
        }
        let manual = Clock::Manual(Arc::new(ManualClock::default())).in_memory();
        assert_eq!(manual.wall.since(MANUAL_EPOCH), manual.time.since(StoreTime::ZERO));
    }

    #[test]
    fn wall_clock_is_that_of_the_system_or_of_the_test() {
        let system = || StoreTime::from_micros(micros(clock_gettime, ClockId::Realtime));
        let (before, wall, after) = (system(), Clock::System.wall(), system());
        assert!((before..=after).contains(&wall));
        let manual = Clock::Manual(Arc::new(ManualClock::default()));
        assert_eq!(manual.wall(), manual.in_memory().wall);
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
