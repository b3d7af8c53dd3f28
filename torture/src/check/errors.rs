//! Locks that are lost, and calls that fail, though nothing explains it.

use std::time::Duration;

use super::verdict::{Check, Finding, Terms, Verdict, fault_at, nanos};
use crate::faults::{Fault, RECONNECT_LIMIT, StoreKind, delay};
use crate::history::{Failure, History, Injected, Ns, Waiting};
use crate::parts::{Lock, Share};

/// A call without an answer fails after this time.
const NO_ANSWER: Duration = Duration::from_secs(2);

/// A release that takes longer hangs.
const HANGS: Duration = Duration::from_secs(5);

/// Leases that were renewed, and were lost all the same.
pub(super) fn losses(history: &History, terms: &Terms, verdict: &mut Verdict) {
    for loss in &history.losses {
        let text = || format!("task {} lost the lock without a cause", loss.task);
        unexplained(history, terms, verdict, Check::Loss, (loss.task, loss.at), |_| true, text);
    }
}

/// Attempts and releases that failed. A lock that was lost cannot be released. A process that was stopped asks again: a stop is no cause
/// for a failed attempt, except that it may keep the file of SQLite locked, and that what the attempt has is lost: a part of a set, and the
/// lease of another task of its owner.
pub(super) fn failures(history: &History, terms: &Terms, verdict: &mut Verdict) {
    for failure in history.failures.iter().filter(|failure| !failure.is_after_loss) {
        let text = || format!("a call of task {} failed without a cause: {}", failure.task, failure.text);
        let may_cause = |fault| {
            let is_excused = terms.store == StoreKind::Sqlite || may_have_lost(history, failure);
            fault != Fault::WorkerStop || !failure.is_attempt() || is_excused
        };
        unexplained(history, terms, verdict, Check::Failure, (failure.task, failure.at), may_cause, text);
    }
}

/// Whether the attempt, while it waited, may have had a lease that it lost.
fn may_have_lost(history: &History, failure: &Failure) -> bool {
    let mut waits = history.waiting.iter().filter(|waiting| {
        let is_over = waiting.to.is_some_and(|to| to < failure.at);
        waiting.task == failure.task && waiting.from <= failure.at && !is_over
    });
    waits.any(|Waiting { part, .. }| {
        matches!((part.lock, part.share), (Lock::Set(_), _) | (_, Share::Owner(_)))
    })
}

/// Releases that return too late. One that has not returned at the end of the run is a stuck task.
pub(super) fn slow_releases(history: &History, terms: &Terms, verdict: &mut Verdict) {
    for section in &history.sections {
        let (Some(left), Some(end)) = (section.left, section.end) else { continue };
        if end - left > nanos(HANGS) {
            let ms = (end - left) / 1_000_000;
            let text = || format!("the release of task {} took {ms} ms", section.task);
            unexplained(history, terms, verdict, Check::Failure, (section.task, end), |_| true, text);
        }
    }
}

fn unexplained(
    history: &History,
    terms: &Terms,
    verdict: &mut Verdict,
    check: Check,
    (task, at): (u32, Ns),
    may_cause: impl Fn(Fault) -> bool,
    text: impl Fn() -> String,
) {
    if is_explained(history, terms, task, at, may_cause) {
        return;
    }
    let (fault, is_exempt) = (fault_at(history, at), !terms.has_bound);
    verdict.findings.push(Finding { check, fault, from: at, to: at, text: text(), is_exempt });
}

/// Whether a fault of this task that may be the cause, or a pause of the machine is not long over. A lease that it kept from being renewed ends within the ttl.
/// The nodes of a quorum do not vote for the ttl after their first use, so an attempt that does not wait fails.
fn is_explained(
    history: &History,
    terms: &Terms,
    task: u32,
    at: Ns,
    may_cause: impl Fn(Fault) -> bool,
) -> bool {
    let lasts =
        |from: Ns, to: Ns, after: Duration| from <= at && at <= to + nanos(terms.ttl + NO_ANSWER + after);
    let reaches = |injected: &&Injected| {
        injected.fault.disturbs_calls(terms.store) && injected.reaches(task, terms.store)
    };
    let causes = |injected: &&Injected| may_cause(injected.fault);
    if terms.store == StoreKind::Redlock && lasts(history.start, history.start, Duration::ZERO) {
        return true;
    }
    history
        .faults
        .iter()
        .filter(reaches)
        .filter(causes)
        .any(|injected| lasts(injected.start, injected.healed, delay(injected.fault, terms.store)))
        || history.pauses.iter().any(|pause| lasts(pause.from, pause.to, RECONNECT_LIMIT))
}
