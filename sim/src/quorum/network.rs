//! The network between processes and nodes: one connection for each process and node, which keeps the order of its messages, and a
//! limit for answers. A connection that was cut is made again, and the client is told.

use leasehold::simulation::{Answered, Call, CallFailed};
use leasehold_core::{ClientId, Command, Failure, Grant, Push, Reply, Token};

use super::event::{Content, Event};
use super::planted::Planted;
use super::world::{Link, PendingCall, World};
use crate::executor::{ProcessId, Thread};
use crate::history::Column;
use crate::plan::{MS, Micros, SECOND};

/// How long a call waits for its answer.
const ANSWER_TIMEOUT: Micros = SECOND;
/// Pauses between attempts to connect.
const RECONNECT_MIN: Micros = 50 * MS;
const RECONNECT_MAX: Micros = 500 * MS;

/// What a dispatched event asks of the engine, which must be called with the state not borrowed.
pub(super) enum Act {
    None,
    Wake(std::task::Waker),
    Deliver(ProcessId, usize, Push),
    Reconnected(ProcessId, usize),
}

impl World {
    pub(super) fn dispatch(&mut self, event: Event) -> Act {
        if let Event::Push { link, .. } | Event::Connected { link } = &event
            && let Some(process) = self.links.get(link).map(|known| known.process)
            && self.is_stalled(process, Thread::Driver)
        {
            self.processes[process].backlog.push(event);
            return Act::None;
        }
        if let Event::Request { link, .. } | Event::Handshake { link } = &event
            && let Some(node) = self.links.get(link).map(|known| known.node)
            && self.nodes[node].is_paused
        {
            self.nodes[node].backlog.push(event);
            return Act::None;
        }
        match event {
            Event::Wake(number) => self.wake(number).map_or(Act::None, Act::Wake),
            Event::Request { link, call, is_late, content } => {
                self.request(link, call, is_late, content);
                Act::None
            }
            Event::Response { link, call, answers } => self.response(link, call, answers),
            Event::Push { link, push } => self.push(link, push),
            Event::Handshake { link } => {
                self.handshake(link);
                Act::None
            }
            Event::Connected { link } => self.connected(link),
            Event::ClosedAtClient { link } => {
                self.close_at_client(link);
                Act::None
            }
            Event::ClosedAtNode { link } => {
                self.close_at_node(link);
                Act::None
            }
            Event::Timeout { call } => {
                self.time_out(call);
                Act::None
            }
            Event::Ping { link, asked_at } => {
                self.ping(link, asked_at);
                Act::None
            }
            Event::Connect { process, node } => {
                self.connect(process, node);
                Act::None
            }
            other => {
                self.disturb(&other);
                Act::None
            }
        }
    }

    // --- Calls -----------------------------------------------------------------------------------

    pub(super) fn call(&mut self, process: ProcessId, node: usize, content: Content) -> u64 {
        let number = self.number();
        let link = self.processes[process].slots[node].link.filter(|_| self.processes[process].is_alive);
        let count = content.batch.len();
        self.calls.insert(number, PendingCall { process, link, count, result: None, waker: None });
        match link {
            Some(link) => {
                self.after(ANSWER_TIMEOUT, Event::Timeout { call: number });
                self.transmit(link, true, Event::Request { link, call: number, is_late: false, content });
            }
            None => self.fail(number, Failure::NotSent, "not connected"),
        }
        number
    }

    /// Sends a message over a connection, behind those before it: to the node, or to the client.
    fn transmit(&mut self, link: u64, is_up: bool, event: Event) {
        let delay = self.message_delay();
        let Some(known) = self.links.get_mut(&link) else { return };
        let (by, slow_until) = self.nodes[known.node].slow;
        let delay = if self.now < slow_until { delay + by } else { delay };
        let pair = (self.processes[known.process].client, known.node);
        let (silent_up, silent_down) = self.silence.get(&pair).copied().unwrap_or_default();
        let (last, silent) = if is_up { (&mut known.up, silent_up) } else { (&mut known.down, silent_down) };
        let at = (self.now + delay).max(*last);
        *last = if self.now < silent { at.max(silent + delay) } else { at };
        let at = *last;
        self.at(at, event);
    }

    fn fail(&mut self, number: u64, failure: Failure, message: &'static str) {
        let Some(call) = self.calls.get_mut(&number) else { return };
        call.result = Some(vec![Err(CallFailed { failure, message }); call.count]);
        let process = call.process;
        if let Some(waker) = call.waker.take() {
            waker.wake();
        }
        let column = self.column(process);
        self.say(column, &[1, number], || format!("call {number}: {message}"));
    }

    fn time_out(&mut self, number: u64) {
        let Some(call) = self.calls.get(&number).filter(|call| call.result.is_none()) else { return };
        let link = call.link;
        self.fail(number, Failure::Unknown, "no answer in time");
        if let Some(link) = link {
            let asked_at = self.now;
            self.after(SECOND, Event::Ping { link, asked_at });
        }
    }

