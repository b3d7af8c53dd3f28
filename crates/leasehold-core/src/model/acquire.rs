//! `Acquire`: an attempt is granted, queued or refused; a repeat returns the present state. The counterpart of the script
//! `acquire.lua`.

use core::time::Duration;

use super::{
    CLAIM_WINDOW, FIRST_WAITER_PLACE, Lease, REPOLL_JITTER_MICROS, REPOLL_SPACING, Rows, Step, Waiter,
};
use crate::command::{Acquire, Grant, PushKind, Queued, Refusal, Reply, WaitFor};
use crate::id::ClientId;
use crate::time::StoreTime;
use crate::token::TokenRange;

/// By how much the lifetime of a repeated grant is shorter.
const REPEAT_MARK: Duration = Duration::from_micros(1);

impl<R: Rows> Step<'_, '_, R> {
    pub(super) fn acquire(&mut self, acquire: &Acquire) -> Result<Reply, R::Error> {
        if let Some(reply) = self.known_attempt(acquire)? {
            self.is_known = true;
            return Ok(reply);
        }
        if acquire.weight == 0 || acquire.weight > acquire.capacity {
            return Ok(Reply::Refused(Refusal::Weight { capacity: acquire.capacity }));
        }
        let replaced = match acquire.replaces {
            Some(sequence) if acquire.owner.is_none() => {
                self.replaceable(acquire.acquisition.client, sequence)?
            }
            _ => None,
        };
        if acquire.replaces.is_some() && replaced.is_none() {
            return Ok(Reply::Refused(Refusal::NotHeld));
        }
        if self.header.leases == 0 && self.header.waiters == 0 {
            self.header.capacity = acquire.capacity;
        } else if self.header.capacity != acquire.capacity {
            return Ok(Reply::Refused(Refusal::Capacity { in_use: self.header.capacity }));
        }
        if let Some(held) = replaced {
            return self.replace(acquire, &held);
        }
        if let Some(held) = self.held_by(acquire.owner.as_ref())? {
            return self.reenter(acquire, &held);
        }
        if !self.header.has_ready_waiter() && self.fits(acquire.weight) {
            let tokens = self.next_tokens(acquire.reserve);
            return self.grant_now(acquire, tokens, self.now());
        }
        match acquire.wait {
            None => Ok(Reply::Busy),
            Some(wait) => self.enqueue(acquire, wait),
        }
    }

    /// The answer to an attempt that the table knows already.
    fn known_attempt(&mut self, acquire: &Acquire) -> Result<Option<Reply>, R::Error> {
        let acquisition = acquire.acquisition;
        if let Some(grant) = self.take_back_grant(acquisition)
            && acquire.inbox.is_none()
        {
            return Ok(Some(Reply::Granted(grant)));
        }
        if self.header.tombstones > 0 && self.rows.tombstone(acquisition)?.is_some() {
            return Ok(Some(Reply::Cancelled));
        }
        if self.header.leases > 0
            && let Some(lease) = self.rows.lease(acquisition)?
        {
            return self.repeated_grant(lease, acquire).map(Some);
        }
        if self.header.waiters > 0
            && let Some(waiter) = self.rows.waiter(acquisition)?
        {
            return self.recheck(waiter, acquire).map(Some);
        }
        Ok(None)
    }

    /// The answer to a repeated `Acquire`: the same grant with its remaining lifetime. Of an attempt that several clients make, only the first
    /// answer is a grant, and only the client that gets it may release the lease on the condition that it speaks for the attempt: after a
    /// further answer it is not known which of them the caller has read.
    fn repeated_grant(&mut self, mut lease: Lease, acquire: &Acquire) -> Result<Reply, R::Error> {
        if lease.retained {
            return Ok(Reply::Cancelled);
        }
        if acquire.inbox.is_some() {
            if !lease.claimed {
                return self.claim(lease, acquire);
            }
            if lease.inbox() != lease.acquisition.client {
                lease.inbox = Some(lease.acquisition.client);
                self.rows.put_lease(lease.clone())?;
            }
        }
        // The reserved range is not stored: a repeat gets the grant's own token only.
        let tokens = TokenRange { first: lease.token, last: lease.token };
        // After the clock was set back more than the ttl would remain, and end early if the clock is set forward again.
        let remaining = lease.expires_at.since(self.now()).min(acquire.ttl);
        // Where several clients make an attempt, a repeat never has the whole ttl: that tells it from the grant.
        let mark = if acquire.inbox.is_some() { REPEAT_MARK } else { Duration::ZERO };
        let valid_for = remaining.saturating_sub(mark);
        Ok(Reply::Granted(Grant { tokens, valid_for, is_plain: false }))
    }

