//! What is due.

use std::sync::Arc;

use leasehold::simulation::{Answered, Call};
use leasehold_core::{Push, Token};

use crate::executor::{ProcessId, Thread};
use crate::plan::Micros;

/// Something that is due at a time.
#[derive(Debug)]
pub(super) enum Event {
    /// A sleep ends.
    Wake(u64),
    /// A call reaches its node. `is_late`: after its connection was closed.
    Request { link: u64, call: u64, is_late: bool, content: Content },
    /// An answer reaches the client.
    Response { link: u64, call: u64, answers: Vec<Answered> },
    /// A push reaches the client.
    Push { link: u64, push: Push },
    /// A new connection reaches the node.
    Handshake { link: u64 },
    /// The node's greeting reaches the client.
    Connected { link: u64 },
    /// The client sees that a connection is closed.
    ClosedAtClient { link: u64 },
    /// The node sees it.
    ClosedAtNode { link: u64 },
    /// A call has taken too long.
    Timeout { call: u64 },
    /// A connection that gave no answer is checked, or one that is being made.
    Ping { link: u64, asked_at: Micros },
    /// A client tries to connect to a node.
    Connect { process: ProcessId, node: usize },
    /// A fault of the plan begins.
    Fault(usize),
    /// A stalled thread continues.
    Resume { process: ProcessId, thread: Thread },
    /// A node continues.
    ResumeNode(usize),
    /// A node's process is there again.
    StartNode(usize),
    /// The loss of this guard must have been reported.
    CheckReported(u64),
    /// A client's process starts.
    Start { client: usize },
    /// Faults end.
    Heal,
}

/// What a call consists of.
#[derive(Clone, Debug)]
pub(super) struct Content {
    pub(super) batch: Arc<[Call]>,
    pub(super) floor: Option<Token>,
}
