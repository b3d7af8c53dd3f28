//! What is due.

use std::sync::Arc;

use leasehold::simulation::{Answered, Call, KeyAnswered, KeyCommand};
use leasehold_core::{Acquire, Acquisition, Command, Push, Resource};

use crate::executor::{ProcessId, Thread};
use crate::plan::Micros;
use crate::world::Line;

/// Something that is due at a time.
#[derive(Debug)]
#[allow(missing_docs, reason = "each line above says what the names of an event mean")]
pub enum Event {
    /// A sleep ends.
    Wake(u64),
    /// A call reaches the server. `is_late`: after its connection was closed.
    Request { connection: u64, call: u64, attempt: u32, is_late: bool, content: Content },
    /// An answer reaches the client.
    Response { connection: u64, call: u64, attempt: u32, answers: Vec<Answered> },
    /// A push reaches the client.
    Push { connection: u64, push: Push },
    /// A new connection reaches the server.
    Handshake { connection: u64 },
    /// The server's greeting reaches the client.
    Connected { connection: u64 },
    /// The client sees that a connection is closed.
    ClosedAtClient { connection: u64 },
    /// The server sees it.
    ClosedAtServer { connection: u64 },
    /// A call has taken too long.
    Timeout { call: u64, attempt: u32 },
    /// A connection that gave no answer is checked, or one that is being made.
    Ping { connection: u64, asked_at: Micros },
    /// A client tries to connect.
    Connect { process: ProcessId, line: Line },
    /// A fault of the plan begins.
    Fault(usize),
    /// A stalled thread continues.
    Resume { process: ProcessId, thread: Thread },
    /// A machine's clock continues.
    Unfreeze { client: usize },
    /// A server continues.
    ResumeServer(usize),
    /// A server starts again.
    StartServer(usize),
    /// A server ends for good.
    StopServer(usize),
    /// A replica copies the master's data, for the failover of this fault.
    Replicate(usize),
    /// A server has memory again.
    Unfull(usize),
    /// The right is granted.
    Allow(usize),
    /// The loss of this guard must have been reported. `is_program`: to a program with another library.
    CheckReported { guard: u64, is_program: bool },
    /// Commands on keys are sent.
    KeySend(u64),
    /// They reach the server. `is_late`: after their connection was closed.
    KeyRequest { connection: u64, call: u64, is_late: bool, commands: Vec<KeyCommand> },
    /// The answers to them reach the client.
    KeyResponse { connection: u64, call: u64, answers: Vec<KeyAnswered> },
    /// Such a call has taken too long.
    KeyTimeout(u64),
    /// The word that a key has changed reaches the client.
    KeyChanged { connection: u64, key: String },
    /// Changes of keys may have been missed.
    KeysMissed(ProcessId),
    /// A key may have expired.
    KeyExpiry { server: usize, key: String },
    /// A key must not have this holder any more.
    CheckKey { lock: usize, holder: String, released_at: Micros },
    /// The key of this guard's lock was deleted by hand, and the guard must have been notified.
    CheckNotified { guard: u64 },
    /// Nothing gets through over the connection for keys any more.
    SilenceKeys { client: usize, lasts: Micros },
    /// An operator deletes the key of this lock, if a bridge has it.
    DeleteKey(usize),
    /// A client's process starts.
    Start { client: usize },
    /// Faults end.
    Heal,
}

/// What a call consists of.
#[derive(Clone, Debug)]
pub enum Content {
    /// Commands in this order, and how many replicas must have them.
    Batch(Arc<[Call]>, u32),
    /// Attempts that are granted together.
    All(Arc<[(Arc<Resource>, Arc<Acquire>)]>),
}

impl Content {
    /// How many answers it has.
    #[must_use]
    pub fn answers(&self) -> usize {
        match self {
            Self::Batch(batch, _) => batch.len(),
            Self::All(attempts) => attempts.len(),
        }
    }

    /// The attempt of each of its commands, if it is an `Acquire`.
    #[must_use]
    pub fn attempts(&self) -> Vec<Option<Acquisition>> {
        let of = |command: &Command| match command {
            Command::Acquire(acquire) => Some(acquire.acquisition),
            _ => None,
        };
        match self {
            Self::Batch(batch, _) => batch.iter().map(|call| of(&call.command)).collect(),
            Self::All(attempts) => attempts.iter().map(|(_, acquire)| Some(acquire.acquisition)).collect(),
        }
    }
}