    fn response(&mut self, link: u64, number: u64, answers: Vec<Answered>) -> Act {
        let Some(known) = self.links.get_mut(&link) else { return Act::None };
        known.received_at = self.now;
        if self.processes[known.process].slots[known.node].link != Some(link) {
            return Act::None;
        }
        let Some(call) = self.calls.get_mut(&number).filter(|call| call.result.is_none()) else {
            return Act::None;
        };
        call.result = Some(answers);
        call.waker.take().map_or(Act::None, Act::Wake)
    }

    fn push(&mut self, link: u64, push: Push) -> Act {
        let Some(known) = self.links.get_mut(&link) else { return Act::None };
        known.received_at = self.now;
        let (process, node) = (known.process, known.node);
        if self.processes[process].slots[node].link != Some(link) {
            return Act::None;
        }
        let (column, sequence) = (self.column(process), push.acquisition.sequence);
        self.say(column, &[6, link, sequence], || {
            format!("push of node {node} for {sequence:x}: {:?}", push.kind)
        });
        Act::Deliver(process, node, push)
    }

    // --- Nodes -----------------------------------------------------------------------------------

    fn request(&mut self, link: u64, call: u64, is_late: bool, content: Content) {
        let Some(known) = self.links.get(&link) else { return };
        let (process, node, late) = (known.process, known.node, known.late);
        if !self.nodes[node].is_up {
            return;
        }
        if !is_late && !self.nodes[node].connections.contains_key(&link) {
            match late {
                Some(late) => self.after(late, Event::Request { link, call, is_late: true, content }),
                None => {
                    let delay = self.message_delay();
                    self.after(delay, Event::ClosedAtClient { link });
                }
            }
            return;
        }
        let mut answers = Vec::new();
        for Call { resource, command } in content.batch.iter() {
            if let Command::Acquire(acquire) = command {
                self.stranger.note(acquire);
            }
            let terms = (content.floor, self.max_ttl());
            let (mut answer, pushes) = self.nodes[node].run(self.now, resource, command, terms, self.planted);
            if let (Command::Acquire(acquire), Reply::Busy | Reply::Queued(_)) = (command, &answer.reply)
                && self.planted == Some(Planted::OneVoteLess)
                && node == 0
                && resource.kind == leasehold_core::Kind::Mutex
                && let Some(token) = content.floor.or(Token::new(1))
            {
                let tokens = leasehold_core::TokenRange { first: token, last: token };
                answer.reply = Reply::Granted(Grant { tokens, valid_for: acquire.ttl, is_plain: false });
            }
            let client = self.processes[process].client;
            let kind = match command {
                Command::Acquire(_) => 16,
                Command::Renew(_) => 17,
                Command::Release(_) => 18,
                _ => 19,
            };
            self.say(Column::Server, &[kind, client as u64, node as u64, call], || {
                format!("node {node}, client {client}: {}", describe(command, &answer.reply))
            });
            self.publish(node, pushes);
            let is_planted = self.planted == Some(Planted::SpuriousErrors)
                && matches!(command, Command::Acquire(_))
                && self.rng.chance(200);
            let failed = CallFailed { failure: Failure::Unknown, message: "a planted error" };
            answers.push(if is_planted { Err(failed) } else { Ok(answer) });
        }
        if self.loses() {
            self.say(Column::Server, &[4, call], || format!("the answer to call {call} is lost"));
            return;
        }
        self.transmit(link, false, Event::Response { link, call, answers });
    }

    fn publish(&mut self, node: usize, pushes: Vec<Push>) {
        for push in pushes {
            self.stranger.hear(&push);
            let to = self.nodes[node].connections.iter().filter(|(_, (_, client))| *client == push.inbox);
            for link in to.map(|(link, _)| *link).collect::<Vec<_>>() {
                if !self.loses() {
                    self.transmit(link, false, Event::Push { link, push: push.clone() });
                }
            }
        }
        self.publish_forged(node);
    }

    /// What the stranger publishes now: also what it has heard at other nodes.
    fn publish_forged(&mut self, node: usize) {
        let subscribers: Vec<(u64, ClientId)> =
            self.nodes[node].connections.iter().map(|(link, (_, client))| (*link, *client)).collect();
        let clients: Vec<ClientId> = subscribers.iter().map(|(_, client)| *client).collect();
        let at = self.nodes[node].clock.at(self.now);
        for push in self.stranger.publish(at, &clients, false) {
            for (link, _) in subscribers.iter().filter(|(_, client)| *client == push.inbox) {
                self.say(Column::Server, &[7, *link], || format!("a stranger publishes {:?}", push.kind));
                self.transmit(*link, false, Event::Push { link: *link, push: push.clone() });
            }
        }
    }

