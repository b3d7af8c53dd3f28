//! Where leases live. Every store runs the same commands; they differ in who shares it.

pub(crate) mod memory;

use std::pin::Pin;
use std::sync::Arc;

use leasehold_core::{Answer, Command, Failure, Push, Resource};

/// What a store says when it could not decide.
#[derive(Debug)]
pub(crate) struct StoreError {
    /// Whether the command may have taken effect.
    pub(crate) failure: Failure,
    /// What happened, without the store's address.
    pub(crate) message: String,
}

/// Receives what a store tells a client unasked. Called from any thread, with no lock of the store held.
pub(crate) trait Inbox: Send + Sync {
    fn deliver(&self, push: Push);
}

pub(crate) type Answered = Result<Answer, StoreError>;
pub(crate) type Pending = Pin<Box<dyn Future<Output = Vec<Answered>> + Send>>;

pub(crate) trait Store: Send + Sync {
    /// Runs one command at once; nothing when that could mean to wait.
    fn call_now(&self, resource: &Resource, command: &Command) -> Option<Answered>;

    /// Runs commands in this order, and answers in this order.
    fn call(&self, batch: Vec<(Arc<Resource>, Command)>) -> Pending;
}
