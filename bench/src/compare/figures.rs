//! Computes the figures of a run from its logs. It is pure, so that tests can show that it detects a broken lock.

use std::collections::HashMap;

use leasehold_bench_peer::acquisition::Acquisition;

use super::results::Figures;

/// The exclusion that a lock promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// None: every task has a lock of its own.
    Alone,
    /// One holder, or any number of readers.
    Exclusive,
    /// Up to this number of holders.
    Permits(u32),
}

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Start, on the clock of the logs.
    pub start_ns: u64,
    /// Start of the measurement, after the warm-up.
    pub from_ns: u64,
    /// End of the last attempt.
    pub end_ns: u64,
    /// Number of tasks in all processes.
    pub tasks: u32,
    /// The exclusion that the lock promises.
    pub rule: Rule,
}

/// The figures of one run. Latencies are in microseconds.
#[must_use]
pub fn figures(mut all: Vec<Acquisition>, window: Window, counter: Option<u64>) -> Figures {
    all.sort_by_key(|acquisition| acquisition.entered);
    let counts = |acquisition: &&Acquisition| (window.from_ns..=window.end_ns).contains(&acquisition.entered);
    let acquisitions: Vec<Acquisition> = all.iter().filter(counts).copied().collect();
    let mut found = Figures::new();
    // Undefined figures, such as the fairness without any acquisition, are left out.
    let mut put = |name: &str, value: f64| {
        if value.is_finite() {
            found.insert(name.to_owned(), value);
        }
    };
    put("acquisitions", count(acquisitions.len()));
    put("rate", count(acquisitions.len()) / (nanos(window.end_ns.saturating_sub(window.from_ns)) / 1e9));
    for (name, times) in [
        ("pair", acquisitions.iter().map(|acquisition| acquisition.done - acquisition.asked).collect()),
        ("wait", waits(&all, &acquisitions, window)),
        ("handoff", if window.rule == Rule::Exclusive { hand_offs(&acquisitions) } else { Vec::new() }),
    ] {
        let mut times: Vec<u64> = times;
        times.sort_unstable();
        for (suffix, share) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
            if let Some(time) = percentile(&times, share) {
                put(&format!("{name}_{suffix}"), nanos(time) / 1e3);
            }
        }
    }
    let served = served(&acquisitions, window.tasks);
    put("jain", jain(&served));
    put("least", served.iter().copied().fold(f64::INFINITY, f64::min));
    put("most", served.iter().copied().fold(0.0, f64::max));
    // The check for overlaps covers every acquisition, those of the warm-up too.
    put("overlaps", count(overlaps(&all, window.rule)));
    if let Some(counter) = counter {
        let writes = all.iter().filter(|acquisition| !acquisition.is_shared).count();
        put("lost_counts", count(writes) - nanos(counter));
    }
    let inside: u64 = acquisitions.iter().map(|acquisition| acquisition.left - acquisition.entered).sum();
    put("hold", nanos(inside) / 1e3 / count(acquisitions.len()));
    found
}

/// Time from a release to the next critical section, if the next holder was waiting.
fn hand_offs(acquisitions: &[Acquisition]) -> Vec<u64> {
    let pairs = acquisitions.iter().zip(acquisitions.iter().skip(1));
    let waited =
        pairs.filter(|(before, next)| next.asked < before.left && !(before.is_shared && next.is_shared));
    waited.filter_map(|(before, next)| next.entered.checked_sub(before.left)).collect()
}

/// Waiting times. A task that still waits at the end counts with the time up to then.
fn waits(all: &[Acquisition], acquisitions: &[Acquisition], window: Window) -> Vec<u64> {
    let mut last: HashMap<u32, u64> = (0..window.tasks).map(|task| (task, window.start_ns)).collect();
    last.extend(
        all.iter()
            .filter(|acquisition| acquisition.entered <= window.end_ns)
            .map(|acquisition| (acquisition.task, acquisition.done)),
    );
    let mut waits: Vec<u64> =
        acquisitions.iter().map(|acquisition| acquisition.entered - acquisition.asked).collect();
    let longest = last.values().map(|last| window.end_ns.saturating_sub(*last)).max();
    // Only if it is the longest: a recent attempt says nothing.
    waits.extend(longest.filter(|longest| waits.iter().all(|wait| wait < longest)));
    waits
}

