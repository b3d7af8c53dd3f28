//! The page on scale: `docs/scale.md`, from the results of `leasehold-bench scale`. Only `publish` reads and writes files.

mod sections;

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use super::text::date;
use crate::compare::results::{Cell, RowResult};
use crate::grouped;
use crate::scale::model::{TOLERANCE, capacities, predictions};
use crate::scale::results::ScaleResults;
use sections::{Line, SECTIONS};

/// A figure that exceeds its bar by less than this is shown as equal to it.
const NOISE: f64 = 1.005;

/// Writes the page, and a copy of the results beside it.
///
/// # Errors
///
/// The results cannot be read, or a file cannot be written.
pub fn publish(from: &Path) -> io::Result<()> {
    let results = ScaleResults::read(from)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", from.display())))?;
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs");
    fs::write(docs.join("scale.md"), write(&results))?;
    results.write(&docs.join("scale.json"))
}

/// Renders the page.
#[must_use]
pub fn write(results: &ScaleResults) -> String {
    let mut page = opening(results);
    for section in &SECTIONS {
        let is_of = |cell: &&Cell| cell.scenario.split('-').next() == Some(section.key);
        let cells: Vec<&Cell> = results.cells.iter().filter(is_of).collect();
        if cells.is_empty() {
            continue;
        }
        let _ = write!(page, "\n## {}\n\n{}\n", section.title, section.about);
        for cell in cells {
            page += &table(cell, section.lines);
        }
    }
    page += &model(results);
    page + "\n## Why\n\n" + include_str!("../../scale.md")
}

fn opening(results: &ScaleResults) -> String {
    let machine = &results.machine;
    format!(
        "# Scale\n\n\
         How many leases, clients, waiters and masters leasehold has been measured with, and what each of them costs. The benchmark writes this page; do not \
         edit it.\n\n    \
         bench/setup redisson etcd\n    \
         cargo run --release -p leasehold-bench -- scale\n    \
         cargo run --release -p leasehold-bench -- scale-report\n\n\
         {} with {} cores, {}, {}, on {}. Servers and clients share these cores, but servers have a higher priority. Absolute figures depend on the machine. `--size` and \
         `--seconds` scale a scenario down; a size other than the full one is stated at its table. A server's CPU is that of its main thread.\n",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.server,
        date(machine.at),
    )
}

/// Figures as lines, rows as columns.
fn table(cell: &Cell, lines: &[Line]) -> String {
    let size = cell.rows.first().and_then(|row| row.median("size"));
    let reduced = size.filter(|size| *size < 1.0);
    let scaled = reduced.map_or(String::new(), |size| format!(" *({size} of the full size)*"));
    let mut page = format!("\n**{}**{scaled}\n\n|  |", cell.title);
    let measured: Vec<&RowResult> = cell.rows.iter().filter(|row| row.missing.is_none()).collect();
    for row in &measured {
        let _ = write!(page, " {} |", row.row);
    }
    let _ = writeln!(page, " at most |\n|---|{}--:|", "--:|".repeat(measured.len()));
    for line in lines {
        let values: Vec<Option<f64>> = measured.iter().map(|row| row.median(line.figure)).collect();
        if values.iter().all(Option::is_none) {
            continue;
        }
        let _ = write!(page, "| {} |", line.title);
        for (row, value) in measured.iter().zip(values) {
            let bar = line.bar.filter(|_| is_promised(cell, row));
            let missed = bar.zip(value).is_some_and(|(bar, value)| value > bar * NOISE);
            let shown = value.map_or("–".to_owned(), |value| line.unit.show(value));
            let _ = write!(page, " {} |", if missed { format!("**{shown}**, missed") } else { shown });
        }
        let bar = line.bar.filter(|_| measured.iter().any(|row| is_promised(cell, row)));
        let _ = writeln!(page, " {} |", bar.map_or(String::new(), |bar| line.unit.show(bar)));
    }
    for row in &cell.rows {
        if let Some(why) = row.failure.as_ref().or(row.missing.as_ref()) {
            let _ = writeln!(page, "\n{}: {}.", row.row, why.trim_end_matches('.').replace('|', "\\|"));
        }
    }
    page
}

/// Limits are those of leasehold.
fn is_promised(cell: &Cell, row: &RowResult) -> bool {
    let is_peer =
        matches!(cell.scenario.as_str(), "held-redisson" | "held-etcd" | "killed-redisson" | "killed-etcd");
    !is_peer && !row.row.starts_with("bare chain")
}

