//! Each checker has a broken specimen, and a history beside it that is right.

use std::time::Duration;

use super::*;
use crate::faults::StoreKind;
use crate::history::{Failure, Loss, Section, Waiting, Write};
use crate::history::{Injected, Ns};
use crate::pauses::Pause;

const MS: Ns = 1_000_000;

fn terms() -> Terms {
    Terms { store: StoreKind::Redis, ttl: Duration::from_secs(2), has_bound: true }
}

fn section(task: u32, order: u64, token: u64, begin_ms: Ns, last_held_ms: Ns) -> Section {
    let (begin, last_held) = (begin_ms * MS, last_held_ms * MS);
    let end = Some(last_held);
    Section { task, begin, begin_order: order, token, last_held, end, ..Section::default() }
}

fn history(sections: Vec<Section>) -> History {
    History { sections, end: 100_000 * MS, ..History::default() }
}

fn fault(fault: Fault, start_ms: Ns, healed_ms: Ns) -> Injected {
    let (start, healed) = (start_ms * MS, healed_ms * MS);
    Injected { fault, target: String::new(), start, healed, tasks: Vec::new(), has_failed: false }
}

fn violations(history: &History) -> Vec<Check> {
    let found = check(history, &terms()).findings;
    found.iter().filter(|finding| !finding.is_exempt).map(|finding| finding.check).collect()
}

#[test]
fn two_sections_that_believe_at_once_overlap() {
    let right = history(vec![section(0, 1, 7, 10, 20), section(1, 2, 8, 21, 30)]);
    assert_eq!(violations(&right), []);
    let broken = history(vec![section(0, 1, 7, 10, 25), section(1, 2, 8, 21, 30)]);
    assert_eq!(violations(&broken), [Check::Overlap]);
    assert_eq!(check(&broken, &terms()).figures[&Fault::None].overlaps, 1);
}

#[test]
fn overlap_is_exempt_only_within_the_window_of_a_fault_that_the_guarantees_name() {
    let mut both = history(vec![section(0, 1, 7, 10, 125), section(1, 2, 8, 121, 130)]);
    both.faults = vec![fault(Fault::FlushAll, 100, 101)];
    let verdict = check(&both, &terms());
    assert!(!verdict.is_violated());
    assert_eq!((verdict.figures[&Fault::FlushAll].exempt, verdict.count(Check::Overlap)), (1, 1));
    both.faults = vec![fault(Fault::WorkerStop, 100, 101)];
    assert_eq!(violations(&both), [Check::Overlap]);
    // A renewal is due each third of the ttl, and its answer within a second.
    both.faults = vec![fault(Fault::FlushAll, 100, 101)];
    both.sections[0].last_held = 2_000 * MS;
    both.sections[1].last_held = 2_000 * MS;
    assert_eq!(violations(&both), [Check::Overlap]);
}

#[test]
fn token_that_does_not_rise_is_found() {
    for token in [6, 7] {
        let broken =
            history(vec![section(0, 1, 7, 10, 20), section(1, 2, token, 21, 30), section(2, 3, 8, 31, 40)]);
        assert_eq!(violations(&broken), [Check::TokenOrder]);
    }
}

#[test]
fn token_may_repeat_only_after_a_loss_of_data_soon_after_a_step_back_of_the_clock() {
    let mut falling = history(vec![section(0, 1, 7, 10, 20), section(1, 2, 6, 1_900, 1_950)]);
    falling.faults = vec![fault(Fault::ClockBack, 100, 1_200), fault(Fault::FlushAll, 1_800, 1_801)];
    assert_eq!(violations(&falling), []);
    falling.faults[1].fault = Fault::ScriptFlush;
    assert_eq!(violations(&falling), [Check::TokenOrder]);
    falling.faults = vec![fault(Fault::FlushAll, 1_800, 1_801)];
    assert_eq!(violations(&falling), [Check::TokenOrder]);
}

