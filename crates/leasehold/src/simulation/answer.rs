//! How a simulated call ends.

use std::pin::Pin;

use leasehold_core::{Answer, Failure};
use leasehold_store::{CallResult, StoreError};

/// Why a command has no answer.
#[derive(Clone, Debug)]
pub struct CallFailed {
    /// Whether it may have taken effect.
    pub failure: Failure,
    /// What happened.
    pub message: &'static str,
}

/// A command's answer.
pub type Answered = Result<Answer, CallFailed>;
/// A future of the simulation.
pub type Pending<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The answer as stores report it.
pub(crate) fn call_result(answered: Answered) -> CallResult {
    answered.map_err(|CallFailed { failure, message }| StoreError::new(failure, message))
}