    // --- Connections -----------------------------------------------------------------------------

    fn reconnect_later(&mut self, process: ProcessId, node: usize) {
        let slot = &mut self.processes[process].slots[node];
        slot.failures += 1;
        let pause = (RECONNECT_MIN << slot.failures.min(6)).min(RECONNECT_MAX);
        let pause = pause / 2 + self.rng.below(pause / 2);
        self.after(pause, Event::Connect { process, node });
    }

    fn close_at_client(&mut self, link: u64) {
        let Some(known) = self.links.get(&link) else { return };
        let (process, node) = (known.process, known.node);
        let slot = &mut self.processes[process].slots[node];
        if slot.link != Some(link) && slot.opening != Some(link) {
            return;
        }
        (slot.link, slot.opening) = (None, None);
        let column = self.column(process);
        self.say(column, &[2, link], || format!("the connection to node {node} is closed"));
        self.transmit(link, true, Event::ClosedAtNode { link });
        self.reconnect_later(process, node);
        let calls = self.calls.iter().filter(|(_, call)| call.link == Some(link) && call.result.is_none());
        for number in calls.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.fail(number, Failure::Unknown, "the connection was lost");
        }
    }

    pub(super) fn close_at_node(&mut self, link: u64) {
        let Some(known) = self.links.get(&link) else { return };
        self.nodes[known.node].connections.remove(&link);
    }

    /// A connection is cut between both sides.
    pub(super) fn cut(&mut self, link: u64, late: Option<Micros>) {
        let Some(known) = self.links.get_mut(&link) else { return };
        known.late = late;
        self.close_at_node(link);
        let delay = self.message_delay();
        self.after(delay, Event::ClosedAtClient { link });
    }

    fn connect(&mut self, process: ProcessId, node: usize) {
        let known = &self.processes[process];
        let slot = &known.slots[node];
        if !known.is_alive || slot.link.is_some() || slot.opening.is_some() {
            return;
        }
        let (silent_up, silent_down) = self.silence.get(&(known.client, node)).copied().unwrap_or_default();
        let there = &self.nodes[node];
        let until = there.unreachable_until.max(silent_up).max(silent_down);
        if !there.is_up || self.now < until {
            self.reconnect_later(process, node);
            return;
        }
        let (link, now) = (self.number(), self.now);
        self.links.insert(link, Link { process, node, up: now, down: now, received_at: now, late: None });
        self.processes[process].slots[node].opening = Some(link);
        self.transmit(link, true, Event::Handshake { link });
        // A node that stands still does not answer.
        self.after(2 * SECOND, Event::Ping { link, asked_at: Micros::MAX });
    }

    fn handshake(&mut self, link: u64) {
        let Some(known) = self.links.get(&link) else { return };
        let (node, process) = (known.node, known.process);
        if !self.processes[process].is_alive {
            return;
        }
        if !self.nodes[node].is_up {
            let delay = self.message_delay();
            self.after(delay, Event::ClosedAtClient { link });
            return;
        }
        let id = self.processes[process].id;
        self.nodes[node].connections.insert(link, (process, id));
        self.transmit(link, false, Event::Connected { link });
    }

    fn connected(&mut self, link: u64) -> Act {
        let Some(known) = self.links.get_mut(&link) else { return Act::None };
        known.received_at = self.now;
        let (process, node) = (known.process, known.node);
        let slot = &mut self.processes[process].slots[node];
        if slot.opening != Some(link) {
            return Act::None;
        }
        (slot.opening, slot.link, slot.failures) = (None, Some(link), 0);
        let column = self.column(process);
        self.say(column, &[3, link], || format!("connected to node {node}"));
        Act::Reconnected(process, node)
    }

    /// Closes a connection over which nothing has arrived since it was asked for, or that is still being made.
    fn ping(&mut self, link: u64, asked_at: Micros) {
        let Some(known) = self.links.get(&link) else { return };
        let slot = &self.processes[known.process].slots[known.node];
        let is_silent = asked_at != Micros::MAX && known.received_at < asked_at;
        if slot.opening == Some(link) || is_silent {
            self.close_at_client(link);
        }
    }
}

fn describe(command: &Command, reply: &Reply) -> String {
    let what = match command {
        Command::Acquire(acquire) => format!("acquire {:x}", acquire.acquisition.sequence),
        Command::Renew(renew) => format!("renew {:x}", renew.acquisition.sequence),
        Command::Release(release) => format!("release {:x}", release.acquisition.sequence),
        Command::Inspect => "inspect".to_owned(),
        Command::ForceRelease => "release by force".to_owned(),
    };
    let reply = match reply {
        Reply::Granted(grant) => format!("granted {}, {:?}", grant.tokens.first.get(), grant.valid_for),
        Reply::View(_) => "shown".to_owned(),
        other => format!("{other:?}"),
    };
    format!("{what} → {reply}")
}
