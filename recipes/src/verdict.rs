//! What all explorations of one recipe come to.

use crate::explorer::{Check, Fault, Sandbox, Scenario, Subject, Violation, explore};

/// What is broken, and what has to be wrong for that.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What is broken, and how.
    pub violation: Violation,
    /// What has to be wrong.
    pub fault: Fault,
}

impl Finding {
    /// What is broken.
    #[must_use]
    pub fn check(&self) -> Check {
        self.violation.check
    }

    /// Whether it is broken by nothing else that was broken before.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.violation.follows.is_none()
    }

    /// In a few words, for tables and tests: `~` before what only follows from another trouble.
    #[must_use]
    pub fn brief(&self) -> String {
        let mark = if self.is_root() { "" } else { "~" };
        match self.fault {
            Fault::None => format!("{mark}{:?}", self.check()),
            fault => format!("{mark}{:?} {fault:?}", self.check()),
        }
    }
}

/// What all explorations of one recipe come to.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// The shortest way to break each check that does not hold: without anything wrong, or with what has to be wrong.
    pub findings: Vec<Finding>,
    /// How many states were looked at.
    pub states: usize,
    /// Where there were too many: all schedules up to this many events were run.
    pub bound: Option<usize>,
}

impl Verdict {
    /// What breaks this check, the worst first: what needs nothing else to be wrong.
    pub fn of(&self, check: Check) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.check() == check)
    }
}

/// Runs every interleaving of every scenario.
#[must_use]
pub fn examine(subject: &Subject, scenarios: &[Scenario]) -> Verdict {
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
    // The plainest first: nothing else broken, nothing wrong, and short.
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
