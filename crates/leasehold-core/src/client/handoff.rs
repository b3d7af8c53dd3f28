//! One client's turn with a lease that its tasks hand on among themselves: with which tokens, and for how long.
//!
//! A turn has no end of its own while no other client waits. It knows neither the tasks nor whether the lease may still be
//! trusted: the former is the session's business, the latter the lease's.

use core::time::Duration;

use crate::time::LocalTime;
use crate::token::{Token, TokenRange};

/// How many tokens a renewal sets aside. At the fastest that tasks can hand on it suffices for some milliseconds, so that
/// the next ones come before these are gone, and tokens do not outrun the wall clock, which counts a million each second.
const RESERVE: u32 = 8_192;

/// How long a client keeps a lease among its own tasks once another client waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandOff {
    /// At most this many hand-overs.
    pub hand_overs: u32,
    /// None later than this.
    pub span: Duration,
}

/// What becomes of a lease whose task is done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOn {
    /// The next task gets it, with this token.
    Next(Token),
    /// The next task gets it when a renewal that is under way has brought tokens.
    Soon,
    /// The turn is over: the lease goes back to the store.
    Over,
}

/// One client's turn with a lease.
#[derive(Clone, Debug)]
pub struct Turn {
    bound: HandOff,
    /// The next token, and the last one of the same range.
    next: u64,
    last: u64,
    /// What a renewal has brought while there were others.
    spare: Option<TokenRange>,
    /// More tokens are being asked for.
    is_asking: bool,
    /// Since when another client waits, and how many hand-overs there were since.
    wanted: Option<(LocalTime, u32)>,
}

impl Turn {
    /// A turn with these tokens, of which the first is the grant's own.
    #[must_use]
    pub const fn new(bound: HandOff, tokens: TokenRange) -> Self {
        let (next, last) = (tokens.first.get() + 1, tokens.last.get());
        Self { bound, next, last, spare: None, is_asking: false, wanted: None }
    }

    /// How many tokens an attempt sets aside for such a turn. Should nobody else want the lease, a renewal brings more.
    #[must_use]
    pub const fn reserve_at_first(bound: HandOff) -> u32 {
        if bound.hand_overs < RESERVE { bound.hand_overs } else { RESERVE }
    }

    /// The critical section that had the lease has ended, and another task waits for it.
    pub fn hand_on(&mut self, now: LocalTime) -> HandOn {
        if let Some((since, hand_overs)) = &mut self.wanted {
            if *hand_overs >= self.bound.hand_overs || now >= *since + self.bound.span {
                return HandOn::Over;
            }
            *hand_overs += 1;
        }
        let next = self.next_token();
        if self.wanted.is_none() && self.spare.is_none() {
            let left = (self.last + 1).saturating_sub(self.next);
            self.is_asking |= left < u64::from(RESERVE / 2);
        }
        match (next, self.is_asking) {
            (Some(token), _) => HandOn::Next(token),
            (None, true) => HandOn::Soon,
            (None, false) => HandOn::Over,
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
        if self.is_asking { RESERVE } else { 0 }
    }

    /// Another client waits.
    pub fn handle_wanted(&mut self, now: LocalTime) {
        self.wanted.get_or_insert((now, 0));
    }

    /// The answer to a renewal that was sent at `sent_at`. It may be older than the word that another client waits.
    pub fn handle_renewed(
        &mut self,
        now: LocalTime,
        sent_at: LocalTime,
        tokens: Option<TokenRange>,
        is_wanted: bool,
    ) {
        if is_wanted {
            self.handle_wanted(now);
        } else if self.wanted.is_some_and(|(since, _)| since < sent_at) {
            self.wanted = None;
        }
        if tokens.is_some() {
            self.spare = tokens;
            self.is_asking = false;
        }
    }

    /// No tokens are coming: what asked for them has failed.
    pub fn handle_failure(&mut self) {
        self.is_asking = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::StoreTime;

    const BOUND: HandOff = HandOff { hand_overs: 3, span: Duration::from_millis(10) };

    fn at(ms: u64) -> LocalTime {
        LocalTime::ZERO + Duration::from_millis(ms)
    }

    fn tokens(after: u64, reserve: u32) -> TokenRange {
        TokenRange::next(after, reserve, StoreTime::ZERO)
    }

    fn token(on: HandOn) -> u64 {
        let HandOn::Next(token) = on else { panic!("{on:?}") };
        token.get()
    }

    #[test]
    fn tokens_rise_within_a_range_and_from_range_to_range() {
        let mut turn = Turn::new(BOUND, tokens(10, 2));
        assert_eq!(token(turn.hand_on(at(0))), 12);
        assert_eq!(turn.reserve(), RESERVE, "there are too few for long");
        turn.handle_renewed(at(1), at(0), Some(tokens(20, RESERVE)), false);
        assert_eq!(token(turn.hand_on(at(1))), 13, "those at hand are used first");
        assert_eq!(token(turn.hand_on(at(1))), 21);
        assert_eq!(turn.reserve(), 0);
    }

    #[test]
    fn without_tokens_it_waits_for_the_renewal_that_brings_some_and_ends_if_it_fails() {
        let mut turn = Turn::new(BOUND, tokens(10, 0));
        assert_eq!(turn.hand_on(at(0)), HandOn::Soon);
        assert_eq!(turn.reserve(), RESERVE);
        let mut failing = turn.clone();
        turn.handle_renewed(at(1), at(0), Some(tokens(20, RESERVE)), false);
        assert_eq!(token(turn.hand_on(at(1))), 21);
        failing.handle_wanted(at(1));
        failing.handle_failure();
        assert_eq!(failing.hand_on(at(1)), HandOn::Over);
    }

    #[test]
    fn it_has_no_end_while_no_other_client_waits() {
        let mut turn = Turn::new(BOUND, tokens(10, 2));
        turn.handle_renewed(at(0), at(0), Some(tokens(20, 1_000)), false);
        for _ in 0..1_000 {
            token(turn.hand_on(at(60_000)));
        }
    }

    #[test]
    fn once_another_client_waits_it_ends_after_so_many_hand_overs() {
        let mut turn = Turn::new(BOUND, tokens(10, 100));
        turn.handle_wanted(at(5));
        for _ in 0..3 {
            turn.handle_wanted(at(6));
            token(turn.hand_on(at(6)));
        }
        assert_eq!(turn.hand_on(at(6)), HandOn::Over);
        assert_eq!(turn.reserve(), 0, "there is nothing to keep tokens for");
    }

    #[test]
    fn once_another_client_waits_it_ends_after_so_long() {
        let mut turn = Turn::new(BOUND, tokens(10, 100));
        turn.handle_wanted(at(5));
        token(turn.hand_on(at(14)));
        assert_eq!(turn.hand_on(at(15)), HandOn::Over);
    }

    #[test]
    fn only_a_renewal_that_was_sent_later_says_that_nobody_waits_any_more() {
        let mut turn = Turn::new(BOUND, tokens(10, 100));
        turn.handle_wanted(at(5));
        turn.handle_renewed(at(6), at(4), None, false);
        assert_eq!(turn.clone().hand_on(at(15)), HandOn::Over);
        turn.handle_renewed(at(8), at(7), None, false);
        token(turn.hand_on(at(15)));
    }
}
