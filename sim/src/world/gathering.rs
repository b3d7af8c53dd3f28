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
    /// The data of the server that clients connected to then.
    pub(crate) epoch: (usize, u32),
    pub(crate) ended: Option<(Micros, WaitEnd)>,
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
