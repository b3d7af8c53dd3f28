//! A task of a client that uses locks.

use std::time::Duration;

use leasehold::Client;

use crate::executor::ProcessId;
use crate::plan::Micros;

/// The weight of a writer, which is the capacity of a read-write lock.
pub(super) const WRITER: u32 = leasehold_core::weight::WRITER;

pub(super) struct User {
    pub(super) process: ProcessId,
    pub(super) client: Client,
    pub(super) task: usize,
}

pub(super) fn span(micros: Micros) -> Duration {
    Duration::from_micros(micros)
}