/// The predictions, and the capacities.
fn model(results: &ScaleResults) -> String {
    let predictions = predictions(results);
    let mut page = String::new();
    if !predictions.is_empty() {
        let close = predictions.iter().filter(|one| one.is_close()).count();
        let _ = write!(
            page,
            "\n**The model against the measurements above**: {close} of {} within {:.0} %\n\n\
             | figure | model | measured | deviation |\n|---|--:|--:|--:|\n",
            predictions.len(),
            TOLERANCE * 100.0
        );
        for one in &predictions {
            let deviation = format!("{:+.0} %", one.deviation() * 100.0);
            let deviation = if one.is_close() { deviation } else { format!("**{deviation}**") };
            let _ = writeln!(
                page,
                "| {} | {} | {} | {deviation} |",
                one.what,
                digits(one.predicted),
                digits(one.measured)
            );
        }
    }
    let capacities = capacities(results);
    if !capacities.is_empty() {
        page += "\n**What a deployment can do**, by the model, on servers like this one, if 70 % of a core of each server may be used\n\n| deployment | |\n|---|--:|\n";
        for (what, value) in &capacities {
            let _ = writeln!(page, "| {what} | {} |", grouped(two_digits(*value)));
        }
    }
    page
}

/// Three digits, or a whole number.
fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => grouped(value),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A model is not more exact than that.
fn two_digits(value: f64) -> f64 {
    format!("{value:.1e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = include_str!("../../tests/scale-sample.json");

    fn results() -> ScaleResults {
        serde_json::from_str(SAMPLE).unwrap()
    }

    fn line<'a>(page: &'a str, beginning: &str) -> &'a str {
        page.lines()
            .find(|line| line.starts_with(beginning))
            .unwrap_or_else(|| panic!("{beginning}:\n{page}"))
    }

    #[test]
    fn page_names_machine_server_date_commands_and_reduced_sizes() {
        let page = write(&results());
        for words in
            ["AMD EPYC with 2 cores", "Redis 7.0.15", "2026-11-21", "leasehold-bench -- scale-report"]
        {
            assert!(page.contains(words), "{words}");
        }
        assert!(line(&page, "**100,000 leases in 8 processes").ends_with("*(0.1 of the full size)*"));
        assert!(line(&page, "**3 masters with replicas").ends_with("ttl 30 s**"));
    }

    #[test]
    fn figures_are_shown_with_what_is_promised_of_them() {
        let page = write(&results());
        assert_eq!(line(&page, "| server's CPU, cores | 0.1"), "| server's CPU, cores | 0.170 | 0.350 |");
        assert_eq!(line(&page, "| leases lost | 0"), "| leases lost | 0 | 0 |");
        assert_eq!(line(&page, "| server's CPU per renewal"), "| server's CPU per renewal | 1.70 µs |  |");
    }

    #[test]
    fn missed_promise_is_marked_and_one_within_the_noise_is_not() {
        let mut results = results();
        let page = write(&results);
        assert_eq!(
            line(&page, "| growth of"),
            "| growth of the server's CPU against the chain's | – | – | **1.90**, missed | 1.30 |"
        );
        assert_eq!(
            line(&page, "| commands per acquisition, of"),
            "| commands per acquisition, of the limit | 1.00 | – | – | 1.00 |"
        );
        results.cells[0].rows[0].figures.insert("lost".into(), vec![3.0]);
        assert_eq!(line(&write(&results), "| leases lost | **"), "| leases lost | **3**, missed | 0 |");
    }

    #[test]
    fn peer_says_why_it_ended_and_has_no_promises() {
        let page = write(&results());
        assert_eq!(line(&page, "| leases lost | 0 | 1,200"), "| leases lost | 0 | 1,200 |  |");
        assert_eq!(line(&page, "50,000 leases:"), "50,000 leases: leases were lost.");
        assert_eq!(line(&page, "etcd lease:"), "etcd lease: it has not answered for 90s.");
    }

    #[test]
    fn model_is_compared_with_the_measurements_and_tells_capacities() {
        let page = write(&results());
        assert!(page.contains("**The model against the measurements above**: 2 of 3 within 20 %"), "{page}");
        assert_eq!(
            line(&page, "| 1: server CPU"),
            "| 1: server CPU for renewals, cores | 0.019 | 0.170 | **-89 %** |"
        );
        assert_eq!(
            line(&page, "| one server: locks"),
            "| one server: locks and releases per second by clients with many tasks | 20,000 |"
        );
    }
}
