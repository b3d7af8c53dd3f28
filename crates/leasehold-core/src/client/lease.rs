//! The client's side of one held lease: when to renew it, and when to stop believing in it.
//!
//! It trusts nothing but its own clock. Each deadline counts from *before* the request was sent, so a slow
//! answer can only shorten the trust, and it passes by itself, with no answer needed. (Gray and Cheriton,
//! *Leases*, 1989, section 3.)

use core::fmt;
use core::time::Duration;

use crate::client::handoff::{HandoffBudget, HandoffDecision};
use crate::command::{Command, Renew, Reply};
use crate::id::Acquisition;
use crate::model::CLAIM_WINDOW;
use crate::time::{LocalTime, drift_margin};

/// The shortest pause before a failed renewal is tried again.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(10);

/// What the caller wants of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// How long the lease runs without renewal.
    pub ttl: Duration,
    /// Whether to renew it. A lease that was pushed is claimed once in any case.
    pub renews: bool,
    /// The hold ends this long after the grant, however well renewals go.
    pub max_hold: Option<Duration>,
    /// The lease runs until this long after the grant, though its holder should die before.
    pub min_lifetime: Duration,
    /// How many of the store's replicas must have the lease, and each renewal, before it counts.
    pub replicas: u32,
}

/// How sure the holder can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Held, and the last renewal went well.
    Held,
    /// Held by the local deadline, but the last renewal failed.
    Uncertain,
    /// Not held any more.
    Lost(Loss),
}

/// Why a lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// It ran out by the local clock before a renewal succeeded.
    Expired,
    /// The store says that the lease is gone: taken away, expired there, or forgotten.
    Gone,
    /// The longest hold is over.
    MaxHold,
    /// The client was closed, which gave it back.
    Closed,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "it ran out before a renewal succeeded",
            Self::Gone => "the store says that it is gone: it was taken away, or expired there",
            Self::MaxHold => "its longest hold is over",
            Self::Closed => "the client was closed",
        })
    }
}

/// One held lease, as its holder sees it.
#[derive(Clone, Debug)]
pub struct LeaseMachine {
    acquisition: Acquisition,
    terms: LeaseTerms,
    state: LeaseState,
    /// Trusted while the local clock is below this.
    trusted_until: LocalTime,
    /// When the longest hold is over.
    hold_ends_at: LocalTime,
    /// No renewal makes the lease end before this.
    min_lifetime_until: LocalTime,
    renew_at: LocalTime,
    /// A renewal is under way. An answer to an older one is as good.
    in_flight: bool,
    /// Something was told while a renewal was under way, whose answer may be older than that.
    recheck_pending: bool,
    /// For a lease that its client's tasks hand on among themselves.
    handoff: Option<HandoffBudget>,
}

impl LeaseMachine {
    /// A lease that was granted at `granted_at` by the local clock (when the request was sent, or when the push
    /// arrived), that is trusted until `trusted_until`, and that runs for `lasts` unless it is renewed.
    #[must_use]
    pub fn new(
        acquisition: Acquisition,
        terms: LeaseTerms,
        granted_at: LocalTime,
        valid_for: Duration,
        trusted_until: LocalTime,
    ) -> Self {
        let hold_ends_at = terms.max_hold.map_or(LocalTime::NEVER, |hold| granted_at + hold);
        let needs_claim = valid_for < terms.ttl;
        let renew_at =
            if terms.renews || needs_claim { granted_at + valid_for / 3 } else { LocalTime::NEVER };
        Self {
            acquisition,
            terms,
            state: LeaseState::Held,
            trusted_until: trusted_until.min(hold_ends_at),
            hold_ends_at,
            min_lifetime_until: granted_at + terms.min_lifetime,
            renew_at,
            in_flight: false,
            recheck_pending: false,
            handoff: None,
        }
    }

    /// The client's tasks hand it on among themselves.
    #[must_use]
    pub fn with_handoff_budget(mut self, handoff: HandoffBudget) -> Self {
        self.handoff = Some(handoff);
        self
    }

    /// What becomes of the lease now that one task is done with it and another one waits. Only a lease that is well is
    /// handed on, so that whoever gets it has some time.
    pub fn hand_off(&mut self, now: LocalTime) -> HandoffDecision {
        let least = self.terms.ttl.min(CLAIM_WINDOW) / 4;
        let is_well = self.state(now) == LeaseState::Held && self.remaining(now) > least;
        let Some(handoff) = self.handoff.as_mut().filter(|_| is_well) else {
            return HandoffDecision::Release;
        };
        let had_asked = handoff.reserve() > 0;
        let on = handoff.hand_off(now);
        if handoff.reserve() > 0 && !had_asked {
            self.handle_hint(now);
        }
        on
    }

    /// Another client waits for the lease.
    pub fn handle_contended(&mut self, now: LocalTime) {
        if let Some(handoff) = &mut self.handoff {
            handoff.handle_contended(now);
        }
    }

    /// The attempt that was granted.
    #[must_use]
    pub const fn acquisition(&self) -> Acquisition {
        self.acquisition
    }

    /// When the longest hold is over; never without one.
    #[must_use]
    pub const fn hold_ends_at(&self) -> LocalTime {
        self.hold_ends_at
    }

    /// The hold goes on from an earlier lease, and ends with it.
    pub fn end_by(&mut self, hold_ends_at: LocalTime) {
        self.hold_ends_at = self.hold_ends_at.min(hold_ends_at);
        self.trusted_until = self.trusted_until.min(hold_ends_at);
    }

