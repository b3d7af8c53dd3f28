//! State machine of one held lease: when to renew it, and until when to trust it.
//!
//! It uses only the local clock. Each deadline counts from the time *before* the request was sent. A slow answer therefore
//! shortens the trust period, and the trust period ends even if there is no answer. (Gray and Cheriton, *Leases*, 1989,
//! section 3.)

use core::fmt;
use core::time::Duration;

use crate::client::handoff::{HandoffBudget, HandoffDecision};
use crate::client::hints::HintLimit;
use crate::command::{Command, Renew, Reply};
use crate::id::Acquisition;
use crate::model::CLAIM_WINDOW;
use crate::time::{LocalTime, drift_margin};
use crate::token::Token;

/// Max time to wait for the answer to a renewal that a task sends. Stores answer sooner, unless the task is not polled.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);

/// Min delay before a failed renewal is retried.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(10);

/// The caller's parameters of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// Lifetime without renewal.
    pub ttl: Duration,
    /// Renew automatically. A pushed lease is claimed by one renewal in any case.
    pub renews: bool,
    /// Max hold from the grant, even if renewals succeed.
    pub max_hold: Option<Duration>,
    /// Min lifetime in the store, from the grant, even if the holder dies.
    pub min_lifetime: Duration,
    /// Number of replicas that must acknowledge the grant and each renewal.
    pub replicas: u32,
}

/// State of a lease, as its holder sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Held; the last renewal succeeded.
    Held,
    /// Held by the local clock, but the last renewal failed.
    Uncertain,
    /// Lost.
    Lost(Loss),
}

/// Why a lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// It expired by the local clock before a renewal succeeded.
    Expired,
    /// The store no longer has the lease: it was revoked, expired there, or the store lost it.
    Gone,
    /// The max hold is over.
    MaxHold,
    /// The client was closed, which released the lease.
    Closed,
    /// The lock of another library that the lease is bridged to was lost: its key expired, was deleted, or has another holder.
    Bridge,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "it expired before a renewal succeeded",
            Self::Gone => "the store no longer has it: it was revoked or expired there",
            Self::MaxHold => "its maximum hold is over",
            Self::Closed => "the client was closed",
            Self::Bridge => {
                "the other library's lock that it is bridged to expired, was deleted or was taken over"
            }
        })
    }
}

/// What a renewal is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// To extend the lease.
    Extend,
    /// To see whether the store still has the lease, and to change nothing: pushes of strangers must not extend a lease that is not
    /// renewed, and a look that arrives late must not shorten one that the caller has renewed since.
    Look,
}

/// State machine of one held lease.
#[derive(Clone, Debug)]
pub struct LeaseMachine {
    acquisition: Acquisition,
    terms: LeaseTerms,
    state: LeaseState,
    /// End of the trust period, by the local clock.
    trusted_until: LocalTime,
    /// End of the max hold.
    hold_ends_at: LocalTime,
    /// No renewal shortens the lease to before this.
    min_lifetime_until: LocalTime,
    /// No renewal is trusted for longer, and the next one follows in a third of that.
    longest_trust: Duration,
    /// Only the lease with this token is renewed.
    token: Option<Token>,
    renew_at: LocalTime,
    /// A push asked for a look then.
    look_at: LocalTime,
    /// Limits the looks that pushes cause.
    hints: HintLimit,
    /// A renewal is in flight; it counts as lost from then on. The answer to an older one counts as well.
    in_flight: Option<(Purpose, LocalTime)>,
    /// A hint arrived during a renewal whose answer may be older than the hint. Another renewal is to be sent.
    recheck_pending: bool,
    /// Set for a lease that the client's tasks hand off among themselves.
    handoff: Option<HandoffBudget>,
}

impl LeaseMachine {
    /// Creates a lease that was granted at `granted_at` by the local clock: the send time of the request, or the receive
    /// time of the push. It is trusted until `trusted_until`, and ends after `valid_for` without a renewal. A waiter's lease is
    /// renewed once in any case, which claims it.
    #[must_use]
    pub fn new(
        acquisition: Acquisition,
        terms: LeaseTerms,
        granted_at: LocalTime,
        valid_for: Duration,
        trusted_until: LocalTime,
        has_waited: bool,
    ) -> Self {
        let hold_ends_at = terms.max_hold.map_or(LocalTime::NEVER, |hold| granted_at + hold);
        let needs_claim = valid_for <= CLAIM_WINDOW && has_waited;
        let renew_at =
            if terms.renews || needs_claim { granted_at + valid_for / 3 } else { LocalTime::NEVER };
        Self {
            acquisition,
            terms,
            state: LeaseState::Held,
            trusted_until: trusted_until.min(hold_ends_at),
            hold_ends_at,
            min_lifetime_until: granted_at + terms.min_lifetime,
            longest_trust: Duration::MAX,
            token: None,
            renew_at,
            look_at: LocalTime::NEVER,
            hints: HintLimit::default(),
            in_flight: None,
            recheck_pending: false,
            handoff: None,
        }
    }

