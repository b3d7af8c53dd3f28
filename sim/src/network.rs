//! The network between processes and servers, as the Redis store of the library uses one: two connections for each client, each
//! of which keeps the order of its messages, pushes over the driver's (the store has a third one for them), and a limit for answers. A
//! connection that was cut is made again, and the client is told. Renewals and releases whose connection was cut are sent once more.

mod connections;
mod keys;

use leasehold::simulation::{Answered, Call, CallFailed};
use leasehold_core::{Command, Failure, Push, PushKind};

use crate::checks::Promise;
use crate::executor::{ProcessId, Thread};
use crate::plan::{MS, Micros, SECOND};
use crate::planted::Planted;
use crate::serving::short;
use crate::world::{Content, Event, Line, PendingCall, World};

/// How long a call waits for its answer, and for a connection.
const ANSWER_TIMEOUT: Micros = SECOND;
/// Pauses between attempts to connect.
const RECONNECT_MIN: Micros = 50 * MS;
const RECONNECT_MAX: Micros = 500 * MS;

/// What a dispatched event asks of the engine, which must be called with the state not borrowed.
pub enum Act {
    /// Nothing.
    None,
    /// A task is woken.
    Wake(std::task::Waker),
    /// A push is delivered.
    Deliver(ProcessId, Push),
    /// The connection was made again.
    Reconnected(ProcessId),
    /// This key has changed, or any of them may have.
    KeyChanged(ProcessId, Option<String>),
    /// A guard is asked whether it knows of its loss.
    CheckNotified(u64),
}

/// Where a message goes.
#[derive(Clone, Copy)]
enum Direction {
    /// To the server.
    Up,
    /// To the client.
    Down,
}

impl World {
    // --- Calls -----------------------------------------------------------------------------------

    pub(crate) fn call(&mut self, process: ProcessId, thread: Thread, content: Content) -> u64 {
        self.check_denied(&content);
        let number = self.number();
        let sent_at = self.now;
        let call = PendingCall {
            process,
            thread,
            content,
            attempt: 0,
            connection: None,
            sent_at,
            result: None,
            waker: None,
        };
        self.calls.insert(number, call);
        let resumed_at = self.processes[process].resumed_at;
        let is_refused = self.planted == Some(Planted::RefusedAfterPause) && resumed_at > 0;
        if is_refused && self.now < resumed_at + SECOND {
            self.fail(number, Failure::NotSent, "it was not polled");
        } else if self.processes[process].is_alive {
            self.send(number);
        }
        number
    }

    /// Sends a call over its thread's connection, or the other one. Without a connection it waits or fails.
    fn send(&mut self, number: u64) {
        let waits = self.plan.network.waits_for_connection;
        let Some(call) = self.calls.get_mut(&number) else { return };
        call.attempt += 1;
        let (attempt, process, thread, content) =
            (call.attempt, call.process, call.thread, call.content.clone());
        let slots = &mut self.processes[process].slots;
        let connection = match thread {
            Thread::Callers => slots[0].connection.or(slots[1].connection),
            Thread::Driver => slots[1].connection,
        };
        call.connection = connection;
        call.sent_at = self.now;
        let Some(connection) = connection else {
            if waits {
                slots[1].waiting.push(number);
                self.after(ANSWER_TIMEOUT, Event::Timeout { call: number, attempt });
            } else {
                self.fail(number, Failure::NotSent, "not connected");
            }
            return;
        };
        self.processes[process].messages += 1;
        let late = if self.planted == Some(Planted::LateFailure) { 10 * SECOND } else { 0 };
        self.after(ANSWER_TIMEOUT + late, Event::Timeout { call: number, attempt });
        self.up(connection, Event::Request { connection, call: number, attempt, is_late: false, content });
    }

    /// Sends a message to the server, behind those before it.
    fn up(&mut self, connection: u64, event: Event) {
        self.transmit(connection, Direction::Up, event);
    }

    /// Sends a message to the client, behind those before it.
    pub(crate) fn down(&mut self, connection: u64, event: Event) {
        self.transmit(connection, Direction::Down, event);
    }

