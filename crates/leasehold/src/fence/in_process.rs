//! A fence for a resource in this process.

use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::Token;

use super::{check_ahead, stale};
use crate::error::Error;

/// Remembers the highest token that a resource in this process has seen, and refuses lower ones.
///
/// ```
/// use leasehold::fence::Fence;
///
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let fence = Fence::new(); // belongs to the protected resource
/// let first = client.mutex("device").lock().await?.token();
/// let second = client.mutex("device").lock().await?.token();
///
/// fence.admit(second)?;
/// fence.admit(second)?; // the same holder again
/// assert!(fence.admit(first).unwrap_err().is_stale());
/// # Ok(()) });
/// ```
#[derive(Debug, Default)]
pub struct Fence(AtomicU64);

impl Fence {
    /// A fence that has seen no token yet. It can be a `static`.
    ///
    /// ```
    /// static FENCE: leasehold::fence::Fence = leasehold::fence::Fence::new();
    /// assert_eq!(FENCE.highest(), None);
    /// ```
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Admits this token, unless a higher one was admitted before.
    ///
    /// Hold one lock of this process, for example `std::sync::Mutex`, while you call this and use the resource. Otherwise a
    /// holder may be stopped after this call, and use the resource after a later holder has used it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// # let fence = leasehold::fence::Fence::new();
    /// let guard = client.mutex("device").lock().await?;
    /// fence.admit(guard.token())?;
    /// assert_eq!(fence.highest(), Some(guard.token()));
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_stale` for a token lower than the highest, and `is_ahead` for one that is a day or more ahead of this machine's clock.
    /// Nothing is changed.
    pub fn admit(&self, token: Token) -> Result<(), Error> {
        check_ahead("the resource", token)?;
        self.admit_ahead(token)
    }

    /// As [`Self::admit`], but also admits a token that is ahead of this machine's clock: for a store whose tokens are, since its
    /// clock was set back.
    ///
    /// ```
    /// # use leasehold::Token;
    /// let fence = leasehold::fence::Fence::new();
    /// let token = Token::new((1 << 53) - 1).unwrap();
    /// assert!(fence.admit(token).unwrap_err().is_ahead());
    /// fence.admit_ahead(token)?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `is_stale` for a token lower than the highest. Nothing is changed.
    pub fn admit_ahead(&self, token: Token) -> Result<(), Error> {
        let highest = self.0.fetch_max(token.get(), Ordering::AcqRel);
        if highest > token.get() { Err(stale("the resource", token, highest)) } else { Ok(()) }
    }

    /// The highest token that was admitted, or `None` if there was none.
    ///
    /// ```
    /// assert_eq!(leasehold::fence::Fence::new().highest(), None);
    /// ```
    #[must_use]
    pub fn highest(&self) -> Option<Token> {
        Token::new(self.0.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

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

    #[test]
    fn fence_refuses_tokens_from_the_future() {
        let fence = Fence::new();
        let ms =
            |time: SystemTime| u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        let of = |ms: u64| token(ms * 2_048);
        let (minute, day) = (60_000, 24 * 3_600_000);
        let now = ms(SystemTime::now());
        let ahead = of(now + day + minute);
        let error = fence.admit(ahead).unwrap_err();
        assert!(error.is_ahead() && !error.is_stale(), "{error}");
        assert_eq!(fence.highest(), None);
        // Stores other than Redis count microseconds.
        let of_others = |ms: u64| token(ms * 1_000);
        assert!(fence.admit(of_others(now + day + minute)).unwrap_err().is_ahead());
        fence.admit(of_others(now + day - minute)).unwrap();
        fence.admit(of(now + day - minute)).unwrap();
        fence.admit_ahead(ahead).unwrap();
        assert_eq!(fence.highest(), Some(ahead));
    }
}
