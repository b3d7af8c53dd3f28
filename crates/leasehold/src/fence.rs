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

/// No store gives more tokens in a millisecond: the clock of Redis.
const TOKENS_PER_MS: u128 = 2_048;

/// A token that is further ahead of this machine's clock is refused.
const FARTHEST: Duration = Duration::from_secs(24 * 3600);

/// An error for a token that no store with a right clock would give within a day. Every later holder would be refused after it.
fn check_ahead(what: impl std::fmt::Display, token: Token) -> Result<(), Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    if u128::from(token.get()) < (now + FARTHEST).as_millis() * TOKENS_PER_MS {
        return Ok(());
    }
    let message = format!(
        "{what}: the token {token} is a day or more ahead of this machine's clock: is it forged, or is a clock wrong? Every later \
         holder would be refused after it"
    );
    Err(Error::new(ErrorKind::Ahead, message))
}

fn stale(what: impl std::fmt::Display, token: Token, highest: u64) -> Error {
    let message =
        format!("{what} was written with token {highest}; {token} is older, so its lease has ended");
    Error::new(ErrorKind::Stale, message)
}
