//! `Renew` and `Release`. The counterpart of the scripts `renew.lua` and `release.lua`.

use core::time::Duration;

use super::{Lease, Rows, Step};
use crate::command::{Release, ReleaseIf, Renew, Reply};
use crate::id::Acquisition;

impl<R: Rows> Step<'_, '_, R> {
    pub(super) fn renew(&mut self, renew: &Renew) -> Result<Reply, R::Error> {
        let held = self.held_lease(renew.acquisition)?;
        let Some(mut lease) = held.filter(|lease| renew.token.is_none_or(|token| token == lease.token))
        else {
            return Ok(Reply::NotHeld);
        };
        if !renew.only_asks() {
            lease.claimed = true;
            lease.granted_at = self.hold_start(&lease);
            lease.expires_at = self.now() + renew.ttl;
            self.note_expiry(lease.expires_at);
        }
        let valid_for = lease.expires_at.since(self.now());
        if let Some(floor) = self.context.now.floor.filter(|floor| floor.get() > self.header.last_token) {
            // A lease at several nodes has one token.
            self.remember_token(floor.get());
            lease.token = floor;
        }
        self.rows.put_lease(lease)?;
        let tokens = (renew.reserve > 0).then(|| self.next_tokens(renew.reserve));
        let contended = self.header.has_ready_waiter();
        Ok(Reply::Renewed { valid_for, tokens, contended })
    }

    pub(super) fn release(&mut self, release: &Release) -> Result<Reply, R::Error> {
        if let Some(condition) = release.only_if
            && !self.is_met(condition, release.acquisition)?
        {
            return Ok(Reply::NotHeld);
        }
        if !release.tombstone.is_zero() {
            self.leave_tombstone(release)?;
        }
        let reply = if let Some(lease) = self.held_lease(release.acquisition)? {
            self.end_lease(lease, release.min_hold)?;
            Reply::Released
        } else if self.header.waiters > 0
            && let Some(waiter) = self.rows.waiter(release.acquisition)?
        {
            self.remove_waiter(&waiter)?;
            Reply::Dequeued
        } else {
            return Ok(Reply::NotHeld);
        };
        self.grant()?;
        Ok(reply)
    }

    fn is_met(&mut self, condition: ReleaseIf, acquisition: Acquisition) -> Result<bool, R::Error> {
        let held = self.held_lease(acquisition)?;
        Ok(match (condition, held) {
            (ReleaseIf::HasToken(token), held) => held.is_none_or(|lease| lease.token == token),
            (ReleaseIf::SpeaksFor(client), Some(lease)) => lease.inbox() == client,
            (ReleaseIf::SpeaksFor(_), None) if self.header.waiters == 0 => true,
            (ReleaseIf::SpeaksFor(client), None) => {
                self.rows.waiter(acquisition)?.is_none_or(|waiter| waiter.inbox() == client)
            }
        })
    }

    /// Ends a lease. Before `min_hold` has passed it is retained, unless its owner holds the resource through another
    /// acquisition: then the last release decides.
    fn end_lease(&mut self, mut lease: Lease, min_hold: Duration) -> Result<(), R::Error> {
        self.remove_lease(&lease)?;
        // At most `min_hold` from now, even if the clock was set back since the grant.
        let keep_for = min_hold.saturating_sub(self.now().since(lease.granted_at));
        if keep_for.is_zero() || self.weight_of(lease.owner.as_ref())? > 0 {
            return Ok(());
        }
        lease.retained = true;
        lease.claimed = true;
        lease.expires_at = self.now() + keep_for;
        self.add_lease(lease)?;
        self.invalidate_head_hint();
        Ok(())
    }

    fn leave_tombstone(&mut self, release: &Release) -> Result<(), R::Error> {
        let until = self.now() + release.tombstone;
        if self.rows.tombstone(release.acquisition)?.is_none() {
            self.header.tombstones += 1;
        }
        self.rows.put_tombstone(release.acquisition, until)?;
        self.note_expiry(until);
        Ok(())
    }
}
