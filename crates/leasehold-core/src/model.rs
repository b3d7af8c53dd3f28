//! The server's side of every lock kind: one weighted FIFO lease table per resource.
//!
//! A resource has a capacity, holders whose weights never sum up to more than it, and a queue. A mutex
//! has capacity 1 and weights of 1. [`apply`] steps one resource by one command, [`apply_all`] several by an attempt
//! each; [`Table`] keeps a resource in memory; [`Rows`] is what another store implements instead. What all commands share
//! is here, and what each of them does in `acquire.rs`, `release.rs` and `inspect.rs`.
//!
//! The rules, each of them a property in `tests/model/`:
//!
//! - **Order.** Nobody overtakes a waiter that is there, except an owner that re-enters, and a holder that waits for
//!   more: only one that has more than half of the capacity may, so that no two can wait for each other.
//! - **Own expiry.** Each lease, each place in the queue and each tombstone ends at its own time. That is
//!   decided by comparing times, by whichever command comes next, so the table needs no timer.
//! - **Who is there.** A client that is absent, or that let a claim window lapse, is *parked*: all its entries keep their
//!   places and are passed over until it is heard from. That is a property of the client, and costs the same however
//!   many entries it has. Its attempt that is asking just now is not passed over, since the answer reaches it.
//! - **Who looks.** The head is told when the present lease ends, and looks then. The others look a little later, so that a
//!   head that is gone together with the holder delays them by a bounded time.
//! - **Claim windows.** A lease granted to a waiter is short until the waiter renews it once.
//! - **Repeats.** A command that is applied twice leaves what it left the first time.
//! - **Nothing for ever.** A table that nobody needs is removed, its last token included once the
//!   wall clock has passed it.
//!
//! ```
//! use leasehold_core::model::{Table, CommandContext, apply};
//! use leasehold_core::{Acquire, Acquisition, ClientId, Command, Now, Reply, StoreTime};
//! use std::time::Duration;
//!
//! let mut table = Table::new();
//! let mut ask = |client| {
//!     let acquisition = Acquisition { client: ClientId::new(client), sequence: 1 };
//!     let ttl = Duration::from_secs(10);
//!     let (capacity, weight, reserve) = (1, 1, 0);
//!     let metadata = "".into();
//!     let (owner, wait, replaces) = (None, None, None);
//!     let acquire = Acquire { acquisition, owner, capacity, weight, ttl, reserve, wait, replaces, metadata };
//!     let now = Now::same(StoreTime::from_micros(1_700_000_000_000_000));
//!     let turn = CommandContext { now, is_reachable: &mut |_| true, pushes: &mut Vec::new() };
//!     apply(&mut table, turn, &acquire.into()).unwrap().reply
//! };
//! assert!(matches!(ask(1), Reply::Granted(_)));
//! assert_eq!(ask(2), Reply::Busy);
//! ```

mod acquire;
mod acquire_all;
mod inspect;
mod release;
mod rows;
mod table;

use alloc::vec::Vec;
use core::time::Duration;

use crate::command::{Answer, Command, Grant, HeadHint, Push, PushKind};
use crate::id::{Acquisition, ClientId, Owner};
use crate::time::{Now, StoreTime};
use crate::token::TokenRange;

pub use acquire_all::apply_all;
pub use rows::{Header, Lease, Rows, Waiter};
pub use table::Table;

/// How long a lease that was granted to a waiter runs before the waiter must have been heard from.
/// What a frozen process costs those behind it, once.
pub const CLAIM_WINDOW: Duration = Duration::from_secs(3);

/// How long the last token is remembered after its last use, so that a wall clock which is stepped
/// back by less than this can't make a token fall.
pub const TOKEN_RETENTION: Duration = Duration::from_secs(3600);

/// Within this time after the lease's end, and after the head's time to look, every other waiter looks.
const REPOLL_JITTER_MICROS: u64 = 1_500_000;

/// How far apart the looks at one resource are on average, however many clients wait for it and however many places each
/// of them has: at most 40 a second.
const REPOLL_SPACING: Duration = Duration::from_millis(25);

/// Where the queue begins for all who do not hold: places below it are for holders that wait for more.
const FIRST_WAITER_PLACE: u64 = 1 << 40;

/// The world around one command: the time, who is there, and where pushes go.
pub struct CommandContext<'a> {
    /// The store's clocks.
    pub now: Now,
    /// Whether this client could receive a push now.
    pub is_reachable: &'a mut dyn FnMut(ClientId) -> bool,
    /// Receives what others are to be told once the command has taken effect.
    pub pushes: &'a mut Vec<Push>,
}

/// Steps one resource by one command.
///
/// # Errors
///
/// The store's, from [`Rows`]. The command must then be rolled back as a whole, and `turn.pushes` dropped.
pub fn apply<R: Rows>(
    rows: &mut R,
    context: CommandContext<'_>,
    command: &Command,
) -> Result<Answer, R::Error> {
    step(rows, context, command).map(|(answer, _)| answer)
}

