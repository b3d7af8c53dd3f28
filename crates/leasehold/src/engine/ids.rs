//! The ids within one client. They are drawn from one counter, so none of them is given twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::{Acquisition, ClientId, FIRST_UNCOUNTED};

/// An entry of the table: an attempt, then its lease, then its release. The store knows the attempt by this number and the client's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct EntryId(u64);

impl EntryId {
    /// After all others.
    pub(super) const LAST: Self = Self(u64::MAX);

    /// The attempt as the store knows it.
    pub(crate) const fn acquisition(self, client: ClientId) -> Acquisition {
        Acquisition { client, sequence: self.0 }
    }

    /// The number of the attempt in the store.
    pub(crate) const fn sequence(self) -> u64 {
        self.0
    }
}

impl From<Acquisition> for EntryId {
    /// That of one of the attempts that this client counts.
    fn from(acquisition: Acquisition) -> Self {
        Self(acquisition.sequence)
    }
}

/// The number of an attempt whose id this client has not counted: a caller has named it, or it is random. A push of such an attempt has
/// this number, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct UncountedId(u64);

impl UncountedId {
    /// None for an attempt that this client has counted.
    pub(super) fn of(acquisition: Acquisition) -> Option<Self> {
        (acquisition.sequence >= FIRST_UNCOUNTED).then_some(Self(acquisition.sequence))
    }
}

/// A local queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QueueId(u64);

/// A task's number in its local queue, which serves the lowest one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TicketNumber(u64);

impl TicketNumber {
    /// The id of the queue that its first task makes.
    pub(super) const fn new_queue(self) -> QueueId {
        QueueId(self.0)
    }
}

/// A future that waits for a change of an entry, or for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WakerId(u64);

/// Draws the ids of one client.
#[derive(Clone)]
pub(crate) struct Ids(Arc<AtomicU64>);

impl Ids {
    pub(super) fn new() -> Self {
        Self(Arc::new(AtomicU64::new(1)))
    }

    pub(super) fn entry(&self) -> EntryId {
        EntryId(self.draw())
    }

    pub(super) fn ticket(&self) -> TicketNumber {
        TicketNumber(self.draw())
    }

    pub(super) fn waker(&self) -> WakerId {
        WakerId(self.draw())
    }

    fn draw(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod of_tests {
    use super::{EntryId, QueueId, TicketNumber, WakerId};

    macro_rules! numbers {
        ($($id:ident),*) => {$(
            impl From<u64> for $id {
                fn from(number: u64) -> Self {
                    Self(number)
                }
            }

            impl PartialEq<u64> for $id {
                fn eq(&self, number: &u64) -> bool {
                    self.0 == *number
                }
            }
        )*};
    }

    numbers!(EntryId, QueueId, TicketNumber, WakerId);
}
