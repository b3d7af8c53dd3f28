//! The seam for the simulation of a quorum.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Command, LocalTime, Resource, Token};

use super::answer::{Answered, Pending};

/// What the quorum store of a simulated process stands on.
pub trait QuorumHost: Send + Sync {
    /// The number of nodes.
    fn nodes(&self) -> usize;

    /// Whether there is a connection to a node now.
    fn is_connected(&self, node: usize) -> bool;

    /// A node's run id, if it is connected.
    fn run_id(&self, node: usize) -> Option<Arc<str>>;

    /// Sends commands together to a node, which grants no token below `floor`. One answer for each.
    fn call(
        &self,
        node: usize,
        batch: Vec<(Arc<Resource>, Command)>,
        floor: Option<Token>,
    ) -> Pending<Vec<Answered>>;

    /// Runs a task of the process.
    fn spawn(&self, task: Pending<()>);

    /// Ends when the local clock of the process reaches `time`.
    fn sleep_until(&self, time: LocalTime) -> Pending<()>;

    /// A random number, for pauses.
    fn random(&self) -> u32;
}

/// The options of a simulated quorum.
#[derive(Clone, Copy, Debug)]
pub struct QuorumOptions {
    /// Whether a token counts only once a quorum knows it.
    pub is_fenced: bool,
    /// The longest ttl, if nodes abstain after they may have lost leases.
    pub max_ttl: Option<Duration>,
}
