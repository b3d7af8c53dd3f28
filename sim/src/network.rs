//! The network between processes and servers, as the Redis store of the library uses one: two connections for each client, each
//! of which keeps the order of its messages, pushes over both, and a limit for answers. A connection that was cut is made again, and
//! the client is told. Renewals and releases whose connection was cut are sent once more.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use leasehold::simulation::{Answered, CallFailed, Pending, Transport};
use leasehold_core::{Acquire, Answer, Command, Failure, LocalTime, Push, PushKind, Reply, Resource};

use crate::checks::{Promise, Step};
use crate::executor::{ProcessId, Thread};
use crate::history::Column;
use crate::plan::{MS, Micros, SECOND};
use crate::planted::Planted;
use crate::server::index_of;
use crate::world::{Call, Connection, Content, Event, World, try_with, with};

/// How long a call waits for its answer, and for a connection.
const ANSWER_TIMEOUT: Micros = SECOND;
/// Pauses between attempts to connect.
const RECONNECT_MIN: Micros = 50 * MS;
const RECONNECT_MAX: Micros = 500 * MS;

/// A process's way to the store, and its timer.
pub struct Wire(pub ProcessId);

impl Transport for Wire {
    fn call(&self, batch: Vec<(Arc<Resource>, Command)>, by_driver: bool) -> Pending<Vec<Answered>> {
        let thread = if by_driver { Thread::Driver } else { Thread::Callers };
        Box::pin(CallFuture::new(self.0, thread, Content::Batch(batch.into())))
    }

    fn acquire_all(&self, attempts: Vec<(Arc<Resource>, Arc<Acquire>)>) -> Pending<Vec<Answered>> {
        Box::pin(CallFuture::new(self.0, Thread::Callers, Content::All(attempts.into())))
    }

    fn sleep_until(&self, time: LocalTime) -> Pending<()> {
        let planted = with(|world| world.planted);
        let time = match planted {
            Some(Planted::LateTimer | Planted::LateTimeout) if time != LocalTime::NEVER => {
                time + Duration::from_millis(2_500)
            }
            Some(Planted::TimerStorm) => with(|world| world.local(self.0)) + Duration::from_millis(1),
            _ => time,
        };
        Box::pin(Sleep::new(self.0, time))
    }

    fn poll_intervals(&self) -> (Duration, Duration) {
        (Duration::from_micros(with(|world| world.plan.repoll_interval)), Duration::from_secs(80))
    }
}

/// Ends when a process's clock reaches a time.
pub struct Sleep {
    process: ProcessId,
    until: LocalTime,
    number: Option<u64>,
}

impl Sleep {
    /// Until this time of this process's clock.
    #[must_use]
    pub fn new(process: ProcessId, until: LocalTime) -> Self {
        Self { process, until, number: None }
    }

    /// For this long.
    #[must_use]
    pub fn span(process: ProcessId, span: Micros) -> Self {
        let until = with(|world| world.local(process)) + Duration::from_micros(span);
        Self::new(process, until)
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        with(|world| {
            if world.local(self.process) >= self.until {
                return Poll::Ready(());
            }
            let number = *self.number.get_or_insert_with(|| world.number());
            world.sleep(number, self.process, self.until, context.waker());
            Poll::Pending
        })
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            drop(try_with(|world| world.sleeps.remove(&number)));
        }
    }
}

/// A call, sent when it is first polled.
struct CallFuture {
    process: ProcessId,
    thread: Thread,
    content: Option<Content>,
    number: u64,
}

impl CallFuture {
    fn new(process: ProcessId, thread: Thread, content: Content) -> Self {
        Self { process, thread, content: Some(content), number: 0 }
    }
}

