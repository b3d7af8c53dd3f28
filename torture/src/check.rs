//! The checkers: pure functions of a history. Each has a broken specimen among the tests.

mod liveness;
mod order;
mod safety;
mod trouble;
mod verdict;

use crate::faults::{Fault, bound};
use crate::history::History;

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
    safety::overlaps(history, terms, &mut verdict);
    safety::token_order(history, terms, &mut verdict);
    safety::stale_writes(history, terms, &mut verdict);
    liveness::stalls(history, terms, &mut verdict);
    liveness::lost_waiters(history, &mut verdict);
    order::starved(history, terms, &mut verdict);
    trouble::losses(history, terms, &mut verdict);
    trouble::failures(history, terms, &mut verdict);
    trouble::slow_releases(history, terms, &mut verdict);
    verdict
}

#[cfg(test)]
mod tests;
