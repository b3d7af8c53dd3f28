//! What goes wrong, and how it heals.

use super::event::Event;
use super::plan::Fault;
use super::world::World;
use crate::executor::{self, ProcessId, Thread};
use crate::history::Column;
use crate::plan::{MS, Micros, SECOND};

impl World {
    /// Schedules the plan's faults, and the end of them.
    pub(super) fn schedule_faults(&mut self) {
        let plan = self.plan.clone();
        for (number, planned) in plan.faults.iter().enumerate() {
            self.at(planned.at, Event::Fault(number));
        }
        self.at(plan.heal_at, Event::Heal);
    }

    /// A fault begins or ends.
    pub(super) fn disturb(&mut self, event: &Event) {
        match *event {
            Event::Fault(number) => {
                let fault = self.plan.faults[number].fault;
                self.say(Column::Server, &[32, number as u64], || format!("fault {number}: {fault:?}"));
                self.begin(fault);
            }
            Event::Resume { process, thread } => self.resume(process, thread),
            Event::ResumeNode(node) => {
                self.nodes[node].is_paused = false;
                for event in std::mem::take(&mut self.nodes[node].backlog) {
                    self.after(0, event);
                }
            }
            Event::StartNode(node) => {
                self.nodes[node].is_up = true;
                self.say(Column::Server, &[33, node as u64], || format!("node {node} is up"));
            }
            Event::CheckReported(number) => self.check_reported(number),
            Event::Heal => self.heal(),
            _ => {}
        }
    }

    fn process_of(&self, client: usize) -> Option<ProcessId> {
        self.machines[client].process.filter(|process| self.processes[*process].is_alive)
    }

    fn begin(&mut self, fault: Fault) {
        let (now, heal_at) = (self.now, self.plan.heal_at);
        let until = |lasts: Micros| (now + lasts).min(heal_at);
        match fault {
            Fault::Pause { client, callers, driver, lasts } => {
                let Some(process) = self.process_of(client) else { return };
                for (_, thread) in [(callers, Thread::Callers), (driver, Thread::Driver)]
                    .into_iter()
                    .filter(|(is_stalled, _)| *is_stalled)
                {
                    let known = &mut self.processes[process];
                    known.stalls[thread as usize] += 1;
                    known.stalled += 1;
                    self.at(until(lasts), Event::Resume { process, thread });
                }
            }
            Fault::Crash { client, restarts_after } => {
                if let Some(process) = self.process_of(client) {
                    self.crash(process);
                    self.at(until(restarts_after), Event::Start { client });
                }
            }
            Fault::Cut { client, node, late } => {
                let Some(process) = self.process_of(client) else { return };
                let nodes = node.map_or(0..self.nodes.len(), |node| node..node + 1);
                for node in nodes {
                    if let Some(link) = self.processes[process].slots[node].link {
                        self.cut(link, late);
                    }
                }
            }
            Fault::Silence { client, node, up, down, lasts } => {
                let (silent_up, silent_down) = self.silence.entry((client, node)).or_default();
                let until = until(lasts);
                *silent_up = if up { until.max(*silent_up) } else { *silent_up };
                *silent_down = if down { until.max(*silent_down) } else { *silent_down };
            }
            Fault::Loss { thousandths, lasts } => self.loss = (thousandths, until(lasts)),
            Fault::Delay { by, lasts } => self.delay = (by, until(lasts)),
            Fault::Unreachable { node, lasts } => {
                self.nodes[node].unreachable_until = until(lasts);
                self.cut_all(node);
            }
            Fault::NodePause { node, lasts } => {
                self.nodes[node].is_paused = true;
                self.at(until(lasts), Event::ResumeNode(node));
            }
            Fault::NodeSlow { node, by, lasts } => self.nodes[node].slow = (by, until(lasts)),
            Fault::NodeRestart { node, lasts, keeps_data } => {
                let there = &mut self.nodes[node];
                there.is_up = false;
                there.is_paused = false;
                there.backlog.clear();
                there.begin_life(keeps_data);
                self.cut_all(node);
                self.at(until(lasts), Event::StartNode(node));
            }
            Fault::Flush { node } => self.nodes[node].flush(),
            Fault::ClockSetRight { node } => self.nodes[node].clock.offset = 0,
        }
    }

    fn cut_all(&mut self, node: usize) {
        let links: Vec<u64> = self.nodes[node].connections.keys().copied().collect();
        for link in links {
            self.cut(link, None);
        }
    }

    /// A thread continues: what has arrived meanwhile and what its tasks were about to do come in any order.
    fn resume(&mut self, process: ProcessId, thread: Thread) {
        let now = self.now;
        let known = &mut self.processes[process];
        known.stalls[thread as usize] = known.stalls[thread as usize].saturating_sub(1);
        known.resumed_at = now;
        let parked = std::mem::take(&mut known.parked);
        for event in std::mem::take(&mut known.backlog) {
            self.after(0, event);
        }
        // Those of the other thread are parked again.
        parked.into_iter().for_each(executor::put_back);
    }

    /// A process is killed. Its tasks are dropped by the caller.
    fn crash(&mut self, process: ProcessId) {
        self.crashes += 1;
        let known = &mut self.processes[process];
        known.is_alive = false;
        known.backlog.clear();
        known.parked.clear();
        let client = known.client;
        self.killed.push(process);
        self.machines[client].process = None;
        for node in 0..self.nodes.len() {
            let links = self.nodes[node].connections.iter().filter(|(_, (other, _))| *other == process);
            for link in links.map(|(link, _)| *link).collect::<Vec<_>>() {
                let delay = self.message_delay();
                self.after(delay, Event::ClosedAtNode { link });
            }
        }
        let records = &mut self.books.records;
        let locks: Vec<usize> =
            records.values().filter(|record| record.process == process).map(|record| record.lock).collect();
        records.retain(|_, record| record.process != process);
        for lock in locks {
            self.demand[lock].busy_at = self.now;
        }
        let plan = self.plan.clone();
        for demand in &mut self.demand {
            demand.waiting.retain(|task, _| plan.tasks[*task].client != client);
        }
    }

    /// The faults end. Connections that are closed on one side only are closed on the other within some time.
    fn heal(&mut self) {
        self.say(Column::Server, &[34], || "the faults end".to_owned());
        self.is_healed = true;
        self.healthy_from = self.now + self.takeover_bound() + self.plan.ttl;
        self.calm_from = self.calm_from.min(self.healthy_from);
        (self.loss, self.delay) = ((0, 0), (0, 0));
        for node in 0..self.nodes.len() {
            let half_open = self.nodes[node].connections.iter().filter(|(link, (process, _))| {
                let slot = &self.processes[*process].slots[node];
                !self.processes[*process].is_alive
                    || slot.link != Some(**link) && slot.opening != Some(**link)
            });
            for link in half_open.map(|(link, _)| *link).collect::<Vec<_>>() {
                let after = self.rng.below(SECOND);
                self.after(after, Event::ClosedAtNode { link });
            }
            let one_sided = self.processes.iter().filter(|process| process.is_alive);
            let one_sided = one_sided.filter_map(|process| process.slots[node].link);
            let one_sided = one_sided.filter(|link| !self.nodes[node].connections.contains_key(link));
            for link in one_sided.collect::<Vec<_>>() {
                let after = self.rng.below(500 * MS);
                self.after(after, Event::ClosedAtClient { link });
            }
        }
        for client in 0..self.machines.len() {
            if self.machines[client].process.is_none() && !self.plan.clients[client].is_absent {
                self.after(0, Event::Start { client });
            }
        }
    }
}
