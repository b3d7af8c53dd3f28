//! The charts of the page.

use crate::compare::results::{Cell, Results, RowResult};

use super::columns::Unit;
use super::plot::{Best, Line, bars, lines};

/// The charts of a page: file names and contents.
pub type Pictures = Vec<(String, String)>;

/// The figures of scenario (c) that are drawn over the number of clients.
const OVER_CLIENTS: [(&str, &str); 4] = [
    ("rate", "acquisitions per second"),
    ("wait_max", "longest wait, µs"),
    ("sent", "commands per acquisition"),
    ("jain", "Jain's fairness index"),
];

/// The number of clients with a bar chart of their own.
const CROWD: u32 = 1_000;

/// The charts of these results.
pub(super) fn draw(results: &Results) -> Pictures {
    let mut pictures = Pictures::new();
    if let Some(cell) = results.cells.iter().find(|cell| cell.scenario == "a") {
        let title = "Uncontended lock + release, median";
        let picture = chart(cell, title, "µs, lower is better", "pair_p50", Unit::Time, Best::Lowest);
        pictures.push(("a-pair.svg".into(), picture));
    }
    for hold in [0, 1, 10] {
        let series = format!("clients, hold {hold} ms");
        let cells: Vec<&Cell> = results.cells.iter().filter(|cell| cell.series == series).collect();
        if let Some(cell) = cells.iter().find(|cell| cell.size == CROWD) {
            let title = format!("One lock, {CROWD} clients, hold {hold} ms: acquisitions per second");
            let picture =
                chart(cell, &title, "acquisitions/s, higher is better", "rate", Unit::Rate, Best::Highest);
            pictures.push((format!("c-rate-{CROWD}-clients-{hold}ms.svg"), picture));
        }
        // A line needs two points.
        if cells.len() < 2 {
            continue;
        }
        for (figure, what) in OVER_CLIENTS {
            // Fairness and commands differ little between holds.
            if hold != 1 && (figure == "jain" || figure == "sent") {
                continue;
            }
            let title = format!("One lock, hold {hold} ms: {what}");
            let picture = lines(&title, "clients (logarithmic)", what, &of_rows(&cells, figure));
            pictures.push((format!("c-{figure}-{hold}ms.svg"), picture));
        }
    }
    if let Some(cell) = results.cells.iter().find(|cell| cell.scenario == "e") {
        let title = "A killed holder: time until the next client has the lock";
        let picture = chart(cell, title, "seconds, lower is better", "takeover", Unit::Seconds, Best::Lowest);
        pictures.push(("e-takeover.svg".into(), picture));
    }
    pictures
}

fn is_drawn(row: &RowResult) -> bool {
    !row.row.ends_with("tuned")
}

/// A line for each row with default settings, leasehold's first.
fn of_rows(cells: &[&Cell], figure: &str) -> Vec<Line> {
    let mut rows: Vec<&RowResult> = cells[0].rows.iter().filter(|row| is_drawn(row)).collect();
    rows.sort_by_key(|row| !row.row.starts_with("leasehold"));
    let line = |row: &RowResult| {
        let points = cells.iter().filter_map(|cell| {
            let found = cell.rows.iter().find(|other| other.row == row.row)?.median(figure)?;
            Some((f64::from(cell.size), found))
        });
        (row.row.clone(), points.collect())
    };
    rows.into_iter().map(line).collect()
}

fn chart(cell: &Cell, title: &str, across: &str, figure: &str, unit: Unit, best: Best) -> String {
    let all: Vec<(String, f64, String)> = cell
        .rows
        .iter()
        .filter(|row| !row.is_broken())
        .filter_map(|row| row.median(figure).map(|value| (row.row.clone(), value, unit.show(value))))
        .collect();
    bars(title, across, best, &all)
}
