//! Grants to the waiters of a queue, and the pushes to its head and to a holder.

use super::{CLAIM_WINDOW, Lease, Rows, Step, Waiter};
use crate::command::{Grant, HeadHint, Push, PushKind};
use crate::id::Acquisition;
use crate::token::TokenRange;

impl<R: Rows> Step<'_, '_, R> {
    /// Grants to the head of the queue while it fits.
    pub(super) fn grant(&mut self) -> Result<(), R::Error> {
        while let Some(waiter) = self.next_candidate()? {
            let Some((fits, held)) = self.fits_waiter(&waiter)? else {
                // The waiter re-checks and learns that the lease to replace is gone.
                self.remove_waiter(&waiter)?;
                self.push(waiter.inbox(), waiter.acquisition, PushKind::Revoked);
                continue;
            };
            let (is_requester, client) = (self.is_requester(&waiter), waiter.inbox());
            if !fits && (is_requester || !self.may_pass_head()) {
                break;
            }
            if !is_requester && !(self.context.is_reachable)(client) {
                self.set_parked(client, true)?;
                continue;
            }
            if !fits {
                break;
            }
            self.remove_waiter(&waiter)?;
            let grant = self.lease_to_waiter(&waiter, held.as_ref())?;
            let proof = waiter.secret.prove(self.now(), &grant);
            self.push(waiter.inbox(), waiter.acquisition, PushKind::Granted(grant, proof));
        }
        Ok(())
    }

    /// Whether the command is this waiter's own `Acquire`: the answer reaches it even if a push would not.
    fn is_requester(&self, waiter: &Waiter) -> bool {
        self.requester.is_some_and(|requester| requester.acquisition == waiter.acquisition)
    }

    /// Whether an attempt may fit although the head of the queue does not. Other commands leave such a head where it is, and cost no
    /// question for its client.
    fn may_pass_head(&self) -> bool {
        self.requester.is_some() && self.header.in_use < self.header.capacity
    }

    /// The next waiter: the first that is not parked, or the parked requester if it is earlier and fits.
    fn next_candidate(&mut self) -> Result<Option<Waiter>, R::Error> {
        let first = self.first_ready()?;
        if let Some(requester) = self.requester.filter(|_| self.is_requester_parked)
            && let Some(requester) = self.rows.waiter(requester.acquisition)?
            && first.as_ref().is_none_or(|first| requester.place < first.place)
            && self.fits_waiter(&requester)?.is_none_or(|(fits, _)| fits)
        {
            return Ok(Some(requester));
        }
        Ok(first)
    }

    /// Whether the waiter's additional weight fits, and its current lease. None if the lease to replace is gone.
    pub(super) fn fits_waiter(&mut self, waiter: &Waiter) -> Result<Option<(bool, Option<Lease>)>, R::Error> {
        let Some(held) = self.current_lease(waiter)? else { return Ok(None) };
        let further = waiter.weight.saturating_sub(held.as_ref().map_or(0, |lease| lease.weight));
        Ok(Some((self.fits(further), held)))
    }

    pub(super) fn first_ready(&mut self) -> Result<Option<Waiter>, R::Error> {
        if self.header.has_ready_waiter() { self.rows.first_ready_waiter() } else { Ok(None) }
    }

    /// The waiter's current lease of the resource, if any. None if the lease to replace is gone.
    fn current_lease(&mut self, waiter: &Waiter) -> Result<Option<Option<Lease>>, R::Error> {
        match waiter.replaces {
            None => Ok(Some(self.held_by(waiter.owner.as_ref())?)),
            Some(sequence) => Ok(self.replaceable(waiter.acquisition.client, sequence)?.map(Some)),
        }
    }

    pub(super) fn lease_to_waiter(
        &mut self,
        waiter: &Waiter,
        held: Option<&Lease>,
    ) -> Result<Grant, R::Error> {
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
            inbox: waiter.inbox,
            owner: waiter.owner.clone(),
            weight: waiter.weight,
            token: tokens.first,
            granted_at,
            expires_at: self.now() + valid_for,
            claimed: false,
            retained: false,
            metadata: waiter.metadata.clone(),
        })?;
        Ok(Grant { tokens, valid_for, is_plain: false })
    }

    /// Removes a pending push of a grant that the answer reports.
    pub(super) fn take_back_grant(&mut self, acquisition: Acquisition) -> Option<Grant> {
        let granted = |push: &Push| match push.kind {
            PushKind::Granted(grant, _) if push.acquisition == acquisition => Some(grant),
            _ => None,
        };
        let (index, grant) =
            self.context.pushes.iter().enumerate().find_map(|(index, push)| Some((index, granted(push)?)))?;
        self.context.pushes.remove(index);
        Some(grant)
    }

    /// Removes a replaced lease, and its pending grant push.
    pub(super) fn remove_replaced(&mut self, held: &Lease) -> Result<(), R::Error> {
        self.take_back_grant(held.acquisition);
        self.remove_lease(held)
    }

    /// Pushes `Contended` to a sole holder that reserved tokens, since only such a holder hands off locally.
    pub(super) fn notify_holder(&mut self) -> Result<(), R::Error> {
        if self.header.leases == 1
            && let Some(lease) = self.rows.first_expiring_lease()?
            && !lease.retained
            && lease.token.get() < self.header.last_token
        {
            self.push(lease.inbox(), lease.acquisition, PushKind::Contended);
        }
        Ok(())
    }

    pub(super) fn notify_head(&mut self) -> Result<(), R::Error> {
        let Some(waiter) = self.first_ready()? else {
            self.header.head = 0;
            return Ok(());
        };
        if waiter.place != self.header.head {
            self.header.head = waiter.place;
            let hint = self.head_hint()?;
            self.push(waiter.inbox(), waiter.acquisition, PushKind::Next(hint));
        }
        Ok(())
    }

    pub(super) fn head_hint(&mut self) -> Result<HeadHint, R::Error> {
        let first = self.rows.first_expiring_lease()?;
        Ok(HeadHint { repoll_at: first.map_or(self.now(), |lease| lease.expires_at) })
    }
}
