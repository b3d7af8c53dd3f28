//! The table of attempts and leases: what a step of one entry means for all that is beside it.
//!
//! Whoever calls has the session's mutex, so nothing here wakes anybody, logs, or asks the store: that is noted in
//! [`After`], for when the mutex is free again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::{Context, Waker};
use std::time::Duration;

use leasehold_core::{ClientId, Command, LocalTime, Owner, Resource};

use super::entry::{Entry, Given, News};
use super::local_queue::Lines;
use super::session::Errand;

/// The largest number of commands in one batch.
const BATCH: usize = 512;

/// A renewal that is due within this part of its ttl goes with one that is due now.
const EARLY: u32 = 20;

/// No renewal goes earlier than this, however long its ttl.
const EARLIEST: Duration = Duration::from_millis(500);

/// The table itself, and what follows from a step of one entry for the others, the timers and the driver.
pub(super) struct State {
    pub(super) id: ClientId,
    /// As the session's.
    pub(super) sequence: Arc<AtomicU64>,
    pub(super) lines: Lines,
    /// By sequence number. Most clients have few, and a tree of few costs less than hashing.
    pub(super) entries: BTreeMap<u64, Box<Entry>>,
    pub(super) timers: BTreeSet<(LocalTime, u64)>,
    pub(super) sleepers: BTreeMap<(LocalTime, u64), Waker>,
    /// When the driver wakes by itself.
    pub(super) armed: LocalTime,
    /// How many entries the store may still keep something for.
    pub(super) unsettled: usize,
    /// How many entries ended without the store's word since the client was closed.
    pub(super) unanswered: u64,
    /// Whoever waits for `unsettled` to become zero, or for the driver to end.
    pub(super) closers: Vec<Waker>,
    /// The driver has let go of the store.
    pub(super) is_driver_gone: bool,
    /// No attempt begins any more.
    pub(super) is_closed: bool,
    /// Nobody is left who could begin one.
    pub(super) is_orphaned: bool,
}

/// What the driver is to do.
pub(crate) struct Due {
    pub(crate) errands: Vec<(Arc<Resource>, Errand)>,
    /// When to ask again.
    pub(crate) next: LocalTime,
    /// There is nothing more to come.
    pub(crate) is_over: bool,
}

/// What is left to do once the mutex is free again.
#[derive(Default)]
pub(super) struct After {
    pub(super) wakers: Vec<Waker>,
    pub(super) news: Vec<(Arc<Resource>, News)>,
    pub(super) is_sooner: bool,
}

impl State {
    pub(super) fn new(id: ClientId, sequence: Arc<AtomicU64>) -> Self {
        Self {
            id,
            sequence,
            lines: Lines::default(),
            entries: BTreeMap::new(),
            timers: BTreeSet::new(),
            sleepers: BTreeMap::new(),
            armed: LocalTime::NEVER,
            unsettled: 0,
            unanswered: 0,
            closers: Vec::new(),
            is_driver_gone: false,
            is_closed: false,
            is_orphaned: false,
        }
    }

    pub(super) fn register_closer(&mut self, context: &mut Context<'_>) {
        if !self.closers.iter().any(|waker| waker.will_wake(context.waker())) {
            self.closers.push(context.waker().clone());
        }
    }

    /// After a step: moves the entry on, sets its timer, and notes whom to tell.
    pub(super) fn settle(&mut self, sequence: u64, now: LocalTime, after: &mut After) {
        let Some(entry) = self.entries.get_mut(&sequence) else { return };
        if entry.move_on(now) {
            after.wakers.extend(entry.wakers.drain(..).map(|(_, waker)| waker));
            after.news.extend(entry.news.drain(..).map(|news| (entry.resource.clone(), news)));
        }
        let entered = entry.take_entered();
        if let Some((line, _)) = entry.line {
            self.stir(line, sequence, now, after);
        }
        if let Some((resource, owner)) = entered {
            self.let_in(&resource, &owner, now, after);
        }
        let Some(entry) = self.entries.get_mut(&sequence) else { return };
        // A timer that comes too early costs one look, which is less than to move it each time.
        let due = entry.poll_timeout();
        if due.is_none() || entry.timer.is_none_or(|set| due < Some(set)) {
            if let Some(set) = entry.timer.take() {
                self.timers.remove(&(set, sequence));
            }
            if let Some(due) = due {
                self.timers.insert((due, sequence));
                entry.timer = Some(due);
                if due < self.armed {
                    // Once is enough: the driver looks at everything when it wakes.
                    self.armed = due;
                    after.is_sooner = true;
                }
            }
        }
        if entry.is_settled() {
            let given = entry.given();
            let was_counted = std::mem::take(&mut entry.is_counted);
            if !entry.is_wanted {
                self.entries.remove(&sequence);
            }
            if was_counted {
                self.count_off(given, after);
            }
        }
    }