    fn transmit(&mut self, connection: u64, direction: Direction, event: Event) {
        let delay = self.delay();
        let Some(known) = self.connections.get_mut(&connection) else { return };
        let machine = &self.machines[self.processes[known.process].client];
        let of_line = if known.line == Line::Keys { machine.silent_keys } else { 0 };
        let (last, silent) = match direction {
            Direction::Up => (&mut known.up, machine.silent_up.max(of_line)),
            Direction::Down => (&mut known.down, machine.silent_down.max(of_line)),
        };
        let (late, until) = machine.late_keys;
        let is_late = known.line == Line::Keys && matches!(direction, Direction::Down) && self.now < until;
        let delay = if is_late { delay + late } else { delay };
        let at = (self.now + delay).max(*last);
        *last = if self.now < silent { at.max(silent + delay) } else { at };
        let at = *last;
        self.at(at, event);
    }

    /// Ends a call without an answer.
    fn fail(&mut self, number: u64, failure: Failure, message: &'static str) {
        let Some(call) = self.calls.get_mut(&number) else { return };
        let failed = vec![Err(CallFailed { failure, message }); call.content.answers()];
        call.result = Some(failed);
        // The caller is the task that polls, or wakes it.
        if let Some(waker) = call.waker.take() {
            waker.wake();
        }
        let process = call.process;
        let column = self.column(process);
        self.say(column, &[1, number], || format!("call {number}: {message}"));
    }

    /// A call's connection is gone: sends it once more if it can be repeated, otherwise its outcome is unknown.
    fn lost(&mut self, number: u64) {
        let Some(call) = self.calls.get(&number) else { return };
        let can_repeat = match &call.content {
            Content::Batch(batch, _) => {
                batch.iter().all(|Call { command, .. }| !matches!(command, Command::Acquire(_)))
            }
            Content::All(_) => false,
        };
        if can_repeat && call.attempt == 1 {
            self.send(number);
        } else {
            self.fail(number, Failure::Unknown, "the connection was lost");
        }
    }

    /// A call has taken too long: its outcome is unknown, and its connection is checked.
    fn time_out(&mut self, number: u64, attempt: u32) {
        let Some(call) = self.calls.get(&number) else { return };
        if call.attempt != attempt || call.result.is_some() {
            return;
        }
        let process = call.process;
        match call.connection {
            None => {
                self.processes[process].slots[1].waiting.retain(|other| *other != number);
                self.fail(number, Failure::NotSent, "not connected in time");
            }
            Some(connection) => {
                self.fail(number, Failure::Unknown, "no answer in time");
                let asked_at = self.now;
                self.after(SECOND, Event::Ping { connection, asked_at });
            }
        }
    }

    /// Closes a connection over which nothing has arrived since it was asked for, or that is still being made.
    fn ping(&mut self, connection: u64, asked_at: Micros) {
        let Some(known) = self.connections.get(&connection) else { return };
        let slot = &self.processes[known.process].slots[known.line as usize];
        let is_silent = asked_at != Micros::MAX && known.received_at < asked_at;
        if slot.opening == Some(connection) || is_silent {
            self.close_at_client(connection);
        }
    }

    // --- The client's side -----------------------------------------------------------------------

    fn response(&mut self, connection: u64, number: u64, attempt: u32, answers: Vec<Answered>) -> Act {
        let Some(process) = self.hear(connection) else { return Act::None };
        self.processes[process].messages += 1;
        let Some(call) = self.calls.get_mut(&number) else { return Act::None };
        if call.attempt != attempt || call.result.is_some() {
            return Act::None;
        }
        if answers.iter().any(Result::is_ok) {
            self.processes[process].answered_at = self.now;
        }
        call.result = Some(answers);
        call.waker.take().map_or(Act::None, Act::Wake)
    }

    fn push(&mut self, connection: u64, mut push: Push) -> Act {
        let Some(process) = self.hear(connection) else { return Act::None };
        if self.planted == Some(Planted::RestampedPush) {
            let server = self.connections[&connection].server;
            push.at = self.servers[server].clock.at(self.now);
            if let PushKind::Granted(grant, proof) = &mut push.kind {
                *proof = self.stranger.secret(push.acquisition).prove(push.at, grant);
            }
        }
        let column = self.column(process);
        self.say(column, &[6, connection, push.acquisition.sequence], || {
            let what = match push.kind {
                PushKind::Granted(grant, _) => format!("granted, token {}", short(grant.tokens.first.get())),
                PushKind::Next(_) => "you are next".to_owned(),
                PushKind::Revoked => "revoked".to_owned(),
                PushKind::Contended => "another client waits".to_owned(),
            };
            format!("push for attempt {}: {what}", push.acquisition.sequence)
        });
        Act::Deliver(process, push)
    }

