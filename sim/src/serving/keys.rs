//! How the servers run commands on the locks of another library, and report changes of them.

use std::collections::BTreeSet;
use std::time::Duration;

use leasehold::simulation::{CallFailed, KeyAnswer, KeyAnswered, KeyCommand};
use leasehold_core::{Effect, Failure};

use crate::executor::ProcessId;
use crate::history::Column;
use crate::plan::{MS, Micros};
use crate::planted::Planted;
use crate::server::{index_of_key, key_of};
use crate::world::{Event, World, key_name};

/// How long after its end the server removes an expired key at most.
const EXPIRY_DELAY: Micros = 100 * MS;

impl World {
    pub(crate) fn request_keys(
        &mut self,
        connection: u64,
        call: u64,
        is_late: bool,
        commands: Vec<KeyCommand>,
    ) {
        self.delay_take(connection, is_late, &commands);
        let again = |commands| Event::KeyRequest { connection, call, is_late: true, commands };
        let Some((server, process, commands)) = self.receive(connection, is_late, commands, again) else {
            return;
        };
        let (mut answers, mut is_tracked) = (Vec::new(), false);
        for command in &commands {
            if let Some(key) = key_of(command).filter(|_| std::mem::take(&mut is_tracked)) {
                self.servers[server].tracked.entry(key.to_owned()).or_default().insert(connection);
            }
            is_tracked = *command == KeyCommand::Track && self.plan.bridges.has_tracking;
            answers.push(self.run_on_key(server, process, connection, command));
        }
        if self.loses(false) {
            self.say(Column::Server, &[81, call], || format!("the answer to call {call} on keys is lost"));
            return;
        }
        self.down(connection, Event::KeyResponse { connection, call, answers });
    }

    /// Cuts the connection if a command to take a lock has been sent over it, and that is the fault that is due.
    fn delay_take(&mut self, connection: u64, is_late: bool, commands: &[KeyCommand]) {
        let take = commands.iter().find(|command| matches!(command, KeyCommand::Take(..)));
        let Some(key) = take.filter(|_| !is_late).and_then(key_of) else { return };
        let Some(known) = self.connections.get(&connection) else { return };
        let client = self.processes[known.process].client;
        let is_open = self.servers[known.server].connections.contains_key(&connection);
        let Some((late, deleted_after)) = self.machines[client].late_take.take_if(|_| is_open) else {
            return;
        };
        self.say(Column::Server, &[88, connection], || {
            format!("connection {connection} is cut, and SET comes late")
        });
        self.cut(connection, Some(late));
        self.after(deleted_after, Event::DeleteKey(index_of_key(key)));
    }

    /// An operator deletes the key of a bridge.
    pub(crate) fn delete_by_hand(&mut self, lock: usize) {
        let (server, key) = (self.master, key_name(lock));
        let Some(holder) = self.servers[server].data.keys.holder(&key).map(str::to_owned) else { return };
        let is_bridge = self.bridging.holders.get(&holder).is_some_and(|by| !self.is_program(*by));
        if !is_bridge || self.is_healed || !self.servers[server].is_up {
            return;
        }
        let clock = self.servers[server].clock.at(self.now);
        self.servers[server].data.keys.run(&KeyCommand::Release(key.clone(), holder.clone()), clock);
        self.say(Column::Server, &[89, server as u64], || format!("{key} is deleted by hand"));
        self.bridging.ended.insert((server, holder), self.now);
        self.note_key_end(&key);
        self.note_deletion(lock);
        self.report_key(server, &key, None);
    }

    fn run_on_key(
        &mut self,
        server: usize,
        process: ProcessId,
        connection: u64,
        command: &KeyCommand,
    ) -> KeyAnswered {
        let Some(key) = key_of(command) else { return Ok(KeyAnswer::Okay) };
        self.expire_key(server, key);
        let answered = match command {
            KeyCommand::Take(..) if self.servers[server].is_full => Err(CallFailed {
                failure: Failure::Transient(Effect::None),
                message: "the server's memory is full",
            }),
            _ => Ok(self.change_key(server, process, connection, key, command)),
        };
        if let (KeyCommand::Take(..), Ok(KeyAnswer::Nil)) = (command, &answered) {
            self.processes[process].refused_at = self.now;
        }
        self.note_key_command(process, server, command, &answered);
        answered
    }

    fn change_key(
        &mut self,
        server: usize,
        process: ProcessId,
        connection: u64,
        key: &str,
        command: &KeyCommand,
    ) -> KeyAnswer {
        let is_bridge = !self.is_program(process);
        let planted = self.planted.filter(|_| is_bridge);
        let clock = self.servers[server].clock.at(self.now);
        let keys = &mut self.servers[server].data.keys;
        let is_holder = |holder: &String| keys.holder(key) == Some(holder);
        match (planted, command) {
            (Some(Planted::KeyRenewalForgotten), KeyCommand::Renew(_, holder, _)) if is_holder(holder) => {
                return KeyAnswer::Number(1);
            }
            (Some(Planted::KeyReleaseForgotten), KeyCommand::Release(_, holder)) if is_holder(holder) => {
                return KeyAnswer::Number(1);
            }
            (Some(Planted::KeyTakeRefused), KeyCommand::Take(..)) if self.now / 20_000_000 % 2 == 1 => {
                return KeyAnswer::Nil;
            }
            _ => {}
        }
        let early = match (planted, command) {
            (Some(Planted::KeyExpiresEarly), KeyCommand::Take(key, holder, ttl)) => {
                Some(KeyCommand::Take(key.clone(), holder.clone(), *ttl / 8))
            }
            _ => None,
        };
        let (answer, is_changed) = keys.run(early.as_ref().unwrap_or(command), clock);
        if let KeyCommand::Release(_, holder) = command
            && self.bridging.holders.get(holder) == Some(&process)
        {
            self.bridging.given_back.insert((server, holder.clone()));
        }
        if is_changed {
            match command {
                KeyCommand::Take(_, holder, _) => {
                    self.bridging.holders.insert(holder.clone(), process);
                }
                KeyCommand::Release(_, holder) => {
                    self.note_key_end(key);
                    if self.bridging.holders.get(holder) != Some(&process) {
                        self.bridging.ended.insert((server, holder.clone()), self.now);
                        self.note_deletion(index_of_key(key));
                    }
                }
                KeyCommand::Renew(_, holder, _) => self.check_goes_on(server, process, key, holder),
                _ => {}
            }
            self.watch_expiry(server, key);
            self.report_key(server, key, Some(connection));
        }
        answer
    }

