//! Waiting tasks that others overtake.

use std::collections::BTreeSet;
use std::time::Duration;

use super::verdict::{Check, Finding, Terms, Verdict, fault_at, nanos};
use crate::history::{History, Ns, Section, Waiting};
use crate::parts::Share;

/// A fault may cost a push. Its waiter re-checks by then.
const RE_CHECK: Duration = Duration::from_secs(27);

/// Of each task so many sections may begin while another task waits: a client hands the lock on among its own tasks for 10 ms, and a section
/// lasts 4 ms or longer.
const SECTIONS: usize = 4;

/// Clients are served in the order in which they wait. An owner that has the lock need not wait.
pub(super) fn starved(history: &History, terms: &Terms, verdict: &mut Verdict) {
    let tasks: BTreeSet<u32> = history.waiting.iter().map(|waiting| waiting.task).collect();
    let begun = begun(history);
    for waiting in &history.waiting {
        let before = overtakes(history, terms, &begun, waiting);
        if before <= SECTIONS * tasks.len() {
            continue;
        }
        let (from, to) = (waiting.from, waiting.to.unwrap_or(history.end));
        let ms = (to - from) / 1_000_000;
        let text = format!(
            "task {} waited for {ms} ms, and {before} sections of others began meanwhile",
            waiting.task
        );
        let (check, fault, is_exempt) = (Check::Starved, fault_at(history, from), !terms.has_bound);
        verdict.findings.push(Finding { check, fault, from, to, text, is_exempt });
    }
}

/// The beginnings of all sections that are no re-entries, and their tasks, in the order of time.
fn begun(history: &History) -> Vec<(Ns, u32)> {
    let mut sections: Vec<&Section> = history.sections.iter().collect();
    sections.sort_by_key(|section| section.begin);
    let mut open: Vec<&Section> = Vec::new();
    let mut begun = Vec::new();
    for section in sections {
        open.retain(|outer| outer.end.is_none_or(|end| end > section.begin));
        let is_owner = matches!(section.share, Share::Owner(_));
        if !(is_owner && open.iter().any(|outer| outer.share == section.share)) {
            begun.push((section.begin, section.task));
        }
        open.push(section);
    }
    begun
}

/// Sections of other tasks that began during the wait, while no fault or pause could be the reason.
fn overtakes(history: &History, terms: &Terms, begun: &[(Ns, u32)], waiting: &Waiting) -> usize {
    let first = begun.partition_point(|(begin, _)| *begin <= waiting.from);
    let during = begun[first..].iter().take_while(|(begin, _)| waiting.to.is_none_or(|to| *begin < to));
    let others = during.filter(|(_, task)| *task != waiting.task);
    others.filter(|(begin, _)| !is_disturbed(history, terms, waiting.task, *begin)).count()
}

fn is_disturbed(history: &History, terms: &Terms, task: u32, at: Ns) -> bool {
    let is_near = |from: Ns, to: Ns| from <= at && at <= to + nanos(RE_CHECK);
    let mut faults = history.faults.iter().filter(|injected| injected.reaches(task, terms.store));
    faults.any(|injected| is_near(injected.start, injected.healed))
        || history.pauses.iter().any(|pause| is_near(pause.from, pause.to))
}
