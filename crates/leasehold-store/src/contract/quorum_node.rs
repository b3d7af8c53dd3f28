//! What a quorum asks of its nodes.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::Token;

use super::{BoxFuture, Call, CallResult, Store, StoreError};

/// Commands that are sent together, to one node or to several.
pub type SharedBatch = Arc<[Call]>;

/// A node does not vote if its tokens are further ahead of the clocks of a majority. A clock that was ahead leaves such tokens behind when it is
/// set right, and so does a user who writes them into the node. Each token of a quorum is stored at a majority, so all later tokens would be as
/// high, for ever, and resources that compare tokens with their own clocks would refuse them from a day on.
///
/// Honest tokens may be ahead, too: by 100 ms where a server reserves some, by the floor that follows the fastest clock that votes, and for as
/// long as the clocks of a majority were ahead before they were set right, for example by the difference of a time zone. The clocks of the
/// servers decide, and not earlier tokens, with which one node could raise the limit step by step.
pub const MAX_VOTED_TOKEN_LEAD: Duration = Duration::from_secs(16 * 3_600);

/// A store that is one of several, which vote.
pub trait QuorumNode: Store {
    /// Waits until the first attempt to connect has succeeded or failed.
    fn await_connected(&self) -> BoxFuture<Result<(), StoreError>>;

    /// Whether there is a connection now.
    fn is_connected(&self) -> bool;

    /// Identifies the server since its start, if it is connected and may be asked.
    fn run_id(&self) -> Option<Arc<str>>;

    /// Closes its connections, which are opened again at its address.
    fn reconnect(&self);

    /// As `Store::call`, without a token below `floor`. It runs where it is polled, on no other runtime.
    fn vote(&self, call: Call, floor: Option<Token>) -> BoxFuture<CallResult>;

    /// As `Store::call_batch`, of commands that several nodes may be sent. It runs where it is polled, on no other runtime.
    fn vote_batch(&self, batch: SharedBatch) -> BoxFuture<Vec<CallResult>>;

    /// Whether the current task would send its commands itself.
    fn runs_on_caller(&self) -> bool;

    /// Does this where the node's timers and sockets work. The future may be awaited on any executor. It ends early if the runtime does.
    fn run_on_runtime(&self, work: BoxFuture<()>) -> BoxFuture<()>;
}
