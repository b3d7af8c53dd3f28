//! Fencing tokens: a hybrid logical clock.
//!
//! A token is `max(last + 1, wall clock in µs)`. It rises with every grant like a counter. If the store loses its data, a
//! counter restarts, but tokens keep rising, because the wall clock has advanced. (Kulkarni et al., *Logical Physical
//! Clocks*, 2014, reduced to one number.) On Redis the tokens are the ids of a stream, which rise in the same way.

use core::fmt;

use crate::time::StoreTime;

/// Tokens stay below 2^53, so that a double represents them exactly (Lua, JavaScript, JSON).
/// In microseconds since 1970 that is the year 2255.
pub const MAX_TOKEN: u64 = (1 << 53) - 1;

/// The highest wall time that a token follows; above it tokens only count up. This leaves room for 2^40 grants if a store's
/// clock is far in the future.
const MAX_WALL: u64 = MAX_TOKEN - (1 << 40);

/// A fencing token: each grant of a lock has a higher token than every earlier grant of it.
///
/// Pass it to the protected resource with each write, and let the resource refuse a token that is lower than the highest it has
/// seen.
///
/// ```
/// # use leasehold_core::Token;
/// let (first, second) = (Token::new(7).unwrap(), Token::new(8).unwrap());
/// assert!(first < second);
/// assert_eq!(i64::from(second), 8); // for a database
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u64);

impl Token {
    /// The token with this number; `None` for zero and for numbers of 2^53 or more.
    ///
    /// ```
    /// # use leasehold_core::Token;
    /// assert!(Token::new(0).is_none() && Token::new(1 << 53).is_none());
    /// ```
    #[must_use]
    pub const fn new(number: u64) -> Option<Self> {
        if number == 0 || number > MAX_TOKEN {
            return None;
        }
        Some(Self(number))
    }

    /// The number to compare and to store.
    ///
    /// ```
    /// # use leasehold_core::Token;
    /// assert_eq!(Token::new(7).unwrap().get(), 7);
    /// ```
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        token.0
    }
}

impl From<Token> for i64 {
    /// The integer type of databases. Tokens are below 2^53, so nothing is lost.
    fn from(token: Token) -> Self {
        token.0.cast_signed()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({})", self.0)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A grant's token, and the higher ones that are reserved for local hand-offs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRange {
    /// The grant's own token.
    pub first: Token,
    /// The last reserved token; equal to `first` if none was requested.
    pub last: Token,
}

impl TokenRange {
    /// The range from `first` to `last`. `None` if one of them is no token, or they are in the wrong order.
    #[must_use]
    pub fn new(first: u64, last: u64) -> Option<Self> {
        let (first, last) = (Token::new(first)?, Token::new(last)?);
        (first <= last).then_some(Self { first, last })
    }

    /// The next `1 + reserve` tokens after `last` (zero if there was none), at wall time `wall`.
    ///
    /// # Panics
    ///
    /// If 2^53 is reached. This takes a trillion grants with a clock that is set to the year 2220 or later.
    #[must_use]
    pub fn next(last: u64, reserve: u32, wall: StoreTime) -> Self {
        let first = (last + 1).max(wall.as_micros().min(MAX_WALL));
        let end = first + u64::from(reserve);
        assert!(end <= MAX_TOKEN, "fencing tokens are exhausted");
        assert!(first > last, "a token did not rise");
        Self { first: Token(first), last: Token(end) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_follows_the_wall_clock_and_always_rises() {
        let at = StoreTime::from_micros;
        assert_eq!(TokenRange::next(0, 0, at(50)).first.get(), 50);
        assert_eq!(TokenRange::next(50, 0, at(50)).first.get(), 51);
        assert_eq!(TokenRange::next(90, 0, at(50)).first.get(), 91);
        let in_the_year_2200 = 7_258_118_400_000_000;
        assert_eq!(TokenRange::next(90, 0, at(in_the_year_2200)).first.get(), in_the_year_2200);
    }

    #[test]
    fn range_is_of_tokens_in_their_order() {
        let range =
            |first, last| TokenRange::new(first, last).map(|range| (range.first.get(), range.last.get()));
        assert_eq!((range(1, 1), range(3, 9)), (Some((1, 1)), Some((3, 9))));
        assert_eq!((range(2, 1), range(0, 1), range(1, MAX_TOKEN + 1)), (None, None, None));
    }

    #[test]
    fn reserved_range_is_never_reissued() {
        let range = TokenRange::next(0, 10, StoreTime::from_micros(100));
        assert_eq!((range.first.get(), range.last.get()), (100, 110));
        let after = TokenRange::next(range.last.get(), 0, StoreTime::from_micros(101));
        assert_eq!(after.first.get(), 111);
    }

    #[test]
    fn absurd_wall_clock_leaves_room_for_rising_tokens() {
        let first = TokenRange::next(0, 0, StoreTime::NEVER);
        let second = TokenRange::next(first.last.get(), 1_000, StoreTime::NEVER);
        assert!(second.first > first.last);
        assert!(second.last.get() <= MAX_TOKEN);
    }
}
