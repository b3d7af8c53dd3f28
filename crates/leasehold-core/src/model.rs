//! The rules of every lock kind: one weighted FIFO lease table per resource.
//!
//! A resource has a capacity, holders and a queue. The total weight of the holders never exceeds the capacity. A mutex
//! has capacity 1 and weights of 1. [`apply`] applies one command to one resource. [`apply_all`] applies one attempt to
//! each of several resources. [`Table`] keeps a resource in memory; other stores implement [`Rows`]. The code that all
//! commands share is in this file, and grants to waiters are in `grant.rs`; the commands are in `acquire.rs`, `release.rs` and
//! `inspect.rs`.
//!
//! The rules are properties in `tests/model/`:
//!
//! - **Order.** No attempt overtakes a reachable waiter. The exceptions are an owner that re-enters and a holder that
//!   upgrades. Only a holder of more than half of the capacity may wait for an upgrade, so two upgrades cannot deadlock.
//! - **Own expiry.** Each lease, queue entry and tombstone has its own expiry. The next command compares times, so the
//!   table needs no timer.
//! - **Parking.** A client that is unreachable, or that let a claim window lapse, is *parked*: its entries keep their places
//!   and are skipped until it sends a command. Parking is a property of the client and has constant cost. The attempt of the
//!   current command is not skipped, because the answer reaches its client.
//! - **Polling.** The head gets the expiry of the current lease, and re-checks at that time. The followers re-check a little
//!   later. If the head died together with the holder, it therefore delays them by a bounded time.
//! - **Claim windows.** A lease that is granted to a waiter is short until the waiter renews it once.
//! - **Idempotence.** A repeated command leaves the same state as the first, but for an `Acquire` of an attempt that several clients may make.
//! - **Cleanup.** An unused table is removed, including its last token once the wall clock has passed it.
//!
//! ```
//! use leasehold_core::model::{Table, CommandContext, apply};
//! use leasehold_core::{Acquire, Acquisition, ClientId, Command, GrantSecret, Now, Reply, StoreTime};
//! use std::time::Duration;
//!
//! let mut table = Table::new();
//! let mut ask = |client| {
//!     let acquisition = Acquisition { client: ClientId::new(client), sequence: 1 };
//!     let ttl = Duration::from_secs(10);
//!     let (capacity, weight, reserve) = (1, 1, 0);
//!     let metadata = "".into();
//!     let (owner, wait, replaces) = (None, None, None);
//!     let secret = GrantSecret::UNUSED;
//!     let inbox = None;
//!     let acquire =
//!         Acquire { acquisition, inbox, owner, capacity, weight, ttl, reserve, wait, replaces, secret, metadata };
//!     let now = Now::same(StoreTime::from_micros(1_700_000_000_000_000));
//!     let context = CommandContext { now, is_reachable: &mut |_| true, pushes: &mut Vec::new() };
//!     apply(&mut table, context, &acquire.into()).unwrap().reply
//! };
//! assert!(matches!(ask(1), Reply::Granted(_)));
//! assert_eq!(ask(2), Reply::Busy);
//! ```

mod acquire;
mod acquire_all;
mod grant;
mod inspect;
mod release;
mod rows;
mod table;

use alloc::vec::Vec;
use core::time::Duration;

use crate::command::{Answer, Command, Push, PushKind};
use crate::id::{Acquisition, ClientId, Owner};
use crate::now::Now;
use crate::time::StoreTime;
use crate::token::TokenRange;

pub use acquire_all::apply_all;
pub use rows::{Header, Lease, Rows, Waiter};
pub use table::Table;

/// Lifetime of a lease granted to a waiter, until the waiter claims it by a renewal. A frozen client delays the waiters
/// behind it once by this time.
pub const CLAIM_WINDOW: Duration = Duration::from_secs(3);

/// How long the last token is kept after its last use. If the wall clock steps back by less than this, tokens do not
/// fall.
pub const TOKEN_RETENTION: Duration = Duration::from_secs(3600);

/// Followers spread their re-checks over this time after the head's.
pub const REPOLL_JITTER_MICROS: u64 = 1_500_000;

/// Average spacing of re-checks at one resource: at most 40 a second, with any number of clients and waiters.
pub const REPOLL_SPACING: Duration = Duration::from_millis(25);

/// First place of ordinary waiters; lower places are for holders that wait for an upgrade.
pub const FIRST_WAITER_PLACE: u64 = 1 << 40;

/// Environment of one command: clocks, reachability of clients, and the pushes to send.
pub struct CommandContext<'a> {
    /// The store's clocks.
    pub now: Now,
    /// Whether a client can receive a push now.
    pub is_reachable: &'a mut dyn FnMut(ClientId) -> bool,
    /// Collects the pushes to send once the command is committed.
    pub pushes: &'a mut Vec<Push>,
}

/// Applies one command to one resource.
///
/// # Errors
///
/// The store's errors, from [`Rows`]. The caller must then roll the command back and drop `context.pushes`.
pub fn apply<R: Rows>(
    rows: &mut R,
    context: CommandContext<'_>,
    command: &Command,
) -> Result<Answer, R::Error> {
    step(rows, context, command).map(|(answer, _)| answer)
}

