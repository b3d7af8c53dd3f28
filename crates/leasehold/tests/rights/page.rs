//! docs/rights.md.

use std::path::PathBuf;
use std::sync::Mutex;
use std::{env, fs};

use crate::Row;
use crate::commands::{COMMANDS, Outcome};

/// Writes the page anew if it is set.
const VARIABLE: &str = "LEASEHOLD_WRITE_RIGHTS";

/// One test writes at a time.
static PAGE: Mutex<()> = Mutex::new(());

/// Compares a part of the page with what was found, by server, or writes it.
pub(crate) fn compare(part: &str, found: &[(&str, Vec<Row>)]) {
    let _writing = PAGE.lock();
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/rights.md");
    let page = fs::read_to_string(&path).unwrap();
    let (begin, end) = (format!("<!-- {part} -->\n\n"), format!("\n<!-- end of {part} -->"));
    let (before, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("docs/rights.md has no {begin}"));
    let (old, after) = rest.split_once(&end).unwrap_or_else(|| panic!("docs/rights.md has no {end}"));
    let new = table(found);
    if env::var_os(VARIABLE).is_some() {
        fs::write(&path, format!("{before}{begin}{new}{end}{after}")).unwrap();
        return;
    }
    let lines = |one: &str, other: &str| {
        let lines = one.lines().filter(|line| !other.lines().any(|same| same == *line));
        lines.collect::<Vec<_>>().join("\n")
    };
    assert!(
        old == new,
        "docs/rights.md is stale, or the servers are others: {VARIABLE}=1 writes it anew\nit says\n{}\nand it is\n{}",
        lines(old, &new),
        lines(&new, old)
    );
}

/// A row for each right, and a column for each command.
fn table(found: &[(&str, Vec<Row>)]) -> String {
    let is_there = |column: usize| {
        found.iter().flat_map(|(_, rows)| rows).any(|row| row.outcomes[column] != Outcome::Absent)
    };
    let columns: Vec<usize> = (0..COMMANDS.len()).filter(|column| is_there(*column)).collect();
    let names: Vec<_> = columns.iter().map(|column| COMMANDS[*column]).collect();
    let mut text = format!("| without | {} |\n|---|{}\n", names.join(" | "), "---|".repeat(names.len()));
    let mut rights: Vec<&str> = Vec::new();
    for row in found.iter().flat_map(|(_, rows)| rows) {
        if !rights.contains(&row.right.as_str()) {
            rights.push(&row.right);
        }
    }
    for right in rights {
        let cells: Vec<_> = columns.iter().map(|column| cell(found, right, *column)).collect();
        text += &format!("| `{}` | {} |\n", right.replace('|', "\\|"), cells.join(" | "));
    }
    text
}

/// `refused`, with the servers if not all refuse it.
fn cell(found: &[(&str, Vec<Row>)], right: &str, column: usize) -> String {
    let outcomes = found.iter().filter_map(|(server, rows)| {
        let row = rows.iter().find(|row| row.right == right)?;
        Some((*server, row.outcomes[column]))
    });
    let (refused, works): (Vec<_>, Vec<_>) = outcomes.partition(|(_, outcome)| *outcome == Outcome::Refused);
    let servers = || refused.iter().map(|(server, _)| *server).collect::<Vec<_>>().join(", ");
    match (refused.is_empty(), works.is_empty()) {
        (true, _) => "works".to_owned(),
        (false, true) => "refused".to_owned(),
        (false, false) => format!("refused: {}", servers()),
    }
}
