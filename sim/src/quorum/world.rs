//! The state of one run: true time, processes, connections, nodes, and the events that are due.

use std::cell::RefCell;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use leasehold::Client;
use leasehold::simulation::{Answered, SimulatedQuorum, ThreadClock, set_clock};
use leasehold_core::{ClientId, LocalTime};

use super::books::Books;
use super::event::Event;
use super::node::Node;
use super::plan::Plan;
use super::planted::Planted;
use crate::checks::{Promise, Violation};
use crate::executor::{ProcessId, TaskId, Thread};
use crate::history::{Column, History};
use crate::plan::{Micros, SECOND};
use crate::rng::Rng;
use crate::schedule::Scheduled;
use crate::server::ServerClock;
use crate::stranger::Stranger;
use crate::world::LocalClock;

thread_local! {
    static WORLD: RefCell<Option<Box<World>>> = const { RefCell::new(None) };
}

/// A client's machine. Its clock outlives its processes.
pub(super) struct Machine {
    pub(super) clock: LocalClock,
    pub(super) process: Option<ProcessId>,
}

/// A connection between a process and a node.
pub(super) struct Link {
    pub(super) process: ProcessId,
    pub(super) node: usize,
    /// When the last message to the node arrives, and the last one to the client.
    pub(super) up: Micros,
    pub(super) down: Micros,
    /// When the client last received anything.
    pub(super) received_at: Micros,
    /// What was in flight when it was cut arrives after this time.
    pub(super) late: Option<Micros>,
}

/// A process's way to one node.
#[derive(Default)]
pub(super) struct Slot {
    pub(super) link: Option<u64>,
    pub(super) opening: Option<u64>,
    pub(super) failures: u32,
}

/// A process: an incarnation of a client.
pub(super) struct Process {
    pub(super) client: usize,
    pub(super) id: ClientId,
    pub(super) is_alive: bool,
    pub(super) inbox: Option<SimulatedQuorum>,
    pub(super) handle: Option<Client>,
    /// By node.
    pub(super) slots: Vec<Slot>,
    /// How many faults stall each of its threads.
    pub(super) stalls: [u32; 2],
    pub(super) parked: Vec<TaskId>,
    /// Events for a stalled driver.
    pub(super) backlog: Vec<Event>,
    pub(super) is_started: bool,
    /// How often one of its threads was stalled.
    pub(super) stalled: u64,
    /// When a thread last continued.
    pub(super) resumed_at: Micros,
}

/// A call that has no answer yet, or whose answer was not taken yet.
pub(super) struct PendingCall {
    pub(super) process: ProcessId,
    pub(super) link: Option<u64>,
    /// How many answers it needs.
    pub(super) count: usize,
    pub(super) result: Option<Vec<Answered>>,
    pub(super) waker: Option<Waker>,
}

struct Sleeping {
    process: ProcessId,
    until: LocalTime,
    waker: Waker,
}

/// What the check of liveness knows of a lock.
#[derive(Default)]
pub(super) struct Demand {
    /// The tasks that wait without a limit, and since when.
    pub(super) waiting: BTreeMap<usize, Micros>,
    /// When the lock was last held by a trusted guard, as far as known.
    pub(super) busy_at: Micros,
}

