//! One state of an exploration, and the transition to the next.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher as _};
use std::rc::Rc;
use std::time::Duration;

use redis::Value;

use super::event::{Event, in_whole_seconds};
use super::replay::{ClientState, StepResult};
use super::sandbox::{Contents, EMPTY, Sandbox, Start};
use super::scenario::{Check, Fault, HolderAction, NAMES, PROBE, Participant, Scenario, Subject, Visit};
use crate::recipe::Role;
use crate::redis::{Note, Op, Redis, display_value};

/// The clients' clocks at the start: a small number, so that a timeline stays readable.
const CLIENTS_START: Duration = Duration::from_secs(100);

/// A transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// A client performs its next step.
    Step(usize),
    /// A client crashes.
    Die(usize),
    /// Time advances by this many seconds.
    Pass(u64),
    /// The scenario's fault happens to this master.
    Break(usize),
}

/// Where a client is in relation to the critical section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    Outside,
    Inside {
        /// When its attempt began, in seconds of the sandbox. The lease counts from there.
        since: u64,
        /// Until when it assumes to hold the lock, by its own clock.
        valid_until: Option<Duration>,
        /// Its next step is the first of its release.
        is_releasing: bool,
    },
    Leaving {
        since: u64,
        valid_until: Option<Duration>,
    },
    Gone,
}

#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) state: ClientState,
    pub(super) phase: Phase,
    /// When its last attempt began.
    pub(super) attempted: u64,
    pub(super) inbox: Vec<Vec<u8>>,
    channels: Vec<String>,
}

impl Client {
    pub(super) fn is_done(&self) -> bool {
        self.state.next.is_none() || self.phase == Phase::Gone
    }
}

/// The highest tokens so far. Two readers may have the same one.
#[derive(Clone, Copy, Debug, Default, Hash)]
pub(super) struct Tokens {
    readers: Option<u64>,
    writers: Option<u64>,
}

impl Tokens {
    /// Whether the token is higher than all that it must exceed.
    fn increase(&mut self, role: Role, token: u64) -> bool {
        let before = self.writers.max(self.readers.filter(|_| role == Role::Writer));
        let own = if role == Role::Writer { &mut self.writers } else { &mut self.readers };
        *own = (*own).max(Some(token));
        before < Some(token)
    }
}

/// One state of an exploration.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) servers: Vec<Contents>,
    pub(super) clients: Vec<Rc<Client>>,
    /// Seconds since the sandbox began.
    pub(super) now: u64,
    passes: u8,
    pub(super) deaths: u8,
    breaks: u8,
    pub(super) last_tokens: Tokens,
    /// The first check that this path broke. Later violations on it may be consequences.
    pub(super) broken: Option<Check>,
}

/// The checks that one step broke.
pub(super) type Broken = Vec<Check>;

/// The lock under test in one scenario.
pub(super) struct Exploration<'a> {
    pub(super) subject: &'a Subject,
    pub(super) scenario: &'a Scenario,
}

