//! The error of a command.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use leasehold_core::Failure;

/// The error of a driver or of the system.
pub type Cause = Arc<dyn StdError + Send + Sync>;

/// A command failed without a reply.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreError {
    /// Whether the command may have taken effect.
    pub failure: Failure,
    /// What happened and what to do, without the store's address.
    pub message: String,
    /// The error of the driver or of the system, if there is one.
    pub cause: Option<Cause>,
}

impl StoreError {
    /// An error without a cause.
    pub fn new(failure: Failure, message: impl Into<String>) -> Self {
        Self { failure, message: message.into(), cause: None }
    }

    /// The error of a command whose runtime has ended: what has become of it is unknown.
    pub fn runtime_ended() -> Self {
        Self::new(Failure::Unknown, "the runtime that the command was sent from has ended")
    }

    /// The same error with another message.
    #[must_use]
    pub fn saying(self, message: impl Into<String>) -> Self {
        Self { message: message.into(), ..self }
    }

    /// The same error of one of several: of a server, or of a sentinel.
    #[must_use]
    pub fn of(self, subject: impl fmt::Display) -> Self {
        let message = format!("{subject}: {}", self.message);
        Self { message, ..self }
    }

    /// The same error, of which something else is known.
    #[must_use]
    pub fn known_as(self, failure: Failure) -> Self {
        Self { failure, ..self }
    }

    /// Adds the error of the driver or of the system.
    pub fn caused_by(self, cause: impl StdError + Send + Sync + 'static) -> Self {
        Self { cause: Some(Arc::new(cause)), ..self }
    }
}
