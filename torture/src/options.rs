//! What to run.

use std::time::Duration;

use crate::faults::{Fault, StoreKind};
use crate::targets::Target;

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
    /// Worker processes, and tasks in each.
    pub workers: (u32, u32),
    /// Print the faults as they are injected.
    pub is_verbose: bool,
}