/// The state of one run.
pub(super) struct World {
    /// True time.
    pub(super) now: Micros,
    pub(super) plan: Arc<Plan>,
    pub(super) planted: Option<Planted>,
    pub(super) rng: Rng,
    /// Publishes what it likes at each node.
    pub(super) stranger: Stranger,
    pub(super) machines: Vec<Machine>,
    /// The processes, dead ones too.
    pub(super) processes: Vec<Process>,
    pub(super) nodes: Vec<Node>,
    pub(super) links: BTreeMap<u64, Link>,
    pub(super) calls: BTreeMap<u64, PendingCall>,
    sleeps: BTreeMap<u64, Sleeping>,
    /// Messages between a client and a node wait until then: those to the node, and those to the client.
    pub(super) silence: BTreeMap<(usize, usize), (Micros, Micros)>,
    /// Answers and pushes are lost: this many of a thousand, until then.
    pub(super) loss: (u64, Micros),
    /// Messages take longer: by this much, until then.
    pub(super) delay: (Micros, Micros),
    pub(super) books: Books,
    pub(super) violation: Option<Violation>,
    pub(super) history: History,
    /// By lock.
    pub(super) demand: Vec<Demand>,
    /// How far each task has come.
    pub(super) progress: Vec<usize>,
    pub(super) finished: Vec<bool>,
    pub(super) is_healed: bool,
    /// From then on the faults have no effect any more.
    pub(super) healthy_from: Micros,
    /// From then on the network is healthy: in a run without faults from its first second.
    pub(super) calm_from: Micros,
    pub(super) crashes: u64,
    /// Processes that were killed and whose tasks exist still.
    pub(super) killed: Vec<ProcessId>,
    next: u64,
    events: BinaryHeap<Scheduled<Event>>,
}

/// Calls `f` with the run's state. The engine must not be called from `f`.
pub(super) fn with<T>(f: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("a simulation is running")))
}

/// As [`with`]; none after the run.
pub(super) fn try_with<T>(f: impl FnOnce(&mut World) -> T) -> Option<T> {
    WORLD.with_borrow_mut(|world| world.as_mut().map(|world| f(world)))
}

/// Begins or ends a run. Returns the state of the run before.
pub(super) fn replace(world: Option<Box<World>>) -> Option<Box<World>> {
    WORLD.with_borrow_mut(|slot| std::mem::replace(slot, world))
}

/// Runs `f` with the clock of a process.
pub(super) fn run_as<T>(process: ProcessId, f: impl FnOnce() -> T) -> T {
    let now = with(|world| world.local(process));
    let before = set_clock(ThreadClock::At(now));
    let result = f();
    set_clock(before);
    result
}

impl World {
    pub(super) fn new(seed: u64, plan: Plan, planted: Option<Planted>, has_lines: bool) -> Self {
        let machines = plan.clients.iter().map(|client| {
            let ppm = if planted == Some(Planted::SlowClients) { -40_000 } else { client.ppm };
            Machine { clock: LocalClock::new(3600 * SECOND + client.offset, ppm), process: None }
        });
        let nodes = plan
            .nodes
            .iter()
            .enumerate()
            .map(|(number, node)| Node::new(number, ServerClock { offset: node.offset, ppm: node.ppm }));
        Self {
            now: 0,
            planted,
            rng: Rng::new(seed, 12),
            stranger: Stranger::new(seed),
            machines: machines.collect(),
            processes: Vec::new(),
            nodes: nodes.collect(),
            links: BTreeMap::new(),
            calls: BTreeMap::new(),
            sleeps: BTreeMap::new(),
            silence: BTreeMap::new(),
            loss: (0, 0),
            delay: (0, 0),
            books: Books::new(plan.locks),
            violation: None,
            history: History::new(has_lines),
            demand: (0..plan.locks).map(|_| Demand::default()).collect(),
            progress: vec![0; plan.tasks.len()],
            finished: plan
                .tasks
                .iter()
                .map(|task| task.is_absent || plan.clients[task.client].is_absent)
                .collect(),
            is_healed: false,
            healthy_from: Micros::MAX,
            // Until then connections are being made.
            calm_from: match plan.slow_minority_from() {
                _ if plan.is_calm() => SECOND,
                Some(from) => from + SECOND,
                None => Micros::MAX,
            },
            crashes: 0,
            killed: Vec::new(),
            next: 1,
            events: BinaryHeap::new(),
            plan: Arc::new(plan),
        }
    }

    /// A number that was not used before.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Schedules an event.
    pub(super) fn at(&mut self, at: Micros, event: Event) {
        let number = self.number();
        self.events.push(Scheduled { at: at.max(self.now), number, event });
    }

