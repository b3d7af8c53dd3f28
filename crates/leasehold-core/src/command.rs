//! What clients and stores say to each other.
//!
//! Every command names the acquisition that it is about, so every one may be repeated: after a lost
//! reply, on another connection, twice.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use crate::id::{Acquisition, ClientId, Owner};
use crate::time::StoreTime;
use crate::token::{Token, TokenRange};

/// One command about one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Take a lease, or a place in the queue for one. Shared, since a waiter says it again and again.
    Acquire(Arc<Acquire>),
    /// Keep a lease, or claim a pushed one.
    Renew(Renew),
    /// Give back a lease or a place in the queue.
    Release(Release),
    /// Say who holds and who waits.
    Inspect,
    /// Take the resource away from whoever holds it.
    ForceRelease,
}

impl From<Acquire> for Command {
    fn from(acquire: Acquire) -> Self {
        Self::Acquire(Arc::new(acquire))
    }
}

/// Take a lease, or a place in the queue for one.
///
/// Sent again with the same acquisition it changes nothing but this: a waiter's deadline starts
/// anew, and the waiter counts as heard from. That is how a waiter re-checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acquire {
    /// This attempt.
    pub acquisition: Acquisition,
    /// Who will hold; the acquisition itself where none is named.
    pub owner: Option<Owner>,
    /// How much weight the resource bears; the same from everyone who uses it at one time.
    pub capacity: u32,
    /// How much of the capacity this holder takes.
    pub weight: u32,
    /// How long the lease runs without renewal.
    pub ttl: Duration,
    /// How many tokens to set aside beyond the grant's own.
    pub reserve: u32,
    /// Whether to queue when it can't be had at once.
    pub wait: Option<WaitFor>,
    /// The lease that this one takes the place of, in one step: that of the same client with this sequence number,
    /// neither of them with a named owner. What it weighs counts as free, and the attempt stands before all who wait.
    pub replaces: Option<u64>,
    /// What others are shown about this holder or waiter. Its meaning is the caller's.
    pub metadata: Arc<str>,
}

impl Acquire {
    /// All of a resource that bears one holder, without a place in the queue and anything special: what others differ from.
    #[must_use]
    pub fn exclusive(acquisition: Acquisition, ttl: Duration) -> Self {
        Self {
            acquisition,
            owner: None,
            capacity: 1,
            weight: 1,
            ttl,
            reserve: 0,
            wait: None,
            replaces: None,
            metadata: Arc::from(""),
        }
    }
}

/// How to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitFor {
    /// How long the place in the queue is kept without a sign of life.
    pub entry_ttl: Duration,
    /// The longest queue to join: with this many waiters in it the answer is `QueueFull`.
    pub max_queue: u32,
}

/// Keep a lease, or claim a pushed one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renew {
    /// The attempt that was granted.
    pub acquisition: Acquisition,
    /// How long the lease runs from now.
    pub ttl: Duration,
    /// How many further tokens to set aside.
    pub reserve: u32,
}

/// Give back a lease or a place in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// The attempt.
    pub acquisition: Acquisition,
    /// Keep the resource taken until this long after the grant, though nobody holds it any more.
    pub min_hold: Duration,
    /// An `Acquire` of this attempt may still be under way: leave a tombstone for this long, so that it
    /// answers `Cancelled` instead of taking a lease that nobody holds. Zero leaves none.
    pub tombstone: Duration,
}

impl Release {
    /// At once, of an attempt whose every `Acquire` was answered.
    #[must_use]
    pub const fn now(acquisition: Acquisition) -> Self {
        Self { acquisition, min_hold: Duration::ZERO, tombstone: Duration::ZERO }
    }
}

/// A store's answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The store's clock when it decided.
    pub at: StoreTime,
    /// What it decided.
    pub reply: Reply,
}

