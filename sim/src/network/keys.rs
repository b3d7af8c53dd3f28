//! The commands on the locks of another library: over a connection of their own, which is opened by the first of them and again by
//! the first one after its end. They are sent from the client's thread, within a second or not at all.

use std::task::Waker;
use std::time::Duration;

use leasehold::simulation::{CallFailed, KeyAnswered, KeyCommand};
use leasehold_core::Failure;

use super::{ANSWER_TIMEOUT, Act};
use crate::executor::ProcessId;
use crate::plan::SECOND;
use crate::world::{Event, KeyCall, KeyResult, Line, World};

/// How long commands wait for a connection.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

impl World {
    /// Sends commands together. Returns the call's number.
    pub(crate) fn call_keys(&mut self, process: ProcessId, commands: Vec<KeyCommand>) -> u64 {
        let number = self.number();
        let until = self.local(process) + SEND_TIMEOUT;
        let commands = self.with_first_values(process, commands);
        let call = KeyCall {
            process,
            commands,
            called_at: self.now,
            until,
            connection: None,
            result: None,
            waker: None,
            is_dropped: false,
        };
        self.bridging.calls.insert(number, call);
        if self.processes[process].is_alive {
            self.after(0, Event::KeySend(number));
        }
        number
    }

    /// The answers of a call, or the task that waits for them from now on.
    pub(crate) fn take_keys(&mut self, number: u64, waker: &Waker) -> Option<KeyResult> {
        let call = self.bridging.calls.get_mut(&number)?;
        if call.result.is_none() {
            call.waker = Some(waker.clone());
            return None;
        }
        self.bridging.calls.remove(&number)?.result
    }

    /// No task waits for a call any more. It is sent all the same.
    pub(crate) fn leave_keys(&mut self, number: u64) {
        let Some(call) = self.bridging.calls.get_mut(&number) else { return };
        call.is_dropped = true;
        let waker = call.waker.take();
        if call.result.is_some() {
            self.bridging.calls.remove(&number);
        }
        drop(waker);
    }

    /// Ends a call.
    fn end_keys(&mut self, number: u64, result: KeyResult) -> Act {
        let Some(call) = self.bridging.calls.get_mut(&number) else { return Act::None };
        let process = call.process;
        let waker = call.waker.take();
        if let Err(CallFailed { message, .. }) = &result {
            let (column, message) = (self.column(process), *message);
            self.say(column, &[80, number], || format!("call {number} on keys: {message}"));
        }
        match self.bridging.calls.get_mut(&number) {
            Some(call) if !call.is_dropped => call.result = Some(result),
            _ => drop(self.bridging.calls.remove(&number)),
        }
        waker.map_or(Act::None, Act::Wake)
    }

    /// Ends a call without answers.
    fn fail_keys(&mut self, number: u64, failure: Failure, message: &'static str) {
        if let Act::Wake(waker) = self.end_keys(number, Err(CallFailed { failure, message })) {
            waker.wake();
        }
    }

    /// The client's thread sends a call, if it is not too late.
    pub(super) fn send_keys(&mut self, number: u64) {
        let Some(call) = self.bridging.calls.get(&number) else { return };
        let (process, until) = (call.process, call.until);
        if self.local(process) > until {
            return self.fail_keys(number, Failure::NotSent, "it was not sent in time");
        }
        let slot = &mut self.processes[process].slots[Line::Keys as usize];
        let Some(connection) = slot.connection else {
            slot.waiting.push(number);
            let is_opening = slot.opening.is_some();
            self.after(SECOND, Event::KeyTimeout(number));
            if !is_opening {
                self.connect(process, Line::Keys);
            }
            return;
        };
        let Some(call) = self.bridging.calls.get_mut(&number) else { return };
        call.connection = Some(connection);
        let commands = call.commands.clone();
        self.processes[process].messages += 1;
        self.after(ANSWER_TIMEOUT, Event::KeyTimeout(number));
        self.up(connection, Event::KeyRequest { connection, call: number, is_late: false, commands });
    }

