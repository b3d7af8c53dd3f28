//! The state of one run: true time, clocks, processes, connections, servers, and the events that are due.
//!
//! One thread runs one simulation at a time. Its state is in a thread-local, which is never borrowed while the engine runs: the engine
//! calls back.

mod bridging;
mod clock;
mod demand;
mod detached;
mod event;
mod gathering;
mod line;
mod planted;
mod programs;

use std::cell::RefCell;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use leasehold::Client;
use leasehold::simulation::{Answered, SimulatedInbox, ThreadClock, set_clock};
use leasehold_core::{ClientId, LocalTime};

use crate::checks::{Books, Promise};
use crate::executor::{ProcessId, TaskId, Thread};
use crate::history::{Column, History};
use crate::plan::{Micros, Plan, SECOND};
use crate::planted::Planted;
use crate::rng::Rng;
use crate::schedule::Scheduled;
use crate::server::{Server, ServerClock};
use crate::stranger::Stranger;
pub(crate) use bridging::{Bridging, Hold, KeyCall, KeyResult, key_name};
pub use clock::LocalClock;
pub use demand::Demand;
pub(crate) use detached::Detached;
pub use event::{Content, Event};
pub(crate) use gathering::{Ended, Gathering, Wait, WaitEnd};
pub use line::Line;

thread_local! {
    static WORLD: RefCell<Option<Box<World>>> = const { RefCell::new(None) };
}

/// A client's machine. Its clock outlives its processes.
#[derive(Debug)]
pub struct Machine {
    /// Its clock.
    pub clock: LocalClock,
    /// Messages to the server wait until then.
    pub silent_up: Micros,
    /// Messages from the server wait until then.
    pub silent_down: Micros,
    /// It can't connect until then.
    pub unconnected: Micros,
    /// The connection for keys is silent, and can't be made, until then.
    pub silent_keys: Micros,
    /// Answers over that connection come this much later, until then.
    pub late_keys: (Micros, Micros),
    /// The next command to take a lock over that connection arrives this late, and its key is deleted after this time.
    pub late_take: Option<(Micros, Micros)>,
    /// Its clock is, or was, outside of the stated bound, and leases of that time may be trusted until then.
    pub tainted: Micros,
    /// Its present process.
    pub process: Option<ProcessId>,
}

/// One of the connections of a process.
#[derive(Debug, Default)]
pub struct ConnectionSlot {
    /// The open connection.
    pub connection: Option<u64>,
    /// A connection that is being made.
    pub opening: Option<u64>,
    /// How many attempts to connect have failed.
    pub failures: u32,
    /// Calls that wait for a connection.
    pub waiting: Vec<u64>,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    /// Whose.
    pub process: ProcessId,
    /// Which of its connections.
    pub line: Line,
    /// To which server.
    pub server: usize,
    /// When the last message to the server arrives.
    pub up: Micros,
    /// When the last message to the client arrives.
    pub down: Micros,
    /// When the client last received anything.
    pub received_at: Micros,
    /// What was in flight when it was cut arrives after this time.
    pub late: Option<Micros>,
}

/// A process: an incarnation of a client.
pub struct Process {
    /// Its client.
    pub client: usize,
    /// The client's id in this process.
    pub id: ClientId,
    /// It was not killed.
    pub is_alive: bool,
    /// It was closed soon after the faults, and the store did not confirm all releases. What it has left expires by itself.
    pub has_left_leases: bool,
    /// The engine's side towards the store.
    pub inbox: Option<SimulatedInbox>,
    /// The library's client.
    pub handle: Option<Client>,
    /// Its connections.
    pub slots: [ConnectionSlot; 3],
    /// How many faults stall each of its threads.
    pub stalls: [u32; 2],
    /// Ready tasks of stalled threads.
    pub parked: Vec<TaskId>,
    /// Events for stalled threads.
    pub backlog: Vec<Event>,
    /// It was connected, and its users' tasks began.
    pub is_started: bool,
    /// How often one of its threads was stalled.
    pub stalled: u64,
    /// When a thread last continued.
    pub resumed_at: Micros,
    /// How often its driver was polled since the network is healthy.
    pub driver_polls: u64,
    /// How many messages it sent and received since then.
    pub messages: u64,
    /// When a server last refused or queued an attempt of it.
    pub refused_at: Micros,
    /// When it last received the answer to a command.
    pub answered_at: Micros,
}

/// A call that has no answer yet, or whose answer was not taken yet.
#[derive(Debug)]
pub struct PendingCall {
    /// Whose.
    pub process: ProcessId,
    /// From which thread.
    pub thread: Thread,
    /// What.
    pub content: Content,
    /// How often it was sent.
    pub attempt: u32,
    /// The connection that it was sent over.
    pub connection: Option<u64>,
    /// When it was sent.
    pub sent_at: Micros,
    /// The answers.
    pub result: Option<Vec<Answered>>,
    /// The task that waits for them.
    pub waker: Option<Waker>,
}

