//! A lease that no guard refers to.

use leasehold::LeaseId;

/// A detached lease that no task uses now.
#[derive(Debug)]
pub(crate) struct Detached {
    pub(crate) lock: usize,
    /// Its share of the capacity.
    pub(crate) weight: u32,
    pub(crate) id: LeaseId,
}
