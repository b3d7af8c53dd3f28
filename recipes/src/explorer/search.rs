//! The breadth-first search over all schedules.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use super::event::Event;
use super::sandbox::{Contents, STALLED, Sandbox};
use super::scenario::{Check, Scenario, Subject};
use super::state::{Broken, Choice, Exploration, Phase, State};
use crate::recipe::Role;

/// A shortest schedule that breaks a check.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The check that does not hold.
    pub check: Check,
    /// The clients' roles.
    pub roles: Vec<Role>,
    /// The schedule, then the probe that shows the damage.
    pub events: Vec<Event>,
    /// The position in `events` of the step that breaks the check.
    pub fatal: usize,
    /// The check that the same schedule broke earlier: this violation may be its consequence.
    pub follows: Option<Check>,
    /// Whether the schedule gave the same result when it ran once more from an empty server, without any restored state.
    pub is_confirmed: bool,
}

/// The result of one exploration.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// One for each check that does not hold.
    pub violations: BTreeMap<Check, Violation>,
    /// Number of states visited.
    pub states: usize,
    /// All schedules of up to this many events were run. None: all schedules were run.
    pub bound: Option<usize>,
}

/// How a state was reached: the position of its predecessor, and the transition.
type Step = Option<(usize, Choice)>;

struct Search<'a> {
    exploration: Exploration<'a>,
    sandbox: &'a mut Sandbox,
    /// One for each state, in the order of the search.
    steps: Vec<Step>,
    states: Vec<State>,
    visited: HashSet<u64>,
    /// Results of the probe, by contents, time and crashed clients.
    probed: HashMap<(Vec<Contents>, u64, Vec<usize>), bool>,
    found: BTreeMap<Check, (Step, Option<Check>)>,
}

/// Runs every interleaving.
pub fn explore(subject: &Subject, scenario: &Scenario, sandbox: &mut Sandbox) -> Findings {
    let mut search = Search {
        exploration: Exploration { subject, scenario },
        sandbox,
        steps: Vec::new(),
        states: Vec::new(),
        visited: HashSet::new(),
        probed: HashMap::new(),
        found: BTreeMap::new(),
    };
    let bound = search.run();
    let states = search.states.len();
    let found = std::mem::take(&mut search.found);
    let violations = found.into_iter().map(|(check, (step, follows))| {
        let mut violation = search.violation(check, step);
        violation.follows = follows;
        (check, violation)
    });
    Findings { violations: violations.collect(), states, bound }
}