/// What a store decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To `Acquire`: the lease is held.
    Granted(Grant),
    /// To `Acquire` with `wait`: the attempt has a place in the queue.
    Queued(Queued),
    /// To `Acquire` without `wait`: somebody else holds it or stands before.
    Busy,
    /// To `Acquire`: the attempt was given back before this command arrived.
    Cancelled,
    /// To `Acquire` with `wait`: the queue is as long as the command allows.
    QueueFull,
    /// To `Acquire`, from one of several stores that vote: until then it may have forgotten what it granted.
    Abstains(StoreTime),
    /// To `Acquire`: it contradicts how the resource is used.
    Refused(Refusal),
    /// To `Renew`: the lease runs on.
    Renewed {
        /// From the store's `at`.
        valid_for: Duration,
        /// The tokens set aside, where some were asked for.
        tokens: Option<TokenRange>,
        /// Somebody waits for the resource.
        contended: bool,
    },
    /// To `Release`: it is given back.
    Released,
    /// To `Renew` or `Release`: the attempt has neither a lease nor a place.
    NotHeld,
    /// To `Inspect`.
    View(View),
    /// To `ForceRelease`: from whom it was taken.
    Forced(Vec<Holder>),
}

/// A lease as it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Its token and those set aside.
    pub tokens: TokenRange,
    /// How long it runs from the store's `at`.
    pub valid_for: Duration,
}

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// Nobody stands before this attempt.
    pub is_head: bool,
    /// When to look again, if nothing is heard until then: for the head, when the first of the present leases ends;
    /// for others a while later, in case that the head is gone too.
    pub repoll_at: StoreTime,
}

/// What the first in the queue needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadHint {
    /// When the first of the present leases ends unless it is renewed: the time to look again.
    pub repoll_at: StoreTime,
}

impl From<HeadHint> for Queued {
    fn from(head: HeadHint) -> Self {
        Self { is_head: true, repoll_at: head.repoll_at }
    }
}

/// Why an `Acquire` contradicts how the resource is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The weight is zero or more than the capacity.
    Weight {
        /// The capacity asked with.
        capacity: u32,
    },
    /// The resource is in use with another capacity.
    Capacity {
        /// The capacity in use.
        in_use: u32,
    },
    /// The owner holds it with less weight, or the lease to be replaced weighs less, and waiting for the rest could
    /// mean to wait for itself.
    HeavierReentry {
        /// The weight it holds.
        held: u32,
    },
    /// The lease that it was to take the place of is not held.
    NotHeld,
}

/// Something a store tells a client unasked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// The attempt that it is about; its client is the addressee.
    pub acquisition: Acquisition,
    /// The store's clock when it was decided.
    pub at: StoreTime,
    /// What happened.
    pub kind: PushKind,
}

impl Push {
    /// The addressee.
    #[must_use]
    pub const fn to(&self) -> ClientId {
        self.acquisition.client
    }
}

/// What a push tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushKind {
    /// The waiter holds the lease now, for a claim window. A renewal makes it full length.
    Granted(Grant),
    /// The waiter is the first in the queue now.
    Next(HeadHint),
    /// The lease was taken away.
    Revoked,
    /// Somebody waits for the lease, whose holder has set tokens aside to hand it on among its own.
    Contended,
}

/// Who holds and who waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// How much weight the resource bears; zero when it is unknown to the store.
    pub capacity: u32,
    /// How much of it is taken.
    pub in_use: u32,
    /// The last token given or set aside.
    pub last_token: Option<Token>,
    /// In the order of their tokens.
    pub holders: Vec<Holder>,
    /// In the order of the queue.
    pub waiters: Vec<QueueEntry>,
}

/// One lease as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The attempt that was granted.
    pub acquisition: Acquisition,
    /// The owner, where one was named.
    pub owner: Option<Owner>,
    /// How much of the capacity it takes.
    pub weight: u32,
    /// Its token.
    pub token: Token,
    /// Since when.
    pub granted_at: StoreTime,
    /// Until when, unless it is renewed.
    pub expires_at: StoreTime,
    /// Nobody holds it any more: it only keeps others out until then.
    pub retained: bool,
    /// What the holder said about itself.
    pub metadata: Arc<str>,
}

/// One place in the queue as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueEntry {
    /// The attempt.
    pub acquisition: Acquisition,
    /// How much of the capacity it wants.
    pub weight: u32,
    /// Since when.
    pub since: StoreTime,
    /// When the place is given up without a sign of life.
    pub deadline: StoreTime,
    /// It was absent or asleep when its turn came: it keeps its place, and is passed over until it is
    /// heard from.
    pub skipped: bool,
    /// What the waiter said about itself.
    pub metadata: Arc<str>,
}
