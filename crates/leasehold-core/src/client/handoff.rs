//! Budget for local hand-offs: how many times, and with which tokens, one client's tasks may pass a lease on.
//!
//! The budget is unlimited while no other client waits. It does not track tasks (the session does) or trust in the lease
//! (`LeaseMachine` does).

use core::time::Duration;

use crate::time::LocalTime;
use crate::token::{Token, TokenRange};

/// Tokens that a renewal reserves. At the maximum hand-off rate they last some milliseconds, long enough to fetch more,
/// and tokens do not outrun the wall clock, which advances by at least a million tokens a second.
const RENEWAL_RESERVE: u32 = 8_192;

/// Limits of local hand-offs once another client waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandoffLimits {
    /// Max number of hand-offs.
    pub max_handoffs: u32,
    /// Max time from the detection of contention to the last hand-off.
    pub max_duration: Duration,
}

/// What to do with a lease whose task has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoffDecision {
    /// Hand it to the next task, with this token.
    Next(Token),
    /// Hand it to the next task once a renewal has fetched tokens.
    AwaitTokens,
    /// Release it to the store.
    Release,
}

/// Local hand-off budget of one lease.
#[derive(Clone, Debug)]
pub struct HandoffBudget {
    limits: HandoffLimits,
    /// The next token, and the last one of the same range.
    next: u64,
    last: u64,
    /// A range that a renewal fetched while the current one was not used up.
    spare: Option<TokenRange>,
    /// Since when renewals request tokens.
    awaiting_tokens: Option<LocalTime>,
    /// The store had no tokens for a renewal that requested some: no other is sent for them.
    has_none: bool,
    /// Since when another client waits, and the hand-offs since then.
    contended: Option<(LocalTime, u32)>,
    /// When the store last said so. An answer to a renewal that was sent before is older.
    contended_at: LocalTime,
}

impl HandoffBudget {
    /// A budget with these tokens; the first is the grant's own.
    #[must_use]
    pub const fn new(limits: HandoffLimits, tokens: TokenRange) -> Self {
        let (next, last) = (tokens.first.get() + 1, tokens.last.get());
        Self {
            limits,
            next,
            last,
            spare: None,
            awaiting_tokens: None,
            has_none: false,
            contended: None,
            contended_at: LocalTime::ZERO,
        }
    }

    /// Tokens that the acquire reserves. While uncontended, renewals fetch more.
    #[must_use]
    pub const fn initial_reserve(limits: HandoffLimits) -> u32 {
        if limits.max_handoffs < RENEWAL_RESERVE { limits.max_handoffs } else { RENEWAL_RESERVE }
    }

    /// Decides what to do after a critical section while another local task waits.
    pub fn hand_off(&mut self, now: LocalTime) -> HandoffDecision {
        if let Some((since, handoffs)) = &mut self.contended {
            if *handoffs >= self.limits.max_handoffs || now >= *since + self.limits.max_duration {
                return HandoffDecision::Release;
            }
            *handoffs += 1;
        }
        let next = self.next_token();
        if self.contended.is_none() && self.spare.is_none() && !self.has_none {
            let left = (self.last + 1).saturating_sub(self.next);
            if left < u64::from(RENEWAL_RESERVE / 2) {
                self.awaiting_tokens.get_or_insert(now);
            }
        }
        match (next, self.awaiting_tokens.is_some()) {
            (Some(token), _) => HandoffDecision::Next(token),
            (None, true) => HandoffDecision::AwaitTokens,
            (None, false) => HandoffDecision::Release,
        }
    }

    fn next_token(&mut self) -> Option<Token> {
        if self.next > self.last
            && let Some(spare) = self.spare.take()
        {
            (self.next, self.last) = (spare.first.get(), spare.last.get());
        }
        let token = Token::new(self.next).filter(|_| self.next <= self.last)?;
        self.next += 1;
        Some(token)
    }

    /// Number of tokens that the next renewal must reserve.
    #[must_use]
    pub const fn reserve(&self) -> u32 {
        if self.awaiting_tokens.is_some() { RENEWAL_RESERVE } else { 0 }
    }

