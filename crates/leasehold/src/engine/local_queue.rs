//! The tasks of one client that want the same lock on the same terms, in the order in which they came.
//!
//! A line has one attempt in the store's queue, or one lease, which goes from task to task. Both are the line's and no
//! task's own: a task that is dropped, or is not polled any more before its turn, holds up nobody. What the store is to be
//! asked meanwhile the driver asks. An ended line is forgotten with its last task.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, HandoffBudget, HandoffDecision, HandoffLimits, LeaseTerms,
    LocalTime, Outcome, Resource, Token, WaitFor, WaitPolicy,
};

use super::entry::Entry;
use super::session::{Ended, Errand, Session};
use super::table::{After, State};

/// What the tasks of one line ask the store for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) resource: Arc<Resource>,
    pub(crate) terms: LeaseTerms,
    pub(crate) wait: WaitFor,
    /// That of the line: its tasks have deadlines of their own.
    pub(crate) patience: WaitPolicy,
    pub(crate) metadata: Arc<str>,
    pub(crate) hand_off: HandoffLimits,
}

/// A task's place in a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) line: u64,
    number: u64,
}

/// Why a task can't stand in a line.
pub(crate) enum NoPlace {
    Closed,
    QueueFull,
}

/// How the wait in a line ended.
pub(crate) enum Turned {
    /// This lease is the task's, with this token.
    Granted(u64, Token),
    Ended(Ended),
}

/// What a task leaves behind that does not wait any more.
pub(crate) enum Left {
    /// Its client has the lease, for another task.
    Held,
    /// Others stand in the line, which goes on asking for them.
    Asking,
    /// What nobody stands for now, and is to be given back; and whether the store may know of it.
    Last { sequence: u64, may_be_in_store: bool },
}

/// All lines of a client.
#[derive(Default)]
pub(super) struct Lines {
    all: BTreeMap<u64, Line>,
    /// Most have one: those who want the same lock want it on the same terms.
    of: HashMap<Arc<Resource>, Vec<u64>>,
}

struct Line {
    wish: Wish,
    stage: Stage,
    /// By the number of the place. Whoever is called stays until it has heard of it.
    waiting: BTreeMap<u64, Option<Waker>>,
    /// What those who waited are to hear of an attempt that was not granted.
    ended: BTreeMap<u64, Ended>,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Idle,
    /// The attempt stands for the line in the store.
    Asking(u64),
    /// The lease is the line's until there are tokens to hand it on with.
    Between(u64),
    /// The lease is for the task with this number, which has not heard of it yet.
    Called {
        lease: u64,
        number: u64,
        token: Token,
    },
    /// A task has the lease.
    Held(u64),
}

impl Lines {
    fn find(&self, wish: &Wish) -> Option<u64> {
        let of = self.of.get(&wish.resource)?;
        of.iter().copied().find(|id| self.all.get(id).is_some_and(|line| line.wish == *wish))
    }

    fn add(&mut self, id: u64, wish: Wish) {
        self.of.entry(wish.resource.clone()).or_default().push(id);
        let line = Line { wish, stage: Stage::Idle, waiting: BTreeMap::new(), ended: BTreeMap::new() };
        self.all.insert(id, line);
    }

    /// Forgets a line that nobody stands in and that has nothing.
    fn prune(&mut self, id: u64) {
        let Some(line) = self.all.get(&id).filter(|line| line.is_empty()) else { return };
        if let Some(of) = self.of.get_mut(&line.wish.resource) {
            of.retain(|other| *other != id);
            if of.is_empty() {
                self.of.remove(&line.wish.resource);
            }
        }
        self.all.remove(&id);
    }
}

impl Line {
    fn is_empty(&self) -> bool {
        matches!(self.stage, Stage::Idle) && self.waiting.is_empty() && self.ended.is_empty()
    }

    /// What the line has in the store.
    fn entry(&self) -> Option<u64> {
        match self.stage {
            Stage::Idle => None,
            Stage::Asking(sequence) | Stage::Between(sequence) | Stage::Held(sequence) => Some(sequence),
            Stage::Called { lease, .. } => Some(lease),
        }
    }

    fn call(&mut self, lease: u64, token: Token, after: &mut After) {
        let Some((&number, waker)) = self.waiting.iter_mut().next() else { return };
        after.wakers.extend(waker.take());
        self.stage = Stage::Called { lease, number, token };
    }