    /// Whose thread an event is for, if it is for a process.
    fn addressee(&self, event: &Event) -> Option<(ProcessId, Thread)> {
        let of = |connection: &u64| {
            self.connections.get(connection).map(|known| (known.process, known.line.thread()))
        };
        match event {
            Event::Response { connection, .. }
            | Event::Push { connection, .. }
            | Event::Connected { connection }
            | Event::ClosedAtClient { connection }
            | Event::Ping { connection, .. } => of(connection),
            Event::Timeout { call, .. } => self.calls.get(call).map(|call| (call.process, call.thread)),
            Event::KeyResponse { connection, .. } | Event::KeyChanged { connection, .. } => of(connection),
            Event::KeySend(call) | Event::KeyTimeout(call) => {
                self.bridging.calls.get(call).map(|call| (call.process, Line::Keys.thread()))
            }
            Event::KeysMissed(process) => Some((*process, Line::Keys.thread())),
            Event::Connect { process, line } => Some((*process, line.thread())),
            _ => None,
        }
    }

    /// Which server an event is for.
    fn server_of(&self, event: &Event) -> Option<usize> {
        match event {
            Event::KeyExpiry { server, .. } => Some(*server),
            Event::Request { connection, .. }
            | Event::KeyRequest { connection, .. }
            | Event::Handshake { connection }
            | Event::ClosedAtServer { connection } => {
                self.connections.get(connection).map(|known| known.server)
            }
            _ => None,
        }
    }

    /// Does what is due. What concerns processes and servers that stand still waits for them.
    pub fn dispatch(&mut self, event: Event) -> Act {
        if let Some((process, thread)) = self.addressee(&event) {
            if !self.processes[process].is_alive {
                return Act::None;
            }
            if self.is_stalled(process, thread) {
                self.processes[process].backlog.push(event);
                return Act::None;
            }
        }
        if let Some(server) = self.server_of(&event)
            && self.servers[server].is_paused
        {
            self.servers[server].backlog.push(event);
            return Act::None;
        }
        match event {
            Event::Wake(number) => {
                let Some(sleeping) = self.sleeps.get(&number) else { return Act::None };
                let process = sleeping.process;
                if self.local(process) < sleeping.until {
                    self.schedule_wake(number);
                    return Act::None;
                }
                return self.sleeps.remove(&number).map_or(Act::None, |sleeping| Act::Wake(sleeping.waker));
            }
            Event::Request { connection, call, attempt, is_late, content } => {
                self.request(connection, call, attempt, is_late, content);
            }
            Event::Response { connection, call, attempt, answers } => {
                return self.response(connection, call, attempt, answers);
            }
            Event::Push { connection, push } => return self.push(connection, push),
            Event::Handshake { connection } => self.handshake(connection),
            Event::Connected { connection } => return self.connected(connection),
            Event::ClosedAtClient { connection } => self.close_at_client(connection),
            Event::ClosedAtServer { connection } => self.close_at_server(connection),
            Event::Timeout { call, attempt } => self.time_out(call, attempt),
            Event::Ping { connection, asked_at } => self.ping(connection, asked_at),
            Event::Connect { process, line } => self.connect(process, line),
            other => return self.dispatch_keys(other),
        }
        Act::None
    }

    /// The process at the other end of a connection, which hears something, unless it has given the connection up.
    fn hear(&mut self, connection: u64) -> Option<ProcessId> {
        let known = self.connections.get_mut(&connection)?;
        known.received_at = self.now;
        let (process, line) = (known.process, known.line);
        let is_open = self.processes[process].slots[line as usize].connection == Some(connection);
        is_open.then_some(process)
    }

    /// Records that a process polls without end.
    pub fn storm(&mut self, what: &str) {
        self.broken(Promise::NoTimerStorm, || what.to_owned());
    }
}
