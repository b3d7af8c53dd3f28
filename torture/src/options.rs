//! What to run.

use std::time::Duration;

use crate::faults::{Fault, StoreKind};
use crate::targets::Target;

/// The usual ttl of the leases.
pub const TTL: Duration = Duration::from_secs(2);
/// The usual time for which a write is on its way.
pub const WRITE: Duration = Duration::from_millis(4);

/// Worker processes, if not told otherwise.
pub const WORKERS: u32 = 4;
/// Tasks of each, if not told otherwise.
pub const TASKS: u32 = 2;

/// In milliseconds.
#[must_use]
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The lock under torture.
    pub target: Target,
    /// The store.
    pub store: StoreKind,
    /// The faults to inject.
    pub faults: Vec<Fault>,
    /// How long workers start new attempts.
    pub time: Duration,
    /// The seed of the faults and of the workers' lengths.
    pub seed: u64,
    /// The ttl of the leases.
    pub ttl: Duration,
    /// How long the write of a section is on its way.
    pub write: Duration,
    /// Worker processes, and tasks in each.
    pub workers: (u32, u32),
    /// Print the faults as they are injected.
    pub is_verbose: bool,
}