    /// Records that another client waits.
    pub fn handle_contended(&mut self, now: LocalTime) {
        self.contended.get_or_insert((now, 0));
        self.contended_at = now;
    }

    /// Handles the answer to a renewal that was sent at `sent_at`. The answer may be older than a contention
    /// push.
    pub fn handle_renewed(
        &mut self,
        now: LocalTime,
        sent_at: LocalTime,
        tokens: Option<TokenRange>,
        is_contended: bool,
    ) {
        if is_contended {
            self.handle_contended(now);
        } else if self.contended_at < sent_at {
            self.contended = None;
        }
        // A renewal that requested tokens brings some, or the store has none to give.
        let has_requested = self.awaiting_tokens.is_some_and(|since| since <= sent_at);
        if tokens.is_some() || has_requested {
            self.awaiting_tokens = None;
            self.has_none = tokens.is_none();
        }
        if let Some(tokens) = tokens {
            // A late answer to an older renewal may have lower tokens than those of a newer one.
            let last = self.spare.map_or(self.last, |spare| spare.last.get());
            if tokens.first.get() > last {
                self.spare = Some(tokens);
            }
        }
    }

    /// Handles a failed renewal: it returns no tokens.
    pub fn handle_failure(&mut self) {
        self.awaiting_tokens = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::StoreTime;

    const BOUND: HandoffLimits = HandoffLimits { max_handoffs: 3, max_duration: Duration::from_millis(10) };

    fn at(ms: u64) -> LocalTime {
        LocalTime::ZERO + Duration::from_millis(ms)
    }

    fn tokens(after: u64, reserve: u32) -> TokenRange {
        TokenRange::next(after, reserve, StoreTime::ZERO)
    }

    fn token(on: HandoffDecision) -> u64 {
        let HandoffDecision::Next(token) = on else { panic!("{on:?}") };
        token.get()
    }

    #[test]
    fn tokens_rise_within_and_across_ranges() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 2));
        assert_eq!(token(budget.hand_off(at(0))), 12);
        assert_eq!(budget.reserve(), RENEWAL_RESERVE, "there are too few for long");
        budget.handle_renewed(at(1), at(0), Some(tokens(20, RENEWAL_RESERVE)), false);
        assert_eq!(token(budget.hand_off(at(1))), 13, "those at hand are used first");
        assert_eq!(token(budget.hand_off(at(1))), 21);
        assert_eq!(budget.reserve(), 0);
    }

    #[test]
    fn handoff_without_tokens_awaits_a_renewal_and_releases_on_failure() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 0));
        assert_eq!(budget.hand_off(at(0)), HandoffDecision::AwaitTokens);
        assert_eq!(budget.reserve(), RENEWAL_RESERVE);
        let mut failing = budget.clone();
        budget.handle_renewed(at(1), at(0), Some(tokens(20, RENEWAL_RESERVE)), false);
        assert_eq!(token(budget.hand_off(at(1))), 21);
        failing.handle_contended(at(1));
        failing.handle_failure();
        assert_eq!(failing.hand_off(at(1)), HandoffDecision::Release);
    }

    #[test]
    fn handoff_releases_when_a_renewal_that_requested_tokens_brings_none() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 0));
        assert_eq!(budget.hand_off(at(1)), HandoffDecision::AwaitTokens);
        budget.handle_renewed(at(2), at(0), None, false);
        assert_eq!(budget.reserve(), RENEWAL_RESERVE, "an older renewal has requested none");
        for is_contended in [true, false] {
            let mut budget = budget.clone();
            budget.handle_renewed(at(2), at(1), None, is_contended);
            assert_eq!(budget.hand_off(at(2)), HandoffDecision::Release, "contended: {is_contended}");
            assert_eq!(budget.reserve(), 0);
        }
    }

    #[test]
    fn tokens_are_requested_again_once_the_store_has_given_some() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 2));
        token(budget.hand_off(at(1)));
        budget.handle_renewed(at(2), at(1), None, false);
        token(budget.hand_off(at(3)));
        assert_eq!(budget.reserve(), 0);
        budget.handle_renewed(at(4), at(3), Some(tokens(20, 1)), false);
        assert_eq!([(); 2].map(|()| token(budget.hand_off(at(5)))), [21, 22]);
        assert_eq!(budget.reserve(), RENEWAL_RESERVE);
    }

    #[test]
    fn handoff_is_unlimited_while_uncontended() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 2));
        budget.handle_renewed(at(0), at(0), Some(tokens(20, 1_000)), false);
        for _ in 0..1_000 {
            token(budget.hand_off(at(60_000)));
        }
    }

    #[test]
    fn contended_handoff_stops_after_max_handoffs() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 100));
        budget.handle_contended(at(5));
        for _ in 0..3 {
            budget.handle_contended(at(6));
            token(budget.hand_off(at(6)));
        }
        assert_eq!(budget.hand_off(at(6)), HandoffDecision::Release);
        assert_eq!(budget.reserve(), 0, "there is nothing to keep tokens for");
    }

    #[test]
    fn contended_handoff_stops_after_max_duration() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 100));
        budget.handle_contended(at(5));
        token(budget.hand_off(at(14)));
        assert_eq!(budget.hand_off(at(15)), HandoffDecision::Release);
    }

    #[test]
    fn only_a_later_renewal_clears_contention() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 100));
        budget.handle_contended(at(5));
        budget.handle_renewed(at(6), at(4), None, false);
        assert_eq!(budget.clone().hand_off(at(15)), HandoffDecision::Release);
        budget.handle_renewed(at(8), at(7), None, false);
        token(budget.hand_off(at(15)));
    }

    #[test]
    fn renewal_sent_when_contention_was_detected_does_not_clear_it() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 100));
        budget.handle_contended(at(5));
        budget.handle_renewed(at(6), at(5), None, false);
        assert_eq!(budget.hand_off(at(15)), HandoffDecision::Release);
    }

    #[test]
    fn renewal_sent_before_the_last_notice_does_not_clear_contention() {
        for (sent_at, is_contended) in [(6, true), (7, true), (8, false)] {
            let mut budget = HandoffBudget::new(BOUND, tokens(10, 100));
            budget.handle_contended(at(5));
            budget.handle_contended(at(7));
            budget.handle_renewed(at(9), at(sent_at), None, false);
            assert_eq!(budget.hand_off(at(15)) == HandoffDecision::Release, is_contended, "{sent_at}");
        }
    }

    #[test]
    fn tokens_are_requested_when_fewer_than_half_of_a_renewals_are_left() {
        let half = RENEWAL_RESERVE / 2;
        let mut budget = HandoffBudget::new(BOUND, tokens(10, half + 1));
        token(budget.hand_off(at(0)));
        assert_eq!(budget.reserve(), 0, "half of them are left");
        token(budget.hand_off(at(0)));
        assert_eq!(budget.reserve(), RENEWAL_RESERVE);
    }

    #[test]
    fn acquire_reserves_a_token_per_handoff_but_no_more_than_a_renewal() {
        for (max_handoffs, reserve) in
            [(0, 0), (1, 1), (3, 3), (8_191, 8_191), (8_192, 8_192), (8_193, 8_192)]
        {
            let limits = HandoffLimits { max_handoffs, ..BOUND };
            assert_eq!(HandoffBudget::initial_reserve(limits), reserve);
        }
    }

    #[test]
    fn tokens_of_a_late_answer_to_an_older_renewal_are_not_used() {
        let range =
            |first, last| TokenRange { first: Token::new(first).unwrap(), last: Token::new(last).unwrap() };
        let mut budget = HandoffBudget::new(BOUND, range(1, 2));
        budget.handle_renewed(at(2), at(1), Some(range(20, 21)), false);
        budget.handle_renewed(at(3), at(0), Some(range(10, 11)), false);
        assert_eq!([(); 3].map(|()| token(budget.hand_off(at(4)))), [2, 20, 21]);
        budget.handle_renewed(at(5), at(0), Some(range(10, 11)), false);
        assert!(!matches!(budget.hand_off(at(5)), HandoffDecision::Next(_)));
    }
}