fn served(acquisitions: &[Acquisition], tasks: u32) -> Vec<f64> {
    let mut served = vec![0.0; tasks as usize];
    for acquisition in acquisitions {
        if let Some(count) = served.get_mut(acquisition.task as usize) {
            *count += 1.0;
        }
    }
    served
}

/// Jain's fairness index over the acquisitions of the tasks, relative to its maximum. If the acquisitions cannot be shared evenly,
/// the maximum is reached when no two tasks differ by more than one.
fn jain(served: &[f64]) -> f64 {
    let (all, tasks): (f64, f64) = (served.iter().sum(), count(served.len()));
    let squares: f64 = served.iter().map(|served| served * served).sum();
    let (each, left) = ((all / tasks).floor(), all % tasks);
    let evenest = left * (each + 1.0) * (each + 1.0) + (tasks - left) * each * each;
    evenest / squares
}

/// Number of violations of the promised exclusion.
fn overlaps(acquisitions: &[Acquisition], rule: Rule) -> usize {
    // A holder that leaves at the moment when another one enters does not overlap.
    let mut moments: Vec<(u64, bool, bool)> = acquisitions
        .iter()
        .flat_map(|acquisition| {
            [
                (acquisition.entered, true, acquisition.is_shared),
                (acquisition.left, false, acquisition.is_shared),
            ]
        })
        .collect();
    moments.sort_by_key(|(at, enters, _)| (*at, *enters));
    let (mut readers, mut writers, mut found) = (0_u32, 0_u32, 0);
    for (_, enters, is_shared) in moments {
        let side = if is_shared { &mut readers } else { &mut writers };
        // A section without duration would otherwise leave before it enters.
        *side = if enters { *side + 1 } else { side.saturating_sub(1) };
        let is_broken = match rule {
            Rule::Alone => false,
            Rule::Exclusive => writers > 1 || (writers == 1 && readers > 0),
            Rule::Permits(permits) => readers + writers > permits,
        };
        found += usize::from(enters && is_broken);
    }
    found
}

fn percentile(sorted: &[u64], share: f64) -> Option<u64> {
    let last = sorted.len().checked_sub(1)?;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is at most the length")]
    let index = (count(last) * share).round() as usize;
    sorted.get(index).copied()
}

#[allow(clippy::cast_precision_loss, reason = "these are far below 2^52")]
fn count(number: usize) -> f64 {
    number as f64
}

