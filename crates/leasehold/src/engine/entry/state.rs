//! What an entry shows of its state.

use std::time::Duration;

use leasehold_core::{LeaseState, LocalTime, Loss, Outcome, Token};
use leasehold_store::StoreError;

use super::{Entry, Lease, Logged, RenewalError, Stage};
use crate::engine::releasing::ReleaseOutcome;

impl Entry {
    /// Whether the store may have received the attempt, so that it can confirm the attempt's end.
    pub(in crate::engine) fn may_be_in_store(&self) -> bool {
        match &self.stage {
            Stage::Attempt(machine) => machine.may_be_in_store(),
            Stage::Lease(_) => self.logged != Logged::Loss,
            Stage::Suspended(_) | Stage::Releasing(_) => true,
            Stage::Ended { .. } => false,
        }
    }

    /// Whether an attempt that has ended without a grant was not refused at once, but needs a release, or needed one.
    pub(in crate::engine) fn needs_release(&self) -> bool {
        matches!(self.stage, Stage::Releasing(_) | Stage::Ended { had_release: true, .. })
    }

    /// Whether the attempt of the lease was queued in the store.
    pub(in crate::engine) fn has_waited(&self) -> bool {
        matches!(self.stage, Stage::Lease(Lease { has_waited: true, .. }))
    }

    /// Whether it is being released unless another client speaks for it.
    pub(in crate::engine) fn releases_on_condition(&self) -> bool {
        matches!(&self.stage, Stage::Releasing(releasing) if releasing.is_conditional())
    }

    pub(in crate::engine) fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Ended { .. })
    }

    pub(in crate::engine) fn release_outcome(&self) -> Option<ReleaseOutcome> {
        match self.stage {
            Stage::Ended { outcome, .. } => Some(outcome),
            _ => None,
        }
    }

    /// The error with which the store refuses the entry's commands at present; they are retried.
    pub(in crate::engine) fn refusal(&self) -> Option<&StoreError> {
        let is_retried = match &self.stage {
            Stage::Attempt(machine) => machine.is_refused(),
            Stage::Lease(_) | Stage::Releasing(_) => true,
            Stage::Suspended(_) | Stage::Ended { .. } => false,
        };
        self.last_error.as_ref().filter(|error| is_retried && error.failure.is_refusal())
    }

    /// Why the lease, or its companion, was not renewed before this loss; none if that is not its cause.
    pub(in crate::engine) fn loss_reason(&self, loss: Loss) -> Option<&StoreError> {
        match loss {
            Loss::Expired => self.renewal_error.as_ref(),
            Loss::Bridge => self.companion_error.as_ref(),
            _ => None,
        }
    }

    /// The error of the release's last try; none before it.
    pub(in crate::engine) fn release_error(&self) -> Option<&StoreError> {
        self.last_error.as_ref().filter(|_| matches!(self.stage, Stage::Releasing(_)))
    }

    /// How much longer the lease may be trusted, or why not.
    pub(in crate::engine) fn remaining(&self, now: LocalTime) -> Result<Duration, Loss> {
        let Stage::Lease(lease) = &self.stage else { return Err(Loss::Closed) };
        match lease.machine.state(now) {
            LeaseState::Lost(loss) => Err(loss),
            LeaseState::Held | LeaseState::Uncertain => match lease.trust_limit.loss(now) {
                Some(loss) => Err(loss),
                None => Ok(lease.machine.remaining(now).min(lease.trust_limit.deadline().since(now))),
            },
        }
    }

    /// Whether less than a tenth of the lease's ttl has passed.
    pub(in crate::engine) fn is_fresh(&self, now: LocalTime) -> bool {
        self.remaining(now).is_ok_and(|remaining| remaining >= self.terms.ttl / 10 * 9)
    }

    pub(in crate::engine) fn ends_at(&self) -> LocalTime {
        match &self.stage {
            Stage::Lease(lease) => lease.machine.hold_ends_at(),
            _ => LocalTime::NEVER,
        }
    }

    /// Why the lease is lost. A later grant of another token to its owner counts as a loss.
    pub(in crate::engine) fn loss(&self, now: LocalTime, granted: Option<Token>) -> Option<Loss> {
        let Stage::Lease(Lease { machine, .. }) = &self.stage else { return None };
        let Some(Outcome::Granted { grant, .. }) = self.outcome else { return None };
        match machine.state(now) {
            LeaseState::Lost(loss) => Some(loss),
            _ => granted.filter(|token| *token != grant.tokens.first).map(|_| Loss::Gone),
        }
    }

    /// The ttl of a held lease that depends on renewals.
    pub(in crate::engine) fn ttl_at_stake(&self, now: LocalTime) -> Option<Duration> {
        let Stage::Lease(Lease { machine, .. }) = &self.stage else { return None };
        let is_held = matches!(machine.state(now), LeaseState::Held | LeaseState::Uncertain);
        (is_held && self.terms.renews).then_some(self.terms.ttl)
    }

    /// When the lease is renewed first if the attempt is granted at once. No lease is renewed before its attempt.
    pub(in crate::engine) fn first_renewal(&self, now: LocalTime) -> Option<LocalTime> {
        self.terms.renews.then(|| now + self.terms.ttl / 3)
    }

    /// Whether a renewal is due within this fraction of the ttl.
    pub(in crate::engine) fn renews_within(&self, now: LocalTime, part: u32) -> bool {
        let Stage::Lease(Lease { machine, .. }) = &self.stage else { return false };
        machine.poll_renewal().is_some_and(|time| time <= now + self.terms.ttl / part)
    }

    /// The result of the last renewal, once none is in flight, and none is to follow it at once.
    pub(in crate::engine) fn renewal_result(&self, now: LocalTime) -> Option<Result<(), RenewalError>> {
        if let Err(loss) = self.remaining(now) {
            return Some(Err(RenewalError::Lost(loss)));
        }
        let Stage::Lease(Lease { machine, .. }) = &self.stage else { return None };
        match (machine.is_confirmed(), machine.state(now), &self.last_error) {
            (false, ..) => None,
            (true, LeaseState::Uncertain, Some(last_error)) => {
                Some(Err(RenewalError::Failed(last_error.clone())))
            }
            // It had no answer in time, and is repeated.
            (true, LeaseState::Uncertain, None) => None,
            (true, ..) => Some(Ok(())),
        }
    }
}