    /// Enables local hand-offs.
    #[must_use]
    pub fn with_handoff_budget(mut self, handoff: HandoffBudget) -> Self {
        self.handoff = Some(handoff);
        self
    }

    /// Limits the trust in each renewal, for a lease that may last longer than was asked for.
    #[must_use]
    pub fn with_longest_trust(mut self, longest_trust: Duration) -> Self {
        self.longest_trust = longest_trust;
        self
    }

    /// The attempt is a request: after its lease has ended, another client may be granted it anew, with another token.
    #[must_use]
    pub fn of_request(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// The token of the lease of a request.
    #[must_use]
    pub fn request_token(&self) -> Option<Token> {
        self.token
    }

    /// Decides what to do after one task has finished while another waits. Only a healthy lease with time left is handed
    /// off.
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

    /// Records that another client waits.
    pub fn handle_contended(&mut self, now: LocalTime) {
        if let Some(handoff) = &mut self.handoff {
            handoff.handle_contended(now);
        }
    }

    /// The granted attempt.
    #[must_use]
    pub const fn acquisition(&self) -> Acquisition {
        self.acquisition
    }

    /// End of the max hold; `NEVER` without one.
    #[must_use]
    pub const fn hold_ends_at(&self) -> LocalTime {
        self.hold_ends_at
    }

    /// Caps the hold at the end of an earlier lease that this one continues.
    pub fn end_by(&mut self, hold_ends_at: LocalTime) {
        self.hold_ends_at = self.hold_ends_at.min(hold_ends_at);
        self.trusted_until = self.trusted_until.min(hold_ends_at);
    }

    /// The state at `now`. Expiry needs no event.
    #[must_use]
    pub fn state(&self, now: LocalTime) -> LeaseState {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain if now >= self.trusted_until => {
                LeaseState::Lost(self.loss_by_time())
            }
            state => state,
        }
    }

