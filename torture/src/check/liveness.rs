//! A free lock with live waiters, and waiters that are never granted it.

use std::time::Duration;

use super::verdict::{Check, Finding, Terms, Verdict, fault_at, figures, nanos};
use crate::faults::{Fault, RECONNECT_LIMIT, StoreKind, bound};
use crate::history::{History, Ns};
use crate::parts::Share;

/// A stall that begins this soon after a pause of the machine follows from it, in nanoseconds.
const AFTER_PAUSE: Ns = 10_000_000_000;

/// A release grants the lock to the first waiter, and a push takes milliseconds. A release that is not sent costs the ttl, and a push that is
/// lost 2 s, until the re-check or the end of the claim window. The time between is for a busy machine.
const HAND_OFF: Duration = Duration::from_millis(1_500);

/// A waiter that has ended, and does not fit, is passed by those behind it at their re-check, after 27 s; and the time that a takeover takes.
const PASSED: Duration = Duration::from_secs(34);

/// What begins or ends at a moment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    /// A section.
    Inside(Share),
    /// An attempt that waits.
    Waits(Share),
    /// A fault, or a pause of the machine.
    Fault,
}

/// What there is at a moment.
#[derive(Default)]
struct State {
    inside: Vec<Share>,
    waiting: Vec<Share>,
    faults: usize,
}

impl State {
    fn change(&mut self, what: What, is_begin: bool) {
        match what {
            What::Inside(share) => change(&mut self.inside, share, is_begin),
            What::Waits(share) => change(&mut self.waiting, share, is_begin),
            What::Fault if is_begin => self.faults += 1,
            What::Fault => self.faults -= 1,
        }
    }

    /// Tasks wait, and each of them might be inside.
    fn is_stalled(&self) -> bool {
        let mut waiting = self.waiting.iter();
        self.faults == 0 && !self.waiting.is_empty() && waiting.all(|share| share.fits(&self.inside))
    }
}

fn change(shares: &mut Vec<Share>, share: Share, is_begin: bool) {
    if is_begin {
        shares.push(share);
    } else if let Some(at) = shares.iter().position(|other| *other == share) {
        shares.swap_remove(at);
    }
}

/// The times for which the lock had room for every live task that waited, and none was granted it, not counting the faults themselves and
/// pauses of the machine.
pub(super) fn stalls(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let (mut state, mut since) = (State::default(), None::<(Ns, bool)>);
    for (at, is_begin, what) in changes(history) {
        state.change(what, is_begin);
        let is_grant = is_begin && matches!(what, What::Inside(_));
        if let Some((from, is_free)) = since.filter(|_| is_grant || !state.is_stalled()) {
            stall(history, terms, verdict, (from, at), is_free);
            since = None;
        }
        if since.is_none() && state.is_stalled() {
            since = Some((at, state.inside.is_empty()));
        }
    }
    if let Some((from, is_free)) = since {
        stall(history, terms, verdict, (from, history.end.max(from)), is_free);
    }
}

/// In the order of time; at the same time a beginning comes first, so that nothing splits a hand-off.
fn changes(history: &History) -> Vec<(Ns, bool, What)> {
    let mut changes = Vec::new();
    let mut span = |from: Ns, to: Option<Ns>, what: What| {
        changes.push((from, true, what));
        changes.extend(to.map(|to| (to.max(from), false, what)));
    };
    for section in &history.sections {
        span(section.begin, section.free(), What::Inside(section.share));
    }
    for waiting in &history.waiting {
        span(waiting.from, waiting.to, What::Waits(waiting.part.share));
    }
    for pause in &history.pauses {
        span(pause.from, Some(pause.to), What::Fault);
    }
    for injected in &history.faults {
        span(injected.start, Some(injected.healed), What::Fault);
    }
    changes.sort_by_key(|(at, is_begin, _)| (*at, !is_begin));
    changes
}

/// A lock that is not free, but has room, may have a waiter at its head that has ended: the others pass it when they re-check.
fn stall(history: &History, terms: &Terms, verdict: &mut Verdict, (from, to): (Ns, Ns), is_free: bool) {
    let fault = fault_at(history, from);
    let figures = figures(verdict, fault);
    let ms = (to - from) / 1_000_000;
    let mut bound = if is_free { bound(fault, terms.store, terms.ttl) } else { PASSED };
    if is_free {
        figures.stall_ms = figures.stall_ms.max(ms);
    }
    if is_paused_before(history, from) {
        // Connections are made again, as after any outage.
        bound += RECONNECT_LIMIT;
    } else if terms.has_bound && is_undisturbed(history, terms, from, is_free) {
        bound = HAND_OFF;
    }
    if u128::from(ms) > bound.as_millis() {
        let free = if is_free { "was free" } else { "had room" };
        let text =
            format!("the lock {free} for {ms} ms while a task waited; the bound is {} ms", bound.as_millis());
        let is_exempt = !terms.has_bound;
        verdict.findings.push(Finding { check: Check::Stall, fault, from, to, text, is_exempt });
    }
}

fn is_paused_before(history: &History, at: Ns) -> bool {
    history.pauses.iter().any(|pause| pause.to <= at && at < pause.to + AFTER_PAUSE)
}

/// Whether the effects of all faults are over: those of processes too, since a killed one may have held the lock, or had a place in the queue.
fn is_undisturbed(history: &History, terms: &Terms, at: Ns, is_free: bool) -> bool {
    let lasts = |fault| if is_free { bound(fault, terms.store, terms.ttl) } else { PASSED };
    let is_over = |fault, healed| at > healed + nanos(lasts(fault));
    let mut begun = history.faults.iter().filter(|injected| injected.start <= at);
    // The nodes of a quorum do not vote for the ttl after their first use.
    let has_votes = terms.store != StoreKind::Redlock || is_over(Fault::None, history.start);
    has_votes && begun.all(|injected| is_over(injected.fault, injected.healed))
}

/// The run ends only when no task waits or holds any more, or nothing has happened for longer than the bound.
pub(super) fn lost_waiters(history: &History, verdict: &mut Verdict) {
    let fault = history.faults.last().map_or(Fault::None, |injected| injected.fault);
    let mut lost = |from, text| {
        let (check, to, is_exempt) = (Check::LostWaiter, history.end, false);
        verdict.findings.push(Finding { check, fault, from, to, text, is_exempt });
    };
    for waiting in history.waiting.iter().filter(|waiting| waiting.to.is_none()) {
        lost(waiting.from, format!("task {} still waits, though the lock is free", waiting.task));
    }
    for section in history.sections.iter().filter(|section| section.end.is_none()) {
        lost(section.begin, format!("the release of task {} has not returned", section.task));
    }
}
