//! The search, by length, and what it finds.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use super::event::Event;
use super::sandbox::{Contents, STALLED, Sandbox};
use super::scenario::{Check, Scenario, Subject};
use super::state::{Broken, Choice, Phase, Stage, State};
use crate::recipe::Role;

/// A shortest schedule that breaks a check.
#[derive(Clone, Debug)]
pub struct Violation {
    /// What is broken.
    pub check: Check,
    /// What each client came for.
    pub roles: Vec<Role>,
    /// What happened, in this order.
    pub events: Vec<Event>,
    /// What was broken before, on the same way: without that it may hold.
    pub follows: Option<Check>,
    /// Whether it came out the same when it was run straight through, on servers that nobody puts back.
    pub is_confirmed: bool,
}

/// What an exploration came to.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// By what is broken.
    pub violations: BTreeMap<Check, Violation>,
    /// How many states there are.
    pub states: usize,
    /// All schedules up to this many events were run; none where that is all there are.
    pub bound: Option<usize>,
}

/// How a state was reached: from which one, and by what.
type Step = Option<(usize, Choice)>;

struct Search<'a> {
    stage: Stage<'a>,
    sandbox: &'a mut Sandbox,
    /// Every state met, in the order of their lengths.
    steps: Vec<Step>,
    states: Vec<State>,
    met: HashSet<u64>,
    /// Whether the lock can be had at once there, and at that time.
    is_free: HashMap<(Vec<Contents>, u64, Vec<usize>), bool>,
    found: BTreeMap<Check, (Step, Option<Check>)>,
}

/// Runs every interleaving.
pub fn explore(subject: &Subject, scenario: &Scenario, sandbox: &mut Sandbox) -> Findings {
    let mut search = Search {
        stage: Stage { subject, scenario },
        sandbox,
        steps: Vec::new(),
        states: Vec::new(),
        met: HashSet::new(),
        is_free: HashMap::new(),
        found: BTreeMap::new(),
    };
    let bound = search.run();
    let states = search.states.len();
    let found = std::mem::take(&mut search.found);
    let violations = found.into_iter().map(|(check, (step, follows))| {
        let mut violation = search.told(check, step);
        violation.follows = follows;
        (check, violation)
    });
    Findings { violations: violations.collect(), states, bound }
}

