//! Spans and times of a run.

/// Microseconds.
pub type Micros = u64;

/// One millisecond.
pub const MS: Micros = 1_000;
/// One second.
pub const SECOND: Micros = 1_000_000;
