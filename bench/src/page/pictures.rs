//! Which pictures there are.

use crate::compare::results::{Cell, Results, RowResult};

use super::Pictures;
use super::columns::Unit;
use super::plot::{Line, bars, lines};

/// What is drawn over the number of clients in (c).
const OVER_CLIENTS: [(&str, &str); 4] = [
    ("rate", "acquisitions per second"),
    ("wait_max", "longest wait in µs"),
    ("sent", "commands per acquisition"),
    ("jain", "Jain's fairness index"),
];

/// The pictures of these results.
pub(super) fn draw(results: &Results) -> Pictures {
    let mut pictures = Pictures::new();
    if let Some(cell) = results.cells.iter().find(|cell| cell.scenario == "a") {
        pictures.push(("a-pair.svg".into(), chart(cell, "lock + release, p50", "pair_p50", Unit::Time)));
    }
    for hold in [0, 1, 10] {
        let series = format!("clients, hold {hold} ms");
        let cells: Vec<&Cell> = results.cells.iter().filter(|cell| cell.series == series).collect();
        // A line has two ends.
        if cells.len() < 2 {
            continue;
        }
        for (figure, what) in OVER_CLIENTS {
            // Fairness and commands differ little between holds.
            if hold != 1 && (figure == "jain" || figure == "sent") {
                continue;
            }
            let title = format!("one lock, hold {hold} ms: {what}");
            let picture = lines(&title, "clients", &of_rows(&cells, figure));
            pictures.push((format!("c-{figure}-{hold}ms.svg"), picture));
        }
    }
    if let Some(cell) = results.cells.iter().find(|cell| cell.scenario == "e") {
        let title = "a killed holder: seconds until the next has the lock";
        pictures.push(("e-takeover.svg".into(), chart(cell, title, "takeover", Unit::Seconds)));
    }
    pictures
}

fn is_drawn(row: &RowResult) -> bool {
    !row.row.ends_with("tuned")
}

/// A line for each row as it comes, ours first.
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

fn chart(cell: &Cell, title: &str, figure: &str, unit: Unit) -> String {
    let all: Vec<(String, f64, String)> = cell
        .rows
        .iter()
        .filter_map(|row| row.median(figure).map(|value| (row.row.clone(), value, unit.show(value))))
        .collect();
    bars(title, &all)
}