/// As [`apply`]. Also returns whether the attempt was already known.
fn step<R: Rows>(
    rows: &mut R,
    context: CommandContext<'_>,
    command: &Command,
) -> Result<(Answer, bool), R::Error> {
    let at = context.now.time;
    let mut step = Step::begin(rows, context)?;
    step.expire()?;
    step.mark_client_alive(command)?;
    step.grant()?;
    let reply = match command {
        Command::Acquire(acquire) => step.acquire(acquire)?,
        Command::Renew(renew) => step.renew(renew)?,
        Command::Release(release) => step.release(release)?,
        Command::Inspect => step.inspect()?,
        Command::ForceRelease => step.force_release()?,
    };
    let is_known = step.is_known;
    step.end()?;
    Ok((Answer { at, reply }, is_known))
}

/// Removes the expired rows of an idle resource, and grants to the next waiter. Returns whether any data is left.
///
/// # Errors
///
/// As [`apply`].
pub fn sweep<R: Rows>(rows: &mut R, context: CommandContext<'_>) -> Result<bool, R::Error> {
    let mut step = Step::begin(rows, context)?;
    step.expire()?;
    step.grant()?;
    step.end()
}

/// The attempt of an `Acquire`, and the client that sent it.
#[derive(Clone, Copy)]
struct Requester {
    acquisition: Acquisition,
    inbox: ClientId,
}

/// One command in progress.
struct Step<'r, 't, R: Rows> {
    rows: &'r mut R,
    context: CommandContext<'t>,
    header: Header,
    /// The stored header, to skip the write if nothing changed.
    before: Option<Header>,
    /// The attempt whose `Acquire` this is. The answer reaches it even if a push would not.
    requester: Option<Requester>,
    /// Its client was parked in this step.
    is_requester_parked: bool,
    /// The table already knew that attempt.
    is_known: bool,
    /// The queue changed, or the leases that its head waits for expire at another time.
    queue_moved: bool,
}

impl<'r, 't, R: Rows> Step<'r, 't, R> {
    fn begin(rows: &'r mut R, context: CommandContext<'t>) -> Result<Self, R::Error> {
        let before = rows.header()?;
        let header = before.clone().unwrap_or_else(|| Header::new(0));
        Ok(Self {
            rows,
            context,
            header,
            before,
            requester: None,
            is_requester_parked: false,
            is_known: false,
            queue_moved: false,
        })
    }

    /// Notifies a newly contended holder and a new head, and stores the header.
    fn end(mut self) -> Result<bool, R::Error> {
        let had_ready_waiter = self.before.as_ref().is_some_and(Header::has_ready_waiter);
        if !had_ready_waiter && self.header.has_ready_waiter() {
            self.notify_holder()?;
        }
        if self.queue_moved {
            self.notify_head()?;
        }
        assert!(self.header.in_use <= self.header.capacity, "more weight is held than there is capacity");
        assert!(self.header.parked <= self.header.waiters, "more waiters are parked than wait");
        if self.header.is_removable(self.context.now.wall) {
            if self.before.is_some() {
                self.rows.remove_header()?;
            }
            return Ok(false);
        }
        if self.before.as_ref() != Some(&self.header) {
            self.rows.put_header(&self.header)?;
        }
        Ok(true)
    }

    fn now(&self) -> StoreTime {
        self.context.now.time
    }

    // --- Time passes -----------------------------------------------------------------------------

    fn expire(&mut self) -> Result<(), R::Error> {
        let now = self.now();
        if self.header.next_expiry > now {
            return Ok(());
        }
        let mut next = StoreTime::NEVER;
        while self.header.leases > 0 {
            let Some(lease) = self.rows.first_expiring_lease()? else { break };
            if lease.expires_at > now {
                next = next.min(lease.expires_at);
                break;
            }
            self.remove_lease(&lease)?;
            if !lease.claimed {
                // The push was lost or the client is frozen. Its other entries would cost a claim window each.
                self.set_parked(lease.inbox(), true)?;
            }
        }
        while self.header.waiters > 0 {
            let Some(waiter) = self.rows.first_expiring_waiter()? else { break };
            if waiter.deadline > now {
                next = next.min(waiter.deadline);
                break;
            }
            self.remove_waiter(&waiter)?;
        }
        if self.header.tombstones > 0 {
            let (removed, first) = self.rows.remove_tombstones(now)?;
            self.header.tombstones -= removed;
            next = next.min(first.unwrap_or(StoreTime::NEVER));
        }
        self.header.next_expiry = next;
        Ok(())
    }

    /// Unparks the sender of an `Acquire` or `Renew`. Who sends the `Renew` of an attempt with an inbox is not known.
    fn mark_client_alive(&mut self, command: &Command) -> Result<(), R::Error> {
        let sender = match command {
            Command::Acquire(acquire) => {
                self.requester = Some(Requester { acquisition: acquire.acquisition, inbox: acquire.inbox() });
                acquire.inbox()
            }
            Command::Renew(renew) => renew.acquisition.client,
            Command::Release(_) | Command::Inspect | Command::ForceRelease => return Ok(()),
        };
        if self.header.parked > 0 {
            self.set_parked(sender, false)?;
        }
        if let Command::Acquire(acquire) = command { self.move_waiter(acquire) } else { Ok(()) }
    }

