//! The page's sentences.

use std::fmt::Write as _;

use crate::compare::results::Results;

use super::verdict::{Behind, TOKENS, Verdict};

/// What a scenario is about.
pub(super) struct About {
    pub(super) letter: &'static str,
    pub(super) title: &'static str,
    pub(super) about: &'static str,
}

const fn about(letter: &'static str, title: &'static str, about: &'static str) -> About {
    About { letter, title, about }
}

/// Every scenario, in the order of the page.
pub(super) const SCENARIOS: [About; 10] = [
    about("a", "A lock that nobody else wants", "Lock and release, one after the other, by one client."),
    about("b", "Many locks at once", "Tasks of one process over one client, each with a lock of its own."),
    about(
        "c",
        "Many clients, one lock",
        "Each waits for the same lock, holds it, gives it back, and asks again. *Clients* have connections of their own, the \
         fewest that their library allows, in one process; *processes* have one client each. *Hand-over* is from the moment when \
         the holder begins to release until somebody who waited is inside. Jain's index is told as a part of what so many \
         turns allow: 2,600 of a thousand clients can't be shared out evenly.",
    ),
    about(
        "d",
        "Many tasks of one client, one lock",
        "A thousand tasks, or threads, of one process over one client.",
    ),
    about(
        "e",
        "A holder is killed",
        "Its process is ended at once, half a second after it took the lock, while another one waits. On Redis the lock is the \
         next one's when the lease has run out; nobody can know any sooner.",
    ),
    about(
        "f",
        "Leases that nobody touches",
        "So many held leases of one client, only of libraries that renew by themselves. Once, since it takes its time.",
    ),
    about("g", "Readers and writers", "Nine of ten turns only read."),
    about("h", "A semaphore", "Ten permits: ten inside, and a hundred who wait."),
    about("i", "A quorum of independent servers", "Redlock: more than half of the servers have to agree."),
    about("j", "A slow network", "A proxy in front of the server adds to every round trip."),
];

/// What it is, how it was made, and how to make it again.
pub(super) fn opening(results: &Results) -> String {
    let machine = &results.machine;
    let quick = if results.is_quick { " --quick" } else { "" };
    let mut page = format!(
        "# Benchmarks\n\n\
         The same work by every lock library, side by side in one run. This page is written by the benchmark; do not edit it.\n\n    \
         bench/setup\n    \
         cargo run --release -p leasehold-bench -- compare{quick}\n    \
         cargo run --release -p leasehold-bench -- report\n\n\
         {} with {} cores, {}, {}, on {}; {:.0} minutes. Figures of machines differ, ratios less: compare within a table.\n",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.server,
        date(machine.at),
        results.minutes.ceil(),
    );
    if results.is_quick {
        page += "\n**This was a quick run: a first look, with short rounds and few of them.**\n";
    }
    page += "\n- Every library runs in a process of its own, on a server of its own, and takes its turn: one row, the next, and when all \
             had their round, again. Figures are medians over the rounds; the lowest and the highest stand in parentheses, and the \
             ratio to the lower bound, which is the first row where there is one, behind them.\n\
             - The driver tells a peer only when to begin and to end. Latencies are taken by the peers themselves, on the clock that all \
             processes of the machine share, and nothing goes through a pipe meanwhile.\n\
             - Every critical section is checked, twice: no two may overlap, and a counter that it increments must not lose a count. A lock \
             that fails is *broken*, however fast.\n\
             - Commands are what clients send for each acquisition, without those that scripts call. Bytes are both ways. A server's CPU is \
             that of its main thread.\n\
             - Every lease has the same ttl.\n";
    let _ = writeln!(
        page,
        "- Before and after each run a fixed piece of work says whether the machine was as fast as at its best. {} runs were thrown \
         away and done again since it was not; {} were kept all the same, since it went on.",
        results.discarded, results.disturbed
    );
    page
}

/// Where leasehold is not the best.
pub(super) fn verdict(verdict: &Verdict) -> String {
    let mut page = String::from("\n## Where leasehold is not the best\n");
    let without_tokens = verdict.class.iter().filter(|behind| behind.leaves_out.contains(&TOKENS)).count();
    let class = format!(
        "More than a tenth behind the first of those that do the same: they renew, tell whoever waits, and where clients compete serve \
         the first to come first; over a quorum, where no order is promised, they renew, and tell whoever waits if clients compete. \
         {without_tokens} of these {} are behind a lock that gives no fencing tokens, which have to outlive their lock:",
        verdict.class.len()
    );
    let parts = [
        (
            class.as_str(),
            "Nowhere is it more than a tenth behind the first of those that do the same.",
            &verdict.class,
        ),
        (
            "More than a tenth behind the first of the others, which leave something of that out:",
            "Nowhere is it more than a tenth behind the first of the others.",
            &verdict.others,
        ),
        (
            "More than 1.3 times away from a lower bound:",
            "Nowhere is it more than 1.3 times away from a lower bound.",
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
        "| where | column | leasehold | who | times | which leaves out |\n|---|---|--:|--:|--:|---|\n",
    );
    for behind in list {
        let Behind { place, column, own, other, ratio, leaves_out } = behind;
        let ratio = if ratio.is_finite() { format!("{ratio:.2}") } else { "–".into() };
        let _ =
            writeln!(page, "| {place} | {column} | {own} | {other} | {ratio} | {} |", leaves_out.join(", "));
    }
    page
}

/// The day of a moment, as 2026-11-21.
fn date(seconds: u64) -> String {
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
    fn days_are_those_of_the_calendar() {
        let days = [0, 951_782_400, 1_709_164_800, 1_735_689_599, 1_795_219_200];
        let dates = ["1970-01-01", "2000-02-29", "2024-02-29", "2024-12-31", "2026-11-21"];
        assert_eq!(days.map(date), dates);
    }
}
