//! The error of a command.

use std::error::Error as StdError;
use std::sync::Arc;

use leasehold_core::Failure;

/// The error of a driver or of the system.
pub(crate) type Cause = Arc<dyn StdError + Send + Sync>;

/// A command failed without a reply.
#[derive(Clone, Debug)]
pub(crate) struct StoreError {
    /// Whether the command may have taken effect.
    pub(crate) failure: Failure,
    /// What happened and what to do, without the store's address.
    pub(crate) message: String,
    /// The error of the driver or of the system, if there is one.
    pub(crate) cause: Option<Cause>,
}

impl StoreError {
    pub(crate) fn new(failure: Failure, message: impl Into<String>) -> Self {
        Self { failure, message: message.into(), cause: None }
    }

    pub(crate) fn caused_by(self, cause: impl StdError + Send + Sync + 'static) -> Self {
        Self { cause: Some(Arc::new(cause)), ..self }
    }
}
