//! What a quorum asks of its nodes.

use std::sync::Arc;

use leasehold_core::Token;

use super::{BoxFuture, Call, CallResult, Store, StoreError};

/// Commands that are sent together, to one node or to several.
pub type SharedBatch = Arc<[Call]>;

/// A store that is one of several, which vote.
pub trait QuorumNode: Store {
    /// Waits until the first attempt to connect has succeeded or failed.
    fn await_connected(&self) -> BoxFuture<Result<(), StoreError>>;

    /// Whether there is a connection now.
    fn is_connected(&self) -> bool;

    /// Identifies the server since its start, if it is connected and may be asked.
    fn run_id(&self) -> Option<Arc<str>>;

    /// As `Store::call`, without a token below `floor`. It runs where it is polled, on no other runtime.
    fn vote(&self, call: Call, floor: Option<Token>) -> BoxFuture<CallResult>;

    /// As `Store::call_batch`, of commands that several nodes may be sent. It runs where it is polled, on no other runtime.
    fn vote_batch(&self, batch: SharedBatch) -> BoxFuture<Vec<CallResult>>;

    /// Whether the current task would send its commands itself.
    fn runs_on_caller(&self) -> bool;

    /// Does this where the node's timers and sockets work. The future may be awaited on any executor. It ends early if the runtime does.
    fn run_on_runtime(&self, work: BoxFuture<()>) -> BoxFuture<()>;
}
