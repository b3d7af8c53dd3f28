//! The tables.

use std::fmt::Write as _;

use crate::compare::catalog;
use crate::compare::results::{Cell, Presence, Results, RowResult};

use super::columns::{Column, of};
use super::verdict::known;

/// The libraries and their features.
pub(super) fn participants(results: &Results) -> String {
    let mut page =
        String::from("\n## Libraries and features\n\n| program | library | runs on |\n|---|---|---|\n");
    for (program, presence) in &results.peers {
        let _ = match presence {
            Presence::There(hello) => writeln!(page, "| {program} | {} | {} |", hello.library, hello.runtime),
            Presence::Missing { missing } => writeln!(page, "| {program} | *missing: {}* | |", flat(missing)),
        };
    }
    page += "\n| row | automatic renewal | push to waiters | FIFO | fencing tokens | settings |\n\
             |---|---|---|---|---|---|\n";
    for row in catalog::all() {
        if row.program == "bounds" {
            continue;
        }
        let promises = row.promises;
        let marks = [promises.renews, promises.has_push, promises.is_fifo, promises.is_fenced]
            .map(|promised| if promised { "yes" } else { "" });
        let _ = writeln!(page, "| {} | {} | {} |", row.name, marks.join(" | "), row.note);
    }
    page
}

/// One table for each cell of a scenario.
pub(super) fn scenario(results: &Results, letter: &str) -> String {
    let columns = of(letter);
    let cells = results.cells.iter().filter(|cell| cell.scenario == letter);
    cells.map(|cell| table(cell, &columns)).collect()
}

fn table(cell: &Cell, columns: &[Column]) -> String {
    let mut page = format!("\n**{}**\n\n|  |", cell.title);
    for column in columns {
        let _ = write!(page, " {} |", column.title);
    }
    page += "\n|---|";
    page += &"--:|".repeat(columns.len());
    page.push('\n');
    let bound = cell.rows.iter().find(|row| known(row).is_some_and(|row| row.program == "bounds"));
    for row in &cell.rows {
        page += &line(row, bound, columns);
    }
    for (row, why) in cell.rows.iter().filter_map(|row| Some((&row.row, row.failure.as_ref()?))) {
        // Some libraries append advice.
        let why = flat(why.split(". ").next().unwrap_or_default());
        let _ = write!(page, "\nAttempts of {row} failed, with: {why}\n");
    }
    page
}

fn line(row: &RowResult, bound: Option<&RowResult>, columns: &[Column]) -> String {
    let is_own = known(row).is_some_and(|row| row.program == "leasehold");
    let mut line = if is_own { format!("| **{}** |", row.row) } else { format!("| {} |", row.row) };
    if let Some(why) = &row.missing {
        let _ = write!(line, " *missing: {}* |", flat(why));
        return line + &" |".repeat(columns.len() - 1) + "\n";
    }
    for (index, column) in columns.iter().enumerate() {
        let mut words = place(row, bound, *column);
        if index == 0 && row.is_broken() {
            words = format!("**broken** {words}");
        }
        let _ = write!(line, " {words} |");
    }
    line + "\n"
}

/// As one line, with `|` escaped.
fn flat(why: &str) -> String {
    why.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn place(row: &RowResult, bound: Option<&RowResult>, column: Column) -> String {
    let is_measured = column.figure != "sent" || !row.is_unused();
    let Some(figure) = row.median(column.figure).filter(|_| is_measured) else { return "–".into() };
    let mut words = column.unit.show(figure);
    if !column.is_chief {
        return words;
    }
    if let Some((low, high)) = row.spread(column.figure).filter(|(low, high)| low < high) {
        let _ = write!(words, " ({} to {})", column.unit.show(low), column.unit.show(high));
    }
    if let Some(bound) = bound.and_then(|bound| bound.median(column.figure)) {
        let _ = write!(words, ", {:.2} ×", figure / bound);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::super::columns::of;
    use super::*;
    use crate::compare::results::Figures;

    #[test]
    fn a_lock_that_was_not_acquired_has_no_number_of_commands() {
        let sent = |rate| {
            let mut row = RowResult::of("redsync");
            row.push(Figures::from([("rate".to_owned(), rate), ("sent".to_owned(), 3.0)]));
            let column = of("c").into_iter().find(|column| column.figure == "sent").unwrap();
            place(&row, None, column)
        };
        assert_eq!([sent(0.0), sent(1.0)], ["–", "3.0"]);
    }
}