#[allow(clippy::cast_precision_loss, reason = "spans are far below 2^52 ns")]
fn nanos(ns: u64) -> f64 {
    ns as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Window =
        Window { start_ns: 0, from_ns: 0, end_ns: 10_000, tasks: 2, rule: Rule::Exclusive };

    fn acquisition(task: u32, asked: u64, entered: u64, left: u64) -> Acquisition {
        Acquisition { task, is_shared: false, asked, entered, left, done: left + 10 }
    }

    fn of(acquisitions: &[Acquisition], window: Window, counter: u64) -> Figures {
        figures(acquisitions.to_vec(), window, Some(counter))
    }

    #[test]
    fn two_tasks_that_alternate_are_fair_and_not_broken() {
        let acquisitions = [
            acquisition(0, 0, 1_000, 2_000),
            acquisition(1, 0, 2_500, 3_000),
            acquisition(0, 2_100, 3_400, 9_900),
        ];
        let found = of(&acquisitions[..2], WINDOW, 2);
        assert_eq!((found["overlaps"], found["lost_counts"], found["jain"]), (0.0, 0.0, 1.0));
        let found = of(&acquisitions, WINDOW, 3);
        assert_eq!((found["least"], found["most"], found["rate"]), (1.0, 2.0, 3e5));
        assert_eq!((found["handoff_max"], found["handoff_p50"]), (0.5, 0.5));
    }

    #[test]
    fn a_lock_that_lets_two_in_is_broken() {
        let acquisitions = [acquisition(0, 0, 1_000, 2_000), acquisition(1, 0, 1_999, 3_000)];
        assert_eq!(of(&acquisitions, WINDOW, 2)["overlaps"], 1.0);
        assert_eq!(of(&acquisitions, WINDOW, 1)["lost_counts"], 1.0);
        let semaphore = Window { rule: Rule::Permits(2), ..WINDOW };
        assert_eq!(of(&acquisitions, semaphore, 2)["overlaps"], 0.0);
        assert_eq!(of(&acquisitions, Window { rule: Rule::Permits(1), ..WINDOW }, 2)["overlaps"], 1.0);
    }

    #[test]
    fn readers_may_be_inside_with_readers_and_not_with_a_writer() {
        let reader = |acquisition: Acquisition| Acquisition { is_shared: true, ..acquisition };
        let readers = [reader(acquisition(0, 0, 1_000, 2_000)), reader(acquisition(1, 0, 1_500, 3_000))];
        assert_eq!(of(&readers, WINDOW, 0)["overlaps"], 0.0);
        let mixed = [readers[0], acquisition(1, 0, 1_500, 3_000)];
        assert_eq!(of(&mixed, WINDOW, 1)["overlaps"], 1.0);
    }

    #[test]
    fn a_task_that_never_acquires_the_lock_has_waited_for_the_whole_run() {
        let acquisitions = [acquisition(0, 0, 100, 200), acquisition(0, 210, 300, 400)];
        let found = of(&acquisitions, WINDOW, 2);
        assert_eq!(found["wait_max"], 10.0);
        // Also if it acquires the lock only at the end.
        let late = [acquisitions[0], acquisitions[1], acquisition(1, 0, 10_001, 10_002)];
        assert_eq!(of(&late, WINDOW, 3)["wait_max"], 10.0);
        assert_eq!((found["least"], found["jain"]), (0.0, 0.5));
    }

    #[test]
    fn acquisitions_before_the_window_are_checked_and_not_counted() {
        let window = Window { from_ns: 5_000, ..WINDOW };
        let acquisitions = [
            acquisition(0, 0, 1_000, 2_000),
            acquisition(1, 0, 1_500, 2_500),
            acquisition(0, 2_100, 6_000, 7_000),
        ];
        let found = of(&acquisitions, window, 3);
        assert_eq!((found["acquisitions"], found["most"], found["overlaps"]), (1.0, 1.0, 1.0));
    }

    #[test]
    fn a_run_without_a_turn_has_figures_all_the_same() {
        let found = of(&[], WINDOW, 0);
        assert_eq!((found["rate"], found["wait_max"], found.get("jain")), (0.0, 10.0, None));
    }

    #[test]
    fn no_more_than_one_turn_of_difference_is_as_fair_as_can_be() {
        assert_eq!([jain(&[3.0, 2.0, 2.0]), jain(&[1.0, 0.0]), jain(&[4.0, 4.0])], [1.0; 3]);
        // Five acquisitions for two tasks: 9 + 4 is the minimum.
        assert_eq!(jain(&[4.0, 1.0]), 13.0 / 17.0);
        assert_eq!(jain(&[6.0, 0.0]), 0.5);
    }

    #[test]
    fn one_turn_each_for_some_of_many_is_as_fair_as_can_be() {
        let window = Window { tasks: 10, ..WINDOW };
        assert_eq!(of(&[acquisition(3, 0, 100, 200), acquisition(5, 0, 300, 400)], window, 2)["jain"], 1.0);
    }
}
