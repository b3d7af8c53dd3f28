//! One run: faults, healing, liveness, and the end, at which nothing may be left.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::simulation::{QuorumOptions, ThreadClock, quorum_client, set_clock};
use leasehold_core::ClientId;

use super::event::Event;
use super::host::Host;
use super::network::Act;
use super::plan::Plan;
use super::planted::Planted;
use super::users;
use super::world::{self, Process, Slot, World, run_as, with};
use crate::checks::{Promise, Violation};
use crate::executor::{self, ProcessId, Thread};
use crate::plan::{Case, SECOND};
use crate::run::Outcome;

/// More polls than this without any time passing are an endless loop.
const POLLS_AT_ONCE: u64 = 100_000;

/// Runs a case. `lines`: how many lines of history the diagram shows at most.
#[must_use]
pub fn run(case: &Case, planted: Option<Planted>, lines: Option<usize>) -> Outcome {
    run_plan(case.seed, Plan::new(case), planted, lines).0
}

/// Runs a plan. Also returns the number of guards by the second in which they were created.
pub(super) fn run_plan(
    seed: u64,
    plan: Plan,
    planted: Option<Planted>,
    lines: Option<usize>,
) -> (Outcome, BTreeMap<u64, u64>) {
    executor::clear();
    set_clock(ThreadClock::Unreadable);
    world::replace(Some(Box::new(World::new(seed, plan, planted, lines.is_some()))));
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
    if with(|world| world.violation.is_none()) {
        run.close();
    }
    let outcome = with(|world| Outcome {
        violation: world.violation.clone(),
        hash: world.history.hash(),
        simulated: world.now,
        polls: run.polls,
        grants: world.books.guards,
        timeline: lines.map_or_else(String::new, |lines| world.history.timeline(lines)),
    });
    let by_second = with(|world| std::mem::take(&mut world.books.by_second));
    tear_down();
    (outcome, by_second)
}