    fn end(&mut self, outcome: Outcome, trouble: Option<&String>, after: &mut After) {
        self.stage = Stage::Idle;
        for (number, waker) in std::mem::take(&mut self.waiting) {
            self.ended.insert(number, (outcome, trouble.cloned()));
            after.wakers.extend(waker);
        }
    }
}

impl Session {
    /// Takes a place at the end of a line. The first one gets what is to be sent.
    pub(crate) fn enter(&self, wish: Wish, now: LocalTime) -> Result<(Place, Option<Errand>), NoPlace> {
        let number = self.sequence.fetch_add(1, Ordering::Relaxed);
        let mut after = After::default();
        let entered = self.state().enter(wish, number, now, &mut after);
        self.tell(after);
        entered
    }

    /// Whether the client itself has the lease, so that a task that does not wait need not ask for it.
    pub(crate) fn is_occupied(&self, wish: &Wish) -> bool {
        let state = self.state();
        let line = state.lines.find(wish).and_then(|id| state.lines.all.get(&id));
        line.is_some_and(|line| !matches!(line.stage, Stage::Idle | Stage::Asking(_)))
    }

    pub(crate) fn poll_turn(&self, place: Place, context: &mut Context<'_>) -> Poll<Turned> {
        let replaced;
        {
            let mut state = self.state();
            let Some(line) = state.lines.all.get_mut(&place.line) else {
                return Poll::Ready(Turned::Ended((Outcome::Cancelled, None)));
            };
            if let Stage::Called { lease, number, token } = line.stage
                && number == place.number
            {
                line.stage = Stage::Held(lease);
                replaced = line.waiting.remove(&number);
                drop(state);
                drop(replaced);
                return Poll::Ready(Turned::Granted(lease, token));
            }
            if let Some(ended) = line.ended.remove(&place.number) {
                state.lines.prune(place.line);
                return Poll::Ready(Turned::Ended(ended));
            }
            replaced = line.waiting.insert(place.number, Some(context.waker().clone()));
        }
        // A waker that goes may drop its task, and with it a guard of this very session: never with the mutex held.
        drop(replaced);
        Poll::Pending
    }

    /// A task does not wait any more.
    pub(crate) fn leave(&self, place: Place, now: LocalTime) -> Left {
        let mut after = After::default();
        let (left, waker) = {
            let mut state = self.state();
            let waker =
                state.lines.all.get_mut(&place.line).and_then(|line| line.waiting.remove(&place.number));
            (state.leave(place, now, &mut after), waker)
        };
        drop(waker);
        self.tell(after);
        left
    }

    /// The task that had this lease is done with it. Whether it went on, or the line keeps it for the next one.
    pub(crate) fn hand_on(&self, line: u64, lease: u64, now: LocalTime) -> bool {
        let mut after = After::default();
        let is_handed_on = {
            let mut state = self.state();
            let has_it = |line: &Line| matches!(line.stage, Stage::Held(held) if held == lease);
            let is_handed_on =
                state.lines.all.get(&line).is_some_and(has_it) && state.hand_on(line, lease, now, &mut after);
            state.settle(lease, now, &mut after);
            is_handed_on
        };
        self.tell(after);
        is_handed_on
    }
}

impl State {
    fn enter(
        &mut self,
        wish: Wish,
        number: u64,
        now: LocalTime,
        after: &mut After,
    ) -> Result<(Place, Option<Errand>), NoPlace> {
        if self.is_closed {
            return Err(NoPlace::Closed);
        }
        let id = self.lines.find(&wish).unwrap_or_else(|| {
            self.lines.add(number, wish);
            number
        });
        let place = Place { line: id, number };
        let Some(line) = self.lines.all.get_mut(&id) else { return Err(NoPlace::Closed) };
        let is_first = line.entry().is_none();
        if !is_first && line.waiting.len() >= line.wish.wait.max_queue as usize {
            return Err(NoPlace::QueueFull);
        }
        line.waiting.insert(number, None);
        if !is_first {
            return Ok((place, None));
        }
        let Some((sequence, mut entry)) = self.attempt_of(id, now) else { return Ok((place, None)) };
        let errand = entry.poll_transmit(sequence, now);
        self.insert(sequence, entry, now, after);
        Ok((place, errand))
    }

