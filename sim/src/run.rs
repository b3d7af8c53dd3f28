//! One run: faults, healing, liveness, and the end, at which nothing may be left.

use std::sync::Arc;
use std::time::Duration;

use leasehold::simulation::{self, ThreadClock, set_clock};
use leasehold_core::{ClientId, Command, Reply};

use crate::checks::{Promise, Violation};
use crate::executor::{self, ProcessId, Thread};
use crate::network::Act;
use crate::plan::{Case, Micros, Plan, SECOND};
use crate::planted::Planted;
use crate::transport::{Sleep, Wire};
use crate::users;
use crate::world::{self, Event, Line, Process, World, run_as, with};

/// More polls than this without any time passing are an endless loop.
const POLLS_AT_ONCE: u64 = 100_000;

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The first broken promise.
    pub violation: Option<Violation>,
    /// Equal for equal runs.
    pub hash: u64,
    /// How much time passed.
    pub simulated: Micros,
    /// How often a task was polled.
    pub polls: u64,
    /// How often the servers granted.
    pub grants: u64,
    /// The diagram, if it was asked for.
    pub timeline: String,
}

/// Runs a case. `lines`: how many lines of history the diagram shows at most.
#[must_use]
pub fn run(case: &Case, planted: Option<Planted>, lines: Option<usize>) -> Outcome {
    executor::clear();
    set_clock(ThreadClock::Unreadable);
    let plan = Plan::new(case);
    world::replace(Some(Box::new(World::new(case.seed, plan, planted, lines.is_some()))));
    let mut run = Run { polls: 0, polls_at_once: 0 };
    with(|world| {
        world.schedule_faults();
        for client in 0..world.plan.clients.len() {
            if !world.plan.clients[client].is_absent {
                world.at(0, Event::Start { client });
            }
        }
    });
    run.live();
    if with(|world| world.books.violation.is_none()) {
        run.close();
    }
    let outcome = with(|world| Outcome {
        violation: world.books.violation.clone(),
        hash: world.history.hash(),
        simulated: world.now,
        polls: run.polls,
        grants: world.books.grants(),
        timeline: lines.map_or_else(String::new, |lines| world.history.timeline(lines)),
    });
    tear_down();
    outcome
}

/// Drops everything of a run. Futures read the clock when they are dropped.
fn tear_down() {
    let processes = with(|world| {
        world.processes.iter_mut().for_each(|process| process.is_alive = false);
        world.processes.len()
    });
    for process in 0..processes {
        drop_process(process);
    }
    executor::clear();
    let world = world::replace(None);
    set_clock(ThreadClock::Real);
    drop(world);
}

fn drop_process(process: ProcessId) {
    run_as(process, || {
        drop(executor::kill(Some(process)));
        let handle = with(|world| world.processes[process].handle.take());
        drop(handle);
    });
}

struct Run {
    polls: u64,
    polls_at_once: u64,
}

impl Run {
    // --- Phases ----------------------------------------------------------------------------------

    /// Faults, healing, and until each task has done everything.
    fn live(&mut self) {
        let deadline = with(|world| {
            let tasks = world.plan.tasks.len() as u64;
            let bound = world.plan.longest_ttl();
            world.plan.heal_at + 400 * SECOND + tasks * (2 * bound + 10 * SECOND)
        });
        // Half of the clients are closed as soon as their own tasks have ended.
        loop {
            self.advance(deadline, |world| world.closable().is_some() || world.are_finished());
            let Some(process) = with(|world| world.closable()) else { break };
            self.close_clients(&[process]);
        }
        with(|world| {
            if let Some(task) = world.finished.iter().position(|is_finished| !is_finished) {
                world.broken(Promise::Liveness, || format!("task {task} still waits at the end"));
            }
            world.check_polls();
            world.check_rounds();
        });
    }

