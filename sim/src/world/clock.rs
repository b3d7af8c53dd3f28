//! The clock of a client's machine.

use leasehold_core::LocalTime;

use crate::plan::Micros;

/// A clock that never steps, with a speed of its own.
#[derive(Clone, Copy, Debug)]
pub struct LocalClock {
    /// True time and the clock's time when its speed last changed.
    since: (Micros, Micros),
    /// By how many millionths it is faster than true time. At -1,000,000 it stands still.
    ppm: i64,
}

impl LocalClock {
    /// A clock with this time at the start.
    #[must_use]
    pub fn new(start: Micros, ppm: i64) -> Self {
        Self { since: (0, start), ppm }
    }

    /// What it shows.
    #[must_use]
    pub fn at(&self, now: Micros) -> LocalTime {
        let passed = now - self.since.0;
        let drift = (i128::from(passed) * i128::from(self.ppm)) / 1_000_000;
        let shown = self.since.1 + passed;
        LocalTime::from_micros(shown.saturating_add_signed(i64::try_from(drift).unwrap_or(0)))
    }

    /// Changes its speed.
    pub fn set_speed(&mut self, now: Micros, ppm: i64) {
        self.since = (now, self.at(now).as_micros());
        self.ppm = ppm;
    }

    /// When it will show a time; none if it stands still or never will.
    #[must_use]
    pub fn when(&self, local: LocalTime) -> Option<Micros> {
        if local == LocalTime::NEVER || self.ppm <= -1_000_000 {
            return None;
        }
        let ahead = i128::from(local.as_micros()) - i128::from(self.since.1);
        if ahead <= 0 {
            return Some(self.since.0);
        }
        let speed = i128::from(1_000_000 + self.ppm);
        let passed = (ahead * 1_000_000 + speed - 1) / speed;
        let mut when = self.since.0 + u64::try_from(passed).ok()?;
        while self.at(when) < local {
            when += 1;
        }
        Some(when)
    }
}
