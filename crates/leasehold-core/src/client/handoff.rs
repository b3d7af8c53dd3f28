//! One client's turn with a lease that its tasks hand on among themselves: with which tokens, and for how long.
//!
//! A turn has no end of its own while no other client waits. It knows neither the tasks nor whether the lease may still be
//! trusted: the former is the session's business, the latter the lease's.

use core::time::Duration;

use crate::time::LocalTime;
use crate::token::{Token, TokenRange};

/// How many tokens a renewal sets aside. At the fastest that tasks can hand on it suffices for some milliseconds, so that
/// the next ones come before these are gone, and tokens do not outrun the wall clock, which counts a million each second.
const RENEWAL_RESERVE: u32 = 8_192;

/// How long a client keeps a lease among its own tasks once another client waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandoffLimits {
    /// At most this many hand-overs.
    pub max_handoffs: u32,
    /// None later than this.
    pub max_duration: Duration,
}

/// What becomes of a lease whose task is done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoffDecision {
    /// The next task gets it, with this token.
    Next(Token),
    /// The next task gets it when a renewal that is under way has brought tokens.
    AwaitTokens,
    /// The turn is over: the lease goes back to the store.
    Release,
}

/// One client's turn with a lease.
#[derive(Clone, Debug)]
pub struct HandoffBudget {
    limits: HandoffLimits,
    /// The next token, and the last one of the same range.
    next: u64,
    last: u64,
    /// What a renewal has brought while there were others.
    spare: Option<TokenRange>,
    /// More tokens are being asked for.
    awaiting_tokens: bool,
    /// Since when another client waits, and how many hand-overs there were since.
    contended: Option<(LocalTime, u32)>,
}

impl HandoffBudget {
    /// A turn with these tokens, of which the first is the grant's own.
    #[must_use]
    pub const fn new(limits: HandoffLimits, tokens: TokenRange) -> Self {
        let (next, last) = (tokens.first.get() + 1, tokens.last.get());
        Self { limits, next, last, spare: None, awaiting_tokens: false, contended: None }
    }

    /// How many tokens an attempt sets aside for such a turn. Should nobody else want the lease, a renewal brings more.
    #[must_use]
    pub const fn initial_reserve(limits: HandoffLimits) -> u32 {
        if limits.max_handoffs < RENEWAL_RESERVE { limits.max_handoffs } else { RENEWAL_RESERVE }
    }

    /// The critical section that had the lease has ended, and another task waits for it.
    pub fn hand_off(&mut self, now: LocalTime) -> HandoffDecision {
        if let Some((since, max_handoffs)) = &mut self.contended {
            if *max_handoffs >= self.limits.max_handoffs || now >= *since + self.limits.max_duration {
                return HandoffDecision::Release;
            }
            *max_handoffs += 1;
        }
        let next = self.next_token();
        if self.contended.is_none() && self.spare.is_none() {
            let left = (self.last + 1).saturating_sub(self.next);
            self.awaiting_tokens |= left < u64::from(RENEWAL_RESERVE / 2);
        }
        match (next, self.awaiting_tokens) {
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

    /// How many tokens the next renewal is to set aside.
    #[must_use]
    pub const fn reserve(&self) -> u32 {
        if self.awaiting_tokens { RENEWAL_RESERVE } else { 0 }
    }

    /// Another client waits.
    pub fn handle_contended(&mut self, now: LocalTime) {
        self.contended.get_or_insert((now, 0));
    }

    /// The answer to a renewal that was sent at `sent_at`. It may be older than the word that another client waits.
    pub fn handle_renewed(
        &mut self,
        now: LocalTime,
        sent_at: LocalTime,
        tokens: Option<TokenRange>,
        is_contended: bool,
    ) {
        if is_contended {
            self.handle_contended(now);
        } else if self.contended.is_some_and(|(since, _)| since < sent_at) {
            self.contended = None;
        }
        if tokens.is_some() {
            self.spare = tokens;
            self.awaiting_tokens = false;
        }
    }

    /// No tokens are coming: what asked for them has failed.
    pub fn handle_failure(&mut self) {
        self.awaiting_tokens = false;
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
    fn tokens_rise_within_a_range_and_from_range_to_range() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 2));
        assert_eq!(token(budget.hand_off(at(0))), 12);
        assert_eq!(budget.reserve(), RENEWAL_RESERVE, "there are too few for long");
        budget.handle_renewed(at(1), at(0), Some(tokens(20, RENEWAL_RESERVE)), false);
        assert_eq!(token(budget.hand_off(at(1))), 13, "those at hand are used first");
        assert_eq!(token(budget.hand_off(at(1))), 21);
        assert_eq!(budget.reserve(), 0);
    }

    #[test]
    fn without_tokens_it_waits_for_the_renewal_that_brings_some_and_ends_if_it_fails() {
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
    fn it_has_no_end_while_no_other_client_waits() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 2));
        budget.handle_renewed(at(0), at(0), Some(tokens(20, 1_000)), false);
        for _ in 0..1_000 {
            token(budget.hand_off(at(60_000)));
        }
    }

    #[test]
    fn once_another_client_waits_it_ends_after_so_many_hand_overs() {
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
    fn once_another_client_waits_it_ends_after_so_long() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 100));
        budget.handle_contended(at(5));
        token(budget.hand_off(at(14)));
        assert_eq!(budget.hand_off(at(15)), HandoffDecision::Release);
    }

    #[test]
    fn only_a_renewal_that_was_sent_later_says_that_nobody_waits_any_more() {
        let mut budget = HandoffBudget::new(BOUND, tokens(10, 100));
        budget.handle_contended(at(5));
        budget.handle_renewed(at(6), at(4), None, false);
        assert_eq!(budget.clone().hand_off(at(15)), HandoffDecision::Release);
        budget.handle_renewed(at(8), at(7), None, false);
        token(budget.hand_off(at(15)));
    }
}
