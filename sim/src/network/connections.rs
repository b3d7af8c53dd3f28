//! The connections between clients and servers: how they open and close.

use super::{Act, RECONNECT_MAX, RECONNECT_MIN};
use crate::executor::ProcessId;
use crate::plan::{Micros, SECOND};
use crate::server::Peer;
use crate::world::{Connection, Event, Line, World};

impl World {
    /// The client closes a connection, or sees that it is closed.
    pub(super) fn close_at_client(&mut self, connection: u64) {
        let Some(known) = self.connections.get(&connection) else { return };
        let (process, line) = (known.process, known.line);
        let slot = &mut self.processes[process].slots[line as usize];
        let was_open = slot.connection == Some(connection);
        if !was_open && slot.opening != Some(connection) {
            return;
        }
        slot.connection = None;
        slot.opening = None;
        slot.failures += 1;
        let pause = (RECONNECT_MIN << slot.failures.min(6)).min(RECONNECT_MAX);
        let column = self.column(process);
        self.say(column, &[2, connection], || format!("connection {connection} closed"));
        self.up(connection, Event::ClosedAtServer { connection });
        let pause = pause / 2 + self.rng.below(pause / 2);
        self.after(pause, Event::Connect { process, line });
        if line == Line::Keys {
            self.keys_lost(process, connection);
        }
        let over_it: Vec<u64> = self
            .calls
            .iter()
            .filter(|(_, call)| call.connection == Some(connection) && call.result.is_none())
            .map(|(number, _)| *number)
            .collect();
        for number in over_it {
            self.lost(number);
        }
    }

    /// The server closes a connection, or sees that it is closed.
    pub fn close_at_server(&mut self, connection: u64) {
        let Some(known) = self.connections.get(&connection) else { return };
        let server = &mut self.servers[known.server];
        server.connections.remove(&connection);
        for watchers in server.tracked.values_mut() {
            watchers.remove(&connection);
        }
    }

    /// A connection is cut between both sides.
    pub fn cut(&mut self, connection: u64, late: Option<Micros>) {
        let Some(known) = self.connections.get_mut(&connection) else { return };
        known.late = late;
        self.close_at_server(connection);
        let delay = self.delay();
        self.after(delay, Event::ClosedAtClient { connection });
    }

    /// The connections that are open on the side of a server.
    #[must_use]
    pub fn open_at(&self, server: usize) -> Vec<u64> {
        self.servers[server].connections.keys().copied().collect()
    }

    pub(super) fn connect(&mut self, process: ProcessId, line: Line) {
        let known = &self.processes[process];
        let slot = &known.slots[line as usize];
        if !known.is_alive || slot.connection.is_some() || slot.opening.is_some() {
            return;
        }
        // It is opened when it is needed.
        if line == Line::Keys && slot.waiting.is_empty() {
            return;
        }
        let machine = &self.machines[known.client];
        let of_line = if line == Line::Keys { machine.silent_keys } else { 0 };
        let silent = machine.silent_up.max(machine.silent_down).max(of_line);
        let is_cut_off = self.now < machine.unconnected.max(silent);
        let server = if line == Line::Keys { self.server_of_store(process) } else { self.master };
        if is_cut_off || !self.servers[server].is_up {
            if line == Line::Keys && !is_cut_off {
                self.refuse_keys(process);
            }
            let slot = &mut self.processes[process].slots[line as usize];
            slot.failures += 1;
            let pause = (RECONNECT_MIN << slot.failures.min(6)).min(RECONNECT_MAX);
            let pause = pause / 2 + self.rng.below(pause / 2);
            self.after(pause, Event::Connect { process, line });
            return;
        }
        let connection = self.number();
        let now = self.now;
        self.connections.insert(
            connection,
            Connection { process, line, server, up: now, down: now, received_at: now, late: None },
        );
        self.processes[process].slots[line as usize].opening = Some(connection);
        self.up(connection, Event::Handshake { connection });
        // A server that stands still does not answer.
        self.after(2 * SECOND, Event::Ping { connection, asked_at: Micros::MAX });
    }

    pub(super) fn handshake(&mut self, connection: u64) {
        let Some(known) = self.connections.get(&connection) else { return };
        let (server, process, line) = (known.server, known.process, known.line);
        if !self.processes[process].is_alive {
            return;
        }
        if !self.servers[server].is_up {
            let delay = self.delay();
            self.after(delay, Event::ClosedAtClient { connection });
            return;
        }
        let id = self.processes[process].id;
        self.servers[server].connections.insert(connection, Peer { process, client: id, line });
        self.down(connection, Event::Connected { connection });
    }

    pub(super) fn connected(&mut self, connection: u64) -> Act {
        let Some(known) = self.connections.get_mut(&connection) else { return Act::None };
        known.received_at = self.now;
        let (process, line, server) = (known.process, known.line, known.server);
        if self.processes[process].slots[line as usize].opening != Some(connection) {
            return Act::None;
        }
        // All connections of a client lead to one server.
        let others: Vec<u64> =
            self.processes[process].slots.iter().filter_map(|slot| slot.connection).collect();
        for other in others {
            if self.connections[&other].server != server {
                self.close_at_client(other);
            }
        }
        let slot = &mut self.processes[process].slots[line as usize];
        slot.opening = None;
        slot.connection = Some(connection);
        slot.failures = 0;
        let column = self.column(process);
        self.say(column, &[3, connection], || format!("connection {connection} to server {server}"));
        if line == Line::Driver {
            let waiting = std::mem::take(&mut self.processes[process].slots[1].waiting);
            for number in waiting {
                if self.calls.get(&number).is_some_and(|call| call.result.is_none()) {
                    self.send(number);
                }
            }
        }
        if line == Line::Keys {
            self.keys_connected(process);
            return Act::KeyChanged(process, None);
        }
        Act::Reconnected(process)
    }

    /// The server that a process is connected to, or that it would connect to.
    fn server_of_store(&self, process: ProcessId) -> usize {
        let open = self.processes[process].slots.iter().find_map(|slot| slot.connection);
        open.map_or(self.master, |connection| self.connections[&connection].server)
    }
}
