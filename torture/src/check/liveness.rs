//! A free lock with live waiters, and waiters that are never granted it.

use std::time::Duration;

use super::verdict::{Check, Finding, Terms, Verdict, fault_at, figures, nanos};
use crate::faults::{Fault, RECONNECT_LIMIT, StoreKind, bound};
use crate::history::{History, Ns};

/// A stall that begins this soon after a pause of the machine follows from it, in nanoseconds.
const AFTER_PAUSE: Ns = 10_000_000_000;

/// A release grants the lock to the first waiter, and a push takes milliseconds. A release that is not sent costs the ttl, and a push that is
/// lost 2 s, until the re-check or the end of the claim window. The time between is for a busy machine.
const HAND_OFF: Duration = Duration::from_millis(1_500);

/// What changes at a moment.
#[derive(Clone, Copy, Default)]
struct Change {
    holders: i64,
    waiters: i64,
    faults: i64,
}

/// The times for which the lock was free while a live task waited, not counting the faults themselves and pauses of the machine.
pub(super) fn stalls(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let (mut state, mut since) = (Change::default(), None::<Ns>);
    for (at, change) in changes(history) {
        state.holders += change.holders;
        state.waiters += change.waiters;
        state.faults += change.faults;
        let is_stalled = state.holders <= 0 && state.waiters > 0 && state.faults <= 0;
        match (since, is_stalled) {
            (None, true) => since = Some(at),
            (Some(from), false) => {
                stall(history, terms, verdict, from, at);
                since = None;
            }
            _ => {}
        }
    }
    if let Some(from) = since {
        stall(history, terms, verdict, from, history.end.max(from));
    }
}

/// In the order of time; at the same time a beginning comes first, so that nothing splits a hand-off.
fn changes(history: &History) -> Vec<(Ns, Change)> {
    let mut changes = Vec::new();
    let mut span = |from: Ns, to: Option<Ns>, change: Change| {
        changes.push((from, change));
        let back = Change { holders: -change.holders, waiters: -change.waiters, faults: -change.faults };
        changes.extend(to.map(|to| (to, back)));
    };
    for section in &history.sections {
        span(section.begin, section.left(), Change { holders: 1, ..Change::default() });
    }
    for waiting in &history.waiting {
        span(waiting.from, waiting.to, Change { waiters: 1, ..Change::default() });
    }
    for pause in &history.pauses {
        span(pause.from, Some(pause.to), Change { faults: 1, ..Change::default() });
    }
    for injected in &history.faults {
        span(injected.start, Some(injected.healed), Change { faults: 1, ..Change::default() });
    }
    changes.sort_by_key(|(at, change)| (*at, -(change.holders + change.waiters + change.faults)));
    changes
}

fn stall(history: &History, terms: &Terms, verdict: &mut Verdict, from: Ns, to: Ns) {
    let fault = fault_at(history, from);
    let figures = figures(verdict, fault);
    let ms = (to - from) / 1_000_000;
    figures.stall_ms = figures.stall_ms.max(ms);
    let mut bound = bound(fault, terms.store, terms.ttl);
    if is_paused_before(history, from) {
        // Connections are made again, as after any outage.
        bound += RECONNECT_LIMIT;
    } else if terms.has_bound && is_undisturbed(history, terms, from) {
        bound = HAND_OFF;
    }
    if u128::from(ms) > bound.as_millis() {
        let text = format!(
            "the lock was free for {ms} ms while a task waited; the bound is {} ms",
            bound.as_millis()
        );
        let is_exempt = !terms.has_bound;
        verdict.findings.push(Finding { check: Check::Stall, fault, from, to, text, is_exempt });
    }
}

fn is_paused_before(history: &History, at: Ns) -> bool {
    history.pauses.iter().any(|pause| pause.to <= at && at < pause.to + AFTER_PAUSE)
}

/// Whether the effects of all faults are over: those of processes too, since a killed one may have held the lock, or had a place in the queue.
fn is_undisturbed(history: &History, terms: &Terms, at: Ns) -> bool {
    let is_over = |fault, healed| at > healed + nanos(bound(fault, terms.store, terms.ttl));
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
