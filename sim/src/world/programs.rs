//! What is checked between guards of bridged locks and programs with the other library.

use leasehold::simulation::LeaseProbe;
use leasehold_core::{Acquisition, Command, Reply};

use crate::checks::Promise;
use crate::executor::ProcessId;
use crate::plan::{MS, Micros, SECOND};
use crate::server::index_of_key;
use crate::world::{Event, World, key_name};

/// How long a released key may stay: section "How it works" of the document on bridges.
const ORPHAN_BOUND: Micros = 4 * SECOND;

impl World {
    /// Whether a process is one of a program with the other library.
    pub(crate) fn is_program(&self, process: ProcessId) -> bool {
        self.plan.clients[self.processes[process].client].is_program
    }

    /// The guards of a lock, with their processes and leases.
    pub(crate) fn guards_of(&self, lock: usize) -> Vec<(u64, ProcessId, LeaseProbe)> {
        let theirs = self.books.records.iter().filter(|(_, record)| record.resource == lock);
        theirs.map(|(number, record)| (*number, record.process, record.probe.clone())).collect()
    }

    /// A program holds the lock from now on. A guard is trusted or not by the clock of its own machine.
    pub(crate) fn check_program(
        &mut self,
        lock: usize,
        program: ProcessId,
        (guard, process, is_trusted): (u64, ProcessId, bool),
    ) {
        if !self.is_sound(process) {
            return;
        }
        if is_trusted {
            self.check_apart(lock, program, process);
        } else if self.books.records.get(&guard).is_some_and(|record| record.is_watched) {
            self.after(MS, Event::CheckReported { guard, is_program: true });
        }
    }

    /// A trusted guard exists from now on.
    pub(crate) fn check_programs(&mut self, lock: usize, process: ProcessId) {
        let holds = self.bridging.holds.values();
        let trusted = holds.filter(|hold| hold.lock == lock && self.local(hold.process) < hold.until);
        let programs: Vec<ProcessId> = trusted.map(|hold| hold.process).collect();
        for program in programs {
            self.check_apart(lock, program, process);
        }
    }

    /// Section "Redis: what no setting prevents": keys that a server has lost, a failover, a clock set forward. A key that was deleted by
    /// hand excludes no other program.
    fn check_apart(&mut self, lock: usize, program: ProcessId, process: ProcessId) {
        let longest = self.plan.locks[lock].ttl.max(self.plan.bridges.longest_ttl());
        let disturbed_at = self.bridging.disturbed_at.max(self.demand[lock].deleted_at);
        let is_disturbed = disturbed_at.is_some_and(|at| self.now <= at + longest + SECOND);
        if !is_disturbed && self.is_sound(program) {
            self.broken(Promise::OneHolder, || {
                format!("process {process} holds r{lock} beside the program with another library of process {program}")
            });
        }
    }

    /// How long `close` may take: a bridged lock is released until its command to take it can't arrive any more.
    pub(crate) fn close_limit(&self) -> Micros {
        let is_bridged = self.plan.locks.iter().any(|lock| lock.is_bridged);
        self.plan.longest_ttl().max(2 * SECOND) + if is_bridged { ORPHAN_BOUND + SECOND } else { 0 }
    }

    /// A server has ended the own leases of a bridged lock.
    pub(crate) fn check_key_of_ended(
        &mut self,
        server: usize,
        lock: usize,
        command: &Command,
        reply: &Reply,
    ) {
        match (command, reply) {
            (Command::Release(release), Reply::Released) => {
                self.check_key_later(server, lock, release.acquisition);
            }
            (Command::ForceRelease, Reply::Forced(holders)) => {
                for holder in holders {
                    self.check_key_later(server, lock, holder.acquisition);
                }
            }
            _ => {}
        }
    }

