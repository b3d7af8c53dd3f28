//! The client's side of one held lease: when to renew it, and when to stop believing in it.
//!
//! It trusts nothing but its own clock. Each deadline counts from *before* the request was sent, so a slow
//! answer can only shorten the trust, and it passes by itself, with no answer needed. (Gray and Cheriton,
//! *Leases*, 1989, section 3.)

use core::fmt;
use core::time::Duration;

use crate::command::{Command, Renew, Reply};
use crate::id::Acquisition;
use crate::model::CLAIM_WINDOW;
use crate::time::{LocalTime, drift_margin};
use crate::turn::{HandOn, Turn};

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
    pub longest_hold: Option<Duration>,
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
    LongestHold,
    /// The client was closed, which gave it back.
    Closed,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "it ran out before a renewal succeeded",
            Self::Gone => "the store says that it is gone: it was taken away, or expired there",
            Self::LongestHold => "its longest hold is over",
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
        let ends_at = terms.longest_hold.map_or(LocalTime::NEVER, |hold| granted_at + hold);
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
        }
    }

    /// A hint that the lease may be gone, or that the connection is new: ask at once.
    pub fn handle_hint(&mut self, now: LocalTime) {
        self.hinted = self.in_flight;
        self.renew_at = self.renew_at.min(now);
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
        if is_over { Loss::LongestHold } else { Loss::Expired }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ClientId;
    use crate::time::StoreTime;
    use crate::token::TokenRange;
    use crate::turn::HandOff;

    const TTL: Duration = Duration::from_secs(9);

    fn at(ms: u64) -> LocalTime {
        LocalTime::ZERO + Duration::from_millis(ms)
    }

    fn lease(terms: LeaseTerms, lasts: Duration) -> LeaseMachine {
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        LeaseMachine::new(acquisition, terms, at(0), lasts, at(0) + (lasts - drift_margin(lasts)))
    }

    fn terms() -> LeaseTerms {
        LeaseTerms { ttl: TTL, renews: true, longest_hold: None, outlives: Duration::ZERO, replicas: 0 }
    }

    fn renewed(lasts: Duration) -> Reply {
        Reply::Renewed { lasts, tokens: None, wanted: false }
    }

    #[test]
    fn it_renews_at_a_third_and_trusts_from_before_the_request_was_sent() {
        let mut lease = lease(terms(), TTL);
        assert_eq!(lease.poll_timeout(), Some(at(3_000)));
        assert_eq!(lease.poll_transmit(at(2_999)), None);
        assert!(lease.poll_transmit(at(3_000)).is_some());
        assert_eq!(lease.poll_transmit(at(3_001)), None, "one renewal is under way");
        lease.handle_reply(at(3_500), at(3_000), &renewed(TTL));
        assert_eq!(lease.remaining(at(3_500)), Duration::from_millis(9_000 - 92 - 500));
        assert_eq!(lease.poll_timeout(), Some(at(6_000)));
    }

    #[test]
    fn it_is_lost_by_the_clock_alone() {
        let lease = lease(terms(), TTL);
        assert_eq!(lease.state(at(8_907)), LeaseState::Held);
        assert_eq!(lease.state(at(8_908)), LeaseState::Lost(Loss::Expired));
        assert_eq!(lease.remaining(at(8_908)), Duration::ZERO);
    }

    #[test]
    fn it_is_lost_by_the_clock_while_a_renewal_is_never_answered() {
        let mut lease = lease(terms(), TTL);
        assert!(lease.poll_transmit(at(3_000)).is_some());
        assert_eq!(lease.poll_timeout(), Some(at(8_908)));
        lease.handle_timeout(at(8_908));
        lease.handle_reply(at(8_909), at(3_000), &renewed(TTL));
        assert_eq!(lease.state(at(8_910)), LeaseState::Lost(Loss::Expired), "what is lost stays lost");
    }

    #[test]
    fn a_failed_renewal_makes_it_uncertain_and_a_later_one_certain_again() {
        let mut lease = lease(terms(), TTL);
        assert!(lease.poll_transmit(at(3_000)).is_some());
        lease.handle_failure(at(3_100));
        assert_eq!(lease.state(at(3_100)), LeaseState::Uncertain);
        let again = lease.poll_timeout().unwrap();
        assert!(again > at(3_100) && again < at(4_000));
        assert!(lease.poll_transmit(again).is_some());
        lease.handle_reply(again, again, &renewed(TTL));
        assert_eq!(lease.state(again), LeaseState::Held);
    }

    #[test]
    fn retries_go_on_until_the_end_without_flooding() {
        let mut lease = lease(terms(), TTL);
        let mut sent = 0;
        while let Some(now) = lease.poll_timeout() {
            if lease.poll_transmit(now).is_some() {
                sent += 1;
                lease.handle_failure(now);
            }
        }
        assert_eq!(lease.state, LeaseState::Lost(Loss::Expired));
        assert!((10..100).contains(&sent), "{sent} renewals were tried");
    }

    #[test]
    fn the_store_s_word_that_it_is_gone_ends_it_at_once() {
        let mut lease = lease(terms(), TTL);
        lease.handle_hint(at(10));
        assert!(lease.poll_transmit(at(10)).is_some());
        lease.handle_reply(at(11), at(10), &Reply::NotHeld);
        assert_eq!(lease.state(at(11)), LeaseState::Lost(Loss::Gone));
        assert_eq!(lease.poll_timeout(), None);
    }

    #[test]
    fn a_hint_that_overtakes_the_answer_to_a_renewal_makes_it_ask_once_more() {
        let mut lease = lease(terms(), TTL);
        assert!(lease.poll_transmit(at(3_000)).is_some());
        lease.handle_hint(at(3_001));
        lease.handle_reply(at(3_002), at(3_000), &renewed(TTL));
        assert!(lease.poll_transmit(at(3_002)).is_some());
        lease.handle_reply(at(3_003), at(3_002), &Reply::NotHeld);
        assert_eq!(lease.state(at(3_003)), LeaseState::Lost(Loss::Gone));
    }

    #[test]
    fn a_pushed_lease_is_claimed_once_even_with_renewal_off() {
        let mut lease = lease(LeaseTerms { renews: false, ..terms() }, Duration::from_secs(3));
        assert_eq!(lease.poll_timeout(), Some(at(1_000)));
        assert!(lease.poll_transmit(at(1_000)).is_some());
        lease.handle_reply(at(1_001), at(1_000), &renewed(TTL));
        assert_eq!(lease.poll_timeout(), Some(at(1_000 + 9_000 - 92)), "nothing but the end is left");
    }

    #[test]
    fn a_lease_that_outlives_its_holder_is_never_renewed_to_end_earlier() {
        let outlives = Duration::from_secs(60);
        let mut lease = lease(LeaseTerms { outlives, ..terms() }, outlives);
        let mut ends_at = at(60_000);
        while ends_at < at(100_000) {
            let now = lease.poll_timeout().unwrap();
            let Some(Command::Renew(renew)) = lease.poll_transmit(now) else { panic!() };
            assert!(now + renew.ttl >= ends_at && renew.ttl >= TTL);
            ends_at = now + renew.ttl;
            lease.handle_reply(now, now, &renewed(renew.ttl));
        }
        assert_eq!(lease.state(at(95_000)), LeaseState::Held);
    }

    #[test]
    fn the_longest_hold_caps_the_last_renewal_and_ends_it() {
        let hold = Some(Duration::from_secs(10));
        let mut lease = lease(LeaseTerms { longest_hold: hold, ..terms() }, TTL);
        let Some(Command::Renew(renew)) = lease.poll_transmit(at(3_000)) else { panic!() };
        assert_eq!(renew.ttl, Duration::from_secs(7));
        lease.handle_reply(at(3_000), at(3_000), &renewed(renew.ttl));
        assert_eq!(lease.renew_at, LocalTime::NEVER);
        let end = lease.poll_timeout().unwrap();
        assert!(end <= at(10_000));
        assert_eq!(lease.state(end), LeaseState::Lost(Loss::LongestHold));
    }

    #[test]
    fn it_is_handed_on_only_while_it_is_well_and_asks_for_tokens_before_they_are_gone() {
        let bound = HandOff { hand_overs: 9, span: TTL };
        let tokens = TokenRange::next(0, 5, StoreTime::ZERO);
        let mut lease = lease(terms(), TTL).with_turn(Turn::new(bound, tokens));
        assert!(matches!(lease.hand_on(at(1)), HandOn::Next(token) if token.get() == 2));
        let Some(Command::Renew(renewal)) = lease.poll_transmit(at(1)) else { panic!("{lease:?}") };
        assert!(renewal.reserve > 0);
        lease.handle_failure(at(2));
        assert_eq!(lease.hand_on(at(2)), HandOn::Over, "nobody knows how long the lease lasts");
        lease.handle_reply(at(4), at(3), &renewed(TTL));
        assert!(matches!(lease.hand_on(at(4)), HandOn::Next(token) if token.get() == 3));
        assert!(matches!(lease.hand_on(at(8_000)), HandOn::Next(_)));
        assert_eq!(lease.hand_on(at(8_500)), HandOn::Over, "too little is left of it");
    }
}