    // --- Rows and header, changed together -------------------------------------------------------

    fn fits(&self, weight: u32) -> bool {
        weight <= self.header.capacity - self.header.in_use
    }

    fn held_lease(&mut self, acquisition: Acquisition) -> Result<Option<Lease>, R::Error> {
        if self.header.leases == 0 {
            return Ok(None);
        }
        Ok(self.rows.lease(acquisition)?.filter(|lease| !lease.retained))
    }

    /// Grant time of the lease; now, if the clock was set back to before it.
    fn hold_start(&self, lease: &Lease) -> StoreTime {
        lease.granted_at.min(self.now())
    }

    /// The lease of this client that an attempt can replace.
    fn replaceable(&mut self, client: ClientId, sequence: u64) -> Result<Option<Lease>, R::Error> {
        let lease = self.held_lease(Acquisition { client, sequence })?;
        Ok(lease.filter(|lease| lease.owner.is_none()))
    }

    /// The heaviest live lease of a named owner.
    fn held_by(&mut self, owner: Option<&Owner>) -> Result<Option<Lease>, R::Error> {
        match owner {
            Some(owner) if self.header.leases > 0 => {
                Ok(self.rows.heaviest_lease_of(owner)?.filter(|lease| !lease.retained))
            }
            _ => Ok(None),
        }
    }

    fn add_lease(&mut self, lease: Lease) -> Result<(), R::Error> {
        let before = self.weight_of(lease.owner.as_ref())?;
        let (weight, owner) = (lease.weight, lease.owner.clone());
        self.note_expiry(lease.expires_at);
        self.rows.put_lease(lease)?;
        self.header.leases += 1;
        self.header.in_use += weight.max(before) - before;
        assert!(owner.is_some() || before == 0, "an acquisition was granted twice");
        Ok(())
    }

    fn remove_lease(&mut self, lease: &Lease) -> Result<(), R::Error> {
        let Now { wall, .. } = self.context.now;
        // The last token is remembered for as long after the last use: the end of a lease that has expired.
        let used = wall.saturating_sub(self.now().since(lease.expires_at));
        self.header.remember_until = self.header.remember_until.max(used + TOKEN_RETENTION);
        self.rows.remove_lease(lease.acquisition)?;
        self.header.leases -= 1;
        let after = self.weight_of(lease.owner.as_ref())?;
        self.header.in_use -= lease.weight.max(after) - after;
        Ok(())
    }

    /// Weight of a named owner: that of its heaviest lease.
    fn weight_of(&mut self, owner: Option<&Owner>) -> Result<u32, R::Error> {
        match owner {
            None => Ok(0),
            Some(owner) => Ok(self.rows.heaviest_lease_of(owner)?.map_or(0, |lease| lease.weight)),
        }
    }

    fn remove_waiter(&mut self, waiter: &Waiter) -> Result<(), R::Error> {
        self.rows.remove_waiter(waiter.acquisition)?;
        self.header.waiters -= 1;
        self.header.parked -= u32::from(waiter.parked);
        self.queue_moved = true;
        Ok(())
    }

    fn set_parked(&mut self, client: ClientId, parked: bool) -> Result<(), R::Error> {
        let changed = self.rows.set_parked(client, parked)?;
        if parked {
            self.header.parked += changed;
        } else {
            self.header.parked -= changed;
        }
        self.queue_moved |= changed > 0;
        if self.requester.is_some_and(|requester| requester.inbox == client) {
            self.is_requester_parked = parked && changed > 0;
        }
        Ok(())
    }

    fn next_tokens(&mut self, reserve: u32) -> TokenRange {
        let Now { wall, floor, may_reserve, .. } = self.context.now;
        let reserve = if may_reserve { reserve } else { 0 };
        let from = floor.map_or(wall, |floor| wall.max(StoreTime::from_micros(floor.get())));
        let tokens = TokenRange::next(self.header.last_token, reserve, from);
        self.remember_token(tokens.last.get());
        tokens
    }

    fn remember_token(&mut self, last: u64) {
        self.header.last_token = last;
        // The last token may be dropped once the wall clock has passed it.
        let passed = StoreTime::from_micros(last) + Duration::from_micros(1);
        self.header.remember_until = passed.max(self.context.now.wall + TOKEN_RETENTION);
    }

    fn note_expiry(&mut self, expiry: StoreTime) {
        self.header.next_expiry = self.header.next_expiry.min(expiry);
    }

    /// Makes the head be notified again: a lease that it waits for expires at another time.
    fn invalidate_head_hint(&mut self) {
        self.header.head = 0;
        self.queue_moved = true;
    }

    fn push(&mut self, inbox: ClientId, acquisition: Acquisition, kind: PushKind) {
        let at = self.now();
        self.context.pushes.push(Push { inbox, acquisition, at, kind });
    }
}
