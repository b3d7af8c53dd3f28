//! What only some stores offer.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use leasehold_core::{Acquire, Acquisition, Answer, Resource, Token};

use super::error::StoreError;
use crate::Diagnosis;

/// What a store keeps once for each client, beside its leases.
pub trait ClientRecords: Send + Sync {
    /// Takes what all holders and waiters of the client have in common: attempts then only carry their own part, and the answers have
    /// both.
    fn publish(&self, metadata: Arc<str>);

    /// Waits until the store has what was published, at most this long: a lease is about to outlast the client.
    fn await_published(&self, limit: Duration) -> BoxFuture<'static, ()>;

    /// Adds to each holder and waiter in these answers what its client has published. After a bounded time the answers lack what
    /// is not known by then.
    fn add_to(&self, answers: Vec<Answer>) -> BoxFuture<'static, Vec<Answer>>;
}

/// What a store of several that vote knows of its client's attempts and leases.
pub trait VotedAttempts: Send + Sync {
    /// Forgets a lease of this client, which stays at the store. Returns the attempt that the store shows as its holder.
    fn detach(&self, acquisition: Acquisition) -> Acquisition;

    /// Takes over a lease that another client has forgotten: commands for it follow.
    fn attach(&self, resource: &Arc<Resource>, request: Arc<Acquire>, token: Token);

    /// Whether this client recently met other clients at this resource: it then queues for admission without trying first.
    fn is_contended(&self, resource: &Resource) -> bool;

    /// Waits, for a bounded time, until nothing that the store releases by itself keeps a lock from others. Returns whether that is so.
    /// The client ends after that.
    fn settle(&self) -> BoxFuture<'static, bool>;

    /// Whether the store abstains after a restart and cannot grant anything yet.
    fn in_restart_grace(&self) -> bool;
}

/// What an operator should know about a store.
pub trait Diagnose: Send + Sync {
    /// Checks everything that locks depend on, and acquires and releases a test lock.
    fn diagnose(&self) -> BoxFuture<'static, Result<Diagnosis, StoreError>>;

    /// What was noticed since the store was opened.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
}