impl Search<'_> {
    fn run(&mut self) -> Option<usize> {
        let first = self.exploration.begin();
        self.visit(first, None);
        let mut at = 0;
        while at < self.states.len() {
            let state = self.states[at].clone();
            for choice in self.exploration.choices(&state) {
                if self.states.len() >= self.exploration.scenario.most_states {
                    return Some(self.choices_to(Some((at, choice))).len() - 1);
                }
                let (mut next, _, mut broken) = self.exploration.next(self.sandbox, &state, choice);
                self.check(&state, &next, choice, &mut broken);
                let step = Some((at, choice));
                for check in broken {
                    self.record(check, step, state.broken);
                    if !matches!(check, Check::DetectsExpiry | Check::FreeAgain) {
                        next.broken.get_or_insert(check);
                    }
                }
                self.visit(next, step);
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

    /// Records a state if it is new, and checks that the lock recovers if all clients crash there.
    fn visit(&mut self, state: State, step: Step) {
        if self.visited.insert(self.exploration.hash(&state)) {
            if !self.found.get(&Check::FreeAgain).is_some_and(|(_, follows)| follows.is_none())
                && !self.is_free_after_crash(&state)
            {
                self.record(Check::FreeAgain, step, state.broken);
            }
            self.states.push(state);
            self.steps.push(step);
        }
    }

    fn record(&mut self, check: Check, step: Step, follows: Option<Check>) {
        let known = self.found.get(&check);
        // A violation that is no consequence of another one is more telling.
        if known.is_none_or(|(_, known)| known.is_some() && follows.is_none()) {
            self.found.insert(check, (step, follows));
        }
    }

    fn check(&mut self, before: &State, after: &State, choice: Choice, broken: &mut Broken) {
        let clients = 0..after.clients.len();
        let pairs = clients.clone().flat_map(|one| (0..one).map(move |other| (one, other)));
        for (one, other) in pairs.filter(|(one, other)| self.conflict(*one, *other)) {
            let (a, b) =
                (self.exploration.holds_in_time(after, one), self.exploration.holds_in_time(after, other));
            let both_inside =
                self.exploration.is_inside(after, one) && self.exploration.is_inside(after, other);
            if a && b {
                broken.push(Check::OneHolder);
            } else if both_inside {
                broken.push(Check::DetectsExpiry);
            }
        }
        if let Choice::Step(who) = choice {
            let was_freed = before.servers != after.servers && !self.is_free(before) && self.is_free(after);
            if was_freed && clients.filter(|other| *other != who).any(|other| self.owns(before, other)) {
                broken.push(Check::FreesOnlyOwn);
            }
        }
        let is_over = after.clients.iter().all(|client| client.is_done() && client.phase == Phase::Outside);
        if is_over && !self.is_free(after) {
            broken.push(Check::NoStaleLock);
        }
        if after.deaths == 0 && self.exploration.has_lost_wakeup(after) {
            broken.push(Check::WaitersWoken);
        }
        broken.sort();
        broken.dedup();
    }

    /// Whether the lock is this client's: it holds, is about to release, or is certain to acquire. A client that acquires
    /// beside a holder does not own the lock. With several servers, only a holder does.
    fn owns(&mut self, state: &State, who: usize) -> bool {
        if self.exploration.holds_in_time(state, who) || state.servers.len() > 1 {
            return self.exploration.holds_in_time(state, who);
        }
        let is_held = (0..state.clients.len()).any(|other| self.exploration.has_in_time(state, other));
        let begins = !is_held && self.exploration.role(who) == Role::Writer;
        self.exploration.has_in_time(state, who)
            || begins && self.exploration.will_hold(self.sandbox, state, who)
    }

    fn conflict(&self, one: usize, other: usize) -> bool {
        let is_reader = |who: usize| self.exploration.role(who) == Role::Reader;
        !(is_reader(one) && is_reader(other))
    }

    fn is_free(&mut self, state: &State) -> bool {
        let crashed = |who: &usize| state.clients[*who].phase == Phase::Gone;
        let key = (state.servers.clone(), state.now, (0..state.clients.len()).filter(crashed).collect());
        if let Some(known) = self.probed.get(&key) {
            return *known;
        }
        let (is_free, _) = self.exploration.probe(self.sandbox, state);
        self.probed.insert(key, is_free);
        is_free
    }

    fn is_free_after_crash(&mut self, state: &State) -> bool {
        let crashed = self.crash_all(state);
        self.is_free(&crashed)
    }

    /// All clients crash, and every lease expires.
    fn crash_all(&mut self, state: &State) -> State {
        let mut ended = state.clone();
        for who in 0..ended.clients.len() {
            if !ended.clients[who].is_done() {
                (ended, _, _) = self.exploration.next(self.sandbox, &ended, Choice::Die(who));
            }
        }
        self.exploration.pass(self.sandbox, &mut ended, self.exploration.subject.longest);
        ended
    }

    /// Replays the path to a violation for its events, then runs it once more from an empty server to confirm it.
    fn violation(&mut self, check: Check, step: Step) -> Violation {
        let choices = self.choices_to(step);
        let events = self.replay(check, &choices);
        let is_confirmed = self.is_confirmed(check, &choices, &events);
        let roles =
            self.exploration.scenario.participants.iter().map(|participant| participant.role).collect();
        Violation { check, roles, events, fatal: choices.len() - 1, follows: None, is_confirmed }
    }

    fn is_confirmed(&mut self, check: Check, choices: &[Choice], events: &[Event]) -> bool {
        loop {
            let began = Instant::now();
            self.sandbox.stop_restoring();
            let is_same = self.replay(check, choices) == events;
            self.sandbox.resume_restoring();
            if is_same || began.elapsed() < STALLED {
                return is_same;
            }
        }
    }

    fn replay(&mut self, check: Check, choices: &[Choice]) -> Vec<Event> {
        let mut state = self.exploration.begin();
        let mut events = Vec::new();
        for choice in choices {
            let (next, event, _) = self.exploration.next(self.sandbox, &state, *choice);
            state = next;
            events.push(event);
        }
        if check == Check::FreeAgain {
            events.push(Event::of(None, "all clients crash, and every lease expires"));
            state = self.crash_all(&state);
        }
        if matches!(check, Check::FreeAgain | Check::FreesOnlyOwn | Check::NoStaleLock) {
            let (is_free, mut probe) = self.exploration.probe(self.sandbox, &state);
            if let Some(last) = probe.last_mut().filter(|_| !is_free) {
                last.notes.push("does not acquire the lock".to_owned());
            }
            events.append(&mut probe);
        }
        events
    }
}
