//! The client's side of one held lease: when to renew it, and when to stop believing in it.
//!
//! It trusts nothing but its own clock. Each deadline counts from *before* the request was sent, so a slow
//! answer can only shorten the trust, and it passes by itself, with no answer needed. (Gray and Cheriton,
//! *Leases*, 1989, section 3.)

use core::fmt;
use core::time::Duration;

use crate::client::handoff::{HandOn, Turn};
use crate::command::{Command, Renew, Reply};
use crate::id::Acquisition;
use crate::model::CLAIM_WINDOW;
use crate::time::{LocalTime, drift_margin};

/// The shortest pause before a failed renewal is tried again.
const RETRY_AT_LEAST: Duration = Duration::from_millis(10);

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
    pub outlives: Duration,
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
    /// Given back by the holder.
    Released,
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
    ends_at: LocalTime,
    /// No renewal makes the lease end before this.
    outlives_until: LocalTime,
    renew_at: LocalTime,
    /// A renewal is under way. An answer to an older one is as good.
    in_flight: bool,
    /// Something was told while a renewal was under way, whose answer may be older than that.
    hinted: bool,
    /// For a lease that its client's tasks hand on among themselves.
    turn: Option<Turn>,
}

impl LeaseMachine {
    /// A lease that was granted at `granted_at` by the local clock (when the request was sent, or when the push
    /// arrived), that is trusted until `trusted_until`, and that runs for `lasts` unless it is renewed.
    #[must_use]
    pub fn new(
        acquisition: Acquisition,
        terms: LeaseTerms,
        granted_at: LocalTime,
        lasts: Duration,
        trusted_until: LocalTime,
    ) -> Self {
        let ends_at = terms.max_hold.map_or(LocalTime::NEVER, |hold| granted_at + hold);
        let needs_claim = lasts < terms.ttl;
        let renew_at = if terms.renews || needs_claim { granted_at + lasts / 3 } else { LocalTime::NEVER };
        Self {
            acquisition,
            terms,
            state: LeaseState::Held,
            trusted_until: trusted_until.min(ends_at),
            ends_at,
            outlives_until: granted_at + terms.outlives,
            renew_at,
            in_flight: false,
            hinted: false,
            turn: None,
        }
    }

    /// The client's tasks hand it on among themselves.
    #[must_use]
    pub fn with_turn(mut self, turn: Turn) -> Self {
        self.turn = Some(turn);
        self
    }

    /// What becomes of the lease now that one task is done with it and another one waits. Only a lease that is well is
    /// handed on, so that whoever gets it has some time.
    pub fn hand_on(&mut self, now: LocalTime) -> HandOn {
        let least = self.terms.ttl.min(CLAIM_WINDOW) / 4;
        let is_well = self.state(now) == LeaseState::Held && self.remaining(now) > least;
        let Some(turn) = self.turn.as_mut().filter(|_| is_well) else { return HandOn::Over };
        let had_asked = turn.reserve() > 0;
        let on = turn.hand_on(now);
        if turn.reserve() > 0 && !had_asked {
            self.handle_hint(now);
        }
        on
    }

    /// Another client waits for the lease.
    pub fn handle_wanted(&mut self, now: LocalTime) {
        if let Some(turn) = &mut self.turn {
            turn.handle_wanted(now);
        }
    }

    /// The attempt that was granted.
    #[must_use]
    pub const fn acquisition(&self) -> Acquisition {
        self.acquisition
    }

    /// When the longest hold is over; never without one.
    #[must_use]
    pub const fn ends_at(&self) -> LocalTime {
        self.ends_at
    }

    /// The hold goes on from an earlier lease, and ends with it.
    pub fn end_by(&mut self, ends_at: LocalTime) {
        self.ends_at = self.ends_at.min(ends_at);
        self.trusted_until = self.trusted_until.min(ends_at);
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

    /// How much longer the holder may work; zero when the lease is lost or released.
    #[must_use]
    pub fn remaining(&self, now: LocalTime) -> Duration {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain => self.trusted_until.since(now),
            LeaseState::Lost(_) | LeaseState::Released => Duration::ZERO,
        }
    }

    /// When something is to be done next: renewing, or noticing that the lease is lost.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<LocalTime> {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain if self.in_flight => Some(self.trusted_until),
            LeaseState::Held | LeaseState::Uncertain => Some(self.renew_at.min(self.trusted_until)),
            LeaseState::Lost(_) | LeaseState::Released => None,
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
        let reserve = self.turn.as_ref().map_or(0, Turn::reserve);
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
            Reply::Renewed { lasts, tokens, wanted } => {
                self.renewed(sent_at, *lasts);
                if let Some(turn) = &mut self.turn {
                    turn.handle_renewed(now, sent_at, *tokens, *wanted);
                }
                if core::mem::take(&mut self.hinted) {
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
            if let Some(turn) = &mut self.turn {
                turn.handle_failure();
            }
            self.retry(now);
            if core::mem::take(&mut self.hinted) {
                // It failed over the way that was there before.
                self.renew_at = now;
            }
        }
    }

    /// A hint that the lease may be gone: ask at once.
    pub fn handle_hint(&mut self, now: LocalTime) {
        self.hinted = self.in_flight;
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

    /// The holder gives the lease back.
    pub fn handle_release(&mut self, now: LocalTime) {
        self.handle_timeout(now);
        if matches!(self.state, LeaseState::Held | LeaseState::Uncertain) {
            self.state = LeaseState::Released;
        }
    }

    fn renewed(&mut self, sent_at: LocalTime, lasts: Duration) {
        self.state = LeaseState::Held;
        let until = sent_at + lasts.saturating_sub(drift_margin(lasts));
        // An answer that overtook a later one never shortens the trust.
        self.trusted_until = self.trusted_until.max(until).min(self.ends_at);
        let is_last = !self.terms.renews || sent_at + lasts >= self.ends_at;
        self.renew_at = if is_last { LocalTime::NEVER } else { sent_at + lasts / 3 };
    }

    /// Tries again soon, and several times before the end.
    fn retry(&mut self, now: LocalTime) {
        let pause = self.trusted_until.since(now) / 8;
        self.renew_at = now + pause.max(RETRY_AT_LEAST);
    }

    fn ttl_from(&self, now: LocalTime) -> Duration {
        self.terms.ttl.min(self.ends_at.since(now)).max(self.outlives_until.since(now))
    }

    fn loss_by_time(&self) -> Loss {
        // The last renewal ends with the hold, and is trusted for a margin less than that.
        let is_over = self.trusted_until + drift_margin(self.terms.ttl) >= self.ends_at;
        if is_over { Loss::MaxHold } else { Loss::Expired }
    }
}

#[cfg(test)]
mod tests;
