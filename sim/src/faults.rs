//! What goes wrong, and how it heals.

use crate::executor::{ProcessId, Thread};
use crate::history::Column;
use crate::plan::{Fault, MS, Micros, SECOND};
use crate::server::{Server, ServerClock};
use crate::world::{Event, Line, World};

impl World {
    /// Schedules the plan's faults, and the end of them.
    pub fn schedule_faults(&mut self) {
        let plan = self.plan.clone();
        for (number, planned) in plan.faults.iter().enumerate() {
            // First, because both are at the same time if the replica is not behind.
            if let Fault::Failover { lag, .. } = planned.fault {
                self.at(planned.at.saturating_sub(lag), Event::Replicate(number));
            }
            self.at(planned.at, Event::Fault(number));
        }
        self.at(plan.heal_at, Event::Heal);
    }

    /// A fault begins or ends.
    pub fn disturb(&mut self, event: &Event) {
        match *event {
            Event::Fault(number) => {
                let fault = self.plan.faults[number].fault;
                self.say(Column::Server, &[32, number as u64], || format!("fault {number}: {fault:?}"));
                self.begin(number, fault);
            }
            Event::Replicate(number) => {
                let data = self.servers[self.master].data.clone();
                self.replicas.insert(number, data);
            }
            Event::Resume { process, thread } => self.resume(process, thread),
            Event::Unfreeze { client } => self.unfreeze(client),
            Event::ResumeServer(server) => self.resume_server(server),
            Event::StartServer(server) => {
                self.servers[server].is_up = true;
                self.say(Column::Server, &[33], || format!("server {server} is up"));
            }
            Event::StopServer(server) => self.stop_server(server),
            Event::Unfull(server) => self.servers[server].is_full = false,
            Event::Allow(server) => self.servers[server].denies = false,
            Event::SilenceKeys { client, lasts } => {
                self.begin(0, Fault::SilenceKeys { client, lasts });
            }
            Event::DeleteKey(lock) => self.delete_by_hand(lock),
            Event::CheckReported { guard, is_program } => self.check_reported(guard, is_program),
            Event::Heal => self.heal(),
            _ => {}
        }
    }

    fn process_of(&self, client: usize) -> Option<ProcessId> {
        self.machines[client].process.filter(|process| self.processes[*process].is_alive)
    }

    fn begin(&mut self, number: usize, fault: Fault) {
        let heal_at = self.plan.heal_at;
        let until = |lasts: Micros, now: Micros| (now + lasts).min(heal_at);
        match fault {
            Fault::Pause { client, callers, driver, lasts } => {
                let threads = [(callers, Thread::Callers), (driver, Thread::Driver)];
                for (_, thread) in threads.into_iter().filter(|(is_stalled, _)| *is_stalled) {
                    self.stall(client, thread, until(lasts, self.now));
                }
            }
            Fault::Suspend { client, lasts } => {
                let until = until(lasts, self.now);
                self.machines[client].clock.set_speed(self.now, -1_000_000);
                self.taint(client, until);
                for thread in [Thread::Callers, Thread::Driver] {
                    self.stall(client, thread, until);
                }
                self.at(until, Event::Unfreeze { client });
            }
            Fault::SlowClock { client, ppm } => {
                self.machines[client].clock.set_speed(self.now, ppm);
                self.taint(client, heal_at);
                self.at(heal_at, Event::Unfreeze { client });
            }
            Fault::Crash { client, restarts_after, closes_after } => {
                if let Some(process) = self.process_of(client) {
                    self.crash(process, closes_after);
                    let restarts = until(restarts_after, self.now);
                    self.at(restarts, Event::Start { client });
                }
            }
            Fault::Cut { client, callers, driver, late } => {
                let Some(process) = self.process_of(client) else { return };
                for (is_cut, slot) in [(callers, 0), (driver, 1)] {
                    let connection = self.processes[process].slots[slot].connection;
                    if let Some(connection) = connection.filter(|_| is_cut) {
                        self.cut(connection, late);
                    }
                }
            }
            Fault::CutKeys { client, late } => {
                let Some(process) = self.process_of(client) else { return };
                let connection = self.processes[process].slots[Line::Keys as usize].connection;
                if let Some(connection) = connection {
                    self.cut(connection, late);
                }
            }
            Fault::SilenceKeys { client, lasts } => {
                let until = until(lasts, self.now);
                self.machines[client].silent_keys = self.machines[client].silent_keys.max(until);
            }
            Fault::LateKeys { client, by, during, lasts } => {
                let silent_from = until(during, self.now);
                self.machines[client].late_keys = (by, silent_from);
                self.at(silent_from, Event::SilenceKeys { client, lasts });
            }
            Fault::LateTake { client, late, deleted_after } => {
                self.machines[client].late_take = Some((late, deleted_after));
            }
            Fault::Silence { client, up, down, lasts } => {
                let until = until(lasts, self.now);
                let machine = &mut self.machines[client];
                machine.silent_up = if up { machine.silent_up.max(until) } else { machine.silent_up };
                machine.silent_down = if down { machine.silent_down.max(until) } else { machine.silent_down };
            }
            Fault::Partition { client, lasts } => {
                let until = until(lasts, self.now);
                let machine = &mut self.machines[client];
                machine.silent_up = machine.silent_up.max(until);
                machine.silent_down = machine.silent_down.max(until);
                machine.unconnected = machine.unconnected.max(until);
            }
            Fault::SlowConsumer { client, lasts } => {
                let until = until(lasts, self.now);
                self.machines[client].silent_down = self.machines[client].silent_down.max(until);
            }
            Fault::Loss { thousandths, pushes_only, lasts } => {
                self.loss = (thousandths, pushes_only, until(lasts, self.now));
            }
            Fault::Delay { by, lasts } => self.delay = (by, until(lasts, self.now)),
            other => self.begin_at_server(number, other),
        }
    }

