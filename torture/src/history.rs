//! What happened in a run: sections, waiting, faults. The checkers look at nothing else.
//!
//! A task that acquires several locks at once has a section and a wait for each of them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::faults::{Fault, StoreKind};
use crate::parts::{Lock, Part, Share};
use crate::pauses::Pause;

pub use crate::pauses::Ns;

/// One critical section, from the grant to the release.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Section {
    /// The worker's task.
    pub task: u32,
    /// The lock.
    pub lock: Lock,
    /// What the section has of it.
    pub share: Share,
    /// When the attempt that was granted began. Zero: unknown.
    pub asked: Ns,
    /// The start: the library reported the lock as held at this time.
    pub begin: Ns,
    /// Position of its start in the order in which the resource was told.
    pub begin_order: u64,
    /// The fencing token. Zero if the library has none.
    pub token: u64,
    /// The last time at which the library reported the lock as held.
    pub last_held: Ns,
    /// When the task began to release. None: its process ended before, or the section is open at the end of the run.
    pub left: Option<Ns>,
    /// The end: the release has returned, or the process ended. None: still open at the end of the run.
    pub end: Option<Ns>,
    /// The library reported that the lock was lost.
    pub is_lost: bool,
    /// The write at the end of the section.
    pub write: Option<Write>,
}

impl Section {
    /// When the task no longer needed the lock.
    #[must_use]
    pub fn left(&self) -> Option<Ns> {
        self.left.or(self.end)
    }

    /// When the lock may be granted again, unless others are inside.
    #[must_use]
    pub fn free(&self) -> Option<Ns> {
        let left = self.left()?;
        Some(match self.share {
            Share::Start { retained } => left.max(self.begin + retained),
            _ => left,
        })
    }
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
    /// What it waits for.
    #[serde(default)]
    pub part: Part,
    /// The first attempt.
    pub from: Ns,
    /// Granted, or the process ended. None: it waits at the end of the run.
    pub to: Option<Ns>,
}

/// A lock that the library reported as lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    /// The worker's task.
    pub task: u32,
    /// When the task saw the loss.
    pub at: Ns,
}

/// An attempt or a release that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The worker's task.
    pub task: u32,
    /// When the call returned.
    pub at: Ns,
    /// The call, and the library's message.
    pub text: String,
    /// It is the release of a lock that was reported as lost before.
    pub is_after_loss: bool,
}

impl Failure {
    /// An attempt, and no release.
    #[must_use]
    pub fn is_attempt(&self) -> bool {
        self.text.starts_with("fail: ")
    }
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
    /// A server refused it. It may have had a part of its effect.
    #[serde(default)]
    pub has_failed: bool,
}

impl Injected {
    /// Whether it may disturb this task. A process that is stopped or killed disturbs its own tasks; stopped within a transaction of SQLite,
    /// it keeps the file locked.
    #[must_use]
    pub fn reaches(&self, task: u32, store: StoreKind) -> bool {
        let locks_file = self.fault == Fault::WorkerStop && store == StoreKind::Sqlite;
        self.tasks.is_empty() || self.tasks.contains(&task) || locks_file
    }
}

/// A whole run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct History {
    /// In the order in which the resource was told.
    pub sections: Vec<Section>,
    /// In the order of their beginning.
    pub waiting: Vec<Waiting>,
    /// In the order of their beginning.
    pub faults: Vec<Injected>,
    /// Pauses of the whole machine.
    pub pauses: Vec<Pause>,
    /// In the order in which the resource was told.
    pub losses: Vec<Loss>,
    /// In the order in which the resource was told.
    pub failures: Vec<Failure>,
    /// The begin of the run.
    pub start: Ns,
    /// The end of the run.
    pub end: Ns,
}

impl History {
    /// The locks that were held or waited for.
    #[must_use]
    pub fn locks(&self) -> BTreeSet<Lock> {
        let waited = self.waiting.iter().map(|waiting| waiting.part.lock);
        self.sections.iter().map(|section| section.lock).chain(waited).collect()
    }

    /// What happened to these locks only. Losses and failures are those of tasks, and are not kept.
    #[must_use]
    pub fn of(&self, is_meant: impl Fn(Lock) -> bool) -> Self {
        Self {
            sections: self.sections.iter().filter(|section| is_meant(section.lock)).cloned().collect(),
            waiting: self.waiting.iter().filter(|waiting| is_meant(waiting.part.lock)).copied().collect(),
            faults: self.faults.clone(),
            pauses: self.pauses.clone(),
            start: self.start,
            end: self.end,
            ..Self::default()
        }
    }
}