    /// A grant from the queue, of which no answer has told yet.
    fn claim(&mut self, lease: Lease, acquire: &Acquire) -> Result<Reply, R::Error> {
        if lease.inbox() != acquire.inbox() {
            // It may still wait there.
            self.push(lease.inbox(), lease.acquisition, PushKind::Revoked);
        }
        let (granted_at, expires_at) = (self.hold_start(&lease), self.now() + acquire.ttl);
        let tokens = TokenRange { first: lease.token, last: lease.token };
        let (inbox, metadata) = (acquire.inbox, acquire.metadata.clone());
        self.rows.put_lease(Lease { inbox, metadata, claimed: true, granted_at, expires_at, ..lease })?;
        self.note_expiry(expires_at);
        Ok(Reply::Granted(Grant { tokens, valid_for: acquire.ttl, is_plain: false }))
    }

    /// A waiter's re-check, still waiting after the queue has moved.
    fn recheck(&mut self, mut waiter: Waiter, acquire: &Acquire) -> Result<Reply, R::Error> {
        if let Some(held) = self.held_by(waiter.owner.as_ref())?
            && waiter.weight <= held.weight
        {
            // Its owner was granted the lease through another attempt meanwhile.
            self.remove_waiter(&waiter)?;
            let grant = self.lease_to_waiter(&waiter, Some(&held))?;
            return match self.held_lease(waiter.acquisition)? {
                Some(lease) if acquire.inbox.is_some() => self.claim(lease, acquire),
                _ => Ok(Reply::Granted(grant)),
            };
        }
        let place = waiter.place;
        if let Some(wait) = acquire.wait {
            waiter.deadline = self.now() + wait.entry_ttl;
            waiter.secret = acquire.secret;
            self.note_expiry(waiter.deadline);
            self.rows.put_waiter(waiter)?;
        }
        self.queued(place)
    }

    /// An `Acquire` that waits, from another inbox than before: it speaks for the waiter from now on. The one before is told, and asks again if its
    /// caller still waits there: the command of a client that the caller has left may come late.
    pub(super) fn move_waiter(&mut self, acquire: &Acquire) -> Result<(), R::Error> {
        if acquire.inbox.is_some()
            && acquire.wait.is_some()
            && self.header.waiters > 0
            && let Some(waiter) = self.rows.waiter(acquire.acquisition)?
            && waiter.inbox() != acquire.inbox()
        {
            self.rows.remove_waiter(waiter.acquisition)?;
            self.header.parked -= u32::from(waiter.parked);
            self.queue_moved |= waiter.parked;
            self.push(waiter.inbox(), waiter.acquisition, PushKind::Revoked);
            let metadata = acquire.metadata.clone();
            // Its client has just sent a command.
            self.rows.put_waiter(Waiter { inbox: acquire.inbox, metadata, parked: false, ..waiter })?;
        }
        Ok(())
    }

    fn reenter(&mut self, acquire: &Acquire, held: &Lease) -> Result<Reply, R::Error> {
        if acquire.weight > held.weight {
            return Ok(Reply::Refused(Refusal::HeavierReentry { held: held.weight }));
        }
        self.grant_now(acquire, TokenRange { first: held.token, last: held.token }, self.now())
    }