/// A sleep on a process's clock.
#[derive(Debug)]
pub struct Sleeping {
    /// Whose clock.
    pub process: ProcessId,
    /// Until when.
    pub until: LocalTime,
    /// The task.
    pub waker: Waker,
}

/// The state of one run.
pub struct World {
    /// True time.
    pub now: Micros,
    /// What happens in this run.
    pub plan: Arc<Plan>,
    /// The bug that was planted.
    pub planted: Option<Planted>,
    /// Chance.
    pub rng: Rng,
    /// Publishes what it likes.
    pub stranger: Stranger,
    /// The machines.
    pub machines: Vec<Machine>,
    /// The processes, dead ones too.
    pub processes: Vec<Process>,
    /// The servers, stopped ones too.
    pub servers: Vec<Server>,
    /// The server that clients connect to.
    pub master: usize,
    /// The replicas' copies, by fault. What is written while there is one is lost by the failover.
    pub replicas: BTreeMap<usize, crate::server::Data>,
    /// All connections.
    pub connections: BTreeMap<u64, Connection>,
    /// All calls.
    pub calls: BTreeMap<u64, PendingCall>,
    /// All sleeps.
    pub sleeps: BTreeMap<u64, Sleeping>,
    /// Answers and pushes are lost: this many of a thousand, only pushes, until then.
    pub loss: (u64, bool, Micros),
    /// Messages take longer: by this much, until then.
    pub delay: (Micros, Micros),
    /// The checks' books.
    pub books: Books,
    /// What happened.
    pub history: History,
    /// By lock.
    pub demand: Vec<Demand>,
    /// The detached leases that no task uses now, in the order in which they were detached.
    pub(crate) detached: VecDeque<Detached>,
    /// The users of latches and barriers, by lock.
    pub(crate) gatherings: BTreeMap<usize, Gathering>,
    /// The locks of another library, and their users.
    pub(crate) bridging: Bridging,
    /// How far each task has come.
    pub progress: Vec<usize>,
    /// The tasks that have done everything.
    pub finished: Vec<bool>,
    /// Faults have ended.
    pub is_healed: bool,
    /// How far clocks of servers were set back in all.
    pub set_back: Micros,
    /// How many processes were killed.
    pub crashes: u64,
    /// Processes that were killed and whose tasks exist still.
    pub killed: Vec<ProcessId>,
    next: u64,
    events: BinaryHeap<Scheduled<Event>>,
}

/// Calls `f` with the run's state. The engine must not be called from `f`.
///
/// # Panics
///
/// If no simulation is running, or from within `f`.
pub fn with<T>(f: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("a simulation is running")))
}

/// As [`with`]; none after the run.
pub fn try_with<T>(f: impl FnOnce(&mut World) -> T) -> Option<T> {
    WORLD.with_borrow_mut(|world| world.as_mut().map(|world| f(world)))
}

/// Begins or ends a run. Returns the state of the run before.
pub fn replace(world: Option<Box<World>>) -> Option<Box<World>> {
    WORLD.with_borrow_mut(|slot| std::mem::replace(slot, world))
}

/// Runs `f` with the clock of a process.
pub fn run_as<T>(process: ProcessId, f: impl FnOnce() -> T) -> T {
    let now = with(|world| world.local(process));
    let before = set_clock(ThreadClock::At(now));
    let result = f();
    set_clock(before);
    result
}

impl World {
    /// The state at the start of a run.
    #[must_use]
    pub fn new(seed: u64, plan: Plan, planted: Option<Planted>, has_lines: bool) -> Self {
        let clock = |client: &crate::plan::ClientPlan| {
            let ppm = if planted == Some(Planted::SlowClient) { -40_000 } else { client.ppm };
            LocalClock::new(3600 * SECOND + client.offset, ppm)
        };
        let machines = plan.clients.iter().map(|client| Machine {
            clock: clock(client),
            silent_up: 0,
            silent_down: 0,
            unconnected: 0,
            silent_keys: 0,
            late_keys: (0, 0),
            late_take: None,
            tainted: 0,
            process: None,
        });
        let server = Server::new(plan.locks.len(), ServerClock { offset: 0, ppm: plan.server_ppm }, 0);
        let machines = machines.collect();
        let mut books = Books::new(&plan.locks, plan.network.slowest());
        if plan.faults.is_empty() {
            // Until then connections are being made.
            books.calm_from = SECOND;
        }
        let stranger = Stranger::new(seed);
        books.has_stranger = stranger.is_present();
        Self {
            now: 0,
            planted,
            rng: Rng::new(seed, 2),
            stranger,
            machines,
            processes: Vec::new(),
            servers: vec![server],
            master: 0,
            replicas: BTreeMap::new(),
            connections: BTreeMap::new(),
            calls: BTreeMap::new(),
            sleeps: BTreeMap::new(),
            loss: (0, false, 0),
            delay: (0, 0),
            books,
            history: History::new(has_lines),
            demand: plan.locks.iter().map(|_| Demand::default()).collect(),
            detached: VecDeque::new(),
            gatherings: BTreeMap::new(),
            bridging: Bridging::new(seed, plan.bridges.programs.len()),
            progress: vec![0; plan.tasks.len()],
            finished: plan
                .tasks
                .iter()
                .map(|task| task.is_absent || plan.clients[task.client].is_absent)
                .collect(),
            is_healed: false,
            set_back: 0,
            crashes: 0,
            killed: Vec::new(),
            next: 1,
            events: BinaryHeap::new(),
            plan: Arc::new(plan),
        }
    }

