//! Constants of the layout. A new layout version has other key names, so that two versions never read each other's keys.

use std::time::Duration;

use leasehold_core::{StoreTime, Token, WaitFor};

/// The layout version. It is the 4 in key and channel names.
pub const LAYOUT: &str = "4";

/// Stands in [`LAYOUT_KEY`] where scripts are [restricted](crate::ScriptVariant::Restricted). Clients that use other scripts would not see
/// the locks of those that use these.
pub const RESTRICTED_LAYOUT: &str = "4-restricted";

/// The key with the layout version of the clients that use a server. A client stores its version there (`SET … NX EX`).
/// If another version is stored, the client disconnects, because the clients would not see each other's locks.
pub const LAYOUT_KEY: &str = "leasehold:layout";

/// Lifetime of [`LAYOUT_KEY`] after the last client connected.
pub const LAYOUT_KEY_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

/// Key of a quorum node with the time since when the server's data is complete.
pub const RESTART_GUARD_KEY: &str = "leasehold:4:born";

/// Max number of renewals in one command, because a script blocks the server.
pub const MAX_RENEWALS: usize = 128;

/// Max number of attempts or releases in one command. It is smaller than that of renewals, because an attempt at a lock that is held
/// takes longer than ten of a free one.
pub const MAX_EACH: usize = 32;

/// Number of hash slots of a cluster.
pub const SLOTS: u16 = 16_384;

/// How attempts usually wait. They need not say it.
pub(crate) const USUAL_WAIT: WaitFor = WaitFor { entry_ttl: Duration::from_secs(80), max_queue: 100_000 };

/// First part of every key and channel name, except [`LAYOUT_KEY`].
pub(crate) const PREFIX: &str = "leasehold:4";

/// Stands in a plain value between what the `Acquire` said and the stream id that is the token.
pub(crate) const PLAIN_MARK: &str = " leasehold:4@";

/// Tokens per millisecond of the server's clock. A token is `milliseconds * 2048 + sequence number` of a stream id.
pub(crate) const TOKENS_PER_MS: u64 = 2_048;

/// Length of a SHA-1 in hexadecimal digits, as Redis computes it for scripts.
pub(crate) const DIGEST_DIGITS: usize = 40;

/// The token that a server whose clock shows this time gives next, if its clock of tokens is not ahead. `None` beyond the
/// year 2109.
#[must_use]
pub fn token_at(time: StoreTime) -> Option<Token> {
    let token = u128::from(time.as_micros()) * u128::from(TOKENS_PER_MS) / 1_000;
    Token::new(u64::try_from(token).ok()?)
}

/// The time for which a server that does not reserve tokens gives this one.
#[must_use]
pub fn token_time(token: Token) -> StoreTime {
    StoreTime::from_micros(token.get() / TOKENS_PER_MS * 1_000)
}

/// Appends the mark of plain values, and the stream id that is this token.
pub(crate) fn push_mark(bytes: &mut Vec<u8>, token: Token) {
    bytes.extend(PLAIN_MARK.as_bytes());
    bytes.extend(format!("{}-{}", token.get() / TOKENS_PER_MS, token.get() % TOKENS_PER_MS).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_stored_for_thirty_days_as_documented() {
        assert_eq!((LAYOUT_KEY, LAYOUT, LAYOUT_KEY_TTL.as_secs()), ("leasehold:layout", "4", 2_592_000));
    }

    #[test]
    fn token_follows_the_time_until_2109() {
        let at = |micros| token_at(StoreTime::from_micros(micros)).map(Token::get);
        assert_eq!(at(7_000), Some(7 * TOKENS_PER_MS));
        assert_eq!(at(7_500), Some(7 * TOKENS_PER_MS + TOKENS_PER_MS / 2));
        assert_eq!(at(4_398_046_511_104_000), None);
        let time = StoreTime::from_micros(1_700_000_000_123_000);
        assert_eq!(token_at(time).map(token_time), Some(time));
    }
}
