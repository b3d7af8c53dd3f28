//! The storage of one resource's lease table: the interface between the model and a store.
//!
//! It looks up, stores and removes rows, and finds the first row in an order. It contains no rules: every rule
//! is in [`super::apply`].

use alloc::sync::Arc;
use core::time::Duration;

use crate::id::{Acquisition, ClientId, Owner};
use crate::secret::GrantSecret;
use crate::time::StoreTime;
use crate::token::Token;

/// Summary of a resource, so that most commands read no rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Total weight of the resource.
    pub capacity: u32,
    /// Weight in use. An owner with several leases counts once.
    pub in_use: u32,
    /// The last token granted or reserved; zero before the first.
    pub last_token: u64,
    /// Place of the next waiter in the queue. Starts at 1.
    pub next_place: u64,
    /// Place of the waiter that was last notified that it is the head; zero if there is none.
    pub head: u64,
    /// Number of leases.
    pub leases: u32,
    /// Number of waiters, including parked ones.
    pub waiters: u32,
    /// Number of parked waiters, which are skipped.
    pub parked: u32,
    /// Number of tombstones.
    pub tombstones: u32,
    /// Lower bound of all expiries. It may be too early, so that a renewal need not search for the minimum.
    pub next_expiry: StoreTime,
    /// The last token must be kept until this time of the wall clock.
    pub remember_until: StoreTime,
}

impl Header {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity,
            in_use: 0,
            last_token: 0,
            next_place: 1,
            head: 0,
            leases: 0,
            waiters: 0,
            parked: 0,
            tombstones: 0,
            next_expiry: StoreTime::NEVER,
            remember_until: StoreTime::ZERO,
        }
    }

    /// Whether only the last token is left.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.leases == 0 && self.waiters == 0 && self.tombstones == 0
    }

    /// Whether there is a waiter that is not skipped.
    #[must_use]
    pub const fn has_ready_waiter(&self) -> bool {
        self.waiters > self.parked
    }

    /// Whether all data can be removed, also the last token, because the wall clock has passed it.
    #[must_use]
    pub fn is_removable(&self, wall: StoreTime) -> bool {
        self.is_idle() && self.remember_until <= wall
    }
}

/// One acquisition's lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The attempt that was granted; the key of this row.
    pub acquisition: Acquisition,
    /// As that of the [`Acquire`](crate::Acquire).
    pub inbox: Option<ClientId>,
    /// The named owner, if any.
    pub owner: Option<Owner>,
    /// Weight of the lease.
    pub weight: u32,
    /// Its token. All acquisitions of one owner share it, because a re-entry is the same critical section.
    pub token: Token,
    /// Time of the grant.
    pub granted_at: StoreTime,
    /// The lease has expired at this time.
    pub expires_at: StoreTime,
    /// The client has sent a command since the grant.
    pub claimed: bool,
    /// The lease was released, and is retained until it expires.
    pub retained: bool,
    /// The holder's metadata.
    pub metadata: Arc<str>,
}

/// One queue entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Place in the queue; the key of this row.
    pub place: u64,
    /// The attempt that waits.
    pub acquisition: Acquisition,
    /// As that of the [`Acquire`](crate::Acquire).
    pub inbox: Option<ClientId>,
    /// The named owner, if any.
    pub owner: Option<Owner>,
    /// Requested weight.
    pub weight: u32,
    /// Lifetime of the lease once it is claimed. The claim window is never longer.
    pub ttl: Duration,
    /// Number of tokens to reserve with the grant.
    pub reserve: u32,
    /// Sequence number of the client's lease that the new one replaces.
    pub replaces: Option<u64>,
    /// What the push of the grant proves.
    pub secret: GrantSecret,
    /// Time of enqueueing.
    pub since: StoreTime,
    /// The entry expires at this time.
    pub deadline: StoreTime,
    /// The client is skipped until it sends a command.
    pub parked: bool,
    /// The waiter's metadata.
    pub metadata: Arc<str>,
}

impl Lease {
    /// The client that speaks for the attempt.
    #[must_use]
    pub fn inbox(&self) -> ClientId {
        self.inbox.unwrap_or(self.acquisition.client)
    }
}

impl Waiter {
    /// The client that speaks for the attempt.
    #[must_use]
    pub fn inbox(&self) -> ClientId {
        self.inbox.unwrap_or(self.acquisition.client)
    }
}

