//! The one error type.

use std::error::Error as StdError;
use std::fmt;

use leasehold_core::NameError;

/// Why something could not be done: what happened, to which lock, on which store.
///
/// Contention is not an error: `try_lock` and `lock_timeout` answer `None`. The predicates say what a program
/// can do about it. Messages never contain a password.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    Invalid,
    Unsupported,
    Unavailable,
    Lost,
    Timeout,
    QueueFull,
    NotOwner,
    Stale,
    Closed,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), source: None }))
    }

    pub(crate) fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Box::new(source));
        self
    }

    /// The caller asked for something that can't be: a bad name, an absurd ttl, an unknown store, another number of
    /// permits than those who use the semaphore. Nothing was changed.
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        self.0.kind == ErrorKind::Invalid
    }

    /// This store can't do it.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        self.0.kind == ErrorKind::Unsupported
    }

    /// The store could not be asked, or did not answer: whether the lock is free is unknown. Whatever it may have granted is being given back.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.0.kind == ErrorKind::Unavailable
    }

    /// The lease ended before its holder gave it back.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.kind == ErrorKind::Lost
    }

    /// A time limit that the caller set has passed.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.0.kind == ErrorKind::Timeout
    }

    /// The lock's queue is as long as it may be.
    #[must_use]
    pub fn is_queue_full(&self) -> bool {
        self.0.kind == ErrorKind::QueueFull
    }

    /// Somebody else holds the lock, or nobody: an owner gives back only its own.
    #[must_use]
    pub fn is_not_owner(&self) -> bool {
        self.0.kind == ErrorKind::NotOwner
    }

    /// A resource has seen a higher token: whoever has this one has lost its lease.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.0.kind == ErrorKind::Stale
    }

    /// The client was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.kind == ErrorKind::Closed
    }
}

impl From<NameError> for Error {
    fn from(error: NameError) -> Self {
        Self::new(ErrorKind::Invalid, error.to_string()).with_source(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}, {:?})", self.0.kind, self.0.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}