impl Future for CallFuture {
    type Output = Vec<Answered>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Vec<Answered>> {
        with(|world| {
            if let Some(content) = self.content.take() {
                self.number = world.call(self.process, self.thread, content);
            }
            let Some(call) = world.calls.get_mut(&self.number) else { return Poll::Pending };
            match call.result.take() {
                Some(answers) => {
                    world.calls.remove(&self.number);
                    Poll::Ready(answers)
                }
                None => {
                    call.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
    }
}

impl Drop for CallFuture {
    fn drop(&mut self) {
        drop(try_with(|world| world.calls.remove(&self.number)));
    }
}

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

    fn call(&mut self, process: ProcessId, thread: Thread, content: Content) -> u64 {
        let number = self.number();
        let sent_at = self.now;
        let call = Call {
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
        if self.processes[process].is_alive {
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
        let lanes = &mut self.processes[process].lanes;
        let connection = match thread {
            Thread::Callers => lanes[0].connection.or(lanes[1].connection),
            Thread::Driver => lanes[1].connection,
        };
        call.connection = connection;
        call.sent_at = self.now;
        let Some(connection) = connection else {
            if waits {
                lanes[1].waiting.push(number);
                self.after(ANSWER_TIMEOUT, Event::Timeout { call: number, attempt });
            } else {
                self.fail(number, Failure::NotSent, "not connected");
            }
            return;
        };
        self.processes[process].messages += 1;
        self.after(ANSWER_TIMEOUT, Event::Timeout { call: number, attempt });
        self.up(connection, Event::Request { connection, call: number, attempt, is_late: false, content });
    }

    /// Sends a message to the server, behind those before it.
    fn up(&mut self, connection: u64, event: Event) {
        self.transmit(connection, Direction::Up, event);
    }

    /// Sends a message to the client, behind those before it.
    fn down(&mut self, connection: u64, event: Event) {
        self.transmit(connection, Direction::Down, event);
    }

    fn transmit(&mut self, connection: u64, direction: Direction, event: Event) {
        let delay = self.delay();
        let Some(known) = self.connections.get_mut(&connection) else { return };
        let machine = &self.machines[self.processes[known.process].client];
        let (last, silent) = match direction {
            Direction::Up => (&mut known.up, machine.silent_up),
            Direction::Down => (&mut known.down, machine.silent_down),
        };
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
            Content::Batch(batch) => batch.iter().all(|(_, command)| !matches!(command, Command::Acquire(_))),
            Content::All(_) => false,
        };
        if can_repeat && call.attempt == 1 {
            self.send(number);
        } else {
            self.fail(number, Failure::Unknown, "the connection was lost");
        }
    }

    // --- Connections -----------------------------------------------------------------------------

    /// The client closes a connection, or sees that it is closed.
    fn close_at_client(&mut self, connection: u64) {
        let Some(known) = self.connections.get(&connection) else { return };
        let (process, lane) = (known.process, known.lane);
        let slot = &mut self.processes[process].lanes[lane as usize];
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
        self.after(pause, Event::Connect { process, lane });
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
        self.servers[known.server].connections.remove(&connection);
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

    fn connect(&mut self, process: ProcessId, lane: Thread) {
        let known = &self.processes[process];
        let slot = &known.lanes[lane as usize];
        if !known.is_alive || slot.connection.is_some() || slot.opening.is_some() {
            return;
        }
        let machine = &self.machines[known.client];
        let is_cut_off = self.now < machine.unconnected.max(machine.silent_up).max(machine.silent_down);
        let server = self.master;
        if is_cut_off || !self.servers[server].is_up {
            let slot = &mut self.processes[process].lanes[lane as usize];
            slot.failures += 1;
            let pause = (RECONNECT_MIN << slot.failures.min(6)).min(RECONNECT_MAX);
            let pause = pause / 2 + self.rng.below(pause / 2);
            self.after(pause, Event::Connect { process, lane });
            return;
        }
        let connection = self.number();
        let now = self.now;
        self.connections.insert(
            connection,
            Connection { process, lane, server, up: now, down: now, heard: now, late: None },
        );
        self.processes[process].lanes[lane as usize].opening = Some(connection);
        self.up(connection, Event::Handshake { connection });
        // A server that stands still does not answer.
        self.after(2 * SECOND, Event::Ping { connection, asked_at: Micros::MAX });
    }

    fn handshake(&mut self, connection: u64) {
        let Some(known) = self.connections.get(&connection) else { return };
        let (server, process) = (known.server, known.process);
        if !self.processes[process].is_alive {
            return;
        }
        if !self.servers[server].is_up {
            let delay = self.delay();
            self.after(delay, Event::ClosedAtClient { connection });
            return;
        }
        let id = self.processes[process].id;
        self.servers[server].connections.insert(connection, (process, id));
        self.down(connection, Event::Connected { connection });
    }

    fn connected(&mut self, connection: u64) -> Act {
        let Some(known) = self.connections.get_mut(&connection) else { return Act::None };
        known.heard = self.now;
        let (process, lane, server) = (known.process, known.lane, known.server);
        if self.processes[process].lanes[lane as usize].opening != Some(connection) {
            return Act::None;
        }
        // All connections of a client lead to one server.
        let other = self.processes[process].lanes[1 - lane as usize].connection;
        if let Some(other) = other.filter(|other| self.connections[other].server != server) {
            self.close_at_client(other);
        }
        let slot = &mut self.processes[process].lanes[lane as usize];
        slot.opening = None;
        slot.connection = Some(connection);
        slot.failures = 0;
        let column = self.column(process);
        self.say(column, &[3, connection], || format!("connection {connection} to server {server}"));
        if lane == Thread::Driver {
            let waiting = std::mem::take(&mut self.processes[process].lanes[1].waiting);
            for number in waiting {
                if self.calls.get(&number).is_some_and(|call| call.result.is_none()) {
                    self.send(number);
                }
            }
        }
        Act::Reconnected(process)
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
                self.processes[process].lanes[1].waiting.retain(|other| *other != number);
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
        let slot = &self.processes[known.process].lanes[known.lane as usize];
        let is_silent = asked_at != Micros::MAX && known.heard < asked_at;
        if slot.opening == Some(connection) || is_silent {
            self.close_at_client(connection);
        }
    }

    // --- The server's side -----------------------------------------------------------------------

    fn request(&mut self, connection: u64, call: u64, attempt: u32, is_late: bool, content: Content) {
        let Some(known) = self.connections.get(&connection) else { return };
        let (server, process, late) = (known.server, known.process, known.late);
        if !self.servers[server].is_up {
            return;
        }
        if !is_late && !self.servers[server].connections.contains_key(&connection) {
            match late {
                Some(late) => {
                    self.after(late, Event::Request { connection, call, attempt, is_late: true, content });
                }
                None => {
                    let delay = self.delay();
                    self.after(delay, Event::ClosedAtClient { connection });
                }
            }
            return;
        }
        let answers = self.run(server, process, &content);
        if self.loses(false) {
            self.say(Column::Server, &[4, call], || format!("the answer to call {call} is lost"));
            return;
        }
        self.down(connection, Event::Response { connection, call, attempt, answers });
    }

    fn run(&mut self, server: usize, process: ProcessId, content: &Content) -> Vec<Answered> {
        match content {
            Content::Batch(batch) => batch
                .iter()
                .map(|(resource, command)| self.run_one(server, process, resource, command))
                .collect(),
            Content::All(attempts) => self.run_all(server, process, attempts),
        }
    }

    fn refuses(&mut self, server: usize, command: &Command) -> Option<CallFailed> {
        let is_acquire = matches!(command, Command::Acquire(_));
        if is_acquire && self.servers[server].is_full {
            return Some(CallFailed { failure: Failure::NotSent, message: "the server's memory is full" });
        }
        let is_planted = self.planted == Some(Planted::SpuriousError) && is_acquire && self.rng.chance(20);
        is_planted.then_some(CallFailed { failure: Failure::NotSent, message: "a planted error" })
    }

    fn run_one(
        &mut self,
        server: usize,
        process: ProcessId,
        resource: &Resource,
        command: &Command,
    ) -> Answered {
        if let Some(failed) = self.refuses(server, command) {
            return Err(failed);
        }
        let index = index_of(resource);
        let (now, planted) = (self.now, self.planted);
        let chance = self.planted.is_some() && self.rng.chance(100);
        let Self { servers, books, .. } = self;
        let this = &mut servers[server];
        let (clock, epoch) = (this.clock.at(now), (server, this.epoch));
        let mut shadow = std::mem::take(&mut this.data.shadows[index]);
        let step = Step { now, resource: index, clock, command, epoch };
        books.before(step, &mut shadow, false);
        let (mut unreachable, mut pushes) = (Vec::new(), Vec::new());
        let reachable: Vec<_> = this.connections.values().map(|(_, client)| *client).collect();
        let mut is_first = planted == Some(Planted::HeadSkipped) && chance;
        let mut is_reachable = |client| {
            let is_reachable = reachable.contains(&client);
            if !is_reachable {
                unreachable.push(client);
            }
            is_reachable && !std::mem::take(&mut is_first)
        };
        let mut answer = match (planted, command) {
            (Some(Planted::RenewalsForgotten), Command::Renew(_)) => {
                let before = this.data.tables[index].clone();
                let answer = this.apply(now, index, command, &mut is_reachable, &mut pushes);
                this.data.tables[index] = before;
                pushes.clear();
                answer
            }
            (Some(Planted::ReleaseForgotten), Command::Release(_)) if chance => {
                Answer { at: clock, reply: Reply::Released }
            }
            (Some(Planted::WaiterForgotten), Command::Acquire(acquire))
                if acquire.wait.is_some() && acquire.acquisition.sequence.is_multiple_of(4) =>
            {
                let before = this.data.tables[index].clone();
                let answer = this.apply(now, index, command, &mut is_reachable, &mut pushes);
                if let Reply::Queued(_) = answer.reply {
                    this.data.tables[index] = before;
                    pushes.clear();
                }
                answer
            }
            (Some(Planted::NoTombstones), Command::Release(release)) => {
                let plain = leasehold_core::Release { tombstone: Duration::ZERO, ..release.clone() };
                this.apply(now, index, &Command::Release(plain), &mut is_reachable, &mut pushes)
            }
            _ => this.apply(now, index, command, &mut is_reachable, &mut pushes),
        };
        match (planted, &mut answer.reply) {
            (Some(Planted::TokenRepeated), Reply::Granted(grant)) if chance => {
                let earlier = grant.tokens.first.get() - 30 * SECOND;
                if let Some(token) = leasehold_core::Token::new(earlier) {
                    grant.tokens.first = token;
                    grant.tokens.last = token;
                }
            }
            (Some(Planted::EagerRecheck), Reply::Queued(queued)) => {
                queued.is_head = true;
                queued.repoll_at = answer.at;
            }
            _ => {}
        }
        books.after(step, &mut shadow, &answer.reply, &pushes, &unreachable);
        this.data.shadows[index] = shadow;
        let column = self.column(process);
        self.note_command(column, server, resource, command, &answer);
        self.publish(server, pushes);
        Ok(answer)
    }

    fn run_all(
        &mut self,
        server: usize,
        process: ProcessId,
        attempts: &[(Arc<Resource>, Arc<Acquire>)],
    ) -> Vec<Answered> {
        if self.servers[server].is_full {
            let full = CallFailed { failure: Failure::NotSent, message: "the server's memory is full" };
            return vec![Err(full); attempts.len()];
        }
        let now = self.now;
        let Self { servers, books, .. } = self;
        let this = &mut servers[server];
        let (clock, epoch) = (this.clock.at(now), (server, this.epoch));
        let commands: Vec<Command> =
            attempts.iter().map(|(_, acquire)| Command::Acquire(acquire.clone())).collect();
        let indexes: Vec<usize> = attempts.iter().map(|(resource, _)| index_of(resource)).collect();
        for (index, command) in indexes.iter().zip(&commands) {
            let mut shadow = std::mem::take(&mut this.data.shadows[*index]);
            books.before(Step { now, resource: *index, clock, command, epoch }, &mut shadow, true);
            this.data.shadows[*index] = shadow;
        }
        let (mut unreachable, mut pushes) = (Vec::new(), Vec::new());
        let reachable: Vec<_> = this.connections.values().map(|(_, client)| *client).collect();
        let mut is_reachable = |client| {
            let is_reachable = reachable.contains(&client);
            if !is_reachable {
                unreachable.push(client);
            }
            is_reachable
        };
        let steps: Vec<_> =
            indexes.iter().copied().zip(attempts.iter().map(|(_, acquire)| acquire)).collect();
        let answers = this.apply_all(now, &steps, &mut is_reachable, &mut pushes);
        let mut seen = Vec::new();
        for (((index, command), answer), (resource, _)) in
            indexes.iter().zip(&commands).zip(&answers).zip(attempts)
        {
            let mut shadow = std::mem::take(&mut this.data.shadows[*index]);
            // Pushes name no resource: those of the attempts that the books know here.
            let theirs: Vec<Push> =
                pushes.iter().filter(|push| books.is_of(push.acquisition, *index)).cloned().collect();
            let step = Step { now, resource: *index, clock, command, epoch };
            books.after(step, &mut shadow, &answer.reply, &theirs, &unreachable);
            this.data.shadows[*index] = shadow;
            seen.push((resource.clone(), command.clone(), answer.clone()));
        }
        let column = self.column(process);
        for (resource, command, answer) in seen {
            self.note_command(column, server, &resource, &command, &answer);
        }
        self.publish(server, pushes);
        answers.into_iter().map(Ok).collect()
    }

    fn note_command(
        &mut self,
        column: Column,
        server: usize,
        resource: &Resource,
        command: &Command,
        answer: &Answer,
    ) {
        let number = match &answer.reply {
            Reply::Granted(grant) => grant.tokens.first.get(),
            Reply::Renewed { valid_for, .. } => u64::try_from(valid_for.as_micros()).unwrap_or(0),
            Reply::Queued(queued) => queued.repoll_at.as_micros(),
            _ => 0,
        };
        let who = match column {
            Column::Server => 0,
            Column::Client(client) => client as u64 + 1,
        };
        let kind = match command {
            Command::Acquire(acquire) => 16 + acquire.acquisition.sequence * 8,
            Command::Renew(renew) => 17 + renew.acquisition.sequence * 8,
            Command::Release(release) => 18 + release.acquisition.sequence * 8,
            Command::Inspect => 19,
            Command::ForceRelease => 20,
        };
        self.say(Column::Server, &[kind, who, number, server as u64], || {
            let who = match column {
                Column::Server => String::new(),
                Column::Client(client) => format!("client {client}: "),
            };
            format!("{who}{}", describe(server, resource, command, &answer.reply))
        });
    }

    /// Sends pushes over all connections of their clients.
    fn publish(&mut self, server: usize, pushes: Vec<Push>) {
        for push in pushes {
            let to: Vec<(u64, ProcessId)> = self.servers[server]
                .connections
                .iter()
                .filter(|(_, (_, client))| *client == push.to())
                .map(|(connection, (process, _))| (*connection, *process))
                .collect();
            for (connection, process) in to {
                let column = self.column(process);
                if self.loses(true) {
                    self.say(column, &[5, connection], || format!("the push {:?} is lost", push.kind));
                    continue;
                }
                self.processes[process].messages += 1;
                self.down(connection, Event::Push { connection, push: push.clone() });
            }
        }
    }

    // --- The client's side -----------------------------------------------------------------------

    fn response(&mut self, connection: u64, number: u64, attempt: u32, answers: Vec<Answered>) -> Act {
        let Some(known) = self.connections.get_mut(&connection) else { return Act::None };
        known.heard = self.now;
        let (process, lane) = (known.process, known.lane);
        if self.processes[process].lanes[lane as usize].connection != Some(connection) {
            // Over a connection that was given up.
            return Act::None;
        }
        self.processes[process].messages += 1;
        let Some(call) = self.calls.get_mut(&number) else { return Act::None };
        if call.attempt != attempt || call.result.is_some() {
            return Act::None;
        }
        call.result = Some(answers);
        call.waker.take().map_or(Act::None, Act::Wake)
    }

    fn push(&mut self, connection: u64, mut push: Push) -> Act {
        let Some(known) = self.connections.get_mut(&connection) else { return Act::None };
        known.heard = self.now;
        let (process, lane, server) = (known.process, known.lane, known.server);
        if self.processes[process].lanes[lane as usize].connection != Some(connection) {
            return Act::None;
        }
        if self.planted == Some(Planted::RestampedPush) {
            push.at = self.servers[server].clock.at(self.now);
        }
        let column = self.column(process);
        self.say(column, &[6, connection, push.acquisition.sequence], || {
            let what = match push.kind {
                PushKind::Granted(grant) => format!("granted, token {}", short(grant.tokens.first.get())),
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
        let of = |connection: &u64| self.connections.get(connection).map(|known| (known.process, known.lane));
        match event {
            Event::Response { connection, .. }
            | Event::Push { connection, .. }
            | Event::Connected { connection }
            | Event::ClosedAtClient { connection }
            | Event::Ping { connection, .. } => of(connection),
            Event::Timeout { call, .. } => self.calls.get(call).map(|call| (call.process, call.thread)),
            Event::Connect { process, lane } => Some((*process, *lane)),
            _ => None,
        }
    }

    /// Which server an event is for.
    fn server_of(&self, event: &Event) -> Option<usize> {
        match event {
            Event::Request { connection, .. }
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
            Event::Connect { process, lane } => self.connect(process, lane),
            other => self.disturb(&other),
        }
        Act::None
    }

    /// Records that a process polls without end.
    pub fn storm(&mut self, what: &str) {
        self.broken(Promise::NoTimerStorm, || what.to_owned());
    }
}

/// The last digits of a token or a time, which distinguish it.
#[must_use]
pub fn short(number: u64) -> String {
    format!("…{:09}", number % 1_000_000_000)
}

fn describe(server: usize, resource: &Resource, command: &Command, reply: &Reply) -> String {
    let what = match command {
        Command::Acquire(acquire) => format!("acquire {}", acquire.acquisition.sequence),
        Command::Renew(renew) => format!("renew {}", renew.acquisition.sequence),
        Command::Release(release) => format!("release {}", release.acquisition.sequence),
        Command::Inspect => "inspect".to_owned(),
        Command::ForceRelease => "release by force".to_owned(),
    };
    let reply = match reply {
        Reply::Granted(grant) => {
            format!("granted {}, {:?}", short(grant.tokens.first.get()), grant.valid_for)
        }
        Reply::Renewed { valid_for, .. } => format!("renewed, {valid_for:?}"),
        Reply::Queued(queued) if queued.is_head => "next".to_owned(),
        Reply::Queued(_) => "queued".to_owned(),
        Reply::View(_) => "shown".to_owned(),
        Reply::Forced(holders) => format!("{} ended", holders.len()),
        other => format!("{other:?}"),
    };
    let at = if server == 0 { String::new() } else { format!(" at {server}") };
    format!("{what} {resource}{at} → {reply}")
}
