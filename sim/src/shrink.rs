//! A failing case is made smaller: parts of its plan are left out as long as the same promise is broken.

use crate::checks::Promise;
use crate::plan::{Case, Part};
use crate::run::Outcome;

/// The smallest case that was found in this many runs. `parts`: what could be left out of a case.
#[must_use]
pub fn shrink(
    case: &Case,
    promise: Promise,
    mut runs: usize,
    parts: impl Fn(&Case) -> Vec<Part>,
    run: impl Fn(&Case) -> Outcome,
) -> Case {
    let mut best = case.clone();
    loop {
        let before = best.clone();
        let parts = parts(&best);
        // First half of everything, then less and less.
        let mut size = (parts.len() / 2).max(1);
        loop {
            for chunk in parts.chunks(size) {
                let missing: Vec<Part> =
                    chunk.iter().copied().filter(|part| !best.without.contains(part)).collect();
                if missing.is_empty() {
                    continue;
                }
                if runs == 0 {
                    return best;
                }
                runs -= 1;
                let mut smaller = best.clone();
                smaller.without.extend(missing);
                let broken = run(&smaller).violation;
                if broken.is_some_and(|violation| violation.promise == promise) {
                    best = smaller;
                }
            }
            if size == 1 {
                break;
            }
            size /= 2;
        }
        if best == before {
            return best;
        }
    }
}
