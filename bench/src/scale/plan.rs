//! The size and the duration of a run, which scale every scenario.

use std::time::Duration;

use crate::compare::results::{Figures, RowResult};
use crate::grouped;
use crate::program::Program;

/// Size and duration of a scenario.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) size: f64,
    pub(super) seconds: Option<Duration>,
    pub(super) ttl: Duration,
    pub(super) program: Program,
}

impl Plan {
    /// The scaled number of something, of which the full scenario has this many.
    pub(super) fn count(&self, full: u32) -> u32 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let scaled = (f64::from(full) * self.size).round() as u32;
        scaled.max(1)
    }

    /// The duration of a measurement, which the full scenario measures for this long.
    pub(super) fn span(&self, full: Duration) -> Duration {
        self.seconds.unwrap_or(full)
    }

    /// A number with commas.
    pub(super) fn shown(&self, count: u32) -> String {
        grouped(f64::from(count))
    }

    /// The row of a scenario that is scaled.
    pub(super) fn row(&self, name: &str, figures: Figures) -> RowResult {
        let mut row = RowResult::of(name);
        row.push(figures);
        row.push(Figures::from([("size".to_owned(), self.size), ("ttl".to_owned(), self.ttl.as_secs_f64())]));
        row
    }
}

/// The whole milliseconds of a duration.
pub(super) fn milliseconds(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