    /// Schedules an event after a time.
    pub(super) fn after(&mut self, span: Micros, event: Event) {
        self.at(self.now + span, event);
    }

    /// Takes the next event that is due by `limit`, and moves the time there.
    pub(super) fn next_event(&mut self, limit: Micros) -> Option<Event> {
        if self.events.peek()?.at > limit {
            return None;
        }
        let Scheduled { at, event, .. } = self.events.pop()?;
        self.now = at;
        Some(event)
    }

    /// The clock of a process.
    pub(super) fn local(&self, process: ProcessId) -> LocalTime {
        self.machines[self.processes[process].client].clock.at(self.now)
    }

    /// Registers a sleep's waker. The sleep ends at `until` of the process's clock.
    pub(super) fn sleep(&mut self, number: u64, process: ProcessId, until: LocalTime, waker: &Waker) {
        if let Some(sleeping) = self.sleeps.get_mut(&number) {
            sleeping.waker.clone_from(waker);
            return;
        }
        self.sleeps.insert(number, Sleeping { process, until, waker: waker.clone() });
        if let Some(at) = self.machines[self.processes[process].client].clock.when(until) {
            self.at(at, Event::Wake(number));
        }
    }

    pub(super) fn end_sleep(&mut self, number: u64) -> Option<Waker> {
        self.sleeps.remove(&number).map(|sleeping| sleeping.waker)
    }

    /// The waker of a sleep whose time has come.
    pub(super) fn wake(&mut self, number: u64) -> Option<Waker> {
        let Sleeping { process, until, .. } = self.sleeps.get(&number)?;
        debug_assert!(self.local(*process) >= *until, "clocks keep their speed");
        self.end_sleep(number)
    }

    /// The delay of a message now.
    pub(super) fn message_delay(&mut self) -> Micros {
        let (base, jitter) = (self.plan.base, self.plan.jitter);
        let mut delay = base + self.rng.below(jitter);
        if self.rng.chance(5) {
            delay += self.rng.below(20 * jitter);
        }
        let (by, until) = self.delay;
        if self.now < until { delay + by } else { delay }
    }

    /// The longest delay of a message without faults.
    pub(super) fn slowest(&self) -> Micros {
        self.plan.base + 21 * self.plan.jitter
    }

    /// Whether a single message is lost.
    pub(super) fn loses(&mut self) -> bool {
        let (thousandths, until) = self.loss;
        self.now < until && self.rng.chance(thousandths)
    }

    /// Whether a thread of a process stands still.
    pub(super) fn is_stalled(&self, process: ProcessId, thread: Thread) -> bool {
        self.processes[process].stalls[thread as usize] > 0
    }

    pub(super) fn max_ttl(&self) -> Option<Duration> {
        self.plan.max_ttl.map(Duration::from_micros)
    }

    /// Adds a line to the history, and its numbers to the hash.
    pub(super) fn say(&mut self, column: Column, numbers: &[u64], text: impl FnOnce() -> String) {
        self.history.note(self.now, numbers);
        self.history.line(self.now, column, text);
    }

    /// The column of a process.
    pub(super) fn column(&self, process: ProcessId) -> Column {
        Column::Client(self.processes[process].client)
    }

    /// Records a broken promise; the first counts.
    pub(super) fn broken(&mut self, promise: Promise, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { promise, what: what(), at: self.now });
        }
    }

    /// The bound of a takeover (`docs/redlock.md`): the ttl and 5 s, and 5 s more for each frozen or killed client. A node that may
    /// have lost leases abstains for `max_ttl` after its first vote.
    pub(super) fn takeover_bound(&self) -> Micros {
        let abstention = self.plan.max_ttl.unwrap_or(0);
        let frozen =
            self.crashes + self.processes.iter().filter(|process| process.stalled > 0).count() as u64;
        self.plan.ttl + abstention + 5 * SECOND * (1 + frozen) + 2 * SECOND
    }
}
