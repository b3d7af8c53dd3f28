//! A lock as others see it.

use std::time::Duration;

use leasehold_core::{Acquisition, ClientId, Holder, Kind, QueueEntry, Resource, StoreTime, Token, View};

use crate::locks::barrier;
use crate::locks::rw::mode_of;
use crate::metadata::HolderMetadata;

/// Who holds a lock and who waits for it, at one moment of the store's clock.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LockInfo {
    /// The kind of lock.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// How much weight it bears: 1 for a mutex, the number of permits for a semaphore, more than readers can use up for a
    /// read-write lock, the number of parties for a barrier; 0 when nobody uses it.
    pub capacity: u32,
    /// How much of that is taken: how many have come, for a barrier.
    pub in_use: u32,
    /// The last token that was given, as far as the store remembers.
    pub last_token: Option<Token>,
    /// In the order of their tokens.
    pub holders: Vec<HolderInfo>,
    /// In the order of the queue.
    pub waiters: Vec<WaiterInfo>,
    /// How many rounds of a barrier have passed lately, in the last minute for instance: as many as the store remembers.
    pub rounds: usize,
}

/// One holder of a lock.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HolderInfo {
    /// The random id of its client.
    pub client: String,
    /// The token of its grant.
    pub token: Token,
    /// How much of the capacity it takes: its permits, for a semaphore.
    pub weight: u32,
    /// What it does with a read-write lock.
    pub mode: Option<Mode>,
    /// The owner that it named, if any: its acquisitions share the lock.
    pub owner: Option<String>,
    /// How long it has held the lock.
    pub held_for: Duration,
    /// How much longer, unless it renews.
    pub expires_in: Duration,
    /// It has given the lock back, and others are kept out until `expires_in` has passed.
    pub retained: bool,
    /// What it says about itself.
    pub metadata: HolderMetadata,
    /// It is a guard of the client that asked.
    pub is_own: bool,
    /// Which attempt was granted.
    pub(crate) acquisition: Acquisition,
}

/// One waiter for a lock.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WaiterInfo {
    /// The random id of its client.
    pub client: String,
    /// 1 for the next one.
    pub position: usize,
    /// How much of the capacity it wants.
    pub weight: u32,
    /// What it wants to do with a read-write lock.
    pub mode: Option<Mode>,
    /// How long it has waited.
    pub waiting_for: Duration,
    /// It was absent or asleep when its turn came: it keeps its place, and is passed over until it is heard from.
    pub skipped: bool,
    /// What it says about itself.
    pub metadata: HolderMetadata,
    /// It is an attempt of the client that asked.
    pub is_own: bool,
}

/// What somebody does, or wants to do, with a read-write lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// It reads.
    Read,
    /// It reads, and may want to write.
    UpgradableRead,
    /// It writes.
    Write,
}

impl Mode {
    fn of(kind: Kind, weight: u32) -> Option<Self> {
        (kind == Kind::ReadWrite).then(|| mode_of(weight))
    }
}

/// Weights as people count them.
fn shown_weight(kind: Kind, weight: u32) -> u32 {
    if kind == Kind::Barrier { barrier::parties(weight) } else { weight }
}

/// What says that a round of a barrier has passed, or is about to, and is no party that waits for one.
fn is_mark(kind: Kind, holder: &Holder) -> bool {
    kind == Kind::Barrier && barrier::parties(holder.weight) == 0
}

impl LockInfo {
    pub(crate) fn new(resource: &Resource, view: View, at: StoreTime, requester: ClientId) -> Self {
        let waiters = view.waiters.into_iter().enumerate();
        let rounds = if resource.kind == Kind::Barrier { barrier::passed_rounds(&view.holders) } else { 0 };
        Self {
            kind: resource.kind,
            name: resource.name.as_str().to_owned(),
            capacity: shown_weight(resource.kind, view.capacity),
            in_use: shown_weight(resource.kind, view.in_use),
            last_token: view.last_token,
            holders: view
                .holders
                .iter()
                .filter(|holder| !is_mark(resource.kind, holder))
                .map(|holder| HolderInfo::new(resource.kind, holder, at, requester))
                .collect(),
            waiters: waiters
                .map(|(index, waiter)| WaiterInfo::new(resource.kind, index + 1, &waiter, at, requester))
                .collect(),
            rounds,
        }
    }
}

impl HolderInfo {
    pub(crate) fn new(kind: Kind, holder: &Holder, at: StoreTime, requester: ClientId) -> Self {
        Self {
            client: holder.acquisition.client.to_string(),
            token: holder.token,
            weight: shown_weight(kind, holder.weight),
            mode: Mode::of(kind, holder.weight),
            owner: holder.owner.as_ref().map(|owner| owner.as_str().to_owned()),
            held_for: at.since(holder.granted_at),
            expires_in: holder.expires_at.since(at),
            retained: holder.retained,
            metadata: HolderMetadata::decode(&holder.metadata),
            is_own: holder.acquisition.client == requester,
            acquisition: holder.acquisition,
        }
    }
}

impl HolderInfo {
    /// In a few words, for a message.
    pub(crate) fn describe(&self) -> String {
        let owner = self.owner.as_ref().map(|owner| format!("owner {owner:?}"));
        let process = match (&self.metadata.host, self.metadata.pid) {
            (Some(host), Some(pid)) => format!("{host:?} pid {pid}"),
            _ => format!("client {}", self.client),
        };
        owner.map_or_else(|| process.clone(), |owner| format!("{owner}, {process}"))
    }
}

impl WaiterInfo {
    fn new(kind: Kind, position: usize, waiter: &QueueEntry, at: StoreTime, requester: ClientId) -> Self {
        Self {
            client: waiter.acquisition.client.to_string(),
            position,
            weight: shown_weight(kind, waiter.weight),
            mode: Mode::of(kind, waiter.weight),
            waiting_for: at.since(waiter.since),
            skipped: waiter.skipped,
            metadata: HolderMetadata::decode(&waiter.metadata),
            is_own: waiter.acquisition.client == requester,
        }
    }
}
