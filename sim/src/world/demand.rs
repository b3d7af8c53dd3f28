//! Who waits for a lock.

use std::collections::BTreeMap;

use crate::plan::Micros;

/// What the checks of liveness know of a lock.
#[derive(Debug, Default)]
pub struct Demand {
    /// The tasks that wait without a limit, and since when.
    pub waiting: BTreeMap<usize, Micros>,
    /// When the lock was last held by a trusted guard, as far as known.
    pub busy_at: Micros,
    /// How many attempts for this lock and another are under way.
    pub sets: u32,
    /// When it was last released by force.
    pub forced_at: Micros,
    /// When its key in the other library was last deleted by another than its holder.
    pub deleted_at: Option<Micros>,
}