    /// The state at `now`. It needs no event to become lost.
    #[must_use]
    pub fn state(&self, now: LocalTime) -> LeaseState {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain if now >= self.trusted_until => {
                LeaseState::Lost(self.loss_by_time())
            }
            state => state,
        }
    }

    /// How much longer the holder may work; zero when the lease is lost.
    #[must_use]
    pub fn remaining(&self, now: LocalTime) -> Duration {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain => self.trusted_until.since(now),
            LeaseState::Lost(_) => Duration::ZERO,
        }
    }

    /// When something is to be done next: renewing, or noticing that the lease is lost.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<LocalTime> {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain if self.in_flight => Some(self.trusted_until),
            LeaseState::Held | LeaseState::Uncertain => Some(self.renew_at.min(self.trusted_until)),
            LeaseState::Lost(_) => None,
        }
    }

    /// Whether a renewal is under way.
    #[must_use]
    pub const fn is_renewing(&self) -> bool {
        self.in_flight
    }

    /// When the next renewal is due; none while one is under way, or when no further one is to come.
    #[must_use]
    pub fn poll_renewal(&self) -> Option<LocalTime> {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain if !self.in_flight => {
                Some(self.renew_at).filter(|time| *time < self.trusted_until)
            }
            _ => None,
        }
    }

    /// The renewal to send now, if one is due. The caller tells how it went.
    pub fn poll_transmit(&mut self, now: LocalTime) -> Option<Command> {
        self.handle_timeout(now);
        let is_live = matches!(self.state, LeaseState::Held | LeaseState::Uncertain);
        if !is_live || self.in_flight || now < self.renew_at {
            return None;
        }
        self.in_flight = true;
        let reserve = self.handoff.as_ref().map_or(0, HandoffBudget::reserve);
        Some(Command::Renew(Renew { acquisition: self.acquisition, ttl: self.ttl_from(now), reserve }))
    }

    /// Notices at `now` that the lease is lost.
    pub fn handle_timeout(&mut self, now: LocalTime) {
        self.state = self.state(now);
    }

    /// The answer to a renewal that was sent at `sent_at`.
    pub fn handle_reply(&mut self, now: LocalTime, sent_at: LocalTime, reply: &Reply) {
        self.in_flight = false;
        self.handle_timeout(now);
        if !matches!(self.state, LeaseState::Held | LeaseState::Uncertain) {
            return;
        }
        match reply {
            Reply::Renewed { valid_for, tokens, contended } => {
                self.apply_renewal(sent_at, *valid_for);
                if let Some(handoff) = &mut self.handoff {
                    handoff.handle_renewed(now, sent_at, *tokens, *contended);
                }
                if core::mem::take(&mut self.recheck_pending) {
                    self.renew_at = now;
                }
            }
            Reply::NotHeld => self.state = LeaseState::Lost(Loss::Gone),
            _ => self.retry(now),
        }
        self.handle_timeout(now);
    }

    /// A renewal that has failed, or whose outcome nobody knows.
    pub fn handle_failure(&mut self, now: LocalTime) {
        self.in_flight = false;
        self.handle_timeout(now);
        if matches!(self.state, LeaseState::Held | LeaseState::Uncertain) {
            self.state = LeaseState::Uncertain;
            if let Some(handoff) = &mut self.handoff {
                handoff.handle_failure();
            }
            self.retry(now);
            if core::mem::take(&mut self.recheck_pending) {
                // It failed over the way that was there before.
                self.renew_at = now;
            }
        }
    }

    /// A hint that the lease may be gone: ask at once.
    pub fn handle_hint(&mut self, now: LocalTime) {
        self.recheck_pending = self.in_flight;
        self.renew_at = self.renew_at.min(now);
    }

    /// The connection is new: ask at once, unless the lease is to end where no renewal is to come. One that is under way there
    /// is enough: it is repeated only if it fails, or a connection that is made again and again would keep the lease for ever.
    pub fn handle_reconnected(&mut self, now: LocalTime) {
        let is_due = self.renew_at != LocalTime::NEVER && !self.in_flight;
        if self.terms.renews || is_due {
            self.handle_hint(now);
        }
    }

    fn apply_renewal(&mut self, sent_at: LocalTime, valid_for: Duration) {
        self.state = LeaseState::Held;
        let until = sent_at + valid_for.saturating_sub(drift_margin(valid_for));
        // An answer that overtook a later one never shortens the trust.
        self.trusted_until = self.trusted_until.max(until).min(self.hold_ends_at);
        let is_last = !self.terms.renews || sent_at + valid_for >= self.hold_ends_at;
        self.renew_at = if is_last { LocalTime::NEVER } else { sent_at + valid_for / 3 };
    }

    /// Tries again soon, and several times before the end.
    fn retry(&mut self, now: LocalTime) {
        let pause = self.trusted_until.since(now) / 8;
        self.renew_at = now + pause.max(MIN_RETRY_DELAY);
    }

    fn ttl_from(&self, now: LocalTime) -> Duration {
        self.terms.ttl.min(self.hold_ends_at.since(now)).max(self.min_lifetime_until.since(now))
    }

    fn loss_by_time(&self) -> Loss {
        // The last renewal ends with the hold, and is trusted for a margin less than that.
        let is_over = self.trusted_until + drift_margin(self.terms.ttl) >= self.hold_ends_at;
        if is_over { Loss::MaxHold } else { Loss::Expired }
    }
}

#[cfg(test)]
mod tests;