    fn begin_at_server(&mut self, number: usize, fault: Fault) {
        let (master, heal_at) = (self.master, self.plan.heal_at);
        let until = |lasts: Micros, now: Micros| (now + lasts).min(heal_at);
        match fault {
            Fault::ServerPause { lasts } => {
                self.servers[master].is_paused = true;
                self.at(until(lasts, self.now), Event::ResumeServer(master));
            }
            Fault::ServerRestart { lasts, keeps_data } => {
                self.stop_server(master);
                if !keeps_data {
                    let (locks, old) = (self.plan.locks.len(), &self.servers[master]);
                    let (clock, epoch) = (old.clock, old.epoch + 1);
                    self.books.lineage.begin((master, epoch));
                    self.bridging.disturb(self.now);
                    self.servers[master] = Server { is_up: false, ..Server::new(locks, clock, epoch) };
                }
                self.at(until(lasts, self.now), Event::StartServer(master));
            }
            Fault::Failover { skew, overlaps, .. } => self.fail_over(number, skew, overlaps),
            Fault::Full { lasts } => {
                self.servers[master].is_full = true;
                self.at(until(lasts, self.now), Event::Unfull(master));
            }
            Fault::Deny { lasts } => {
                self.servers[master].denies = true;
                self.at(until(lasts, self.now), Event::Allow(master));
            }
            Fault::ClockStep { by } => {
                let server = &mut self.servers[master];
                server.clock.offset += by;
                if by > 0 {
                    // Section "Redis: what no setting prevents": leases end early.
                    server.epoch += 1;
                    let epoch = (master, server.epoch);
                    self.books.lineage.begin(epoch);
                    self.bridging.disturb(self.now);
                } else {
                    self.set_back += by.unsigned_abs();
                }
            }
            _ => {}
        }
    }

    /// Whether a replica has what this server writes now. One that is to take over and is behind has not, and none follows a former master.
    pub(crate) fn has_replica(&self, server: usize) -> bool {
        server == self.master && self.replicas.is_empty()
    }

    fn fail_over(&mut self, number: usize, skew: i64, overlaps: Micros) {
        let Some(data) = self.replicas.remove(&number) else { return };
        let old = self.master;
        let clock = self.servers[old].clock;
        let clock = ServerClock { offset: clock.offset + skew, ..clock };
        if skew < 0 {
            self.set_back += skew.unsigned_abs();
        }
        let server = Server { data, ..Server::new(self.plan.locks.len(), clock, 0) };
        let before = (old, self.servers[old].epoch);
        self.servers.push(server);
        self.master = self.servers.len() - 1;
        if skew > 0 {
            self.books.lineage.begin((self.master, 0));
        } else {
            self.books.lineage.follow((self.master, 0), before);
        }
        let end = (self.now + overlaps).min(self.plan.heal_at);
        self.bridging.disturb(end);
        self.watch_expiries(self.master);
        if overlaps == 0 {
            self.stop_server(old);
            return;
        }
        // Each client learns of the new master at a time of its own.
        for connection in self.open_at(old) {
            let after = self.rng.below(overlaps);
            self.after(after, Event::ClosedAtClient { connection });
        }
        self.at(end, Event::StopServer(old));
    }

    fn stop_server(&mut self, server: usize) {
        self.servers[server].is_up = false;
        self.servers[server].is_paused = false;
        self.servers[server].backlog.clear();
        for connection in self.open_at(server) {
            self.cut(connection, None);
        }
    }

    fn resume_server(&mut self, server: usize) {
        self.servers[server].is_paused = false;
        for event in std::mem::take(&mut self.servers[server].backlog) {
            self.after(0, event);
        }
    }

    fn stall(&mut self, client: usize, thread: Thread, until: Micros) {
        let Some(process) = self.process_of(client) else { return };
        let known = &mut self.processes[process];
        known.stalls[thread as usize] += 1;
        known.stalled += 1;
        self.at(until, Event::Resume { process, thread });
    }

