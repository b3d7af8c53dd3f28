//! Why a store can't be opened.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use leasehold_core::{Failure, NameError};

use crate::contract::{Cause, StoreError};
use crate::tasks::TaskEnded;

/// What can be done about an [`OpenError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpenErrorKind {
    /// The address or a file that it names is wrong.
    Invalid,
    /// This build or this system has no such store.
    Unsupported,
    /// The store was not reached, did not answer, or refused.
    Unavailable,
    /// This process was forked from one that has the store open.
    Forked,
}

/// A store can't be opened. The message names the store and what to do, and contains no password.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenError {
    /// What can be done about it.
    pub kind: OpenErrorKind,
    /// The full message. It may end with the text of the cause.
    pub message: String,
    /// The error of the driver or of the system, if there is one.
    pub cause: Option<Cause>,
    /// What is known about the command that failed at the store.
    pub failure: Option<Failure>,
}

impl OpenError {
    /// Whether the address or a file that it names is wrong.
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        self.kind == OpenErrorKind::Invalid
    }

    /// Whether this build or this system has no such store.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        self.kind == OpenErrorKind::Unsupported
    }

    fn new(kind: OpenErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), cause: None, failure: None }
    }

    /// The address or a file that it names is wrong.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(OpenErrorKind::Invalid, message)
    }

    /// This build or this system has no such store.
    #[must_use]
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(OpenErrorKind::Unsupported, message)
    }

    /// This build has no such store, because a feature of `leasehold` is off.
    #[must_use]
    pub fn needs_feature(what: &str, feature: &str) -> Self {
        Self::unsupported(format!("{what} needs the feature \"{feature}\" of leasehold"))
    }

    /// The store was not reached, did not answer, or refused.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(OpenErrorKind::Unavailable, message)
    }

    /// This process was forked from one that has the store open.
    #[must_use]
    pub fn forked(message: impl Into<String>) -> Self {
        Self::new(OpenErrorKind::Forked, message)
    }

    /// A command failed while the store was opened. `subject`: the store.
    pub fn from_store(subject: impl fmt::Display, error: &StoreError) -> Self {
        Self::of_store(error).prefixed(subject)
    }

    /// As `from_store`, in the store's words alone.
    #[must_use]
    pub fn of_store(error: &StoreError) -> Self {
        let StoreError { failure, message, cause } = error.clone();
        Self { kind: OpenErrorKind::Unavailable, message, cause, failure: Some(failure) }
    }

    fn prefixed(self, subject: impl fmt::Display) -> Self {
        Self { message: format!("{subject}: {}", self.message), ..self }
    }

    /// The error of the driver or of the system.
    #[must_use]
    pub fn with_source(self, source: impl StdError + Send + Sync + 'static) -> Self {
        Self { cause: Some(Arc::new(source)), ..self }
    }
}

impl From<NameError> for OpenError {
    fn from(error: NameError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<TaskEnded> for OpenError {
    fn from(_: TaskEnded) -> Self {
        Self::unavailable("a thread of the client has ended while the store was opened")
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for OpenError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.cause.as_deref().map(|cause| cause as &(dyn StdError + 'static))
    }
}