#[test]
fn late_holder_of_a_failover_may_have_the_lower_token() {
    let mut late = history(vec![section(0, 1, 7, 110, 120), section(1, 2, 6, 121, 130)]);
    late.faults = vec![fault(Fault::MasterFreeze, 100, 1_200)];
    let replicated = |history: &History| check(history, &Terms { store: StoreKind::Sentinel, ..terms() });
    assert!(!replicated(&late).is_violated());
    assert_eq!(replicated(&late).figures[&Fault::MasterFreeze].exempt_tokens, 1);
    // From before the failover it may not.
    late.sections[0] = section(0, 1, 7, 10, 20);
    assert!(replicated(&late).is_violated());
}

/// No fence refuses the write with the higher of the two tokens.
#[test]
fn write_before_the_late_holder_of_a_failover_may_be_accepted() {
    let stale = |token, begin_ms| {
        let mut late = history(vec![
            written(section(0, 1, 7, begin_ms, 120), 120, 3, true),
            section(1, 2, token, 121, 130),
        ]);
        late.faults = vec![fault(Fault::MasterFreeze, 100, 1_200)];
        check(&late, &Terms { store: StoreKind::Sentinel, ..terms() })
    };
    let allowed = stale(6, 110);
    assert!(!allowed.is_violated());
    let figures = &allowed.figures[&Fault::MasterFreeze];
    assert_eq!((figures.stale_fenced, figures.exempt_tokens), (0, 2));
    for broken in [stale(8, 110), stale(6, 10)] {
        assert_eq!(broken.figures[&Fault::MasterFreeze].stale_fenced, 1);
        assert!(broken.is_violated());
    }
}

fn written(mut section: Section, checked_ms: Ns, order: u64, is_accepted: bool) -> Section {
    section.write =
        Some(Write { checked: checked_ms * MS, arrived: (checked_ms + 50) * MS, order, is_accepted });
    section
}

#[test]
fn stale_write_counts_for_both_registers_and_is_a_violation_if_the_fence_accepted_it() {
    let stale = |token, is_accepted| {
        history(vec![
            written(section(0, 1, token, 10, 20), 20, 3, is_accepted),
            section(1, 2, if token == 0 { 0 } else { 8 }, 21, 30),
        ])
    };
    let refused = check(&stale(7, false), &terms());
    assert!(!refused.is_violated());
    let figures = &refused.figures[&Fault::None];
    assert_eq!((figures.stale_unfenced, figures.stale_fenced), (1, 0));
    // A resource without a fence.
    assert_eq!(violations(&stale(7, true)), [Check::StaleFenced]);
    // A lock without tokens: nothing is promised, and the figure shows it.
    let unfenced = check(&stale(0, true), &terms());
    assert_eq!((unfenced.is_violated(), unfenced.figures[&Fault::None].stale_fenced), (false, 1));
}

#[test]
fn write_that_arrives_before_the_next_section_is_not_stale() {
    let right = history(vec![written(section(0, 1, 7, 10, 20), 20, 2, true), section(1, 3, 8, 80, 90)]);
    let verdict = check(&right, &terms());
    assert_eq!((verdict.count(Check::StaleFenced), verdict.count(Check::StaleUnfenced)), (0, 0));
}

fn waits(task: u32, from_ms: Ns, to_ms: Option<Ns>) -> Waiting {
    Waiting { task, from: from_ms * MS, to: to_ms.map(|to| to * MS) }
}

#[test]
fn free_lock_with_a_waiter_beyond_the_bound_is_a_stall() {
    let mut history = history(vec![section(0, 1, 7, 0, 1_000), section(1, 2, 8, 9_000, 9_100)]);
    history.waiting = vec![waits(1, 500, Some(9_000))];
    assert_eq!(violations(&history), [Check::Stall]);
    assert_eq!(check(&history, &terms()).figures[&Fault::None].stall_ms, 8_000);
    // A peer has no such bound.
    assert!(!check(&history, &Terms { has_bound: false, ..terms() }).is_violated());
    // The time of a fault does not count, only what follows it.
    history.faults = vec![fault(Fault::WorkerStop, 900, 5_000)];
    assert_eq!(violations(&history), []);
    assert_eq!(check(&history, &terms()).figures[&Fault::WorkerStop].stall_ms, 4_000);
    // Nor does a pause of the machine.
    history.faults.clear();
    history.pauses = vec![Pause { from: 900 * MS, to: 5_000 * MS }];
    assert_eq!(violations(&history), []);
    history.pauses.clear();
    // Without a waiter a free lock is idle.
    history.faults.clear();
    history.waiting = vec![waits(1, 8_900, Some(9_000))];
    assert_eq!(check(&history, &terms()).figures[&Fault::None].stall_ms, 100);
}

