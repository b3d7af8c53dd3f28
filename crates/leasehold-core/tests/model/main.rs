//! The promises of the lease table.
//!
//! This file has the table's environment. `checks.rs` checks the promises after every step of random command sequences,
//! `broken_stores.rs` shows that each check can fail, `requests.rs` checks those of attempts that several clients make, and `sequences.rs` tests
//! single command sequences.

mod broken_stores;
mod checks;
mod requests;
mod sequences;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use leasehold_core::model::{CommandContext, Rows, Table, apply, sweep};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Now, Push, PushKind, Queued, Release, Renew, Reply,
    StoreTime, View, WaitFor,
};

const CLIENTS: u128 = 4;
const TTL: Duration = Duration::from_secs(10);
const ENTRY_TTL: Duration = Duration::from_secs(30);
const START: StoreTime = StoreTime::from_micros(1_700_000_000_000_000);

fn id(client: u128, sequence: u64) -> Acquisition {
    Acquisition { client: ClientId::new(client), sequence }
}

fn acquire(acquisition: Acquisition, capacity: u32, weight: u32, wait: bool) -> Command {
    Command::from(Acquire {
        capacity,
        weight,
        wait: wait.then_some(WaitFor { entry_ttl: ENTRY_TTL, max_queue: 1_000 }),
        ..Acquire::exclusive(acquisition, TTL)
    })
}

/// Added to the sequence number of a lease for the attempt that replaces it.
const REPLACING: u64 = 6;

fn replace(old: Acquisition, new: Acquisition, capacity: u32, weight: u32, wait: bool) -> Command {
    let Command::Acquire(command) = acquire(new, capacity, weight, wait) else { unreachable!() };
    Command::from(Acquire { replaces: Some(old.sequence), ..Acquire::clone(&command) })
}

fn release(acquisition: Acquisition) -> Command {
    Command::Release(Release::now(acquisition))
}

fn renew(acquisition: Acquisition) -> Command {
    Command::Renew(Renew::to(acquisition, TTL))
}

/// A table with a clock, a list of unreachable clients, and what its waiters know.
struct World<R> {
    rows: R,
    now: StoreTime,
    /// Total time by which the clock was set back.
    stepped_back: Duration,
    absent: Vec<ClientId>,
    pushes: Vec<Push>,
    /// The waiter that last learned, by an answer or a push, that it is the head of the queue.
    notified_head: Option<Acquisition>,
    /// The tombstones that have not ended.
    tombstones: BTreeMap<Acquisition, StoreTime>,
}

impl World<Table> {
    fn new() -> Self {
        Self::over(Table::new())
    }
}

impl<R: Rows<Error = Infallible>> World<R> {
    fn over(rows: R) -> Self {
        Self {
            rows,
            now: START,
            stepped_back: Duration::ZERO,
            absent: Vec::new(),
            pushes: Vec::new(),
            notified_head: None,
            tombstones: BTreeMap::new(),
        }
    }

    fn run(&mut self, command: &Command) -> Reply {
        let (absent, pushed_before) = (self.absent.clone(), self.pushes.len());
        let context = CommandContext {
            now: Now::same(self.now),
            is_reachable: &mut |client| !absent.contains(&client),
            pushes: &mut self.pushes,
        };
        let Answer { at, reply } =
            apply(&mut self.rows, context, command).unwrap_or_else(|never| match never {});
        assert_eq!(at, self.now);
        if let (Command::Acquire(acquire), Reply::Queued(Queued { is_head: true, .. })) = (command, &reply) {
            self.notified_head = Some(acquire.acquisition);
        }
        let is_next = |push: &&Push| matches!(push.kind, PushKind::Next(_));
        let next = self.pushes[pushed_before..].iter().rfind(is_next).map(|push| push.acquisition);
        self.notified_head = next.or(self.notified_head);
        self.tombstones.retain(|_, until| *until > self.now);
        if let Command::Release(Release { acquisition, tombstone, .. }) = command
            && !tombstone.is_zero()
        {
            self.tombstones.insert(*acquisition, self.now + *tombstone);
        }
        reply
    }

    fn sweep(&mut self) -> bool {
        let context = CommandContext {
            now: Now::same(self.now),
            is_reachable: &mut |_| true,
            pushes: &mut self.pushes,
        };
        sweep(&mut self.rows, context).unwrap_or_else(|never| match never {})
    }

    fn view(&mut self) -> View {
        match self.run(&Command::Inspect) {
            Reply::View(view) => view,
            other => panic!("inspect answered {other:?}"),
        }
    }

    fn pass(&mut self, span: Duration) {
        self.now = self.now + span;
    }

    fn step_back(&mut self, span: Duration) {
        self.now = self.now.saturating_sub(span);
        self.stepped_back += span;
    }
}