    /// The other clients are closed after the network has recovered, and nothing may be left.
    fn close(&mut self) {
        let living: Vec<ProcessId> = with(|world| {
            let living = world.processes.iter().enumerate().filter(|(_, process)| process.is_alive);
            living.map(|(number, _)| number).collect()
        });
        let recovered_at = with(|world| world.recovered_at());
        self.advance(recovered_at, |_| false);
        let is_open = |process: &ProcessId| with(|world| world.processes[*process].handle.is_some());
        let late: Vec<ProcessId> = living.iter().copied().filter(is_open).collect();
        self.close_clients(&late);
        let is_closed = |process: &ProcessId| with(|world| !world.processes[*process].has_left_leases);
        let closed: Vec<ProcessId> = living.iter().copied().filter(is_closed).collect();
        // Later a short lease would have expired.
        let arrived = with(|world| world.now + 2 * world.plan.network.slowest());
        self.advance(arrived, |_| false);
        with(|world| {
            world.check_server(Some(&closed));
            world.check_keys(&closed);
        });
        // The drivers end, and what is still on its way arrives.
        let settled = with(|world| world.now) + 5 * SECOND;
        self.advance(settled, |_| false);
        self.check_clean(&living, &closed);
    }

    fn close_clients(&mut self, processes: &[ProcessId]) {
        let limit = with(|world| world.close_limit());
        let closing = Arc::new(std::sync::atomic::AtomicUsize::new(processes.len()));
        for process in processes {
            let Some(client) = with(|world| world.processes[*process].handle.take()) else { continue };
            let (process, closing) = (*process, closing.clone());
            executor::spawn(process, Thread::Callers, async move {
                if with(|world| world.planted == Some(Planted::SlowClose)) {
                    Sleep::span(process, limit + 2 * SECOND).await;
                }
                let began = with(|world| world.now);
                let closed = client.close().await;
                closing.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
                if let Err(error) = closed {
                    with(|world| {
                        // Soon after the faults a connection may still be missing while the last retry of a release ends.
                        if began < world.recovered_at() && error.is_unavailable() {
                            world.processes[process].has_left_leases = true;
                            return;
                        }
                        // A release that was sent twice and found no lease is not confirmed, if the lease had a minimum hold.
                        let not_retained_at = world.books.not_retained.get(&world.processes[process].id);
                        if not_retained_at.is_some_and(|at| at + 5 * SECOND >= began) {
                            return;
                        }
                        world.broken(Promise::NothingLeft, || format!("process {process}: close: {error}"));
                    });
                }
            });
        }
        let until = with(|world| world.now) + limit + SECOND;
        self.advance(until, |_| closing.load(std::sync::atomic::Ordering::Relaxed) == 0);
        let left = closing.load(std::sync::atomic::Ordering::Relaxed);
        if left > 0 {
            with(|world| {
                world.broken(Promise::InTime, || format!("{left} clients are not closed after {limit} µs"));
            });
        }
    }

    /// Nothing is left of these processes, nor at the server of those that were closed without an error.
    fn check_clean(&mut self, living: &[ProcessId], closed: &[ProcessId]) {
        for process in living {
            let tasks = executor::count(*process);
            if tasks > 0 {
                with(|world| {
                    world.broken(Promise::NothingLeft, || {
                        format!("{tasks} tasks of process {process} are left")
                    });
                });
            }
            let inbox = with(|world| world.processes[*process].inbox.clone());
            let entries = inbox.map_or(0, |inbox| inbox.entries());
            if entries > 0 {
                with(|world| {
                    world.broken(Promise::NothingLeft, || {
                        format!("process {process} has {entries} entries left")
                    });
                });
            }
        }
        with(|world| world.check_server(Some(closed)));
        // Longer than any ttl, any queue entry and any tombstone.
        let all_ended =
            with(|world| world.now + world.set_back + world.plan.longest_row().max(80 * SECOND) + 5 * SECOND);
        self.advance(all_ended, |_| false);
        with(|world| world.check_server(None));
    }

    // --- The loop --------------------------------------------------------------------------------