    /// Whoever holds enters again before all who wait, but the store tells only the first of them. So the owner's other
    /// attempts ask.
    fn let_in(&mut self, resource: &Resource, owner: &Owner, now: LocalTime, after: &mut After) {
        let is_theirs = |entry: &Entry| entry.owner.as_ref() == Some(owner) && *entry.resource == *resource;
        let theirs = self.entries.iter().filter(|(_, entry)| entry.outcome.is_none() && is_theirs(entry));
        let theirs: Vec<u64> = theirs.map(|(sequence, _)| *sequence).collect();
        for sequence in theirs {
            if let Some(entry) = self.entries.get_mut(&sequence) {
                entry.ask_again(now);
            }
            self.settle(sequence, now, after);
        }
    }

    /// One less that the store may keep something for.
    pub(super) fn count_off(&mut self, given: Option<Given>, after: &mut After) {
        self.unsettled -= 1;
        self.unanswered += u64::from(given == Some(Given::Unanswered));
        if self.unsettled == 0 {
            after.wakers.append(&mut self.closers);
            // The driver may have nothing more to do.
            after.is_sooner |= self.is_closed || self.is_orphaned;
        }
    }

    pub(super) fn arm(&mut self, time: LocalTime, after: &mut After) {
        if time < self.armed {
            self.armed = time;
            after.is_sooner = true;
        }
    }

    pub(super) fn due(&mut self, now: LocalTime, after: &mut After) -> Due {
        while let Some(sleeper) = self.sleepers.first_entry()
            && sleeper.key().0 <= now
        {
            after.wakers.push(sleeper.remove());
        }
        let mut errands = Vec::new();
        while errands.len() < BATCH
            && let Some(&(time, sequence)) = self.timers.first()
            && time <= now
        {
            errands.extend(self.fire(sequence, now, after));
        }
        if errands.iter().any(|(_, errand)| matches!(errand.command, Command::Renew(_))) {
            self.renew_early(now, &mut errands, after);
        }
        let timer = self.timers.first().map_or(LocalTime::NEVER, |(time, _)| *time);
        let sleeper = self.sleepers.first_key_value().map_or(LocalTime::NEVER, |((time, _), _)| *time);
        self.armed = timer.min(sleeper);
        let is_over = self.unsettled == 0 && (self.is_closed || self.is_orphaned);
        Due { errands, next: self.armed, is_over }
    }

    fn fire(&mut self, sequence: u64, now: LocalTime, after: &mut After) -> Option<(Arc<Resource>, Errand)> {
        let entry = self.entries.get_mut(&sequence)?;
        if let Some(set) = entry.timer.take() {
            self.timers.remove(&(set, sequence));
        }
        let errand = entry.poll_transmit(sequence, now).map(|errand| (entry.resource.clone(), errand));
        self.settle(sequence, now, after);
        errand
    }

    /// Renewals that are due soon go with those that are due now, so that leases of one length come to be
    /// renewed together, whenever they were taken.
    fn renew_early(&mut self, now: LocalTime, errands: &mut Vec<(Arc<Resource>, Errand)>, after: &mut After) {
        let soon = self.timers.range(..=(now + EARLIEST, u64::MAX));
        let early: Vec<u64> = soon
            .map(|(_, sequence)| *sequence)
            .filter(|sequence| {
                self.entries.get(sequence).is_some_and(|entry| entry.renews_within(now, EARLY))
            })
            .take(BATCH.saturating_sub(errands.len()))
            .collect();
        for sequence in early {
            if let Some(entry) = self.entries.get_mut(&sequence) {
                entry.renew_now(now);
            }
            errands.extend(self.fire(sequence, now, after));
        }
    }
}
