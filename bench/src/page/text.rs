//! The sentences of the page.

use std::fmt::Write as _;

use crate::compare::results::Results;

use super::verdict::{Behind, TOKENS, Verdict};

/// Title and description of a scenario.
pub(super) struct Section {
    pub(super) letter: &'static str,
    pub(super) title: &'static str,
    pub(super) about: &'static str,
}

const fn section(letter: &'static str, title: &'static str, about: &'static str) -> Section {
    Section { letter, title, about }
}

/// Every scenario, in the order of the page.
pub(super) const SCENARIOS: [Section; 10] = [
    section("a", "An uncontended lock", "One client acquires and releases a lock repeatedly."),
    section(
        "b",
        "Many locks at once",
        "The tasks of one process share a client. Each has a lock of its own.",
    ),
    section(
        "c",
        "Many clients, one lock",
        "Each client acquires the same lock, holds it, releases it, and starts again. *Clients* share one process and have connections \
         of their own, as few as their library allows; *processes* have one client each. *Hand-off* is the time from the start of \
         a release until a waiter is in the critical section. Jain's fairness index is relative to its maximum for this number of \
         acquisitions, because 1,000 clients cannot share 2,600 acquisitions evenly.",
    ),
    section(
        "d",
        "Many tasks of one client, one lock",
        "1,000 tasks or threads of one process share a client.",
    ),
    section(
        "e",
        "A holder is killed",
        "The holder's process is killed half a second after it has acquired the lock, while another client waits. On Redis the lock \
         passes to the waiter when the lease expires; the server cannot know of the crash earlier.",
    ),
    section(
        "f",
        "Idle leases",
        "One client holds this many leases. Only libraries that renew automatically take part. This is a single run, because it takes long.",
    ),
    section("g", "Readers and writers", "Nine of ten acquisitions are for reading."),
    section("h", "A semaphore", "Ten permits, and a hundred waiters."),
    section("i", "A quorum of independent servers", "Redlock: a majority of the servers grants the lock."),
    section("j", "A slow network", "A proxy in front of the server adds latency to every round trip."),
];

/// When layout 4 of the Redis keys replaced layout 3, as a Unix time.
const LAYOUT_4_SINCE: u64 = 1_795_981_983;

/// The head of the page: the machine, the method, and the commands to repeat it.
pub(super) fn opening(results: &Results) -> String {
    let machine = &results.machine;
    let quick = if results.is_quick { " --quick" } else { "" };
    let mut page = format!(
        "# Benchmarks\n\n\
         Every lock library does the same work, side by side in one run. The benchmark writes this page; do not edit it.\n\n    \
         bench/setup\n    \
         cargo run --release -p leasehold-bench -- compare{quick}\n    \
         cargo run --release -p leasehold-bench -- report\n\n\
         {} with {} cores, {}, {}, on {}; {:.0} minutes. Absolute figures depend on the machine, and ratios depend on it less. \
         Compare rows within a table.\n",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.server,
        date(machine.at),
        results.minutes.ceil(),
    );
    if machine.at < LAYOUT_4_SINCE {
        page += "\n**The figures of leasehold on Redis are out of date.** They were measured with layout 3 of its keys and scripts, or an \
                 earlier one, which layout 4 has replaced since. *Why*, below, also describes that one.\n";
    }
    if results.is_quick {
        page += "\n**This was a quick run, with few and short rounds.**\n";
    }
    page += "\n- Every library has a process and a server of its own. In each round all rows run one after the other. A figure is the median over \
             the rounds, with the lowest and the highest in parentheses, then the ratio to the lower bound. The lower bound, if a table has \
             one, is its first row.\n\
             - Each library's process measures its own latencies, on the clock of the machine. The driver does not communicate with it \
             during a measurement.\n\
             - Two checks cover every critical section: two critical sections must not overlap, and a counter that each section increments must \
             not lose a count. A lock that fails is marked *broken*.\n\
             - *Commands* counts what clients send per acquisition, without the commands inside scripts. *Bytes* counts both directions. A server's \
             CPU is that of its main thread.\n\
             - Every lease has the same ttl.\n\
             - A table that begins with *on Valkey 9* repeats the work of leasehold and of the lower bounds there, because a server with a conditional \
             delete needs less Lua. Compare its ratios with those of the table above it.\n";
    let _ = writeln!(
        page,
        "- Before and after each run, a fixed workload checks whether the machine runs at its full speed. {} runs at a lower speed \
         were discarded and repeated. {} runs were kept because the lower speed persisted.",
        results.discarded, results.disturbed
    );
    if results.others_are_paused {
        page += "- While a row is measured, the processes of the other libraries are paused, since 1,000 idle clients can need more than a core. \
                 Those on stores of other kinds are not, since their sessions would end. In (e), all rows run at the same time.\n";
    }
    if !results.again.is_empty() {
        let _ = writeln!(
            page,
            "- These tables were measured again after the run, with all their rows: *{}*.",
            results.again.join("*, *")
        );
    }
    page
}

/// The list of all figures in which leasehold is not the best.
pub(super) fn verdict(verdict: &Verdict) -> String {
    let mut page = String::from("\n## Where leasehold is not the best\n");
    let without_tokens = verdict.class.iter().filter(|behind| behind.leaves_out.contains(&TOKENS)).count();
    let class = format!(
        "Rows where leasehold is more than 10 % behind the best lock with the same features: renewal, push to waiters, and under contention \
         FIFO order. Over a quorum, which promises no order, the features are renewal and, under contention, push. In {without_tokens} of \
         these {} rows the better lock has no fencing tokens:",
        verdict.class.len()
    );
    let parts = [
        (
            class.as_str(),
            "In no row is leasehold more than 10 % behind the best lock with the same features.",
            &verdict.class,
        ),
        (
            "Rows where leasehold is more than 10 % behind the best lock that lacks some of these features:",
            "In no row is leasehold more than 10 % behind a lock that lacks some of these features.",
            &verdict.others,
        ),
        (
            "Rows where leasehold is more than 1.3 times away from the lower bound:",
            "In no row is leasehold more than 1.3 times away from the lower bound.",
            &verdict.bound,
        ),
    ];
    for (some, none, list) in parts {
        page += &if list.is_empty() { format!("\n{none}\n") } else { format!("\n{some}\n\n{}", table(list)) };
    }
    page + "\n### Why\n\n" + include_str!("../../explanations.md")
}

fn table(list: &[Behind]) -> String {
    let mut page = String::from(
        "| scenario | column | leasehold | best other | ratio | features that it lacks |\n|---|---|--:|--:|--:|---|\n",
    );
    for behind in list {
        let Behind { place, column, own, other, ratio, leaves_out } = behind;
        let ratio = if ratio.is_finite() { format!("{ratio:.2}") } else { "–".into() };
        let _ =
            writeln!(page, "| {place} | {column} | {own} | {other} | {ratio} | {} |", leaves_out.join(", "));
    }
    page
}

/// The date of a Unix time, as 2026-11-21.
pub(super) fn date(seconds: u64) -> String {
    // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": years that begin in March end with the leap day.
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{}-{month:02}-{day:02}", year + era * 400 + next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_times_become_calendar_dates() {
        let days = [0, 951_782_400, 1_709_164_800, 1_735_689_599, 1_795_219_200];
        let dates = ["1970-01-01", "2000-02-29", "2024-02-29", "2024-12-31", "2026-11-21"];
        assert_eq!(days.map(date), dates);
    }
}
