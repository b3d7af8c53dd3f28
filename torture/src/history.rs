//! What happened in a run: sections, waiting, faults. The checkers look at nothing else.

use serde::{Deserialize, Serialize};

use crate::faults::Fault;
use crate::pauses::Pause;

pub use crate::pauses::Ns;

/// One critical section, from the grant to the release.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// The worker's task.
    pub task: u32,
    /// The start: the library reported the lock as held at this time.
    pub begin: Ns,
    /// Position of its start in the order in which the resource was told.
    pub begin_order: u64,
    /// The fencing token. Zero if the library has none.
    pub token: u64,
    /// The last time at which the library reported the lock as held.
    pub last_held: Ns,
    /// The end: released, given up after a loss, or the process ended. None: still open at the end of the run.
    pub end: Option<Ns>,
    /// The library reported that the lock was lost.
    pub is_lost: bool,
    /// The write at the end of the section.
    pub write: Option<Write>,
}

/// A write that has arrived at the resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Write {
    /// The last check of the lock before it was sent.
    pub checked: Ns,
    /// When it arrived.
    pub arrived: Ns,
    /// Position in the resource's order.
    pub order: u64,
    /// Whether the fenced register accepted it. A register without a token to compare accepts everything.
    pub is_accepted: bool,
}

/// A time during which a task waited for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// The worker's task.
    pub task: u32,
    /// The first attempt.
    pub from: Ns,
    /// Granted, or the process ended. None: it waits at the end of the run.
    pub to: Option<Ns>,
}

/// A fault that was injected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Injected {
    /// Which fault.
    pub fault: Fault,
    /// What it was done to, for people.
    pub target: String,
    /// The beginning.
    pub start: Ns,
    /// Everything works again.
    pub healed: Ns,
    /// The tasks whose process it stopped or ended.
    pub tasks: Vec<u32>,
}

/// A whole run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    /// In the order in which the resource was told.
    pub sections: Vec<Section>,
    /// In the order of their beginning.
    pub waiting: Vec<Waiting>,
    /// In the order of their beginning.
    pub faults: Vec<Injected>,
    /// Pauses of the whole machine.
    pub pauses: Vec<Pause>,
    /// Attempts and releases that failed, each with its time and the library's message.
    pub failures: Vec<(Ns, String)>,
    /// The begin of the run.
    pub start: Ns,
    /// The end of the run.
    pub end: Ns,
}