    fn leave(&mut self, place: Place, now: LocalTime, after: &mut After) -> Left {
        let Some(line) = self.lines.all.get_mut(&place.line) else { return Left::Asking };
        line.ended.remove(&place.number);
        let left = match line.stage {
            Stage::Called { lease, number, .. } if number == place.number => {
                let is_handed_on = self.hand_on(place.line, lease, now, after);
                self.settle(lease, now, after);
                if is_handed_on { Left::Held } else { Left::Last { sequence: lease, may_be_in_store: true } }
            }
            Stage::Called { .. } | Stage::Held(_) => Left::Held,
            Stage::Asking(sequence) | Stage::Between(sequence) if line.waiting.is_empty() => {
                line.stage = Stage::Idle;
                let may_be_in_store =
                    self.entries.get(&sequence).is_some_and(|entry| entry.may_be_in_store());
                Left::Last { sequence, may_be_in_store }
            }
            Stage::Idle | Stage::Asking(_) | Stage::Between(_) => Left::Asking,
        };
        self.lines.prune(place.line);
        left
    }

    /// An attempt in the name of this line, none where nothing begins any more.
    fn attempt_of(&mut self, id: u64, now: LocalTime) -> Option<(u64, Box<Entry>)> {
        let line = self.lines.all.get_mut(&id)?;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let wish = &line.wish;
        // Who is alone has nobody to hand it on to. Tokens that nobody uses would make the clock run ahead.
        let reserve = if line.waiting.len() > 1 { HandoffBudget::initial_reserve(wish.hand_off) } else { 0 };
        let command = Acquire {
            reserve,
            wait: Some(wish.wait),
            metadata: wish.metadata.clone(),
            ..Acquire::exclusive(
                Acquisition { client: self.id, sequence },
                wish.terms.ttl.max(wish.terms.min_lifetime),
            )
        };
        let machine = AcquireMachine::new(command, Some(wish.patience), now);
        let mut entry = Entry::new(wish.resource.clone(), None, wish.terms, Duration::ZERO, machine);
        entry.line = Some((id, wish.hand_off));
        line.stage = Stage::Asking(sequence);
        Some((sequence, Box::new(entry)))
    }

    fn insert(&mut self, sequence: u64, entry: Box<Entry>, now: LocalTime, after: &mut After) {
        self.entries.insert(sequence, entry);
        self.unsettled += 1;
        self.settle(sequence, now, after);
    }

    /// A lease of the line is free for the next task. If it is not handed on, the line asks for another one where
    /// somebody waits, and this one is to be given back.
    fn hand_on(&mut self, id: u64, lease: u64, now: LocalTime, after: &mut After) -> bool {
        let Some(line) = self.lines.all.get_mut(&id) else { return false };
        if line.waiting.is_empty() {
            line.stage = Stage::Idle;
            self.lines.prune(id);
            return false;
        }
        match self.entries.get_mut(&lease).map_or(HandoffDecision::Release, |entry| entry.hand_on(now)) {
            HandoffDecision::Next(token) => line.call(lease, token, after),
            HandoffDecision::AwaitTokens => line.stage = Stage::Between(lease),
            HandoffDecision::Release if self.is_closed => {
                line.end(Outcome::Cancelled, None, after);
                return false;
            }
            HandoffDecision::Release => {
                if let Some((sequence, entry)) = self.attempt_of(id, now) {
                    // The driver sends it.
                    self.insert(sequence, entry, now, after);
                }
                return false;
            }
        }
        true
    }

    /// Something has changed about what a line has in the store.
    pub(super) fn stir(&mut self, id: u64, sequence: u64, now: LocalTime, after: &mut After) {
        let Some(line) = self.lines.all.get_mut(&id) else { return };
        let Some(entry) = self.entries.get_mut(&sequence) else { return };
        if line.entry() != Some(sequence) {
            return;
        }
        if let Stage::Asking(_) = line.stage {
            match entry.outcome {
                None => {}
                Some(Outcome::Granted { grant, .. }) => line.call(sequence, grant.tokens.first, after),
                Some(outcome) => {
                    entry.is_wanted = false;
                    line.end(outcome, entry.trouble.as_ref(), after);
                }
            }
            return;
        }
        let is_held = matches!(line.stage, Stage::Held(_));
        let is_free = matches!(line.stage, Stage::Between(_)) || entry.remaining(now).is_err();
        if is_free && !self.hand_on(id, sequence, now, after) && !is_held {
            self.disown(sequence, now);
        }
    }

    /// Nobody stands for this lease any more. Its guard, if there were one, would give it back.
    fn disown(&mut self, sequence: u64, now: LocalTime) {
        if let Some(entry) = self.entries.get_mut(&sequence) {
            entry.is_wanted = false;
            entry.let_go(now);
        }
    }
}