/// The rows of one resource. The client of a row is the one that speaks for its attempt.
///
/// `put_*` inserts or replaces by key. If a method fails, the command must have no effect: the caller rolls back.
pub trait Rows {
    /// The store's error; [`core::convert::Infallible`] in memory.
    type Error;

    /// The header; `None` if the store does not know the resource.
    ///
    /// # Errors
    /// The store's.
    fn header(&mut self) -> Result<Option<Header>, Self::Error>;
    /// Stores the header.
    ///
    /// # Errors
    /// The store's.
    fn put_header(&mut self, header: &Header) -> Result<(), Self::Error>;
    /// Removes the header. Called when no rows are left.
    ///
    /// # Errors
    /// The store's.
    fn remove_header(&mut self) -> Result<(), Self::Error>;

    /// The lease of this acquisition.
    ///
    /// # Errors
    /// The store's.
    fn lease(&mut self, acquisition: Acquisition) -> Result<Option<Lease>, Self::Error>;
    /// Stores a lease.
    ///
    /// # Errors
    /// The store's.
    fn put_lease(&mut self, lease: Lease) -> Result<(), Self::Error>;
    /// Removes a lease that exists.
    ///
    /// # Errors
    /// The store's.
    fn remove_lease(&mut self, acquisition: Acquisition) -> Result<(), Self::Error>;
    /// The lease that expires first.
    ///
    /// # Errors
    /// The store's.
    fn first_expiring_lease(&mut self) -> Result<Option<Lease>, Self::Error>;
    /// The heaviest lease of this named owner.
    ///
    /// # Errors
    /// The store's.
    fn heaviest_lease_of(&mut self, owner: &Owner) -> Result<Option<Lease>, Self::Error>;
    /// Every lease, in no particular order.
    ///
    /// # Errors
    /// The store's.
    fn each_lease(&mut self, see: &mut dyn FnMut(Lease)) -> Result<(), Self::Error>;

    /// The queue entry of this acquisition.
    ///
    /// # Errors
    /// The store's.
    fn waiter(&mut self, acquisition: Acquisition) -> Result<Option<Waiter>, Self::Error>;
    /// Stores a queue entry. It is parked if, and only if, the other entries of its client are.
    ///
    /// # Errors
    /// The store's.
    fn put_waiter(&mut self, waiter: Waiter) -> Result<(), Self::Error>;
    /// Removes a queue entry that exists.
    ///
    /// # Errors
    /// The store's.
    fn remove_waiter(&mut self, acquisition: Acquisition) -> Result<(), Self::Error>;
    /// The waiter with the lowest place whose client is not parked.
    ///
    /// # Errors
    /// The store's.
    fn first_ready_waiter(&mut self) -> Result<Option<Waiter>, Self::Error>;
    /// The waiter whose deadline comes first.
    ///
    /// # Errors
    /// The store's.
    fn first_expiring_waiter(&mut self) -> Result<Option<Waiter>, Self::Error>;
    /// Parks or unparks this client. Returns the number of its entries, or zero if nothing has changed. A client without
    /// entries is not parked.
    ///
    /// # Errors
    /// The store's.
    fn set_parked(&mut self, client: ClientId, parked: bool) -> Result<u32, Self::Error>;
    /// Number of clients that have waiters and are not parked.
    ///
    /// # Errors
    /// The store's.
    fn ready_clients(&mut self) -> Result<u32, Self::Error>;
    /// Number of this client's queue entries.
    ///
    /// # Errors
    /// The store's.
    fn waiters_of(&mut self, client: ClientId) -> Result<u32, Self::Error>;
    /// Every queue entry, in queue order.
    ///
    /// # Errors
    /// The store's.
    fn each_waiter(&mut self, see: &mut dyn FnMut(Waiter)) -> Result<(), Self::Error>;

    /// End of this acquisition's tombstone, if it has one.
    ///
    /// # Errors
    /// The store's.
    fn tombstone(&mut self, acquisition: Acquisition) -> Result<Option<StoreTime>, Self::Error>;
    /// Stores a tombstone that ends then.
    ///
    /// # Errors
    /// The store's.
    fn put_tombstone(&mut self, acquisition: Acquisition, until: StoreTime) -> Result<(), Self::Error>;
    /// Removes the tombstones that end at `now` or before. Returns their number, and when the next one ends.
    ///
    /// # Errors
    /// The store's.
    fn remove_tombstones(&mut self, now: StoreTime) -> Result<(u32, Option<StoreTime>), Self::Error>;
}
