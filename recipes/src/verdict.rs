//! The combined result of all explorations of one recipe.

use crate::explorer::{Check, Fault, Sandbox, Scenario, Subject, Violation, explore};

/// A check that breaks, and the fault that it needs.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The schedule that breaks it.
    pub violation: Violation,
    /// The fault that it needs.
    pub fault: Fault,
}

impl Finding {
    /// The check.
    #[must_use]
    pub fn check(&self) -> Check {
        self.violation.check
    }

    /// Whether no other check broke earlier in the same schedule.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.violation.follows.is_none()
    }

    /// A short form for tables and tests: `~` marks the consequence of another violation.
    #[must_use]
    pub fn brief(&self) -> String {
        let mark = if self.is_root() { "" } else { "~" };
        match self.fault {
            Fault::None => format!("{mark}{:?}", self.check()),
            fault => format!("{mark}{:?} {fault:?}", self.check()),
        }
    }
}

/// The combined result of all explorations of one recipe.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// A shortest schedule for each check that breaks, with the fault that it needs.
    pub findings: Vec<Finding>,
    /// Number of states visited.
    pub states: usize,
    /// All schedules of up to this many events were run. None: all schedules were run.
    pub bound: Option<usize>,
}

impl Verdict {
    /// What breaks this check. A violation without a fault comes first.
    pub fn of(&self, check: Check) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.check() == check)
    }
}

/// Runs every interleaving of every scenario.
#[must_use]
pub fn explore_scenarios(subject: &Subject, scenarios: &[Scenario]) -> Verdict {
    let mut sandbox = Sandbox::new(subject.nodes);
    let mut verdict = Verdict::default();
    let mut all: Vec<Finding> = Vec::new();
    for scenario in scenarios {
        let found = explore(subject, scenario, &mut sandbox);
        verdict.states += found.states;
        verdict.bound = verdict.bound.into_iter().chain(found.bound).min();
        let fault = scenario.fault;
        all.extend(found.violations.into_values().map(|violation| Finding { violation, fault }));
    }
    // The most telling first: no fault, no consequence of another violation, and short.
    all.sort_by_key(|finding| {
        (finding.check(), finding.fault, !finding.is_root(), finding.violation.events.len())
    });
    for finding in all {
        let tells_more = verdict.of(finding.check()).all(|known| {
            known.fault != finding.fault
                && (known.fault != Fault::None || !known.is_root() && finding.is_root())
        });
        if tells_more {
            verdict.findings.push(finding);
        }
    }
    verdict
}