    /// Removes a key whose time is over.
    pub(crate) fn expire_key(&mut self, server: usize, key: &str) {
        let clock = self.servers[server].clock.at(self.now);
        let holder = self.servers[server].data.keys.holder(key).map(str::to_owned);
        if self.servers[server].data.keys.expire(key, clock) {
            self.bridging.ended.extend(holder.map(|holder| ((server, holder), self.now)));
            self.note_key_end(key);
            self.say(Column::Server, &[82, server as u64], || format!("{key} has expired"));
            self.report_key(server, key, None);
        }
    }

    /// The server looks for expired keys from time to time.
    pub(crate) fn look_for_expired(&mut self, server: usize, key: &str) {
        self.servers[server].expiring.remove(key);
        self.expire_key(server, key);
        self.watch_expiry(server, key);
    }

    /// Schedules the removal of a key at its end.
    fn watch_expiry(&mut self, server: usize, key: &str) {
        let Some(at) = self.servers[server].data.keys.expires_at(key) else { return };
        if !self.servers[server].expiring.insert(key.to_owned()) {
            return;
        }
        let left = at.since(self.servers[server].clock.at(self.now));
        let delay = self.rng.below(EXPIRY_DELAY) + MS;
        let left = u64::try_from(left.as_micros()).unwrap_or(Micros::MAX);
        self.after(left.saturating_add(delay), Event::KeyExpiry { server, key: key.to_owned() });
    }

    /// As `watch_expiry`, for a server that has a copy of another one's data.
    pub(crate) fn watch_expiries(&mut self, server: usize) {
        let keys: Vec<String> = self.servers[server].data.keys.names().cloned().collect();
        for key in keys {
            self.watch_expiry(server, &key);
        }
    }

    /// Tells those who have asked for it, except for the connection that has changed the key.
    fn report_key(&mut self, server: usize, key: &str, by: Option<u64>) {
        let watchers: BTreeSet<u64> = self.servers[server].tracked.remove(key).unwrap_or_default();
        for connection in watchers.into_iter().filter(|connection| Some(*connection) != by) {
            if !self.servers[server].connections.contains_key(&connection) {
                continue;
            }
            if self.planted == Some(Planted::KeyNewsLost) || self.loses(true) {
                self.say(Column::Server, &[83, connection], || format!("the news of {key} is lost"));
                continue;
            }
            self.down(connection, Event::KeyChanged { connection, key: key.to_owned() });
        }
    }

    /// The key was held until now.
    fn note_key_end(&mut self, key: &str) {
        self.demand[index_of_key(key)].busy_at = self.now;
    }

    fn note_key_command(
        &mut self,
        process: ProcessId,
        server: usize,
        command: &KeyCommand,
        answered: &KeyAnswered,
    ) {
        let client = self.processes[process].client;
        let (kind, holder) = match command {
            KeyCommand::Take(_, holder, _) => (84, &**holder),
            KeyCommand::Renew(_, holder, _) => (85, &**holder),
            KeyCommand::Release(_, holder) => (86, &**holder),
            _ => (87, ""),
        };
        let result = match answered {
            Ok(KeyAnswer::Number(number)) => number.unsigned_abs(),
            Ok(KeyAnswer::Okay) => 1,
            _ => 0,
        };
        let holder = u64::from_str_radix(holder.get(16..).unwrap_or(""), 16).unwrap_or(0);
        self.say(Column::Server, &[kind, client as u64, holder, result, server as u64], || {
            format!("client {client}: {}: {}", describe(command), describe_answer(answered))
        });
    }
}

/// The last digits of a holder's value.
fn end_of(holder: &str) -> &str {
    holder.get(26..).unwrap_or(holder)
}

fn describe(command: &KeyCommand) -> String {
    let millis = |ttl: &Duration| ttl.as_millis();
    match command {
        KeyCommand::Take(key, holder, ttl) => format!("SET {key} …{} {}", end_of(holder), millis(ttl)),
        KeyCommand::Renew(key, holder, ttl) => format!("renew {key} …{} {}", end_of(holder), millis(ttl)),
        KeyCommand::Release(key, holder) => format!("delete {key} …{}", end_of(holder)),
        other => format!("{other:?}"),
    }
}

fn describe_answer(answered: &KeyAnswered) -> String {
    match answered {
        Ok(KeyAnswer::Text(holder)) => format!("…{}", end_of(holder)),
        other => format!("{other:?}"),
    }
}