/// As [`apply`]. Also says whether the table had heard of the attempt before.
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

/// Lets time pass for a resource that nobody asks about: what has expired is removed, and whoever is
/// next is granted. Says whether anything of the resource is left.
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

/// One command under way.
struct Step<'r, 't, R: Rows> {
    rows: &'r mut R,
    context: CommandContext<'t>,
    header: Header,
    /// As it was stored, to save the write when nothing changed.
    before: Option<Header>,
    /// Whose `Acquire` this is. The answer reaches it, whether or not a push would.
    requester: Option<Acquisition>,
    /// Its client was found absent in this step. (Before the step it was heard from.)
    is_requester_parked: bool,
    /// The table had heard of that attempt before.
    is_known: bool,
    /// Somebody joined or left the queue, or the leases that its head waits for ended earlier.
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

    /// Tells a holder that is wanted now and a new head that it is one, and stores what is worth keeping.
    fn end(mut self) -> Result<bool, R::Error> {
        let was_awaited = self.before.as_ref().is_some_and(Header::has_ready_waiter);
        if !was_awaited && self.header.has_ready_waiter() {
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
                // It was pushed the lease and said nothing: asleep, or the push was lost. Either way its
                // other entries would cost the queue a claim window each.
                self.set_parked(lease.acquisition.client, true)?;
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

    /// A client that takes or keeps something is awake: its entries are no longer passed over.
    fn mark_client_alive(&mut self, command: &Command) -> Result<(), R::Error> {
        let sender = match command {
            Command::Acquire(acquire) => {
                self.requester = Some(acquire.acquisition);
                acquire.acquisition.client
            }
            Command::Renew(renew) => renew.acquisition.client,
            Command::Release(_) | Command::Inspect | Command::ForceRelease => return Ok(()),
        };
        if self.header.parked > 0 {
            self.set_parked(sender, false)?;
        }
        Ok(())
    }

    // --- Grants ----------------------------------------------------------------------------------

    /// Grants to the head of the queue while it fits.
    fn grant(&mut self) -> Result<(), R::Error> {
        while let Some(waiter) = self.next_candidate()? {
            let Some((fits, held)) = self.fits_waiter(&waiter)? else {
                // It is told to ask again, and then learns that what it was to take the place of is gone.
                self.remove_waiter(&waiter)?;
                self.push(waiter.acquisition, PushKind::Revoked);
                continue;
            };
            if !fits {
                break;
            }
            let client = waiter.acquisition.client;
            if self.requester != Some(waiter.acquisition) && !(self.context.is_reachable)(client) {
                self.set_parked(client, true)?;
                continue;
            }
            self.remove_waiter(&waiter)?;
            let grant = self.lease_to_waiter(&waiter, held.as_ref())?;
            self.push(waiter.acquisition, PushKind::Granted(grant));
        }
        Ok(())
    }

    /// The waiter that is next: the first that is not passed over. The attempt that asks is not, if it can have what it
    /// waits for now.
    fn next_candidate(&mut self) -> Result<Option<Waiter>, R::Error> {
        let first = self.first_ready()?;
        if let Some(requester) = self.requester.filter(|_| self.is_requester_parked)
            && let Some(requester) = self.rows.waiter(requester)?
            && first.as_ref().is_none_or(|first| requester.place < first.place)
            && self.fits_waiter(&requester)?.is_none_or(|(fits, _)| fits)
        {
            return Ok(Some(requester));
        }
        Ok(first)
    }

    /// Whether what the waiter adds to what it holds already fits, and that. None if what it was to take the place of is
    /// gone.
    fn fits_waiter(&mut self, waiter: &Waiter) -> Result<Option<(bool, Option<Lease>)>, R::Error> {
        let Some(held) = self.current_lease(waiter)? else { return Ok(None) };
        let further = waiter.weight.saturating_sub(held.as_ref().map_or(0, |lease| lease.weight));
        Ok(Some((self.fits(further), held)))
    }

    fn first_ready(&mut self) -> Result<Option<Waiter>, R::Error> {
        if self.header.has_ready_waiter() { self.rows.first_ready_waiter() } else { Ok(None) }
    }

    /// What a waiter holds of the resource already, if anything. None if it was to take the place of a lease that is
    /// gone.
    fn current_lease(&mut self, waiter: &Waiter) -> Result<Option<Option<Lease>>, R::Error> {
        match waiter.replaces {
            None => Ok(Some(self.held_by(waiter.owner.as_ref())?)),
            Some(sequence) => Ok(self.replaceable(waiter.acquisition.client, sequence)?.map(Some)),
        }
    }

    fn lease_to_waiter(&mut self, waiter: &Waiter, held: Option<&Lease>) -> Result<Grant, R::Error> {
        let valid_for = waiter.ttl.min(CLAIM_WINDOW);
        let mut granted_at = self.now();
        let tokens = match held {
            Some(held) if waiter.replaces.is_none() => TokenRange { first: held.token, last: held.token },
            _ => self.next_tokens(waiter.reserve),
        };
        if let Some(held) = held.filter(|_| waiter.replaces.is_some()) {
            self.remove_replaced(held)?;
            granted_at = self.hold_start(held);
        }
        self.add_lease(Lease {
            acquisition: waiter.acquisition,
            owner: waiter.owner.clone(),
            weight: waiter.weight,
            token: tokens.first,
            granted_at,
            expires_at: self.now() + valid_for,
            claimed: false,
            retained: false,
            metadata: waiter.metadata.clone(),
        })?;
        Ok(Grant { tokens, valid_for })
    }

    /// A grant that is answered need not be pushed as well.
    fn take_back_grant(&mut self, acquisition: Acquisition) -> Option<Grant> {
        let index = self.context.pushes.iter().position(|push| push.acquisition == acquisition)?;
        match self.context.pushes[index].kind {
            PushKind::Granted(grant) => {
                self.context.pushes.remove(index);
                Some(grant)
            }
            PushKind::Next(_) | PushKind::Revoked | PushKind::Contended => None,
        }
    }

    /// Ends a lease whose place another takes. If it was granted just now, nobody needs to hear of it any more.
    fn remove_replaced(&mut self, held: &Lease) -> Result<(), R::Error> {
        self.take_back_grant(held.acquisition);
        self.remove_lease(held)
    }

    /// A holder that is alone hands on to its own only with tokens that it has set aside, and those come after its
    /// lease's own. Others have no use for the news.
    fn notify_holder(&mut self) -> Result<(), R::Error> {
        if self.header.leases == 1
            && let Some(lease) = self.rows.first_expiring_lease()?
            && !lease.retained
            && lease.token.get() < self.header.last_token
        {
            self.push(lease.acquisition, PushKind::Contended);
        }
        Ok(())
    }

    fn notify_head(&mut self) -> Result<(), R::Error> {
        let Some(waiter) = self.first_ready()? else {
            self.header.head = 0;
            return Ok(());
        };
        if waiter.place != self.header.head {
            self.header.head = waiter.place;
            let hint = self.head_hint()?;
            self.push(waiter.acquisition, PushKind::Next(hint));
        }
        Ok(())
    }

    fn head_hint(&mut self) -> Result<HeadHint, R::Error> {
        let first = self.rows.first_expiring_lease()?;
        Ok(HeadHint { repoll_at: first.map_or(self.now(), |lease| lease.expires_at) })
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

    /// When the lease was granted; now, where the clock has been set back to before that.
    fn hold_start(&self, lease: &Lease) -> StoreTime {
        lease.granted_at.min(self.now())
    }

    /// The lease that another attempt of its client can take the place of.
    fn replaceable(&mut self, client: ClientId, sequence: u64) -> Result<Option<Lease>, R::Error> {
        let lease = self.held_lease(Acquisition { client, sequence })?;
        Ok(lease.filter(|lease| lease.owner.is_none()))
    }

    /// The live lease of a named owner that a further acquisition joins.
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
        self.rows.remove_lease(lease.acquisition)?;
        self.header.leases -= 1;
        let after = self.weight_of(lease.owner.as_ref())?;
        self.header.in_use -= lease.weight.max(after) - after;
        Ok(())
    }

    /// The weight that a named owner holds: that of its heaviest lease, however many it has.
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
        if self.requester.is_some_and(|requester| requester.client == client) {
            self.is_requester_parked = parked && changed > 0;
        }
        Ok(())
    }

    fn next_tokens(&mut self, reserve: u32) -> TokenRange {
        let Now { wall, floor, .. } = self.context.now;
        let from = floor.map_or(wall, |floor| wall.max(StoreTime::from_micros(floor.get())));
        let tokens = TokenRange::next(self.header.last_token, reserve, from);
        self.remember_token(tokens.last.get());
        tokens
    }

    fn remember_token(&mut self, last: u64) {
        self.header.last_token = last;
        // Forgetting the last token is safe once the wall clock has passed it, and not before.
        let passed = StoreTime::from_micros(last) + Duration::from_micros(1);
        self.header.remember_until = passed.max(self.context.now.wall + TOKEN_RETENTION);
    }

    fn note_expiry(&mut self, expiry: StoreTime) {
        self.header.next_expiry = self.header.next_expiry.min(expiry);
    }

    /// A lease that it waits for ends at another time than it was told.
    fn invalidate_head_hint(&mut self) {
        self.header.head = 0;
        self.queue_moved = true;
    }

    fn push(&mut self, acquisition: Acquisition, kind: PushKind) {
        let at = self.now();
        self.context.pushes.push(Push { acquisition, at, kind });
    }
}
