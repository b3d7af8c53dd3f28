//! The commands, replies and pushes that clients and stores exchange.
//!
//! Every command carries its acquisition id and is idempotent: a client may resend it after a lost reply or on another
//! connection.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use crate::id::{Acquisition, ClientId, Owner};
use crate::secret::{GrantProof, GrantSecret, digest};
use crate::time::StoreTime;
use crate::token::{Token, TokenRange};

/// One command about one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Acquire a lease, or enqueue. Shared, because a waiter resends it.
    Acquire(Arc<Acquire>),
    /// Extend a lease, or claim a pushed one.
    Renew(Renew),
    /// Release a lease or leave the queue.
    Release(Release),
    /// List the holders and the waiters.
    Inspect,
    /// Revoke all leases of the resource.
    ForceRelease,
}

impl From<Acquire> for Command {
    fn from(acquire: Acquire) -> Self {
        Self::Acquire(Arc::new(acquire))
    }
}

impl From<Arc<Acquire>> for Command {
    fn from(acquire: Arc<Acquire>) -> Self {
        Self::Acquire(acquire)
    }
}

impl From<Renew> for Command {
    fn from(renew: Renew) -> Self {
        Self::Renew(renew)
    }
}

impl From<Release> for Command {
    fn from(release: Release) -> Self {
        Self::Release(release)
    }
}

/// Acquires a lease, or enqueues the attempt.
///
/// A repeat with the same acquisition id only restarts the waiter's deadline and marks its client as alive. A waiter
/// re-checks that way. A repeat from another inbox moves the attempt there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acquire {
    /// This attempt.
    pub acquisition: Acquisition,
    /// The client to which the pushes go, unless it is the one of the acquisition's id. Several clients can then make one attempt, one
    /// after the other.
    pub inbox: Option<ClientId>,
    /// The owner of the lease; without one, the acquisition owns itself.
    pub owner: Option<Owner>,
    /// Total weight of the resource. All concurrent users must pass the same value.
    pub capacity: u32,
    /// Weight of this lease.
    pub weight: u32,
    /// Lifetime of the lease without renewal.
    pub ttl: Duration,
    /// Number of tokens to reserve beyond the grant's own.
    pub reserve: u32,
    /// Enqueue if the lease is not available at once.
    pub wait: Option<WaitFor>,
    /// Sequence number of a lease of the same client that this lease replaces in one step. Neither lease may have a named
    /// owner. The replaced weight counts as free, and the attempt goes ahead of all waiters.
    pub replaces: Option<u64>,
    /// What the push of a grant must prove. The queue entry keeps the secret of the last `Acquire` that arrived, and a lease keeps
    /// none.
    pub secret: GrantSecret,
    /// Opaque text that `Inspect` shows for this holder or waiter.
    pub metadata: Arc<str>,
}

impl Acquire {
    /// An exclusive attempt that does not wait; a base for struct update syntax.
    #[must_use]
    pub fn exclusive(acquisition: Acquisition, ttl: Duration) -> Self {
        Self {
            acquisition,
            inbox: None,
            owner: None,
            capacity: 1,
            weight: 1,
            ttl,
            reserve: 0,
            wait: None,
            replaces: None,
            secret: GrantSecret::UNUSED,
            metadata: Arc::from(""),
        }
    }

    /// The client that speaks for the attempt: its pushes go there.
    #[must_use]
    pub fn inbox(&self) -> ClientId {
        self.inbox.unwrap_or(self.acquisition.client)
    }
}

/// Queue parameters of a waiting attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitFor {
    /// Lifetime of the queue entry without a re-check.
    pub entry_ttl: Duration,
    /// Maximum queue length: with this many waiters the reply is `QueueFull`.
    pub max_queue: u32,
}

/// Extends a lease, or claims a pushed one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renew {
    /// The granted attempt.
    pub acquisition: Acquisition,
    /// New lifetime, from the time the store runs the command. Zero extends and claims nothing, and only asks how long the lease is
    /// still valid: such a question may arrive at any later time, and does no harm then.
    pub ttl: Duration,
    /// Number of further tokens to reserve.
    pub reserve: u32,
    /// Renew only the lease with this token: after it has ended, the attempt may have been granted anew.
    pub token: Option<Token>,
}

impl Renew {
    /// Extends the lease to this lifetime.
    #[must_use]
    pub const fn to(acquisition: Acquisition, ttl: Duration) -> Self {
        Self { acquisition, ttl, reserve: 0, token: None }
    }

