//! Where a resource's lease table is kept: the seam between the model and a store.
//!
//! Deliberately small and deliberately dumb: look up, put, remove, and "the first by this order".
//! No implementation decides anything; every rule is in [`super::apply`].

use alloc::sync::Arc;
use core::time::Duration;

use crate::id::{Acquisition, ClientId, Owner};
use crate::time::StoreTime;
use crate::token::Token;

/// The few numbers about a resource that let most commands go without looking at its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// How much weight the resource bears.
    pub capacity: u32,
    /// The weight of its live owners, each counted once.
    pub in_use: u32,
    /// The last token given or set aside; zero before the first.
    pub last_token: u64,
    /// Where the next waiter queues. Starts at 1.
    pub next_place: u64,
    /// The waiter that knows that it is the first; zero when there is none.
    pub head: u64,
    /// How many leases there are.
    pub leases: u32,
    /// How many waiters there are, the parked ones included.
    pub waiters: u32,
    /// How many of them are passed over.
    pub parked: u32,
    /// How many tombstones there are.
    pub tombstones: u32,
    /// No row expires before this. A lower bound, so that renewing need not look for the minimum.
    pub next_expiry: StoreTime,
    /// Until then, by the wall clock, the last token must be remembered.
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

    /// Nothing is left but the last token.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.leases == 0 && self.waiters == 0 && self.tombstones == 0
    }

    /// Somebody waits who is not passed over.
    #[must_use]
    pub const fn has_ready_waiter(&self) -> bool {
        self.waiters > self.parked
    }

    /// Nothing is left that anybody could need: not even the last token, since the wall clock has
    /// long passed it.
    #[must_use]
    pub fn is_removable(&self, wall: StoreTime) -> bool {
        self.is_idle() && self.remember_until <= wall
    }
}

/// One acquisition's lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its key.
    pub acquisition: Acquisition,
    /// The owner, where one was named.
    pub owner: Option<Owner>,
    /// How much of the capacity it takes.
    pub weight: u32,
    /// Its token. Acquisitions of one owner share it: a re-entry is the same critical section.
    pub token: Token,
    /// Since when.
    pub granted_at: StoreTime,
    /// It is over when the clock reaches this.
    pub expires_at: StoreTime,
    /// The holder has been heard from since the grant was made.
    pub claimed: bool,
    /// It was given back and only keeps others out.
    pub retained: bool,
    /// What the holder said about itself.
    pub metadata: Arc<str>,
}

/// One place in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Its key, and its order.
    pub place: u64,
    /// The attempt that waits.
    pub acquisition: Acquisition,
    /// The owner, where one was named.
    pub owner: Option<Owner>,
    /// How much of the capacity it wants.
    pub weight: u32,
    /// How long its lease is to run once it is claimed; the claim window is never longer.
    pub ttl: Duration,
    /// How many tokens to set aside with the grant.
    pub reserve: u32,
    /// The lease of its client, by sequence number, that its own takes the place of.
    pub replaces: Option<u64>,
    /// Since when.
    pub since: StoreTime,
    /// The place is given up when the clock reaches this.
    pub deadline: StoreTime,
    /// Its client is passed over until it is heard from.
    pub parked: bool,
    /// What the waiter said about itself.
    pub metadata: Arc<str>,
}

/// The rows of one resource.
///
/// Every method is about that one resource. `put_*` inserts or replaces by key. A method that fails
/// leaves the command undone: the caller rolls back.
pub trait Rows {
    /// What can go wrong; [`core::convert::Infallible`] in memory.
    type Error;

    /// The header; none for a resource that the store does not know.
    ///
    /// # Errors
    /// The store's.
    fn header(&mut self) -> Result<Option<Header>, Self::Error>;
    /// Stores the header.
    ///
    /// # Errors
    /// The store's.
    fn put_header(&mut self, header: &Header) -> Result<(), Self::Error>;
    /// Removes the header. No rows are left when this is called.
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
    /// Shows every lease, in no particular order.
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
    /// Parks this client, or no longer, and says how many entries it has; zero when it is so already. A client without
    /// entries is not parked.
    ///
    /// # Errors
    /// The store's.
    fn set_parked(&mut self, client: ClientId, parked: bool) -> Result<u32, Self::Error>;
    /// How many clients have waiters and are not parked.
    ///
    /// # Errors
    /// The store's.
    fn ready_clients(&mut self) -> Result<u32, Self::Error>;
    /// How many queue entries this client has.
    ///
    /// # Errors
    /// The store's.
    fn waiters_of(&mut self, client: ClientId) -> Result<u32, Self::Error>;
    /// Shows every queue entry in the order of the queue.
    ///
    /// # Errors
    /// The store's.
    fn each_waiter(&mut self, see: &mut dyn FnMut(Waiter)) -> Result<(), Self::Error>;

    /// Until when this acquisition is buried.
    ///
    /// # Errors
    /// The store's.
    fn tombstone(&mut self, acquisition: Acquisition) -> Result<Option<StoreTime>, Self::Error>;
    /// Buries an acquisition until then.
    ///
    /// # Errors
    /// The store's.
    fn put_tombstone(&mut self, acquisition: Acquisition, until: StoreTime) -> Result<(), Self::Error>;
    /// Removes the tombstones that end at `now` or before, and says how many, and when the next ends.
    ///
    /// # Errors
    /// The store's.
    fn remove_tombstones(&mut self, now: StoreTime) -> Result<(u32, Option<StoreTime>), Self::Error>;
}
