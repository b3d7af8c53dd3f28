//! Resources that remember the highest fencing token that they have seen, and refuse lower ones.
//!
//! A process may be stopped for longer than its lease and then continue. A lock cannot refuse its late write. The protected
//! resource can, if it compares tokens. This module has such resources: [`Fence`] for a resource in this process, and
//! [`FencedFile`]; with the feature `postgres`, a table that a transaction checks. In a database or an object store, make the comparison a condition of the write: see the examples
//! `fencing_sql` and `fencing_object`, and [the guarantees](crate::guide::guarantees#what-a-lease-cant-do).

#[cfg(unix)]
mod file;
mod in_process;
#[cfg(feature = "postgres")]
pub mod postgres;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold_core::Token;

use crate::error::{Error, ErrorKind};
#[cfg(unix)]
pub use file::FencedFile;
pub use in_process::Fence;

/// Redis, whose tokens are ids of a stream. The other stores count microseconds.
const TOKENS_PER_MS_OF_REDIS: u128 = 2_048;

/// The beginning of 2025 in milliseconds since 1970: before any lock of this program.
const FIRST_LOCKS_MS: u128 = 1_735_689_600_000;

/// A token that is further ahead of this machine's clock is refused.
const FARTHEST: Duration = Duration::from_secs(24 * 3600);

/// An error for a token that no store with a right clock would give within a day. Every later holder would be refused after it.
fn check_ahead(what: impl std::fmt::Display, token: Token) -> Result<(), Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    if is_near(token, now + FARTHEST) {
        return Ok(());
    }
    let message = format!(
        "{what}: the token {token} is a day or more ahead of this machine's clock: is it forged, or is a clock wrong? Every later \
         holder would be refused after it"
    );
    Err(Error::new(ErrorKind::Ahead, message))
}

/// Whether some store may have given this token before `latest`, by the time since 1970. A token does not say which store that was: one
/// of Redis has about twice the number, and one between those of the others and those of Redis is of no store.
fn is_near(token: Token, latest: Duration) -> bool {
    let token = u128::from(token.get());
    let of_redis = FIRST_LOCKS_MS * TOKENS_PER_MS_OF_REDIS..latest.as_millis() * TOKENS_PER_MS_OF_REDIS;
    token < latest.as_micros() || of_redis.contains(&token)
}

fn stale(what: impl std::fmt::Display, token: Token, highest: u64) -> Error {
    let message =
        format!("{what} was written with token {highest}; {token} is older, so its lease has ended");
    Error::new(ErrorKind::Stale, message)
}
