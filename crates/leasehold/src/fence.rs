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

use leasehold_core::Token;

use crate::error::{Error, ErrorKind};
#[cfg(unix)]
pub use file::FencedFile;
pub use in_process::Fence;

fn stale(what: impl std::fmt::Display, token: Token, highest: u64) -> Error {
    let message =
        format!("{what} was written with token {highest}; {token} is older, so its lease has ended");
    Error::new(ErrorKind::Stale, message)
}
