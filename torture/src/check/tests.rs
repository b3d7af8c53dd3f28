//! Each checker has a broken specimen, and a history beside it that is right.

use std::time::Duration;

use super::*;
use crate::faults::StoreKind;
use crate::history::{Failure, Loss, Section, Waiting, Write};
use crate::history::{Injected, Ns};
use crate::parts::{Lock, Part, Share};
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
    Waiting { task, part: Part::default(), from: from_ms * MS, to: to_ms.map(|to| to * MS) }
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
fn nodes_of_a_quorum_may_refuse_an_attempt_until_they_vote() {
    let text = "fail: no quorum".to_owned();
    let failure = Failure { task: 3, at: 10_000 * MS, text, is_after_loss: false };
    let quorum = |start_ms| {
        let start = start_ms * MS;
        let history = History { failures: vec![failure.clone()], start, ..history(Vec::new()) };
        check(&history, &Terms { store: StoreKind::Redlock, ..terms() }).is_violated()
    };
    assert!(!quorum(6_000) && quorum(5_999));
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
    let sections_of_two: Vec<Section> = (1..=sections).map(of).collect();
    let end = sections * 10 + 10;
    let waiting = vec![waits(0, 0, Some(20)), waits(1, 0, Some(10)), waits(2, 0, Some(end))];
    History { waiting, ..history(sections_of_two) }
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

#[test]
fn server_of_a_fleet_that_goes_away_explains_no_loss_and_no_failure() {
    for gone in Fault::all(StoreKind::Redis).filter(|fault| fault.is_of_serve()) {
        let mut history = lost(0, 200);
        history.failures =
            vec![Failure { task: 0, at: 200 * MS, text: "fail: gone".to_owned(), is_after_loss: false }];
        history.faults = vec![fault(gone, 100, 150)];
        assert_eq!(violations(&history), [Check::Loss, Check::Failure], "{gone:?}");
        // A server that is stopped may be within a transaction.
        for store in [StoreKind::Sqlite, StoreKind::Postgres] {
            let in_transaction = check(&history, &Terms { store, ..terms() });
            assert_eq!(in_transaction.is_violated(), gone != Fault::ServeStop, "{gone:?}");
        }
    }
}

/// The same sections, in order of tasks, of another lock.
fn of(lock: Lock, shares: &[Share], sections: Vec<Section>) -> History {
    let shared =
        sections.into_iter().zip(shares).map(|(section, share)| Section { lock, share: *share, ..section });
    history(shared.collect())
}

fn permits(weight: u32) -> Share {
    Share::Permits { weight, of: 4 }
}

#[test]
fn semaphore_with_more_permits_inside_than_it_has_is_found() {
    let inside = |last| {
        let sections = vec![section(0, 1, 7, 10, 30), section(1, 2, 8, 12, 30), section(2, 3, 9, 14, 16)];
        of(Lock::Semaphore, &[permits(2), permits(1), permits(last)], sections)
    };
    assert_eq!(violations(&inside(1)), []);
    let broken = inside(2);
    assert_eq!(violations(&broken), [Check::Overlap]);
    let finding = &check(&broken, &terms()).findings[0];
    assert_eq!(finding.text, "semaphore: tasks 0, 1, 2 held 5 of 4 permits");
    assert_eq!((finding.from, finding.to), (14 * MS, 16 * MS));
    // It has left before.
    let mut right = inside(2);
    right.sections[0].last_held = 14 * MS;
    assert_eq!(violations(&right), []);
    let mut flushed = inside(2);
    flushed.faults = vec![fault(Fault::FlushAll, 13, 13)];
    assert_eq!(violations(&flushed), []);
}

#[test]
fn writer_beside_a_reader_or_a_writer_is_found() {
    let both = |one, other| {
        let sections = vec![section(0, 1, 7, 10, 30), section(1, 2, 8, 20, 40)];
        violations(&of(Lock::ReadWrite, &[one, other], sections))
    };
    assert_eq!(both(Share::Read, Share::Read), []);
    assert_eq!(both(Share::Read, Share::Whole), [Check::Overlap]);
    assert_eq!(both(Share::Whole, Share::Read), [Check::Overlap]);
    assert_eq!(both(Share::Whole, Share::Whole), [Check::Overlap]);
}

/// The token of the outer section is the token of the lock.
#[test]
fn two_owners_at_once_are_found_and_a_re_entry_with_another_token() {
    let both = |other, token, asked_ms| {
        let mut sections = vec![section(0, 1, 7, 10, 30), section(1, 2, token, 20, 40)];
        sections[1].asked = asked_ms * MS;
        violations(&of(Lock::Reentrant, &[Share::Owner(1), Share::Owner(other)], sections))
    };
    assert_eq!(both(1, 7, 15), []);
    assert_eq!(both(2, 8, 15), [Check::Overlap]);
    assert_eq!(both(1, 8, 15), [Check::TokenOrder]);
    // It was granted the lock before the other one, perhaps.
    assert_eq!(both(1, 8, 5), []);
    assert_eq!(both(1, 6, 15), [Check::TokenOrder, Check::TokenOrder]);
}

/// A grant that was asked for after another one had begun: the two overlap.
#[test]
fn token_that_does_not_rise_while_others_are_inside_is_found() {
    let granted = |token, asked_ms| {
        let mut sections = vec![section(0, 1, 7, 10, 30), section(1, 2, token, 20, 40)];
        sections[1].asked = asked_ms * MS;
        violations(&of(Lock::Semaphore, &[permits(1), permits(1)], sections))
    };
    assert_eq!(granted(8, 15), []);
    assert_eq!(granted(7, 15), [Check::TokenOrder]);
    assert_eq!(granted(6, 15), [Check::TokenOrder]);
    assert_eq!(granted(6, 5), [], "it may have been granted first");
    // It may have seen its grant after the other one, that was granted together with it, had ended; but not if they exclude each other.
    let seen_late = |lock, one, other| {
        violations(&of(lock, &[one, other], vec![section(0, 1, 7, 10, 15), section(1, 2, 6, 20, 40)]))
    };
    assert_eq!(seen_late(Lock::ReadWrite, Share::Read, Share::Read), []);
    assert_eq!(seen_late(Lock::ReadWrite, Share::Read, Share::Whole), [Check::TokenOrder]);
}

#[test]
fn owner_that_comes_back_gets_a_token_that_is_not_lower() {
    let back = |owner, token| {
        let mut sections = vec![section(0, 1, 7, 10, 20), section(1, 2, token, 21, 40)];
        sections[1].asked = 20 * MS;
        violations(&of(Lock::Reentrant, &[Share::Owner(1), Share::Owner(owner)], sections))
    };
    assert_eq!((back(1, 7), back(2, 8)), (vec![], vec![]));
    assert_eq!((back(1, 6), back(2, 7)), (vec![Check::TokenOrder], vec![Check::TokenOrder]));
}

#[test]
fn two_starts_within_a_period_are_found() {
    let start = Share::Start { retained: 900 * MS };
    let starts = |asked_ms, second_ms| {
        let mut sections = vec![section(0, 1, 7, 1_000, 1_010), section(1, 2, 8, second_ms, second_ms + 5)];
        sections[0].asked = asked_ms * MS;
        of(Lock::OncePer, &[start, start], sections)
    };
    assert_eq!(violations(&starts(998, 1_900)), []);
    assert_eq!(violations(&starts(998, 1_890)), [Check::Overlap]);
    // The first one may have been granted long before it was seen, for instance by a stop of its process.
    assert_eq!(violations(&starts(500, 1_500)), []);
    let mut forgotten = starts(998, 1_500);
    forgotten.faults = vec![fault(Fault::FlushAll, 1_200, 1_201)];
    assert_eq!(violations(&forgotten), []);
    forgotten.faults = vec![fault(Fault::WorkerKill, 1_200, 1_201)];
    assert_eq!(violations(&forgotten), [Check::Overlap]);
}

#[test]
fn two_leaders_are_found() {
    let sections = vec![section(0, 1, 7, 10, 30), section(1, 2, 8, 20, 40)];
    assert_eq!(violations(&of(Lock::Election, &[Share::Whole; 2], sections)), [Check::Overlap]);
}

/// Sections of different mutexes do not exclude each other, and have tokens of their own.
#[test]
fn two_sets_with_a_mutex_in_common_at_once_are_found() {
    let both = |one, other| {
        let sections = vec![section(0, 1, 7, 10, 30), section(1, 2, 6, 20, 40)];
        let locks = [Lock::Set(one), Lock::Set(other)];
        let of_set = sections.into_iter().zip(locks).map(|(section, lock)| Section { lock, ..section });
        violations(&history(of_set.collect()))
    };
    assert_eq!(both(0, 1), []);
    assert_eq!(both(1, 1), [Check::Overlap]);
}

/// A free mutex is no stall if its waiters are sets that lack another mutex. All of them waiting while no set is complete is one.
#[test]
fn sets_that_wait_while_none_is_held_are_a_stall() {
    let waits_for = |task, number, from, to| {
        let part = Part { lock: Lock::Set(number), share: Share::Whole };
        Waiting { part, ..waits(task, from, Some(to)) }
    };
    let mut history = history(vec![Section { lock: Lock::Set(0), ..section(0, 1, 7, 0, 1_000) }]);
    history.waiting = vec![waits_for(1, 0, 500, 20_000), waits_for(1, 1, 500, 20_000)];
    history.sections.push(Section { lock: Lock::Set(1), ..section(2, 2, 7, 900, 19_900) });
    assert_eq!(violations(&history), []);
    history.sections.pop();
    assert_eq!(violations(&history), [Check::Stall]);
}

/// With a waiter each, that asks for these shares, beside a section of that share.
fn beside(lock: Lock, inside: Share, waiting: &[Share]) -> Vec<Check> {
    let section = Section { lock, share: inside, ..section(0, 1, 7, 0, 50_000) };
    let waiting = waiting.iter().zip(1..).map(|(share, task)| Waiting {
        part: Part { lock, share: *share },
        ..waits(task, 1_000, Some(40_000))
    });
    violations(&History { waiting: waiting.collect(), ..history(vec![section]) })
}

#[test]
fn waiter_for_which_there_is_room_is_a_stall_unless_one_before_it_does_not_fit() {
    assert_eq!(beside(Lock::Semaphore, permits(2), &[permits(2)]), [Check::Stall]);
    assert_eq!(beside(Lock::Semaphore, permits(2), &[permits(2), permits(3)]), []);
    assert_eq!(beside(Lock::ReadWrite, Share::Read, &[Share::Read]), [Check::Stall]);
    assert_eq!(beside(Lock::ReadWrite, Share::Read, &[Share::Read, Share::Whole]), []);
    assert_eq!(beside(Lock::ReadWrite, Share::Whole, &[Share::Read]), []);
    // Those of other processes wait for their re-check.
    assert_eq!(beside(Lock::Reentrant, Share::Owner(1), &[Share::Owner(1)]), []);
}

/// It waits behind a writer whose process has ended, until it re-checks.
#[test]
fn reader_behind_a_dead_writer_is_passed_by_its_re_check() {
    let mut readers = history(vec![
        Section { lock: Lock::ReadWrite, share: Share::Read, ..section(0, 1, 7, 0, 50_000) },
        Section { lock: Lock::ReadWrite, share: Share::Read, ..section(1, 2, 8, 30_000, 30_010) },
    ]);
    let part = Part { lock: Lock::ReadWrite, share: Share::Read };
    readers.waiting = vec![Waiting { part, ..waits(1, 1_000, Some(30_000)) }];
    assert_eq!(violations(&readers), [Check::Stall]);
    readers.faults = vec![Injected { tasks: vec![5], ..fault(Fault::WorkerKill, 500, 500) }];
    assert_eq!(violations(&readers), []);
    readers.waiting[0].to = Some(36_000 * MS);
    readers.sections[1].begin = 36_000 * MS;
    readers.sections[1].last_held = 36_010 * MS;
    assert_eq!(violations(&readers), [Check::Stall]);
}

#[test]
fn work_of_a_period_is_not_free_until_the_period_is_over() {
    let share = Share::Start { retained: 900 * MS };
    let started = |next_ms| {
        let sections = vec![section(0, 1, 7, 0, 10), section(1, 2, 8, next_ms, next_ms + 10)];
        let mut history = of(Lock::OncePer, &[share; 2], sections);
        let part = Part { lock: Lock::OncePer, share };
        history.waiting = vec![Waiting { part, ..waits(1, 1, Some(next_ms)) }];
        violations(&history)
    };
    assert_eq!(started(2_400), []);
    assert_eq!(started(2_401 + 100), [Check::Stall]);
}

#[test]
fn writer_that_readers_overtake_is_starved_and_one_whom_an_owner_re_enters_is_not() {
    let mut readers = overtaken(13);
    for section in &mut readers.sections {
        (section.lock, section.share) = (Lock::ReadWrite, Share::Read);
    }
    for waiting in &mut readers.waiting {
        waiting.part = Part { lock: Lock::ReadWrite, share: Share::Whole };
    }
    assert_eq!(violations(&readers), [Check::Starved]);
    let mut owner = readers.clone();
    for section in &mut owner.sections {
        (section.lock, section.share) = (Lock::Reentrant, Share::Owner(1));
        (section.token, section.begin_order) = (1, 1);
        // Each one is entered again before it ends.
        section.end = section.end.map(|end| end + 5 * MS);
    }
    for waiting in &mut owner.waiting {
        waiting.part = Part { lock: Lock::Reentrant, share: Share::Owner(2) };
    }
    assert_eq!(violations(&owner), []);
    for section in &mut owner.sections {
        section.end = Some(section.last_held);
    }
    assert_eq!(violations(&owner), [Check::Starved]);
}

#[test]
fn write_of_a_writer_after_a_reader_has_begun_is_stale_and_one_beside_its_own_owner_is_not() {
    let late = |lock, shares: [Share; 2]| {
        let sections = vec![written(section(0, 1, 7, 10, 20), 20, 3, true), section(1, 2, 8, 21, 30)];
        violations(&of(lock, &shares, sections))
    };
    assert_eq!(late(Lock::ReadWrite, [Share::Whole, Share::Read]), [Check::StaleFenced]);
    assert_eq!(late(Lock::Reentrant, [Share::Owner(1), Share::Owner(2)]), [Check::StaleFenced]);
    assert_eq!(late(Lock::Reentrant, [Share::Owner(1), Share::Owner(1)]), []);
}

#[test]
fn stop_of_a_process_may_fail_an_attempt_that_had_a_part_of_a_set() {
    let mut failed = History {
        failures: vec![Failure {
            task: 3,
            at: 10_000 * MS,
            text: "fail: lost".to_owned(),
            is_after_loss: false,
        }],
        faults: vec![Injected { tasks: vec![2, 3], ..fault(Fault::WorkerStop, 7_000, 9_900) }],
        ..history(Vec::new())
    };
    let wait = |lock| Waiting { part: Part { lock, share: Share::Whole }, ..waits(3, 9_000, Some(10_100)) };
    failed.waiting = vec![wait(Lock::Mutex)];
    assert_eq!(violations(&failed), [Check::Failure]);
    failed.waiting = vec![wait(Lock::Set(1))];
    assert_eq!(violations(&failed), []);
    failed.faults.clear();
    assert_eq!(violations(&failed), [Check::Failure]);
}