    /// Runs until `limit`, or until `is_over` says so, or a promise is broken.
    fn advance(&mut self, limit: Micros, is_over: impl Fn(&World) -> bool) {
        loop {
            while let Some(task) = next_task() {
                let Some((process, thread)) = executor::place_of(task) else { continue };
                let is_polled = with(|world| {
                    if world.is_stalled(process, thread) {
                        world.processes[process].parked.push(task);
                        return false;
                    }
                    let is_counted = thread == Thread::Driver && world.now >= world.books.calm_from;
                    world.processes[process].driver_polls += u64::from(is_counted);
                    true
                });
                if !is_polled {
                    continue;
                }
                self.polls += 1;
                self.polls_at_once += 1;
                if self.polls_at_once > POLLS_AT_ONCE {
                    with(|world| world.storm("tasks wake each other without end"));
                    return;
                }
                run_as(process, || executor::poll(task));
            }
            let event = with(|world| {
                if world.books.violation.is_some() || is_over(world) {
                    return None;
                }
                let before = world.now;
                let event = world.next_event(limit);
                if world.now > before {
                    self.polls_at_once = 0;
                }
                if event.is_none() {
                    world.now = limit.max(world.now);
                }
                event
            });
            match event {
                None => return,
                Some(Event::Start { client }) => start(client),
                Some(event) => dispatch(event),
            }
        }
    }
}

fn next_task() -> Option<executor::TaskId> {
    executor::next_ready(|count| with(|world| if world.plan.shuffles { world.rng.index(count) } else { 0 }))
}

fn dispatch(event: Event) {
    match with(|world| world.dispatch(event)) {
        Act::None => {}
        Act::Wake(waker) => waker.wake(),
        Act::Deliver(process, push) => {
            if let Some(inbox) = with(|world| world.processes[process].inbox.clone()) {
                run_as(process, || inbox.deliver(push));
            }
        }
        Act::KeyChanged(process, key) => {
            if let Some(inbox) = with(|world| world.processes[process].inbox.clone()) {
                run_as(process, || match key {
                    Some(key) => inbox.key_changed(&key),
                    None => inbox.keys_missed(),
                });
            }
        }
        Act::CheckNotified(guard) => users::check_notified(guard),
        Act::Reconnected(process) => {
            let inbox = with(|world| world.processes[process].inbox.clone());
            if let Some(inbox) = inbox {
                run_as(process, || inbox.reconnected());
            }
            begin_tasks(process);
        }
    }
    for process in with(|world| std::mem::take(&mut world.killed)) {
        drop_process(process);
        let inbox = with(|world| world.processes[process].inbox.take());
        run_as(process, || drop(inbox));
    }
}

/// A client's process starts: its driver, and its connections.
fn start(client: usize) {
    let Some((process, id)) = with(|world| {
        if world.machines[client].process.is_some() {
            return None;
        }
        let process = world.processes.len();
        let id = ClientId::new(u128::from(world.rng.bits()) << 64 | u128::from(world.rng.bits()));
        world.processes.push(Process {
            client,
            id,
            is_alive: true,
            has_left_leases: false,
            inbox: None,
            handle: None,
            slots: Default::default(),
            stalls: [0, 0],
            parked: Vec::new(),
            backlog: Vec::new(),
            is_started: false,
            stalled: 0,
            resumed_at: 0,
            driver_polls: 0,
            messages: 0,
            refused_at: 0,
            answered_at: 0,
        });
        world.machines[client].process = Some(process);
        let column = world.column(process);
        world.say(column, &[35, process as u64], || format!("process {process} starts"));
        let is_program = world.plan.clients[client].is_program;
        for line in [Line::Driver, Line::Callers].into_iter().filter(|_| !is_program) {
            world.at(world.now, Event::Connect { process, line });
        }
        Some((process, id))
    }) else {
        return;
    };
    if with(|world| world.is_program(process)) {
        return start_program(process, client);
    }
    let (handle, inbox, driver) = run_as(process, || simulation::client(id, Arc::new(Wire(process))));
    with(|world| {
        world.processes[process].handle = Some(handle);
        world.processes[process].inbox = Some(inbox);
    });
    executor::spawn(process, Thread::Driver, driver);
}

/// The process of a program with another library.
fn start_program(process: ProcessId, client: usize) {
    let of = |world: &World| world.plan.bridges.programs.iter().position(|program| program.client == client);
    if let Some(number) = with(|world| of(world)) {
        executor::spawn(process, Thread::Callers, users::run_program(process, number));
    }
}

