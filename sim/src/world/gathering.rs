//! What has happened at a latch or a barrier, as its users report it.

use std::collections::BTreeSet;

use crate::plan::Micros;

/// What the checks know of the users of a latch or a barrier.
#[derive(Debug, Default)]
pub(crate) struct Gathering {
    /// The tasks that began to count a latch down, which each does once.
    pub(crate) counted: BTreeSet<usize>,
    /// The waits at a barrier, in the order in which they began.
    pub(crate) waits: Vec<Wait>,
}

/// A wait at a barrier.
#[derive(Debug)]
pub(crate) struct Wait {
    pub(crate) began: Micros,
    /// The life of the server that its client was connected to then.
    pub(crate) begun_at: Option<(usize, u32)>,
    /// How often its process was stalled before.
    pub(crate) stalled: u64,
    pub(crate) ended: Option<Ended>,
}

/// The end of a wait at a barrier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) now: Micros,
    pub(crate) end: WaitEnd,
    /// The life of the server that has decided it, if that is known: a process that was stalled may have learned of it late.
    pub(crate) by: Option<(usize, u32)>,
}

impl Wait {
    /// Whether all of it took place at one life of one server.
    pub(crate) fn is_of_one_life(&self) -> bool {
        self.ended.is_some_and(|ended| ended.by.is_some() && ended.by == self.begun_at)
    }
}

/// How a wait at a barrier ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    /// Its round passed; one of its parties leads.
    Passed { leads: bool },
    /// The party left: no round has counted it.
    Departed,
    /// It failed, or its future was dropped: a round may have counted it.
    Unknown,
}
