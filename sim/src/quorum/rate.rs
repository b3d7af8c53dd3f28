//! The rate of a contended lock while a minority of the nodes is slow or silent, compared with the same clients on healthy nodes.

use std::collections::BTreeMap;

use super::plan::Plan;
use super::planted::Planted;
use super::run::run_plan;
use crate::checks::{Promise, Violation};
use crate::plan::{Case, SECOND};
use crate::run::Outcome;

/// The minority is slow from the first second on, and must not be felt from the second one on.
const COMPARED: std::ops::Range<u64> = 2..4;

/// Runs the contention of a seed with and without a slow minority. With it the rate must be at least half of what it is without.
#[must_use]
pub fn run(case: &Case, planted: Option<Planted>, lines: Option<usize>) -> Outcome {
    let (healthy, before) = run_plan(case.seed, Plan::contended(case.seed, false), None, None);
    let (mut outcome, after) = run_plan(case.seed, Plan::contended(case.seed, true), planted, lines);
    let count = |guards: &BTreeMap<u64, u64>| guards.range(COMPARED).map(|(_, count)| count).sum::<u64>();
    let (before, after) = (count(&before), count(&after));
    outcome.violation = healthy.violation.or(outcome.violation);
    if outcome.violation.is_none() && 2 * after < before {
        let what = format!("{after} grants with a slow or silent minority, {before} without, in 2 s");
        outcome.violation = Some(Violation { promise: Promise::Rate, what, at: 4 * SECOND });
    }
    outcome
}