/// Runs a case twice, and compares.
#[must_use]
pub fn run_twice(case: &Case) -> Outcome {
    let (mut first, second) = (run(case, None, None), run(case, None, None));
    if first.hash != second.hash && first.violation.is_none() {
        let what = format!("the histories are {:016x} and {:016x}", first.hash, second.hash);
        first.violation = Some(Violation { promise: Promise::Repeatable, what, at: 0 });
    }
    first
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
        let (handle, inbox) = with(|world| {
            let known = &mut world.processes[process];
            (known.handle.take(), known.inbox.take())
        });
        drop((handle, inbox));
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
            world.plan.heal_at + 400 * SECOND + tasks * (2 * world.plan.ttl + 10 * SECOND)
        });
        self.advance(deadline, |world| world.finished.iter().all(|is_finished| *is_finished));
        with(|world| {
            if let Some(task) = world.finished.iter().position(|is_finished| !is_finished) {
                world.broken(Promise::Liveness, || format!("task {task} still waits at the end"));
            }
        });
    }

    /// All clients are closed, and nothing may be left.
    fn close(&mut self) {
        // A closed client does not repeat its releases at a minority that does not answer: those leases expire.
        // All tasks may have ended before the faults do.
        let heal_at = with(|world| world.plan.heal_at);
        self.advance(heal_at + 1, |_| false);
        let healthy_from = with(|world| world.healthy_from);
        self.advance(healthy_from, |_| false);
        let limit = with(|world| world.plan.ttl.max(3 * SECOND));
        let living: Vec<ProcessId> = with(|world| {
            let living = world.processes.iter().enumerate().filter(|(_, process)| process.is_alive);
            living.map(|(number, _)| number).collect()
        });
        let closing = Arc::new(AtomicUsize::new(living.len()));
        for process in &living {
            let Some(client) = with(|world| world.processes[*process].handle.take()) else { continue };
            let (process, closing) = (*process, closing.clone());
            executor::spawn(process, Thread::Callers, async move {
                let closed = client.close().await;
                closing.fetch_sub(1, Ordering::Relaxed);
                if let Err(error) = closed {
                    with(|world| {
                        world.broken(Promise::NothingLeft, || format!("process {process}: close: {error}"));
                    });
                }
            });
        }
        let until = with(|world| world.now) + limit + SECOND;
        self.advance(until, |_| closing.load(Ordering::Relaxed) == 0);
        let left = closing.load(Ordering::Relaxed);
        if left > 0 {
            with(|world| {
                world.broken(Promise::InTime, || format!("{left} clients are not closed after {limit} µs"));
            });
        }
        // The drivers end, and what is still on its way arrives.
        let settled = with(|world| world.now) + 5 * SECOND;
        self.advance(settled, |_| false);
        self.check_clean(&living);
    }

    fn check_clean(&mut self, living: &[ProcessId]) {
        for process in living {
            let inbox = with(|world| world.processes[*process].inbox.take());
            let entries = inbox.as_ref().map_or(0, leasehold::simulation::SimulatedQuorum::entries);
            run_as(*process, || drop(inbox));
            if entries > 0 {
                with(|world| {
                    world.broken(Promise::NothingLeft, || {
                        format!("process {process} has {entries} entries left")
                    });
                });
            }
        }
        // The store's own task ends with the store.
        let settled = with(|world| world.now) + SECOND;
        self.advance(settled, |_| false);
        for process in living {
            let tasks = executor::count(*process);
            if tasks > 0 {
                with(|world| {
                    world.broken(Promise::NothingLeft, || {
                        format!("{tasks} tasks of process {process} are left")
                    });
                });
            }
        }
        with(|world| world.check_nodes(living));
        // Longer than any ttl, any queue entry and any tombstone.
        let all_ended = with(|world| world.now + world.plan.ttl.max(80 * SECOND) + 65 * SECOND);
        self.advance(all_ended, |_| false);
        with(World::check_kept);
    }

    // --- The loop --------------------------------------------------------------------------------

    /// Runs until `limit`, or until `is_over` says so, or a promise is broken.
    fn advance(&mut self, limit: u64, is_over: impl Fn(&World) -> bool) {
        loop {
            while let Some(task) = next_task() {
                let Some((process, thread)) = executor::place_of(task) else { continue };
                let is_polled = with(|world| {
                    let is_stalled = world.is_stalled(process, thread);
                    if is_stalled {
                        world.processes[process].parked.push(task);
                    }
                    !is_stalled
                });
                if !is_polled {
                    continue;
                }
                self.polls += 1;
                self.polls_at_once += 1;
                if self.polls_at_once > POLLS_AT_ONCE {
                    with(|world| {
                        world
                            .broken(Promise::NoTimerStorm, || "tasks wake each other without end".to_owned());
                    });
                    return;
                }
                run_as(process, || executor::poll(task));
            }
            let event = with(|world| {
                if world.violation.is_some() || is_over(world) {
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
    let act = with(|world| world.dispatch(event));
    let inbox_of = |process: ProcessId| with(|world| world.processes[process].inbox.clone());
    match act {
        Act::None => {}
        Act::Wake(waker) => waker.wake(),
        Act::Deliver(process, node, push) => {
            if let Some(inbox) = inbox_of(process) {
                run_as(process, || inbox.deliver(node, push));
            }
        }
        Act::Reconnected(process, node) => {
            if let Some(inbox) = inbox_of(process) {
                run_as(process, || inbox.reconnected(node));
            }
            begin_tasks(process);
        }
    }
    for process in with(|world| std::mem::take(&mut world.killed)) {
        drop_process(process);
    }
}

/// A client's process starts: its driver, and its connections.
fn start(client: usize) {
    let Some((process, id, options)) = with(|world| {
        if world.machines[client].process.is_some() {
            return None;
        }
        let process = world.processes.len();
        let id = ClientId::new(u128::from(world.rng.bits()) << 64 | u128::from(world.rng.bits()));
        let nodes = world.nodes.len();
        world.processes.push(Process {
            client,
            id,
            is_alive: true,
            inbox: None,
            handle: None,
            slots: (0..nodes).map(|_| Slot::default()).collect(),
            stalls: [0, 0],
            parked: Vec::new(),
            backlog: Vec::new(),
            is_started: false,
            stalled: 0,
            resumed_at: 0,
        });
        world.machines[client].process = Some(process);
        let column = world.column(process);
        world.say(column, &[35, process as u64], || format!("process {process} starts"));
        for node in 0..nodes {
            world.at(world.now, Event::Connect { process, node });
        }
        let max_ttl = world.plan.max_ttl.map(Duration::from_micros);
        Some((process, id, QuorumOptions { is_fenced: true, max_ttl }))
    }) else {
        return;
    };
    let nodes = with(|world| world.nodes.len());
    let host = Arc::new(Host { process, nodes });
    let (handle, inbox, driver) = run_as(process, || quorum_client(id, host, options));
    with(|world| {
        world.processes[process].handle = Some(handle);
        world.processes[process].inbox = Some(inbox);
    });
    executor::spawn(process, Thread::Driver, driver);
}

/// Once connected to a majority, a process begins its users' tasks.
fn begin_tasks(process: ProcessId) {
    let begun = with(|world| {
        let known = &mut world.processes[process];
        let connected = known.slots.iter().filter(|slot| slot.link.is_some()).count();
        if connected < known.slots.len() / 2 + 1 || std::mem::replace(&mut known.is_started, true) {
            return None;
        }
        let (client, handle) = (known.client, known.handle.clone()?);
        let tasks: Vec<usize> = (0..world.plan.tasks.len())
            .filter(|task| world.plan.tasks[*task].client == client && !world.finished[*task])
            .collect();
        Some((handle, tasks))
    });
    let Some((handle, tasks)) = begun else { return };
    for task in tasks {
        executor::spawn(process, Thread::Callers, users::run_task(process, handle.clone(), task));
    }
}

impl World {
    /// The nodes keep nothing for these processes.
    fn check_nodes(&mut self, living: &[ProcessId]) {
        let clients: Vec<ClientId> = living.iter().map(|process| self.processes[*process].id).collect();
        for node in 0..self.nodes.len() {
            let left = self.nodes[node].left(self.now);
            if let Some((name, client)) = left.into_iter().find(|(_, client)| clients.contains(client)) {
                self.broken(Promise::NothingLeft, || {
                    format!("node {node} keeps something of {client} in {name} at the end")
                });
            }
        }
    }

    /// Two hours later the nodes keep nothing at all. What a node has stored while its clock was ahead lasts for as much longer.
    fn check_kept(&mut self) {
        for node in 0..self.nodes.len() {
            let ahead = u64::try_from(self.plan.nodes[node].offset).unwrap_or(0);
            // Its clock may be slow.
            let later = 7200 * SECOND + ahead + ahead / 100;
            if let Some(name) = self.nodes[node].keeps(self.now + later) {
                self.broken(Promise::NothingLeft, || format!("node {node} keeps {name} for ever"));
            }
        }
    }
}