    /// A thread continues: what has arrived meanwhile and what its tasks were about to do come in any order.
    fn resume(&mut self, process: ProcessId, thread: Thread) {
        let now = self.now;
        let known = &mut self.processes[process];
        known.stalls[thread as usize] = known.stalls[thread as usize].saturating_sub(1);
        known.resumed_at = now;
        let parked = std::mem::take(&mut known.parked);
        let backlog = std::mem::take(&mut known.backlog);
        for event in backlog {
            self.after(0, event);
        }
        // Those of the other thread are parked again.
        parked.into_iter().for_each(crate::executor::put_back);
    }

    /// A machine's clock is outside of the bound until then. Leases of that time may be trusted for longer, and so may a pushed
    /// grant whose waiter last asked at that time, which is up to 27 s before.
    fn taint(&mut self, client: usize, until: Micros) {
        let longest = self.plan.longest_ttl();
        let machine = &mut self.machines[client];
        machine.tainted = machine.tainted.max(until + 2 * longest + 30 * SECOND);
    }

    fn unfreeze(&mut self, client: usize) {
        let ppm = self.plan.clients[client].ppm;
        self.machines[client].clock.set_speed(self.now, ppm);
        let theirs: Vec<u64> = self
            .sleeps
            .iter()
            .filter(|(_, sleeping)| self.processes[sleeping.process].client == client)
            .map(|(number, _)| *number)
            .collect();
        for number in theirs {
            self.schedule_wake(number);
        }
    }

    /// A process is killed. Its tasks are dropped by the caller.
    fn crash(&mut self, process: ProcessId, closes_after: Micros) {
        self.crashes += 1;
        let known = &mut self.processes[process];
        known.is_alive = false;
        self.killed.push(process);
        let known = &mut self.processes[process];
        known.backlog.clear();
        known.parked.clear();
        let client = known.client;
        self.machines[client].process = None;
        let theirs: Vec<u64> = self
            .servers
            .iter()
            .flat_map(|server| &server.connections)
            .filter(|(_, peer)| peer.process == process)
            .map(|(connection, _)| *connection)
            .collect();
        for connection in theirs {
            let delay = self.delay();
            let at = self.now + closes_after + delay;
            self.at(at, Event::ClosedAtServer { connection });
        }
        self.bridging.holds.retain(|_, hold| hold.process != process);
        let records = &mut self.books.records;
        let locks: Vec<usize> = records
            .values()
            .filter(|record| record.process == process)
            .map(|record| record.resource)
            .collect();
        records.retain(|_, record| record.process != process);
        for lock in locks {
            self.demand[lock].busy_at = self.now;
        }
        let tasks: Vec<usize> =
            (0..self.plan.tasks.len()).filter(|task| self.plan.tasks[*task].client == client).collect();
        for demand in &mut self.demand {
            demand.waiting.retain(|task, _| !tasks.contains(task));
        }
    }

    /// The faults end. Connections that are closed on one side only are closed on the other within some seconds.
    fn heal(&mut self) {
        self.say(Column::Server, &[34], || "the faults end".to_owned());
        self.is_healed = true;
        self.books.healthy_from = self.now + self.takeover_bound();
        self.books.calm_from = self.books.calm_from.min(self.books.healthy_from);
        self.loss = (0, false, 0);
        self.delay = (0, 0);
        for machine in &mut self.machines {
            machine.late_take = None;
        }
        for server in 0..self.servers.len() {
            if self.servers[server].is_paused {
                self.resume_server(server);
            }
            self.servers[server].is_full = false;
            self.servers[server].denies = false;
        }
        let half_open: Vec<u64> = self
            .servers
            .iter()
            .flat_map(|server| &server.connections)
            .filter(|(connection, peer)| {
                let known = &self.processes[peer.process];
                !known.is_alive
                    || known.slots.iter().all(|slot| {
                        slot.connection != Some(**connection) && slot.opening != Some(**connection)
                    })
            })
            .map(|(connection, _)| *connection)
            .collect();
        for connection in half_open {
            let after = self.rng.below(5 * SECOND);
            self.after(after, Event::ClosedAtServer { connection });
        }
        let one_sided: Vec<u64> = self
            .processes
            .iter()
            .filter(|process| process.is_alive)
            .flat_map(|process| &process.slots)
            .filter_map(|slot| slot.connection)
            .filter(|connection| {
                let server = self.connections[connection].server;
                !self.servers[server].connections.contains_key(connection)
            })
            .collect();
        for connection in one_sided {
            let after = self.rng.below(500 * MS);
            self.after(after, Event::ClosedAtClient { connection });
        }
        let absent: Vec<usize> = (0..self.machines.len())
            .filter(|client| {
                self.machines[*client].process.is_none() && !self.plan.clients[*client].is_absent
            })
            .collect();
        for client in absent {
            self.after(0, Event::Start { client });
        }
    }
}
