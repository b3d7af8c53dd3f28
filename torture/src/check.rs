//! The checkers: pure functions of a history. Each has a broken specimen among the tests.

mod errors;
mod exemptions;
mod liveness;
mod order;
mod safety;
mod tokens;
mod verdict;

use std::collections::BTreeSet;

use crate::faults::{Fault, bound};
use crate::history::History;
use crate::parts::Lock;

use verdict::{fault_at, figures, millis};

pub use verdict::{Check, Figures, Finding, Terms, Verdict};

/// Runs the checkers that look at the history.
#[must_use]
pub fn check(history: &History, terms: &Terms) -> Verdict {
    let mut verdict = Verdict::default();
    let injected = history.faults.iter().map(|injected| (injected.fault, u64::from(!injected.has_failed)));
    for (fault, times) in std::iter::once((Fault::None, 0)).chain(injected) {
        let figures = verdict.figures.entry(fault).or_default();
        figures.injected += times;
        figures.bound_ms = millis(bound(fault, terms.store, terms.ttl));
    }
    for section in &history.sections {
        figures(&mut verdict, fault_at(history, section.begin)).sections += 1;
    }
    let locks = history.locks();
    for lock in &locks {
        let of_lock = history.of(|other| other == *lock);
        let before = verdict.findings.len();
        safety::overlaps(&of_lock, terms, &mut verdict);
        safety::too_many_permits(&of_lock, terms, &mut verdict);
        safety::early_starts(&of_lock, terms, &mut verdict);
        tokens::order(&of_lock, terms, &mut verdict);
        tokens::re_entries(&of_lock, terms, &mut verdict);
        safety::stale_writes(&of_lock, terms, &mut verdict);
        if lock.has_order() {
            order::starved(&of_lock, terms, &mut verdict);
        }
        name(&mut verdict, before, *lock);
    }
    for group in locks.iter().map(|lock| lock.group()).collect::<BTreeSet<Lock>>() {
        let before = verdict.findings.len();
        liveness::stalls(&history.of(|lock| lock.group() == group), terms, &mut verdict);
        name(&mut verdict, before, group);
    }
    liveness::lost_waiters(history, &mut verdict);
    errors::losses(history, terms, &mut verdict);
    errors::failures(history, terms, &mut verdict);
    errors::slow_releases(history, terms, &mut verdict);
    verdict
}

/// Says which lock the findings since then are about, unless it is the only kind that a peer has.
fn name(verdict: &mut Verdict, before: usize, lock: Lock) {
    for finding in verdict.findings[before..].iter_mut().filter(|_| lock != Lock::Mutex) {
        finding.text = format!("{lock}: {}", finding.text);
    }
}

#[cfg(test)]
mod tests;
