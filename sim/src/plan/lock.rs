//! The locks of a run.

use super::Micros;

/// What a lock is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// `Client::mutex`.
    Mutex,
    /// `Client::rw_lock`.
    ReadWrite,
    /// `Client::semaphore`.
    Semaphore(u32),
    /// `Client::reentrant_mutex`.
    Reentrant,
    /// `Client::election`.
    Election,
    /// `Client::once_per`, and how long a start is retained: nine tenths of the period.
    OncePer(Micros),
    /// `Client::latch`, of this count.
    Latch(u32),
    /// `Client::barrier`, of this many parties.
    Barrier(u32),
}

impl LockKind {
    /// One guard at a time holds all of it.
    #[must_use]
    pub const fn is_exclusive(self) -> bool {
        matches!(self, Self::Mutex | Self::Election | Self::OncePer(_))
    }
}

/// A lock and the options that all its users pass.
#[derive(Clone, Debug)]
pub struct LockPlan {
    /// Its kind.
    pub kind: LockKind,
    /// `ttl`.
    pub ttl: Micros,
    /// `auto_renew`.
    pub renews: bool,
    /// `max_hold`.
    pub max_hold: Option<Micros>,
    /// `min_hold`; of work that is started once per period, the retention.
    pub min_hold: Micros,
    /// `global_fifo`.
    pub global_fifo: bool,
    /// `local_handoff`.
    pub handoff: Option<(u32, Micros)>,
    /// `replicas`.
    pub replicas: u32,
    /// It is bridged to the lock of another library.
    pub is_bridged: bool,
}

impl LockPlan {
    /// Its capacity, if it is a semaphore.
    #[must_use]
    pub fn permits(&self) -> u32 {
        if let LockKind::Semaphore(permits) = self.kind { permits } else { 1 }
    }
}