    /// The own lease of this attempt has ended: the key follows soon, or has gone before. During the faults it may follow when they
    /// are over.
    fn check_key_later(&mut self, server: usize, lock: usize, released: Acquisition) {
        let Some(holder) = self.servers[server].data.keys.holder(&key_name(lock)) else { return };
        let by = self.bridging.holders.get(holder).copied();
        if by.is_some_and(|process| self.processes[process].id == released.client) {
            let (holder, slowest, released_at) = (holder.to_owned(), self.plan.network.slowest(), self.now);
            let at = self.now.max(self.plan.faults_end() + 5 * SECOND) + ORPHAN_BOUND + SECOND + 4 * slowest;
            self.at(at, Event::CheckKey { lock, holder, released_at });
        }
    }

    /// The lock with this key was released then, long ago. A replica that was behind may know it still, and so may one whose former master
    /// has released it.
    pub(crate) fn check_key(&mut self, lock: usize, holder: &str, released_at: Micros) {
        let server = &self.servers[self.master];
        let is_left = server.data.keys.holder(&key_name(lock)) == Some(holder);
        let is_alive = self.bridging.holders.get(holder).is_some_and(|by| self.processes[*by].is_alive);
        let is_disturbed = self.bridging.disturbed_at.is_some_and(|at| at >= released_at);
        let is_elsewhere = self.bridging.was_given_back_elsewhere(self.master, holder);
        if is_left && is_alive && !is_disturbed && !is_elsewhere {
            self.broken(Promise::NothingLeft, || format!("the key k{lock} is left after its release"));
        }
    }

    /// The key of this lock was deleted by hand: on a healthy network its holder is told at once, or by its next renewal.
    pub(crate) fn note_deletion(&mut self, lock: usize) {
        self.demand[lock].deleted_at = Some(self.now);
        if self.now < self.books.calm_from {
            return;
        }
        let ttl = self.plan.locks[lock].ttl;
        let longest = if self.plan.bridges.has_tracking { ttl.min(3 * SECOND) } else { ttl };
        // A renewal may be lost with a connection that the other side has closed, and is sent again.
        let bound = longest / 3 + longest / 12 + 8 * self.plan.network.slowest() + 10 * MS;
        let guards: Vec<u64> = self.guards_of(lock).into_iter().map(|(guard, ..)| guard).collect();
        for guard in guards {
            self.after(bound, Event::CheckNotified { guard });
        }
    }

    /// The guard whose key was deleted by hand is not trusted any more. The caller asks it by its own clock.
    pub(crate) fn check_notified(&mut self, guard: u64, is_trusted: bool) {
        let Some(record) = self.books.records.get(&guard).filter(|_| is_trusted) else { return };
        let (resource, process) = (record.resource, record.process);
        self.broken(Promise::LossReported, || {
            format!("the key of r{resource} was deleted by hand, and guard {guard} of process {process} was not told")
        });
    }

    /// A key is renewed for this holder. If the key has ended since a guard of the process exists, the guard never learns of that.
    pub(crate) fn check_goes_on(&mut self, server: usize, process: ProcessId, key: &str, holder: &str) {
        let Some(ended_at) = self.bridging.ended.get(&(server, holder.to_owned())).copied() else { return };
        let lock = index_of_key(key);
        let mut records = self.books.records.values();
        let is_held = records
            .any(|record| record.resource == lock && record.process == process && record.since <= ended_at);
        if is_held && !self.is_program(process) {
            self.broken(Promise::LossReported, || {
                format!("process {process} goes on with r{lock} although its key had ended: a late command has taken it again")
            });
        }
    }

    /// No key has a holder's value of these processes, which were closed without an error.
    pub(crate) fn check_keys(&mut self, closed: &[ProcessId]) {
        let (server, now) = (&self.servers[self.master], self.now);
        let clock = server.clock.at(now);
        // What a program leaves expires.
        let is_of_closed = |process: &ProcessId| closed.contains(process) && !self.is_program(*process);
        let left = server.data.keys.names().find(|key| {
            let by = server.data.keys.holder(key).and_then(|holder| self.bridging.holders.get(holder));
            let is_over = server.data.keys.expires_at(key).is_none_or(|at| at <= clock);
            !is_over && by.is_some_and(is_of_closed)
        });
        if let Some(key) = left {
            let lock = index_of_key(key);
            self.broken(Promise::NothingLeft, || format!("the key k{lock} is left at the end"));
        }
    }
}