    /// Whether this only asks for the lease.
    #[must_use]
    pub const fn only_asks(&self) -> bool {
        self.ttl.is_zero()
    }
}

/// Releases a lease or a queue entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// The attempt.
    pub acquisition: Acquisition,
    /// Otherwise the reply is `NotHeld`, and nothing changes.
    pub only_if: Option<ReleaseIf>,
    /// Retain the lease, without a holder, until this time after the grant.
    pub min_hold: Duration,
    /// Lifetime of the tombstone; zero leaves none. It is needed if an `Acquire` of this attempt may still be in flight.
    /// That `Acquire` then gets `Cancelled` instead of a lease without a holder.
    pub tombstone: Duration,
    /// The attempt and its token, if the grant was plain and nothing is known to have changed the lease since. A store may
    /// then release the lease by comparing what it stores with what the attempt made it store. If something else has changed
    /// it, this costs a round trip.
    pub as_granted: Option<(Arc<Acquire>, Token)>,
}

/// On which condition an attempt that holds or waits is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseIf {
    /// This client speaks for it.
    SpeaksFor(ClientId),
    /// It holds no lease with another token: after the lease has ended, the attempt may have been granted anew.
    HasToken(Token),
}

impl Release {
    /// A release without minimum hold and tombstone, for an attempt whose every `Acquire` was answered.
    #[must_use]
    pub const fn now(acquisition: Acquisition) -> Self {
        Self {
            acquisition,
            only_if: None,
            min_hold: Duration::ZERO,
            tombstone: Duration::ZERO,
            as_granted: None,
        }
    }
}

/// A store's answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The store's clock when it ran the command.
    pub at: StoreTime,
    /// The result.
    pub reply: Reply,
}

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To `Acquire`: the lease is held.
    Granted(Grant),
    /// To `Acquire` with `wait`: the attempt is queued.
    Queued(Queued),
    /// To `Acquire` without `wait`: the lock is held, or other attempts are queued.
    Busy,
    /// To `Acquire`: the attempt was released before this command arrived.
    Cancelled,
    /// To `Acquire` with `wait`: the queue has `max_queue` entries.
    QueueFull,
    /// To `Acquire`, from a quorum node: the node may have lost leases, and does not vote until this time.
    Abstains(StoreTime),
    /// To `Acquire`: the parameters contradict the resource's current use.
    Refused(Refusal),
    /// To `Renew`: the lease is extended.
    Renewed {
        /// Remaining lifetime, from the store's `at`.
        valid_for: Duration,
        /// The reserved tokens, if any were requested.
        tokens: Option<TokenRange>,
        /// Whether another client waits for the resource.
        contended: bool,
    },
    /// To `Release`: the lease is released.
    Released,
    /// To `Release`: the attempt had no lease, and its queue entry is removed.
    Dequeued,
    /// To `Renew`: the attempt has no lease. To `Release`: it has neither a lease nor a queue entry.
    NotHeld,
    /// To `Inspect`.
    View(View),
    /// To `ForceRelease`: the revoked leases.
    Forced(Vec<Holder>),
    /// To `Inspect` and `ForceRelease`, from Redis: the key has a value of another program, which leaves it alone.
    Foreign {
        /// When that key expires; `None` if it does not.
        expires_at: Option<StoreTime>,
    },
}

impl Reply {
    /// The client of each holder and waiter that the reply shows, and their metadata.
    pub fn metadata_mut(&mut self) -> impl Iterator<Item = (ClientId, &mut Arc<str>)> {
        let (holders, waiters): (&mut [Holder], &mut [QueueEntry]) = match self {
            Self::View(view) => (&mut view.holders, &mut view.waiters),
            Self::Forced(holders) => (holders, &mut []),
            _ => (&mut [], &mut []),
        };
        let holders = holders.iter_mut().map(|holder| (holder.acquisition.client, &mut holder.metadata));
        let waiters = waiters.iter_mut().map(|waiter| (waiter.acquisition.client, &mut waiter.metadata));
        holders.chain(waiters)
    }
}

/// A granted lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The lease's token, followed by the reserved ones.
    pub tokens: TokenRange,
    /// Lifetime, from the store's `at`.
    pub valid_for: Duration,
    /// What the store keeps is the command and the token, and no other lease or waiter. Set by stores that have this form.
    pub is_plain: bool,
}