#[test]
fn task_that_waits_at_the_end_is_lost() {
    let mut history = history(vec![section(0, 1, 7, 0, 1_000)]);
    history.end = 2_000 * MS;
    history.waiting = vec![waits(1, 500, None)];
    assert_eq!(violations(&history), [Check::LostWaiter]);
}

#[test]
fn release_that_does_not_return_is_caught() {
    let mut history = history(vec![section(0, 0, 5, 0, 10)]);
    history.end = 2_000 * MS;
    assert_eq!(violations(&history), []);
    history.sections[0].end = None;
    assert_eq!(violations(&history), [Check::LostWaiter]);
}

fn lost(task: u32, at_ms: Ns) -> History {
    History { losses: vec![Loss { task, at: at_ms * MS }], ..history(Vec::new()) }
}

#[test]
fn loss_needs_a_fault_or_a_pause_within_the_ttl_and_the_time_of_a_call() {
    let mut history = lost(3, 10_000);
    assert_eq!(violations(&history), [Check::Loss]);
    // A peer promises nothing.
    assert!(!check(&history, &Terms { has_bound: false, ..terms() }).is_violated());
    history.faults = vec![fault(Fault::FlushAll, 5_000, 6_001)];
    assert_eq!(violations(&history), []);
    history.faults = vec![fault(Fault::FlushAll, 5_000, 5_999)];
    assert_eq!(violations(&history), [Check::Loss]);
    // The client sends its scripts again.
    history.faults = vec![fault(Fault::ScriptFlush, 9_000, 9_001)];
    assert_eq!(violations(&history), [Check::Loss]);
    // It has not begun.
    history.faults = vec![fault(Fault::FlushAll, 10_001, 10_002)];
    assert_eq!(violations(&history), [Check::Loss]);
    // The clients have 5 s more to reconnect.
    history.faults = vec![fault(Fault::NetCut, 500, 1_001)];
    assert_eq!(violations(&history), []);
    history.faults.clear();
    history.pauses = vec![Pause { from: 9_000 * MS, to: 9_600 * MS }];
    assert_eq!(violations(&history), []);
}

#[test]
fn process_that_was_stopped_explains_the_losses_of_its_own_tasks() {
    let mut history = lost(3, 10_000);
    history.faults = vec![Injected { tasks: vec![2, 3], ..fault(Fault::WorkerStop, 7_000, 9_900) }];
    assert_eq!(violations(&history), []);
    history.faults[0].tasks = vec![0, 1];
    assert_eq!(violations(&history), [Check::Loss]);
    // It may keep the file of SQLite locked.
    assert!(!check(&history, &Terms { store: StoreKind::Sqlite, ..terms() }).is_violated());
}

#[test]
fn failed_call_needs_a_fault_unless_its_lock_was_lost_before() {
    let failure =
        Failure { task: 3, at: 10_000 * MS, text: "fail: no answer".to_owned(), is_after_loss: false };
    let mut history = History { failures: vec![failure], ..history(Vec::new()) };
    assert_eq!(violations(&history), [Check::Failure]);
    history.failures[0].is_after_loss = true;
    assert_eq!(violations(&history), []);
    history.failures[0].is_after_loss = false;
    history.faults = vec![fault(Fault::ServerStop, 7_000, 9_900)];
    assert_eq!(violations(&history), []);
}

#[test]
fn stop_of_a_process_fails_none_of_its_attempts() {
    let failed = |text: &str| History {
        failures: vec![Failure { task: 3, at: 10_000 * MS, text: text.to_owned(), is_after_loss: false }],
        faults: vec![Injected { tasks: vec![2, 3], ..fault(Fault::WorkerStop, 7_000, 9_900) }],
        ..history(Vec::new())
    };
    let attempt = failed("fail: no answer");
    assert_eq!(violations(&attempt), [Check::Failure]);
    assert_eq!(violations(&failed("kept: no answer")), [], "the answer to a release may have come too late");
    // It may keep the file of SQLite locked.
    assert!(!check(&attempt, &Terms { store: StoreKind::Sqlite, ..terms() }).is_violated());
    let mut attempt = attempt;
    attempt.faults.push(fault(Fault::ServerStop, 7_000, 9_900));
    assert_eq!(violations(&attempt), []);
}