/// Once connected, a process begins its users' tasks: a client is not there before its driver has a connection.
fn begin_tasks(process: ProcessId) {
    let begun = with(|world| {
        let known = &mut world.processes[process];
        let is_connected = known.slots[Line::Driver as usize].connection.is_some();
        if !is_connected || std::mem::replace(&mut known.is_started, true) {
            return None;
        }
        let client = known.client;
        let tasks: Vec<usize> = (0..world.plan.tasks.len())
            .filter(|task| world.plan.tasks[*task].client == client && !world.finished[*task])
            .collect();
        Some((known_handle(world, process)?, tasks))
    });
    let Some((handle, tasks)) = begun else { return };
    for task in tasks {
        executor::spawn(process, Thread::Callers, users::run_task(process, handle.clone(), task));
    }
}

fn known_handle(world: &World, process: ProcessId) -> Option<leasehold::Client> {
    world.processes[process].handle.clone()
}

impl World {
    /// A driver is polled when something is due, was asked for or has arrived.
    fn check_polls(&mut self) {
        if self.now < self.books.calm_from {
            return;
        }
        let seconds = (self.now - self.books.calm_from) / SECOND + 1;
        let busy = self
            .processes
            .iter()
            .position(|process| process.driver_polls > 200 + 20 * seconds + 10 * process.messages);
        if let Some(busy) = busy {
            let (polls, messages) = (self.processes[busy].driver_polls, self.processes[busy].messages);
            self.storm(&format!("the driver of process {busy} was polled {polls} times in {seconds} s, with {messages} messages"));
        }
    }

    /// The server keeps nothing for these processes; with `None`, nothing for any process, and two hours later nothing at all.
    fn check_server(&mut self, of: Option<&[ProcessId]>) {
        let clients: Option<Vec<ClientId>> =
            of.map(|of| of.iter().map(|process| self.processes[*process].id).collect());
        let is_theirs = |client: ClientId| clients.as_ref().is_none_or(|clients| clients.contains(&client));
        let (now, master) = (self.now, self.master);
        for resource in 0..self.plan.locks.len() {
            let answer =
                self.servers[master].apply(now, resource, &Command::Inspect, &mut |_| false, &mut Vec::new());
            let Reply::View(view) = answer.reply else { continue };
            // A replica that was behind may know what was given back to the master before it. That expires by itself.
            let is_known =
                |acquisition| clients.is_none() || self.books.was_asked_for_at(acquisition, master);
            let holder = view.holders.iter().find(|holder| {
                is_theirs(holder.acquisition.client)
                    && is_known(holder.acquisition)
                    && !(holder.retained && clients.is_some())
            });
            let waiter = view.waiters.iter().find(|waiter| {
                is_theirs(waiter.acquisition.client)
                    && is_known(waiter.acquisition)
                    && !(self.books.is_late_repeat(waiter.acquisition) && clients.is_some())
            });
            if let Some(holder) = holder {
                let what = format!("r{resource}: the lease {} is left at the end", holder.acquisition);
                self.broken(Promise::NothingLeft, || what);
            }
            if let Some(waiter) = waiter {
                let what = format!("r{resource}: the waiter {} is left at the end", waiter.acquisition);
                self.broken(Promise::NothingLeft, || what);
            }
            let later = now + self.set_back + 7200 * SECOND;
            if clients.is_none() && self.servers[master].keeps(later, resource) {
                self.broken(Promise::NothingLeft, || format!("r{resource}: something is kept for ever"));
            }
        }
    }
}

/// Runs a case twice, and compares.
#[must_use]
pub fn run_twice(case: &Case) -> Outcome {
    let (mut first, second) = (run(case, None, None), run(case, None, None));
    if first.hash != second.hash {
        let what = "two runs of one seed differ".to_owned();
        first.violation = Some(Violation { promise: Promise::Repeatable, what, at: 0 });
    }
    first
}

/// A span as text.
#[must_use]
pub fn hours(simulated: Micros) -> f64 {
    Duration::from_micros(simulated).as_secs_f64() / 3600.0
}
