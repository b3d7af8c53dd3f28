//! A lease that no guard refers to.

use leasehold::LeaseId;

use crate::plan::Micros;

/// A detached lease that no task uses now.
#[derive(Debug)]
pub(crate) struct Detached {
    pub(crate) lock: usize,
    /// Its share of the capacity.
    pub(crate) weight: u32,
    pub(crate) id: LeaseId,
    /// When it was detached or last renewed.
    pub(crate) since: Micros,
}