    /// A number that was not used before.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Schedules an event.
    pub fn at(&mut self, at: Micros, event: Event) {
        let number = self.number();
        self.events.push(Scheduled { at: at.max(self.now), number, event });
    }

    /// Schedules an event after a time.
    pub fn after(&mut self, span: Micros, event: Event) {
        self.at(self.now + span, event);
    }

    /// Takes the next event that is due by `limit`, and moves the time there.
    pub fn next_event(&mut self, limit: Micros) -> Option<Event> {
        if self.events.peek()?.at > limit {
            return None;
        }
        let Scheduled { at, event, .. } = self.events.pop()?;
        self.now = at;
        Some(event)
    }

    /// The clock of a process.
    #[must_use]
    pub fn local(&self, process: ProcessId) -> LocalTime {
        self.machines[self.processes[process].client].clock.at(self.now)
    }

    /// Registers a sleep's waker. The sleep ends at `until` of the process's clock.
    pub fn sleep(&mut self, number: u64, process: ProcessId, until: LocalTime, waker: &Waker) {
        if let Some(sleeping) = self.sleeps.get_mut(&number) {
            sleeping.waker.clone_from(waker);
            return;
        }
        self.sleeps.insert(number, Sleeping { process, until, waker: waker.clone() });
        self.schedule_wake(number);
    }

    /// Schedules the end of a sleep. One that can't end now is scheduled again when its clock changes.
    pub fn schedule_wake(&mut self, number: u64) {
        let Some(Sleeping { process, until, .. }) = self.sleeps.get(&number) else { return };
        let client = self.processes[*process].client;
        if let Some(at) = self.machines[client].clock.when(*until) {
            self.at(at, Event::Wake(number));
        }
    }

    /// The delay of a message now.
    pub fn delay(&mut self) -> Micros {
        let network = &self.plan.network;
        let (base, jitter) = (network.base, network.jitter);
        let mut delay = base + self.rng.below(jitter);
        if self.rng.chance(5) {
            delay += self.rng.below(20 * jitter);
        }
        let (by, until) = self.delay;
        if self.now < until { delay + by } else { delay }
    }

    /// Whether a single message is lost.
    pub fn loses(&mut self, is_push: bool) -> bool {
        let (thousandths, pushes_only, until) = self.loss;
        self.now < until && (is_push || !pushes_only) && self.rng.chance(thousandths)
    }

    /// Whether a thread of a process stands still.
    #[must_use]
    pub fn is_stalled(&self, process: ProcessId, thread: Thread) -> bool {
        self.processes[process].stalls[thread as usize] > 0
    }

    /// Adds a line to the history, and its numbers to the hash.
    pub fn say(&mut self, column: Column, numbers: &[u64], text: impl FnOnce() -> String) {
        self.history.note(self.now, numbers);
        self.history.line(self.now, column, text);
    }

    /// The column of a process.
    #[must_use]
    pub fn column(&self, process: ProcessId) -> Column {
        Column::Client(self.processes[process].client)
    }

    /// Records a broken promise.
    pub fn broken(&mut self, promise: Promise, what: impl FnOnce() -> String) {
        self.books.broken(self.now, promise, what);
    }

    /// From then on an operation that fails breaks a promise.
    #[must_use]
    pub fn recovered_at(&self) -> Micros {
        (self.plan.heal_at + 20 * SECOND).min(self.books.calm_from)
    }

    /// Whether all tasks have done everything.
    #[must_use]
    pub fn are_finished(&self) -> bool {
        self.finished.iter().all(|is_finished| *is_finished)
    }

    /// A client that is open although its tasks have done everything: one of those that are closed early.
    #[must_use]
    pub fn closable(&self) -> Option<ProcessId> {
        let is_done = |client: usize| {
            let mut tasks = self.plan.tasks.iter().zip(&self.finished);
            tasks.all(|(task, is_finished)| task.client != client || *is_finished)
        };
        self.processes.iter().enumerate().step_by(2).find_map(|(number, process)| {
            let is_open = process.is_alive && process.is_started && process.handle.is_some();
            (is_open && is_done(process.client)).then_some(number)
        })
    }

    /// The bound on a stall after the faults: section "Liveness", *Bounds of a takeover* and the row on lost pushes.
    #[must_use]
    pub fn takeover_bound(&self) -> Micros {
        let min_hold = self.plan.locks.iter().map(|lock| lock.min_hold).max().unwrap_or(0);
        let frozen = self.crashes + self.plan.clients.len() as u64;
        self.plan.longest_ttl()
            + min_hold
            + 5 * SECOND * (1 + frozen.min(20))
            + 27 * SECOND
            + self.set_back
            + 2 * SECOND
    }
}