#[test]
fn lock_is_free_once_its_release_has_begun() {
    let mut history = history(vec![section(0, 1, 7, 0, 1_000), section(1, 2, 8, 9_000, 9_100)]);
    history.sections[0].end = Some(8_990 * MS);
    history.waiting = vec![waits(1, 500, Some(9_000))];
    assert_eq!(violations(&history), []);
    history.sections[0].left = Some(1_000 * MS);
    assert_eq!(violations(&history), [Check::Stall, Check::Failure]);
}

#[test]
fn injection_that_failed_is_not_counted() {
    let mut history = history(Vec::new());
    history.faults = vec![fault(Fault::FlushAll, 1, 2), fault(Fault::FlushAll, 3, 4)];
    history.faults[1].has_failed = true;
    assert_eq!(check(&history, &terms()).figures[&Fault::FlushAll].injected, 1);
}

#[test]
fn hand_off_is_prompt_unless_a_fault_was_there_within_the_bound() {
    let mut history = history(vec![section(0, 1, 7, 0, 10_000), section(1, 2, 8, 12_000, 12_100)]);
    history.waiting = vec![waits(1, 500, Some(12_000))];
    assert_eq!(violations(&history), [Check::Stall]);
    history.faults = vec![Injected { tasks: vec![5], ..fault(Fault::WorkerKill, 3_000, 3_000) }];
    assert_eq!(violations(&history), []);
    history.faults[0].healed = 2_999 * MS;
    assert_eq!(violations(&history), [Check::Stall]);
    history.faults.clear();
    history.pauses = vec![Pause { from: 9_000 * MS, to: 9_600 * MS }];
    assert_eq!(violations(&history), []);
    history.pauses.clear();
    // The nodes of a quorum abstain at first.
    let quorum = |history: &History| check(history, &Terms { store: StoreKind::Redlock, ..terms() });
    assert!(quorum(&history).is_violated());
    history.start = 5_000 * MS;
    assert!(!quorum(&history).is_violated());
}

/// Sections of 10 ms, of two tasks in turn, while a third one waits.
fn overtaken(sections: u64) -> History {
    let of = |number: u64| {
        section(u32::from(number.is_multiple_of(2)), number, number, number * 10, number * 10 + 9)
    };
    let turns: Vec<Section> = (1..=sections).map(of).collect();
    let end = sections * 10 + 10;
    let waiting = vec![waits(0, 0, Some(20)), waits(1, 0, Some(10)), waits(2, 0, Some(end))];
    History { waiting, ..history(turns) }
}

#[test]
fn task_that_waits_while_others_have_more_than_four_turns_each_is_starved() {
    assert_eq!(violations(&overtaken(12)), []);
    let mut history = overtaken(13);
    assert_eq!(violations(&history), [Check::Starved]);
    // It may have lost its push, but not by a stop of another process.
    history.faults = vec![Injected { tasks: vec![2], ..fault(Fault::WorkerStop, 10, 20) }];
    assert_eq!(violations(&history), []);
    history.faults[0].tasks = vec![0, 1];
    assert_eq!(violations(&history), [Check::Starved]);
}

#[test]
fn release_that_returns_after_more_than_5_s_is_a_failure() {
    let mut history = history(vec![section(0, 1, 7, 0, 1_000)]);
    history.sections[0].left = Some(1_000 * MS);
    history.sections[0].end = Some(6_000 * MS);
    assert_eq!(violations(&history), []);
    history.sections[0].end = Some(6_001 * MS);
    assert_eq!(violations(&history), [Check::Failure]);
    history.faults = vec![Injected { tasks: vec![0], ..fault(Fault::WorkerStop, 2_000, 5_900) }];
    assert_eq!(violations(&history), []);
}