impl GrantSecret {
    /// What a push of this grant contains. The numbers are doubles, as the scripts have them.
    #[must_use]
    pub fn prove(self, at: StoreTime, grant: &Grant) -> GrantProof {
        let numbers =
            [at.as_micros(), grant.tokens.first.get(), grant.tokens.last.get(), micros(grant.valid_for)];
        let [at, first, last, valid_for] = numbers.map(double);
        GrantProof::new(digest(&[&self.bytes(), &at, &first, &last, &valid_for]))
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[allow(clippy::cast_precision_loss, reason = "times and tokens are below 2^53")]
fn double(number: u64) -> [u8; 8] {
    (number as f64).to_be_bytes()
}

/// A queue position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// Whether this attempt is the head of the queue.
    pub is_head: bool,
    /// When to re-check if no push arrives. The head re-checks when the first current lease expires. Followers
    /// re-check somewhat later, because the head may be gone too.
    pub repoll_at: StoreTime,
}

/// Sent to the first waiter in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadHint {
    /// The time to re-check: when the first current lease expires unless it is renewed.
    pub repoll_at: StoreTime,
}

impl From<HeadHint> for Queued {
    fn from(head: HeadHint) -> Self {
        Self { is_head: true, repoll_at: head.repoll_at }
    }
}

/// Why an `Acquire` was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The weight is zero or more than the capacity.
    Weight {
        /// The requested capacity.
        capacity: u32,
    },
    /// The resource is in use with another capacity.
    Capacity {
        /// The capacity in use.
        in_use: u32,
    },
    /// The owner's current lease, or the lease to replace, has less weight, and waiting for the rest could deadlock.
    HeavierReentry {
        /// The weight it holds.
        held: u32,
    },
    /// The lease to replace is not held.
    NotHeld,
}

/// An unsolicited message from a store to a client.
///
/// Any user of a server may be able to send one. So a push is a hint, for which a client asks the store sooner, unless it proves a
/// grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// The recipient.
    pub inbox: ClientId,
    /// The attempt concerned. A store that delivers only the number of the attempt names the recipient as its client.
    pub acquisition: Acquisition,
    /// The store's clock when the event happened.
    pub at: StoreTime,
    /// What happened.
    pub kind: PushKind,
}

impl Push {
    /// A push to the client of the attempt's id.
    #[must_use]
    pub const fn new(acquisition: Acquisition, at: StoreTime, kind: PushKind) -> Self {
        Self { inbox: acquisition.client, acquisition, at, kind }
    }
}

/// The event that a push reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushKind {
    /// The waiter holds the lease for a claim window. A renewal extends it to the full ttl. Counts only with the proof that the sender
    /// knows the secret of the waiter's `Acquire`; without it, it is a hint as the others are.
    Granted(Grant, GrantProof),
    /// The waiter is now the first in the queue.
    Next(HeadHint),
    /// The lease was revoked.
    Revoked,
    /// Another client waits for a lease whose holder reserved tokens for local hand-offs.
    Contended,
}

/// Holders and waiters of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Total weight; zero if the store does not know the resource.
    pub capacity: u32,
    /// Weight in use.
    pub in_use: u32,
    /// The last token granted or reserved.
    pub last_token: Option<Token>,
    /// Ordered by token.
    pub holders: Vec<Holder>,
    /// In queue order.
    pub waiters: Vec<QueueEntry>,
}

/// A lease, as `Inspect` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The attempt that was granted.
    pub acquisition: Acquisition,
    /// The named owner, if any.
    pub owner: Option<Owner>,
    /// Weight of the lease.
    pub weight: u32,
    /// Its token.
    pub token: Token,
    /// Time of the grant.
    pub granted_at: StoreTime,
    /// Time of expiry unless the lease is renewed.
    pub expires_at: StoreTime,
    /// The lease was released and only retained until `expires_at`.
    pub retained: bool,
    /// The holder's metadata.
    pub metadata: Arc<str>,
}

/// A queue entry, as `Inspect` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueEntry {
    /// The attempt.
    pub acquisition: Acquisition,
    /// Requested weight.
    pub weight: u32,
    /// Time of enqueueing.
    pub since: StoreTime,
    /// When the entry expires without a re-check.
    pub deadline: StoreTime,
    /// The client was unreachable or did not claim a grant. The waiter keeps its place and is skipped until its client
    /// sends a command.
    pub skipped: bool,
    /// The waiter's metadata.
    pub metadata: Arc<str>,
}