    /// A call has waited too long, for a connection or for its answers. A connection without an answer is given up.
    pub(super) fn time_out_keys(&mut self, number: u64) {
        let Some(call) = self.bridging.calls.get(&number).filter(|call| call.result.is_none()) else {
            return;
        };
        let process = call.process;
        match call.connection {
            Some(connection) => {
                self.fail_keys(number, Failure::Unknown, "no answer in time");
                self.close_at_client(connection);
            }
            None => {
                self.processes[process].slots[Line::Keys as usize].waiting.retain(|other| *other != number);
                self.fail_keys(number, Failure::NotSent, "connecting took too long");
            }
        }
    }

    /// There is a connection for keys: what has waited for it is sent.
    pub(super) fn keys_connected(&mut self, process: ProcessId) {
        if self.plan.bridges.has_tracking {
            self.bridging.tracking.insert(process);
        }
        let waiting = std::mem::take(&mut self.processes[process].slots[Line::Keys as usize].waiting);
        for number in waiting {
            self.send_keys(number);
        }
    }

    /// The server has refused a connection for keys.
    pub(super) fn refuse_keys(&mut self, process: ProcessId) {
        let waiting = std::mem::take(&mut self.processes[process].slots[Line::Keys as usize].waiting);
        for number in waiting {
            self.fail_keys(number, Failure::NotSent, "the connection was refused");
        }
    }

    /// A connection for keys was lost, with what has no answer and changes of which no client will be told.
    pub(super) fn keys_lost(&mut self, process: ProcessId, connection: u64) {
        let calls = self.bridging.calls.iter();
        let over_it: Vec<u64> = calls
            .filter(|(_, call)| call.connection == Some(connection) && call.result.is_none())
            .map(|(number, _)| *number)
            .collect();
        for number in over_it {
            self.fail_keys(number, Failure::Unknown, "the connection was lost");
        }
        self.after(0, Event::KeysMissed(process));
    }

    pub(super) fn key_response(&mut self, connection: u64, number: u64, answers: Vec<KeyAnswered>) -> Act {
        let Some(process) = self.hear(connection) else { return Act::None };
        self.processes[process].messages += 1;
        let is_awaited = |call: &&KeyCall| call.result.is_none() && call.connection == Some(connection);
        if self.bridging.calls.get(&number).filter(is_awaited).is_none() {
            return Act::None;
        }
        self.processes[process].answered_at = self.now;
        self.count_from_answer(number, &answers);
        let answers = self.with_last_values(process, answers);
        self.end_keys(number, Ok(answers))
    }

    pub(super) fn key_changed(&mut self, connection: u64, key: String) -> Act {
        let Some(process) = self.hear(connection) else { return Act::None };
        self.processes[process].messages += 1;
        Act::KeyChanged(process, Some(key))
    }

    /// Does what is due with keys; everything else is a fault.
    pub(super) fn dispatch_keys(&mut self, event: Event) -> Act {
        match event {
            Event::KeySend(call) => self.send_keys(call),
            Event::KeyRequest { connection, call, is_late, commands } => {
                self.request_keys(connection, call, is_late, commands);
            }
            Event::KeyResponse { connection, call, answers } => {
                return self.key_response(connection, call, answers);
            }
            Event::KeyTimeout(call) => self.time_out_keys(call),
            Event::KeyChanged { connection, key } => return self.key_changed(connection, key),
            Event::KeysMissed(process) => return Act::KeyChanged(process, None),
            Event::KeyExpiry { server, key } => self.look_for_expired(server, &key),
            Event::CheckKey { lock, holder, released_at } => self.check_key(lock, &holder, released_at),
            Event::CheckNotified { guard } => return Act::CheckNotified(guard),
            other => self.disturb(&other),
        }
        Act::None
    }
}
