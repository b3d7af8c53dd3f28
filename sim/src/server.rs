//! The store's side: the core's model, with a clock, connections and data that can be lost.

mod keys;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leasehold_core::model::{CommandContext, Table, apply, apply_all, sweep};
use leasehold_core::{Acquire, Answer, ClientId, Command, Now, Push, Resource, StoreTime};

use crate::checks::Shadow;
use crate::executor::ProcessId;
use crate::plan::Micros;
use crate::world::Line;
pub use keys::{Keys, key_of};

/// What a server's clock shows when true time is zero: some day in 2023.
pub const EPOCH: u64 = 1_700_000_000_000_000;

/// A clock that runs at a speed of its own and can be set.
#[derive(Clone, Copy, Debug)]
pub struct ServerClock {
    /// What it was set by, in microseconds.
    pub offset: i64,
    /// By how many millionths it is faster than true time.
    pub ppm: i64,
}

impl ServerClock {
    /// What it shows.
    #[must_use]
    pub fn at(self, now: Micros) -> StoreTime {
        let drift = i64::try_from(now).unwrap_or(i64::MAX) / 1_000 * self.ppm / 1_000;
        StoreTime::from_micros((EPOCH + now).saturating_add_signed(self.offset + drift))
    }
}

/// What a server keeps, and what the checks know about it. A replica has an older copy.
#[derive(Clone, Debug, Default)]
pub struct Data {
    /// By the number in the resource's name.
    pub tables: Vec<Table>,
    /// The queue of each, as the checks see it.
    pub shadows: Vec<Shadow>,
    /// The locks of another library.
    pub keys: Keys,
}

/// The client's side of a connection.
#[derive(Debug)]
pub struct Peer {
    /// The process that opened it.
    pub process: ProcessId,
    /// The process's client.
    pub client: ClientId,
    /// Which of the process's it is. The driver's is subscribed to the inbox.
    pub line: Line,
}

/// A server.
#[derive(Debug)]
pub struct Server {
    /// It answers.
    pub is_up: bool,
    /// It runs.
    pub is_paused: bool,
    /// It refuses writes that need memory.
    pub is_full: bool,
    /// A right is missing.
    pub denies: bool,
    /// Its clock.
    pub clock: ServerClock,
    /// Its data.
    pub data: Data,
    /// Counts up whenever leases may end early: data was lost, or the clock set forward.
    pub epoch: u32,
    /// The connections that are open on its side.
    pub connections: BTreeMap<u64, Peer>,
    /// The connections that are told of the next change of a key.
    pub tracked: BTreeMap<String, BTreeSet<u64>>,
    /// The keys whose expiry is looked at later.
    pub expiring: BTreeSet<String>,
    /// What arrived while it was paused.
    pub backlog: Vec<crate::world::Event>,
}

impl Server {
    /// A server without data.
    #[must_use]
    pub fn new(locks: usize, clock: ServerClock, epoch: u32) -> Self {
        let tables = (0..locks).map(|_| Table::new()).collect();
        let shadows = (0..locks).map(|_| Shadow::default()).collect();
        Self {
            is_up: true,
            is_paused: false,
            is_full: false,
            denies: false,
            clock,
            data: Data { tables, shadows, keys: Keys::default() },
            epoch,
            connections: BTreeMap::new(),
            tracked: BTreeMap::new(),
            expiring: BTreeSet::new(),
            backlog: Vec::new(),
        }
    }

    /// The connections that are subscribed to their client's inbox, as far as the server knows.
    pub fn subscribers(&self) -> impl Iterator<Item = (u64, &Peer)> {
        self.connections
            .iter()
            .filter(|(_, peer)| peer.line == Line::Driver)
            .map(|(number, peer)| (*number, peer))
    }

    /// Runs one command on a resource.
    pub fn apply(
        &mut self,
        now: Micros,
        resource: usize,
        command: &Command,
        is_reachable: &mut dyn FnMut(ClientId) -> bool,
        pushes: &mut Vec<Push>,
    ) -> Answer {
        let context = CommandContext { now: Now::same(self.clock.at(now)), is_reachable, pushes };
        let answered = apply(&mut self.data.tables[resource], context, command);
        answered.unwrap_or_else(|never| match never {})
    }

    /// Runs attempts of several resources as one command.
    pub fn apply_all(
        &mut self,
        now: Micros,
        attempts: &[(usize, &Arc<Acquire>)],
        is_reachable: &mut dyn FnMut(ClientId) -> bool,
        pushes: &mut Vec<Push>,
    ) -> Vec<Answer> {
        let context = CommandContext { now: Now::same(self.clock.at(now)), is_reachable, pushes };
        let mut tables: Vec<Table> =
            attempts.iter().map(|(resource, _)| std::mem::take(&mut self.data.tables[*resource])).collect();
        let mut steps: Vec<_> =
            tables.iter_mut().zip(attempts).map(|(table, (_, acquire))| (table, *acquire)).collect();
        let answers = apply_all(context, &mut steps).unwrap_or_else(|never| match never {});
        for ((resource, _), table) in attempts.iter().zip(tables) {
            self.data.tables[*resource] = table;
        }
        answers
    }

    /// Whether anything is left of a resource, this much later.
    pub fn keeps(&mut self, now: Micros, resource: usize) -> bool {
        let context = CommandContext {
            now: Now::same(self.clock.at(now)),
            is_reachable: &mut |_| false,
            pushes: &mut Vec::new(),
        };
        sweep(&mut self.data.tables[resource], context).unwrap_or_else(|never| match never {})
    }
}

/// The number in a resource's name.
#[must_use]
pub fn index_of(resource: &Resource) -> usize {
    number_in(resource.name.as_str())
}

/// The number of the lock with this key.
#[must_use]
pub fn index_of_key(key: &str) -> usize {
    number_in(key)
}

fn number_in(name: &str) -> usize {
    name.trim_start_matches(|next: char| !next.is_ascii_digit()).parse().unwrap_or(0)
}