impl Search<'_> {
    fn run(&mut self) -> Option<usize> {
        let first = self.stage.begin();
        self.meet(first, None);
        let mut at = 0;
        while at < self.states.len() {
            let state = self.states[at].clone();
            for choice in self.stage.choices(&state) {
                if self.states.len() >= self.stage.scenario.most_states {
                    return Some(self.choices_to(Some((at, choice))).len() - 1);
                }
                let (mut next, _, mut broken) = self.stage.next(self.sandbox, &state, choice);
                self.check(&state, &next, choice, &mut broken);
                let step = Some((at, choice));
                for check in broken {
                    self.record(check, step, state.broken);
                    if !matches!(check, Check::KnowsItsEnd | Check::FreeAgain) {
                        next.broken.get_or_insert(check);
                    }
                }
                self.meet(next, step);
            }
            at += 1;
        }
        None
    }

    fn choices_to(&self, mut step: Step) -> Vec<Choice> {
        let mut choices = Vec::new();
        while let Some((from, choice)) = step {
            choices.push(choice);
            step = self.steps[from];
        }
        choices.reverse();
        choices
    }

    /// Remembers a state if it is new. The end of everybody is looked at from every state.
    fn meet(&mut self, state: State, step: Step) {
        if self.met.insert(self.stage.number(&state)) {
            if !self.found.get(&Check::FreeAgain).is_some_and(|(_, follows)| follows.is_none())
                && !self.is_free_after_all(&state)
            {
                self.record(Check::FreeAgain, step, state.broken);
            }
            self.states.push(state);
            self.steps.push(step);
        }
    }

    fn record(&mut self, check: Check, step: Step, follows: Option<Check>) {
        let known = self.found.get(&check);
        // One that follows from nothing tells more.
        if known.is_none_or(|(_, known)| known.is_some() && follows.is_none()) {
            self.found.insert(check, (step, follows));
        }
    }

    fn check(&mut self, before: &State, after: &State, choice: Choice, broken: &mut Broken) {
        let everybody = 0..after.clients.len();
        let pairs = everybody.clone().flat_map(|one| (0..one).map(move |other| (one, other)));
        for (one, other) in pairs.filter(|(one, other)| self.conflict(*one, *other)) {
            let (a, b) = (self.stage.holds_in_time(after, one), self.stage.holds_in_time(after, other));
            let both_believe = self.stage.believes(after, one) && self.stage.believes(after, other);
            if a && b {
                broken.push(Check::OneHolder);
            } else if both_believe {
                broken.push(Check::KnowsItsEnd);
            }
        }
        if let Choice::Step(who) = choice {
            let was_freed = before.servers != after.servers && !self.is_free(before) && self.is_free(after);
            if was_freed && everybody.filter(|other| *other != who).any(|other| self.has_it(before, other)) {
                broken.push(Check::FreesOnlyOwn);
            }
        }
        let is_over = after.clients.iter().all(|client| client.is_done() && client.phase == Phase::Outside);
        if is_over && !self.is_free(after) {
            broken.push(Check::NothingLeft);
        }
        if after.deaths == 0 && self.stage.waits_in_vain(after) {
            broken.push(Check::Woken);
        }
        broken.sort();
        broken.dedup();
    }

    /// Whether it holds, is about to release, or has begun to hold: it will come to hold where nobody else could. What comes
    /// to hold beside others says nothing about whose the lock was; where most of several servers decide, only a holder has it.
    fn has_it(&mut self, state: &State, who: usize) -> bool {
        if self.stage.holds_in_time(state, who) || state.servers.len() > 1 {
            return self.stage.holds_in_time(state, who);
        }
        let is_held = (0..state.clients.len()).any(|other| self.stage.has_in_time(state, other));
        let begins = !is_held && self.stage.role(who) == Role::Writer;
        self.stage.has_in_time(state, who) || begins && self.stage.will_hold(self.sandbox, state, who)
    }

    fn conflict(&self, one: usize, other: usize) -> bool {
        let reads = |who: usize| self.stage.role(who) == Role::Reader;
        !(reads(one) && reads(other))
    }

    fn is_free(&mut self, state: &State) -> bool {
        let gone = |who: &usize| state.clients[*who].phase == Phase::Gone;
        let key = (state.servers.clone(), state.now, (0..state.clients.len()).filter(gone).collect());
        if let Some(known) = self.is_free.get(&key) {
            return *known;
        }
        let (is_free, _) = self.stage.probe(self.sandbox, state);
        self.is_free.insert(key, is_free);
        is_free
    }

    fn is_free_after_all(&mut self, state: &State) -> bool {
        let ended = self.ended(state);
        self.is_free(&ended)
    }

    /// Everybody has died, and every lease has passed.
    fn ended(&mut self, state: &State) -> State {
        let mut ended = state.clone();
        for who in 0..ended.clients.len() {
            if !ended.clients[who].is_done() {
                (ended, _, _) = self.stage.next(self.sandbox, &ended, Choice::Die(who));
            }
        }
        self.stage.pass(self.sandbox, &mut ended, self.stage.subject.longest);
        ended
    }

    /// What happened on the way, once more from the beginning, and once straight through.
    fn told(&mut self, check: Check, step: Step) -> Violation {
        let choices = self.choices_to(step);
        let events = self.replay(check, &choices);
        let is_confirmed = self.goes_straight(check, &choices, &events);
        let roles = self.stage.scenario.parts.iter().map(|part| part.role).collect();
        Violation { check, roles, events, follows: None, is_confirmed }
    }

    fn goes_straight(&mut self, check: Check, choices: &[Choice], events: &[Event]) -> bool {
        loop {
            let began = Instant::now();
            self.sandbox.go_straight();
            let is_same = self.replay(check, choices) == events;
            self.sandbox.go_back();
            if is_same || began.elapsed() < STALLED {
                return is_same;
            }
        }
    }

    fn replay(&mut self, check: Check, choices: &[Choice]) -> Vec<Event> {
        let mut state = self.stage.begin();
        let mut events = Vec::new();
        for choice in choices {
            let (next, event, _) = self.stage.next(self.sandbox, &state, *choice);
            state = next;
            events.push(event);
        }
        if check == Check::FreeAgain {
            let said = "all clients die, and every lease passes".to_owned();
            events.push(Event { who: None, said, reply: None, notes: Vec::new() });
            state = self.ended(&state);
        }
        if matches!(check, Check::FreeAgain | Check::FreesOnlyOwn | Check::NothingLeft) {
            let (is_free, mut tried) = self.stage.probe(self.sandbox, &state);
            if let Some(last) = tried.last_mut().filter(|_| !is_free) {
                last.notes.push("does not get it".to_owned());
            }
            events.append(&mut tried);
        }
        events
    }
}