impl Exploration<'_> {
    pub(super) fn begin(&self) -> State {
        let clients = (0..self.scenario.participants.len()).map(|who| Rc::new(self.client(who, 0))).collect();
        State {
            servers: vec![EMPTY; self.subject.nodes],
            clients,
            now: 0,
            passes: 0,
            deaths: 0,
            breaks: 0,
            last_tokens: Tokens::default(),
            broken: None,
        }
    }

    pub(super) fn client(&self, who: usize, now: u64) -> Client {
        let program = self.program(who);
        let (state, _) = ClientState::begin(&program, NAMES[who], self.clock(who, now));
        Client { state, phase: Phase::Outside, attempted: now, inbox: Vec::new(), channels: Vec::new() }
    }

    fn program(&self, who: usize) -> impl Fn(Redis) -> Visit + use<> {
        let probe = Participant { role: Role::Writer, tries: 1, action: HolderAction::None };
        let participant = if who == PROBE { probe } else { self.scenario.participants[who] };
        let owner = if self.scenario.fault == Fault::SameOwner && who != PROBE { 0 } else { who };
        self.subject.program(participant, owner)
    }

    /// A client's clock. The clocks of two clients differ by a millisecond at least, so that no two stored times are equal.
    pub(super) fn clock(&self, who: usize, now: u64) -> Duration {
        let is_ahead = self.scenario.fault == Fault::ClocksDiffer && who == 1;
        let ahead = if is_ahead { self.subject.longest } else { 0 };
        let own = u64::try_from(who).unwrap_or(0);
        CLIENTS_START + Duration::from_secs(now + ahead) + Duration::from_millis(own)
    }

    /// Whether a client waits although the lock is free and no client can take a step.
    pub(super) fn has_lost_wakeup(&self, state: &State) -> bool {
        let mut clients = state.clients.iter().enumerate();
        clients.all(|(who, client)| client.phase == Phase::Outside && !self.can_step(state, who))
            && state.clients.iter().any(|client| !client.is_done())
    }

    fn can_step(&self, state: &State, who: usize) -> bool {
        let client = &state.clients[who];
        match &client.state.next {
            _ if client.phase == Phase::Gone => false,
            Some(Op::Receive(until)) => !client.inbox.is_empty() || self.clock(who, state.now) >= *until,
            next => next.is_some(),
        }
    }

    /// The transitions from this state.
    pub(super) fn choices(&self, state: &State) -> Vec<Choice> {
        let steps = (0..state.clients.len()).filter(|who| self.can_step(state, *who)).map(Choice::Step);
        let mut choices: Vec<_> = steps.collect();
        let is_over = state.clients.iter().all(|client| client.is_done());
        if is_over {
            return choices;
        }
        if state.deaths < self.scenario.most_deaths {
            let living = state.clients.iter().enumerate().filter(|(_, client)| !client.is_done());
            choices.extend(living.map(|(who, _)| Choice::Die(who)));
        }
        if state.passes < self.scenario.most_passes {
            choices.extend(self.scenario.passes.iter().map(|seconds| Choice::Pass(*seconds)));
        }
        if state.breaks == 0 && matches!(self.scenario.fault, Fault::MasterRestarts | Fault::MasterJumps) {
            choices.extend((0..state.servers.len()).map(Choice::Break));
        }
        choices
    }

    pub(super) fn next(
        &self,
        sandbox: &mut Sandbox,
        state: &State,
        choice: Choice,
    ) -> (State, Event, Broken) {
        let mut next = state.clone();
        let event = match choice {
            Choice::Step(who) => return self.step(sandbox, next, who),
            Choice::Die(who) => {
                let client = Rc::make_mut(&mut next.clients[who]);
                client.phase = Phase::Gone;
                client.channels.clear();
                next.deaths += 1;
                Event::of(Some(who), "crashes")
            }
            Choice::Pass(seconds) => {
                self.pass(sandbox, &mut next, seconds);
                next.passes += 1;
                // A client without a step so far begins later, and has not been delayed.
                for who in 0..next.clients.len() {
                    if next.clients[who].state.is_fresh() && next.clients[who].phase != Phase::Gone {
                        next.clients[who] = Rc::new(self.client(who, next.now));
                    }
                }
                Event::of(None, format!("{seconds} seconds pass"))
            }
            Choice::Break(node) => {
                next.breaks += 1;
                let was = next.servers[node];
                if self.scenario.fault == Fault::MasterRestarts {
                    next.servers[node] = sandbox.empty(node);
                    Event::of(None, format!("master {} restarts without its data", node + 1))
                } else {
                    let span = self.subject.longest;
                    next.servers[node] = sandbox.pass(node, was, span, next.now + span);
                    Event::of(None, format!("the clock of master {} jumps by {span} seconds", node + 1))
                }
            }
        };
        (next, event, Broken::new())
    }

    pub(super) fn pass(&self, sandbox: &mut Sandbox, state: &mut State, seconds: u64) {
        state.now += seconds;
        for (node, contents) in state.servers.iter_mut().enumerate() {
            *contents = sandbox.pass(node, *contents, seconds, state.now);
        }
    }

    pub(super) fn step(&self, sandbox: &mut Sandbox, mut state: State, who: usize) -> (State, Event, Broken) {
        let client = Rc::make_mut(&mut state.clients[who]);
        if let Phase::Inside { since, valid_until, is_releasing: true } = client.phase {
            client.phase = Phase::Leaving { since, valid_until };
        }
        let op = client.state.next.take().expect("it has a step to perform");
        let (action, value) = match op {
            Op::Subscribe(channel) => {
                let action = format!("SUBSCRIBE {channel}");
                client.channels.push(channel);
                (action, Value::Okay)
            }
            Op::Receive(_) if client.inbox.is_empty() => ("waits until the timeout".to_owned(), Value::Nil),
            Op::Receive(_) => ("receives a message".to_owned(), Value::BulkString(client.inbox.remove(0))),
            Op::Sleep(_) => ("sleeps".to_owned(), Value::Nil),
            Op::Send { node, request, label } => {
                let start = self.start(&state, node);
                let outcome = sandbox.run(&start, &request);
                state.servers[node] = outcome.after;
                for (channel, message) in outcome.messages {
                    deliver(&mut state, &channel, &message);
                }
                (label, in_whole_seconds(outcome.reply))
            }
        };
        let reply = Some(display_value(&value));
        let result = StepResult { value, clock: self.clock(who, state.now) };
        let client = &mut state.clients[who];
        let program = self.program(who);
        let (client_state, notes) = client.state.advance(&program, NAMES[who], result);
        Rc::make_mut(client).state = client_state;
        let (notes, broken) = self.apply_notes(&mut state, who, &notes);
        (state, Event { who: Some(who), action, reply, notes }, broken)
    }

    fn start(&self, state: &State, node: usize) -> Start {
        let channels = state.clients.iter().flat_map(|client| client.channels.iter().cloned());
        let mut channels: Vec<_> = channels.collect();
        channels.sort();
        channels.dedup();
        Start { node, contents: state.servers[node], seconds: state.now, channels }
    }

    /// Updates the client's phase from its notes. Returns them as text, with the checks that they break.
    fn apply_notes(&self, state: &mut State, who: usize, notes: &[Note]) -> (Vec<String>, Broken) {
        let (now, mut lines, mut broken) = (state.now, Vec::new(), Broken::new());
        let role = self.role(who);
        let client = Rc::make_mut(&mut state.clients[who]);
        for note in notes {
            match note {
                Note::Attempting => client.attempted = now,
                Note::Acquired(hold) => {
                    let is_new = !matches!(client.phase, Phase::Inside { .. });
                    let (since, valid_until) = (client.attempted, hold.valid_until);
                    client.phase = Phase::Inside { since, valid_until, is_releasing: false };
                    lines.push(if is_new {
                        "holds the lock".to_owned()
                    } else {
                        "has renewed the lock".to_owned()
                    });
                    if is_new && hold.token.is_some_and(|token| !state.last_tokens.increase(role, token)) {
                        broken.push(Check::TokensIncrease);
                    }
                }
                Note::Lost => {
                    client.phase = Phase::Outside;
                    lines.push("notices that the lock is lost".to_owned());
                }
                Note::Releasing => {
                    if let Phase::Inside { is_releasing, .. } = &mut client.phase {
                        *is_releasing = true;
                    }
                }
                Note::Released(was_found) => {
                    let Phase::Leaving { since, valid_until } = client.phase else { continue };
                    client.phase = Phase::Outside;
                    if !was_found {
                        lines.push("cannot release: not its lock".to_owned());
                        if self.runs(who, since, now) && self.is_valid(who, valid_until, now) {
                            broken.push(Check::CanRelease);
                        }
                    }
                }
                Note::Failed(error) => lines.push(format!("error: {error}")),
            }
        }
        (lines, broken)
    }

    pub(super) fn role(&self, who: usize) -> Role {
        if who == PROBE { Role::Writer } else { self.scenario.participants[who].role }
    }

    /// Whether the lease of an attempt that began at `since` still runs.
    fn runs(&self, who: usize, since: u64, now: u64) -> bool {
        (self.subject.lease)(self.role(who)).is_none_or(|lease| now < since + lease)
    }

    /// Whether this client is in the critical section and its lease runs.
    pub(super) fn holds_in_time(&self, state: &State, who: usize) -> bool {
        let Phase::Inside { since, .. } = state.clients[who].phase else { return false };
        self.is_inside(state, who) && self.runs(who, since, state.now)
    }

    /// Whether this client is in the critical section or is releasing, and its lease runs.
    pub(super) fn has_in_time(&self, state: &State, who: usize) -> bool {
        match state.clients[who].phase {
            Phase::Leaving { since, valid_until } => {
                self.runs(who, since, state.now) && self.is_valid(who, valid_until, state.now)
            }
            _ => self.holds_in_time(state, who),
        }
    }

    /// Whether this client is in the critical section and has not noticed any expiry.
    pub(super) fn is_inside(&self, state: &State, who: usize) -> bool {
        let Phase::Inside { valid_until, .. } = state.clients[who].phase else { return false };
        self.is_valid(who, valid_until, state.now)
    }

    fn is_valid(&self, who: usize, until: Option<Duration>, now: u64) -> bool {
        until.is_none_or(|until| self.clock(who, now) < until)
    }

    /// Hash by which equal states are recognised.
    pub(super) fn hash(&self, state: &State) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&state.servers, state.now, state.passes, state.deaths, state.breaks).hash(&mut hasher);
        (state.last_tokens, state.broken).hash(&mut hasher);
        for client in &state.clients {
            (client.state.hash, client.phase, client.attempted, &client.inbox).hash(&mut hasher);
        }
        hasher.finish()
    }
}

fn deliver(state: &mut State, channel: &str, message: &[u8]) {
    for client in &mut state.clients {
        if client.channels.iter().any(|subscribed| subscribed == channel) {
            Rc::make_mut(client).inbox.push(message.to_vec());
        }
    }
}