    /// Replaces a lease. With less weight this is the same critical section, with the same token; with more it is a new one. In
    /// both cases the hold continues, and counts from its beginning.
    fn replace(&mut self, acquire: &Acquire, held: &Lease) -> Result<Reply, R::Error> {
        let further = acquire.weight.saturating_sub(held.weight);
        if !self.fits(further) {
            return match acquire.wait {
                None => Ok(Reply::Busy),
                Some(wait) if held.weight > self.header.capacity / 2 => self.enqueue(acquire, wait),
                Some(_) => Ok(Reply::Refused(Refusal::HeavierReentry { held: held.weight })),
            };
        }
        self.remove_replaced(held)?;
        let tokens = match further {
            0 => TokenRange { first: held.token, last: held.token },
            _ => self.next_tokens(acquire.reserve),
        };
        let reply = self.grant_now(acquire, tokens, self.hold_start(held))?;
        self.invalidate_head_hint();
        self.grant()?;
        Ok(reply)
    }

    fn grant_now(
        &mut self,
        acquire: &Acquire,
        tokens: TokenRange,
        granted_at: StoreTime,
    ) -> Result<Reply, R::Error> {
        self.add_lease(Lease {
            acquisition: acquire.acquisition,
            inbox: acquire.inbox,
            owner: acquire.owner.clone(),
            weight: acquire.weight,
            token: tokens.first,
            granted_at,
            expires_at: self.now() + acquire.ttl,
            claimed: true,
            retained: false,
            metadata: acquire.metadata.clone(),
        })?;
        Ok(Reply::Granted(Grant { tokens, valid_for: acquire.ttl, is_plain: false }))
    }

    fn enqueue(&mut self, acquire: &Acquire, wait: WaitFor) -> Result<Reply, R::Error> {
        // At most one holder can wait for more, and a full queue must not cost it its lease.
        if acquire.replaces.is_none() && self.header.waiters >= wait.max_queue {
            return Ok(Reply::QueueFull);
        }
        let number = self.header.next_place;
        let parked = self.is_requester_parked;
        let place = if acquire.replaces.is_some() { number } else { FIRST_WAITER_PLACE + number };
        let deadline = self.now() + wait.entry_ttl;
        self.rows.put_waiter(Waiter {
            place,
            acquisition: acquire.acquisition,
            inbox: acquire.inbox,
            owner: acquire.owner.clone(),
            weight: acquire.weight,
            ttl: acquire.ttl,
            reserve: acquire.reserve,
            replaces: acquire.replaces,
            secret: acquire.secret,
            since: self.now(),
            deadline,
            parked,
            metadata: acquire.metadata.clone(),
        })?;
        self.header.next_place += 1;
        self.header.waiters += 1;
        self.header.parked += u32::from(parked);
        self.note_expiry(deadline);
        self.queued(place)
    }

    /// The answer for a queue entry. The head learns here that it is the head, and needs no push.
    fn queued(&mut self, place: u64) -> Result<Reply, R::Error> {
        let is_head = self.first_ready()?.is_some_and(|first| first.place == place);
        let repoll_at = if is_head {
            self.header.head = place;
            self.head_hint()?.repoll_at
        } else {
            self.follower_repoll_at()?
        };
        Ok(Reply::Queued(Queued { is_head, repoll_at }))
    }

    /// When a waiter other than the head re-checks.
    ///
    /// The head re-checks when the lease ends. If both holder and head are gone, the followers find out: after the time that
    /// a head may need, spread over an interval.
    ///
    /// With more clients each one re-checks less often, and so does each waiter of a client with several waiters. The waiters
    /// of one client therefore do not delay the re-checks of other clients.
    fn follower_repoll_at(&mut self) -> Result<StoreTime, R::Error> {
        let now = self.now();
        let ends = self.head_hint()?.repoll_at;
        // A lease that ends sooner than this was not renewed or not claimed.
        let head_start = if ends.since(now) > CLAIM_WINDOW { CLAIM_WINDOW } else { Duration::ZERO };
        let client = self.requester.map_or(ClientId::new(0), |requester| requester.inbox);
        // The lower half of a random number.
        #[allow(clippy::cast_possible_truncation, reason = "any bits of it will do")]
        let apart = Duration::from_micros(u64::from(client.get() as u32) % REPOLL_JITTER_MICROS);
        let spacing = REPOLL_SPACING * self.rows.ready_clients()? * self.rows.waiters_of(client)?;
        Ok((ends + head_start + apart).max(now + spacing))
    }
}
