//! A fence for something in this process.

use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::Token;

use super::stale;
use crate::error::Error;

/// The highest token that something in this process has seen.
///
/// ```
/// use leasehold::fence::Fence;
///
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let fence = Fence::new(); // belongs to what is protected
/// let first = client.mutex("device").lock().await?.token();
/// let second = client.mutex("device").lock().await?.token();
///
/// fence.admit(second)?;
/// fence.admit(second)?; // the same holder, once more
/// assert!(fence.admit(first).unwrap_err().is_stale());
/// # Ok(()) });
/// ```
#[derive(Debug, Default)]
pub struct Fence(AtomicU64);

impl Fence {
    /// A fence that has seen no token yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Lets this token pass, unless a higher one has passed before.
    ///
    /// What follows must happen before anybody else asks, under the resource's own lock for instance: otherwise a holder may
    /// be stopped right after it was let in.
    ///
    /// # Errors
    ///
    /// `is_stale`, and nothing is changed.
    pub fn admit(&self, token: Token) -> Result<(), Error> {
        let highest = self.0.fetch_max(token.get(), Ordering::AcqRel);
        if highest > token.get() { Err(stale("it", token, highest)) } else { Ok(()) }
    }

    /// The highest token that has passed.
    #[must_use]
    pub fn highest(&self) -> Option<Token> {
        Token::new(self.0.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(number: u64) -> Token {
        Token::new(number).unwrap()
    }

    #[test]
    fn fence_refuses_tokens_below_the_highest() {
        let fence = Fence::new();
        assert_eq!(fence.highest(), None);
        fence.admit(token(7)).unwrap();
        fence.admit(token(7)).unwrap();
        assert!(fence.admit(token(6)).unwrap_err().is_stale());
        assert_eq!(fence.highest(), Some(token(7)));
        fence.admit(token(8)).unwrap();
    }
}