    /// Remaining trust period; zero when the lease is lost.
    #[must_use]
    pub fn remaining(&self, now: LocalTime) -> Duration {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain => self.trusted_until.since(now),
            LeaseState::Lost(_) => Duration::ZERO,
        }
    }

    /// Time of the next action: a renewal, or the detection of the loss.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<LocalTime> {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain => {
                let next = self.in_flight.map_or_else(|| self.next_renewal(), |(_, until)| until);
                Some(next.min(self.trusted_until))
            }
            LeaseState::Lost(_) => None,
        }
    }

    /// Whether a renewal is in flight.
    #[must_use]
    pub const fn is_renewing(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Whether every renewal that was asked for has been answered, or has failed.
    #[must_use]
    pub const fn is_confirmed(&self) -> bool {
        !self.is_renewing() && !self.recheck_pending
    }

    /// Time of the next renewal; none while one is in flight or if no more will be sent.
    #[must_use]
    pub fn poll_renewal(&self) -> Option<LocalTime> {
        match self.state {
            LeaseState::Held | LeaseState::Uncertain if self.in_flight.is_none() => {
                Some(self.next_renewal()).filter(|time| *time < self.trusted_until)
            }
            _ => None,
        }
    }

    /// The renewal to send now, if one is due. The caller reports its result.
    pub fn poll_transmit(&mut self, now: LocalTime) -> Option<Command> {
        self.handle_timeout(now);
        let is_live = matches!(self.state, LeaseState::Held | LeaseState::Uncertain);
        if !is_live || self.in_flight.is_some() || now < self.next_renewal() {
            return None;
        }
        // A lease that is renewed, or has to be claimed, is extended instead.
        let purpose = if self.terms.renews || self.renew_at != LocalTime::NEVER {
            Purpose::Extend
        } else {
            Purpose::Look
        };
        self.in_flight = Some((purpose, LocalTime::NEVER));
        self.recheck_pending = false;
        self.look_at = LocalTime::NEVER;
        self.hints.handle_sent(now);
        let ttl = match purpose {
            Purpose::Extend => self.ttl_from(now),
            Purpose::Look => Duration::ZERO,
        };
        if purpose == Purpose::Extend {
            // Near the end of the max hold a renewal shortens the lease in the store, whether or not it is answered.
            self.trusted_until = self.trusted_until.min(now + ttl.saturating_sub(drift_margin(ttl)));
        }
        let reserve = self.handoff.as_ref().map_or(0, HandoffBudget::reserve);
        Some(Command::Renew(Renew { reserve, token: self.token, ..Renew::to(self.acquisition, ttl) }))
    }

    /// The renewal that was sent now is answered only while its task is polled. Without an answer it counts as failed in time for
    /// others, unless the lease is renewed by tasks alone.
    pub fn limit_answer(&mut self, now: LocalTime) {
        if self.terms.renews && self.is_renewing() {
            let until = now + ANSWER_TIMEOUT.min(self.trusted_until.since(now) / 2);
            self.in_flight = self.in_flight.map(|(purpose, _)| (purpose, until));
        }
    }

    /// Updates the state to `now`.
    pub fn handle_timeout(&mut self, now: LocalTime) {
        if self.in_flight.is_some_and(|(_, until)| now >= until) {
            self.handle_failure(now);
        }
        self.state = self.state(now);
    }

    /// Handles the answer to a renewal sent at `sent_at`.
    pub fn handle_reply(&mut self, now: LocalTime, sent_at: LocalTime, reply: &Reply) {
        let purpose = self.in_flight.take().map_or(Purpose::Extend, |(purpose, _)| purpose);
        self.handle_timeout(now);
        if !matches!(self.state, LeaseState::Held | LeaseState::Uncertain) {
            return;
        }
        match reply {
            Reply::Renewed { valid_for, tokens, contended } => {
                match purpose {
                    Purpose::Extend => self.apply_renewal(sent_at, *valid_for),
                    Purpose::Look => self.state = LeaseState::Held,
                }
                if let Some(handoff) = &mut self.handoff {
                    handoff.handle_renewed(now, sent_at, *tokens, *contended);
                }
                if self.recheck_pending {
                    self.renew_at = now;
                }
            }
            Reply::NotHeld => self.state = LeaseState::Lost(Loss::Gone),
            _ => self.retry(now, purpose),
        }
        self.handle_timeout(now);
    }

    /// Handles a renewal that failed or whose outcome is unknown.
    pub fn handle_failure(&mut self, now: LocalTime) {
        let purpose = self.in_flight.take().map_or(Purpose::Extend, |(purpose, _)| purpose);
        self.handle_timeout(now);
        if matches!(self.state, LeaseState::Held | LeaseState::Uncertain) {
            self.state = LeaseState::Uncertain;
            if let Some(handoff) = &mut self.handoff {
                handoff.handle_failure();
            }
            self.retry(now, purpose);
            if self.recheck_pending {
                // It failed on the old connection.
                self.renew_at = now;
            }
        }
    }

    /// Handles a push that says that the lease may be gone. Anybody may have sent it: the store's answer decides, and the store is
    /// asked at most once a second.
    pub fn handle_pushed_hint(&mut self, now: LocalTime) {
        self.look_at = self.look_at.min(self.hints.due(now));
    }

    /// Schedules a renewal at once.
    pub fn handle_hint(&mut self, now: LocalTime) {
        self.recheck_pending |= self.is_renewing();
        self.renew_at = self.renew_at.min(now);
    }

    /// Handles a reconnect. With automatic renewal, schedules a renewal at once. Without it, a renewal in flight is repeated
    /// only if it fails. Otherwise repeated reconnects would extend the lease without limit.
    pub fn handle_reconnected(&mut self, now: LocalTime) {
        let is_due = self.renew_at != LocalTime::NEVER && !self.is_renewing();
        if self.terms.renews || is_due {
            self.handle_hint(now);
        }
    }

    fn apply_renewal(&mut self, sent_at: LocalTime, valid_for: Duration) {
        self.state = LeaseState::Held;
        let valid_for = valid_for.min(self.longest_trust);
        let until = sent_at + valid_for.saturating_sub(drift_margin(valid_for));
        // A reordered older answer never shortens the trust period.
        self.trusted_until = self.trusted_until.max(until).min(self.hold_ends_at);
        let is_last = !self.terms.renews || sent_at + valid_for >= self.hold_ends_at;
        self.renew_at = if is_last { LocalTime::NEVER } else { sent_at + valid_for / 3 };
    }

    /// Schedules a retry, several times before the expiry.
    fn retry(&mut self, now: LocalTime, purpose: Purpose) {
        let pause = self.trusted_until.since(now) / 8;
        let at = now + pause.max(MIN_RETRY_DELAY);
        match purpose {
            Purpose::Extend => self.renew_at = at,
            Purpose::Look => self.look_at = self.look_at.min(at),
        }
    }

    fn next_renewal(&self) -> LocalTime {
        self.renew_at.min(self.look_at)
    }

    fn ttl_from(&self, now: LocalTime) -> Duration {
        self.terms.ttl.min(self.hold_ends_at.since(now)).max(self.min_lifetime_until.since(now))
    }

    fn loss_by_time(&self) -> Loss {
        // The last renewal is capped at the max hold, and trusted for a margin less.
        let is_over = self.trusted_until + drift_margin(self.terms.ttl) >= self.hold_ends_at;
        if is_over { Loss::MaxHold } else { Loss::Expired }
    }
}

#[cfg(test)]
mod tests;
