//! Which data of servers goes on from which, for leases that replicas had when they were confirmed.

use std::collections::BTreeMap;

/// A server, and which of its lives.
type Epoch = (usize, u32);

/// The lives of servers, each with the first one that it goes on from without the loss of anything that replicas had.
#[derive(Debug, Default)]
pub struct Lineage(BTreeMap<Epoch, Epoch>);

impl Lineage {
    /// Leases may end early: data was lost, or the clock set forward.
    pub fn begin(&mut self, epoch: Epoch) {
        self.0.insert(epoch, epoch);
    }

    /// A replica has taken over from this master, with a clock that is not ahead.
    pub fn follow(&mut self, epoch: Epoch, master: Epoch) {
        self.0.insert(epoch, self.first(master));
    }

    /// The first of those that it goes on from.
    #[must_use]
    pub fn first(&self, epoch: Epoch) -> Epoch {
        self.0.get(&epoch).copied().unwrap_or(epoch)
    }
}
