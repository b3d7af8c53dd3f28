//! The clock of a simulation, one for each thread. The crate in `sim/` sets it before it runs a process.

use std::cell::Cell;

use leasehold_core::LocalTime;

/// What the local clock of this thread shows.
#[derive(Clone, Copy)]
pub enum ThreadClock {
    /// The machine's clock, as everywhere outside of a simulation.
    Real,
    /// No simulated process is running: reading a clock is a mistake of the simulation.
    Unreadable,
    /// The clock of the simulated process that is running.
    At(LocalTime),
}

thread_local! {
    static CLOCK: Cell<ThreadClock> = const { Cell::new(ThreadClock::Real) };
}

/// Sets the clock of this thread.
pub fn set_clock(clock: ThreadClock) -> ThreadClock {
    CLOCK.replace(clock)
}

/// The simulated time; none outside of a simulation.
///
/// # Panics
///
/// While no simulated process is running.
pub(super) fn local_time() -> Option<LocalTime> {
    match CLOCK.get() {
        ThreadClock::Real => None,
        ThreadClock::Unreadable => panic!("a clock was read while no simulated process was running"),
        ThreadClock::At(now) => Some(now),
    }
}
