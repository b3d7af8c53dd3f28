//! What the checks know: the guards, by the clocks of their own machines. No single node knows who holds a lock.

use std::collections::BTreeMap;

use leasehold::simulation::LeaseProbe;

use crate::executor::ProcessId;

/// A guard that exists.
pub(super) struct Record {
    pub(super) lock: usize,
    pub(super) process: ProcessId,
    pub(super) probe: LeaseProbe,
    pub(super) token: u64,
    /// Its number in the order in which guards were created.
    pub(super) order: u64,
    /// A future waits for its loss.
    pub(super) is_watched: bool,
}

/// What the checks know of one lock.
#[derive(Default)]
pub(super) struct LockBook {
    /// The highest token of a guard.
    pub(super) last_token: u64,
    /// The highest token that the fenced resource has seen.
    pub(super) fence: u64,
    /// The highest guard whose write was accepted.
    pub(super) written: u64,
}

/// The checks' books.
pub(super) struct Books {
    pub(super) locks: Vec<LockBook>,
    /// All guards, by a number.
    pub(super) records: BTreeMap<u64, Record>,
    /// How many guards there were.
    pub(super) guards: u64,
    /// The same by the second in which they were created.
    pub(super) by_second: BTreeMap<u64, u64>,
}

impl Books {
    pub(super) fn new(locks: usize) -> Self {
        Self {
            locks: (0..locks).map(|_| LockBook::default()).collect(),
            records: BTreeMap::new(),
            guards: 0,
            by_second: BTreeMap::new(),
        }
    }
}
