//! A lock with one holder at a time.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{HandoffLimits, Kind};

use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::lock::Lock;
use crate::options::settings;

/// A lock with one holder at a time, and how to take it. Made by [`Client::mutex`](crate::Client::mutex).
///
/// It waits in the store's queue: first come, first served, across processes. Cloning is cheap.
///
/// **Tasks of one client** that want the same mutex with the same settings stand in a line of their own, first come, first
/// served, which has one place in the store's queue, and one lease, which it hands on without asking the store. Each task
/// gets a token of its own, higher than the ones before, also across clients. While no other client waits this has no end;
/// once one does, the lease goes back after 64 further hand-overs or 10 ms, whichever comes first (and the critical section
/// that is under way). So one client waits for another for at most 10 ms and one critical section. See
/// [`Self::local_handoff`] and [`Self::global_fifo`]. With [`Self::min_hold`], with [`Self::max_hold`], and without renewal,
/// leases are not handed on.
///
/// A task that gets the lease handed on gets what is left of it, three quarters of a second at least, or a quarter of a
/// shorter ttl; renewals go on. Whoever looks sees the first holder's token, and of a line that waits one place.
#[derive(Clone)]
pub struct Mutex(pub(crate) Lock);

/// How long a client keeps a lease among its tasks once another client waits: hand-overs enough to make up for the way to
/// the store and back, and a time that a network's hiccup also takes.
const HAND_OFF: HandoffLimits = HandoffLimits { max_handoffs: 64, max_duration: Duration::from_millis(10) };

settings!(Mutex);

impl Mutex {
    pub(crate) fn new(handle: Arc<Handle>, name: &str) -> Self {
        let mut lock = Lock::new(handle, Kind::Mutex, name, 1);
        lock.hand_off = Some(HAND_OFF);
        Self(lock)
    }

    /// How long the tasks of this client may hand the lease on among themselves once another client waits: for so many
    /// hand-overs, none of them later than `span`. 64 and 10 ms unless set. More is faster for each client in its turn, and
    /// lets the others wait for longer. Should the word that somebody waits be lost, the next renewal tells, at a third of the
    /// ttl.
    #[must_use]
    pub fn local_handoff(mut self, hand_overs: u32, span: Duration) -> Self {
        self.0.hand_off = Some(HandoffLimits { max_handoffs: hand_overs, max_duration: span });
        self
    }

    /// First come, first served over the tasks of all clients: each waits in the store's queue on its own, and each release
    /// goes to the store.
    #[must_use]
    pub fn global_fifo(mut self) -> Self {
        self.0.hand_off = None;
        self
    }

    /// Waits for the lock, for as long as it takes.
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name or a setting that can't be; `is_unavailable` when the store could not be asked;
    /// `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point it gives back whatever it has or may have come to have, a place in the queue or a lease.
    pub async fn lock(&self) -> Result<Guard, Error> {
        self.0.lock(1).await
    }

    /// Takes the lock if it can be had at once, and otherwise answers `None`.
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn try_lock(&self) -> Result<Option<Guard>, Error> {
        self.0.try_lock(1).await
    }

    /// Waits for the lock for at most this long, and then answers `None`. With `Duration::MAX` it waits for as long as it
    /// takes, with zero not at all.
    ///
    /// `None` is the store's word. When the limit is over the attempt is cancelled there, and a store that answers delays the
    /// result by a round trip. One that has not answered 2 s after the limit is an error.
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn lock_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        self.0.lock_timeout(1, limit).await
    }
}
