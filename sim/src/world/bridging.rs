//! What the world knows of the locks of another library, and of those who use them.

use std::collections::{BTreeMap, BTreeSet};
use std::task::Waker;

use leasehold::simulation::{CallFailed, KeyAnswered, KeyCommand};
use leasehold_core::LocalTime;

use crate::executor::ProcessId;
use crate::plan::Micros;
use crate::rng::Rng;

/// The answers to commands on keys, or why there are none.
pub(crate) type KeyResult = Result<Vec<KeyAnswered>, CallFailed>;

/// Commands on keys that have no answer yet, or whose answers were not taken yet.
#[derive(Debug)]
pub(crate) struct KeyCall {
    pub(crate) process: ProcessId,
    pub(crate) commands: Vec<KeyCommand>,
    pub(crate) called_at: Micros,
    /// They are not sent after that.
    pub(crate) until: LocalTime,
    /// The connection that they were sent over.
    pub(crate) connection: Option<u64>,
    pub(crate) result: Option<KeyResult>,
    /// The task that waits for them.
    pub(crate) waker: Option<Waker>,
    /// No task waits for them any more.
    pub(crate) is_dropped: bool,
}

/// A lock of the other library that a program relies on.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) lock: usize,
    pub(crate) process: ProcessId,
    /// Until when it does, by its own clock.
    pub(crate) until: LocalTime,
}

/// The bridges of a run.
#[derive(Debug)]
pub(crate) struct Bridging {
    /// Chance for the values of holders.
    pub(crate) rng: Rng,
    pub(crate) calls: BTreeMap<u64, KeyCall>,
    /// What programs with the other library hold.
    pub(crate) holds: BTreeMap<u64, Hold>,
    /// The processes that have taken a lock with these values.
    pub(crate) holders: BTreeMap<String, ProcessId>,
    /// The values of bridges whose key has ended at this server, deleted by hand or expired, and when.
    pub(crate) ended: BTreeMap<(usize, String), Micros>,
    /// The values whose release by their own process a server has run. It may have had none of them.
    pub(crate) given_back: BTreeSet<(usize, String)>,
    /// What bridges have drawn: their values are these numbers and those that follow. And the last of each that was sent.
    pub(crate) drawn: BTreeMap<u128, u128>,
    /// The processes to which the server reports changes of keys.
    pub(crate) tracking: BTreeSet<ProcessId>,
    /// When keys may last have been lost, or have expired early; perhaps in the future.
    pub(crate) disturbed_at: Option<Micros>,
    /// How far each program with the other library has come.
    pub(crate) progress: Vec<usize>,
}

impl Bridging {
    pub(crate) fn new(seed: u64, programs: usize) -> Self {
        Self {
            rng: Rng::new(seed, 8),
            calls: BTreeMap::new(),
            holds: BTreeMap::new(),
            holders: BTreeMap::new(),
            ended: BTreeMap::new(),
            given_back: BTreeSet::new(),
            drawn: BTreeMap::new(),
            tracking: BTreeSet::new(),
            disturbed_at: None,
            progress: vec![0; programs],
        }
    }

    /// Keys are lost, or expire early, until then.
    pub(crate) fn disturb(&mut self, until: Micros) {
        self.disturbed_at = self.disturbed_at.max(Some(until));
    }

    /// Random bytes.
    pub(crate) fn random(&mut self) -> [u8; 16] {
        (u128::from(self.rng.bits()) << 64 | u128::from(self.rng.bits())).to_be_bytes()
    }

    /// Whether another server than this one was told to release the key with this value.
    pub(crate) fn was_given_back_elsewhere(&self, server: usize, value: &str) -> bool {
        self.given_back.iter().any(|(other, released)| *other != server && released == value)
    }

    /// Random bytes for a bridge.
    pub(crate) fn draw(&mut self) -> [u8; 16] {
        let bytes = self.random();
        let number = u128::from_be_bytes(bytes);
        self.drawn.insert(number, number);
        bytes
    }
}

/// The key of the lock with this number.
pub(crate) fn key_name(lock: usize) -> String {
    format!("k{lock}")
}
