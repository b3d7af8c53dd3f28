//! The table of `ls` and `watch`: a row for each lock, in lines that fit into the terminal.

use leasehold::LockInfo;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::duration::show as span;
use crate::inspect::identity;
use crate::text::printable;

const COLUMNS: usize = 7;

/// The names of the columns.
pub(crate) const HEAD: [&str; COLUMNS] =
    ["NAME", "KIND", "HOLDER", "HELD FOR", "EXPIRES IN", "WAITING", "TOKEN"];

/// The columns whose text may be long, and is cut on a terminal.
const NAME: usize = 0;
const HOLDER: usize = 2;

/// The columns that a narrow terminal leaves out, in this order. `show` has them all.
const LEFT_OUT: [usize; 6] = [6, 4, 3, 1, 5, HOLDER];

/// What a long column keeps at least before another column is left out.
const NARROWEST: usize = 16;

/// The width to which long columns are padded where nothing limits a line: one long name does not move all other rows.
const PADDED: usize = 60;

/// The space between two columns.
const GAP: usize = 2;

pub(crate) fn row(lock: &LockInfo) -> [String; COLUMNS] {
    let holder = lock.holders.first();
    let more = lock.holders.len().saturating_sub(1);
    let without_holder = if lock.foreign.is_some() { "another program" } else { "-" };
    let shown =
        holder.map_or_else(|| without_holder.to_owned(), |holder| identity(&holder.metadata, &holder.client));
    let shown = if more > 0 { format!("{shown} and {more} more") } else { shown };
    [
        printable(&lock.name),
        lock.kind.to_string(),
        shown,
        holder.map_or_else(|| "-".to_owned(), |holder| span(holder.held_for)),
        holder.map_or_else(|| "-".to_owned(), |holder| span(holder.expires_in)),
        lock.waiters.len().to_string(),
        holder.map_or_else(|| "-".to_owned(), |holder| holder.token.to_string()),
    ]
}

/// The columns that are shown, with their widths.
pub(crate) struct Columns {
    shown: Vec<(usize, usize)>,
    /// Whether cells are cut to the width. Otherwise it is what they are padded to.
    are_cut: bool,
}

impl Columns {
    /// For these rows, in lines of this width. Without a limit nothing is left out or cut.
    pub(crate) fn new(rows: &[[String; COLUMNS]], room: Option<usize>) -> Self {
        let width = |column: usize| {
            let cells = rows.iter().map(|row| row[column].width()).max().unwrap_or(0);
            cells.max(HEAD[column].width())
        };
        let is_long = |column| column == NAME || column == HOLDER;
        let mut shown: Vec<(usize, usize)> = (0..COLUMNS).map(|column| (column, width(column))).collect();
        let Some(room) = room else {
            for (_, width) in shown.iter_mut().filter(|(column, _)| is_long(*column)) {
                *width = PADDED.min(*width);
            }
            return Self { shown, are_cut: false };
        };
        let least =
            |&(column, width): &(usize, usize)| if is_long(column) { NARROWEST.min(width) } else { width };
        for left_out in LEFT_OUT {
            if shown.iter().map(least).sum::<usize>() + (shown.len() - 1) * GAP <= room {
                break;
            }
            shown.retain(|(column, _)| *column != left_out);
        }
        let others: usize =
            shown.iter().filter(|(column, _)| !is_long(*column)).map(|(_, width)| width).sum();
        let left = room.saturating_sub(others + (shown.len() - 1) * GAP);
        let holder = shown.iter().find(|(column, _)| *column == HOLDER).map_or(0, |(_, width)| *width);
        // Each may have half of what is left, and what the other does not need.
        let name = shown[0].1.min(left.saturating_sub(holder).max(left / 2)).max(1);
        for (column, width) in &mut shown {
            match *column {
                NAME => *width = name,
                HOLDER => *width = holder.min(left - name),
                _ => {}
            }
        }
        // Without a holder, the name has all of it.
        if holder == 0 {
            shown[0].1 = width(NAME).min(left);
        }
        Self { shown, are_cut: true }
    }

    /// What is shown of a row.
    pub(crate) fn cells<S: AsRef<str>>(&self, row: &[S; COLUMNS]) -> Vec<String> {
        let fitted = |&(column, width): &(usize, usize)| {
            let cell = row[column].as_ref();
            if self.are_cut { cut(cell, width) } else { cell.to_owned() }
        };
        self.shown.iter().map(fitted).collect()
    }

    #[cfg(feature = "watch")]
    pub(crate) fn widths(&self) -> impl Iterator<Item = usize> {
        self.shown.iter().map(|(_, width)| *width)
    }

    /// A row as a line of text.
    pub(crate) fn line<S: AsRef<str>>(&self, row: &[S; COLUMNS]) -> String {
        let mut line = String::new();
        for (cell, &(_, width)) in self.cells(row).iter().zip(&self.shown) {
            let padding = width.saturating_sub(cell.width()) + GAP;
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', padding));
        }
        line.truncate(line.trim_end().len());
        line
    }
}

/// The beginning of a text that fits into this width, with a mark where it is cut.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut room = width.saturating_sub(1);
    let fits = |c: &char| {
        let needed = c.width().unwrap_or(0);
        needed <= room && {
            room -= needed;
            true
        }
    };
    text.chars().take_while(fits).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(rows: &[[&str; COLUMNS]], room: Option<usize>) -> Vec<String> {
        let rows: Vec<[String; COLUMNS]> = rows.iter().map(|row| row.map(str::to_owned)).collect();
        let columns = Columns::new(&rows, room);
        [columns.line(&HEAD)].into_iter().chain(rows.iter().map(|row| columns.line(row))).collect()
    }

    const COMMAND: &str = "build7 pid 4711 (a very long command line)";

    #[test]
    fn every_line_fits_into_the_terminal_and_shows_the_name() {
        let long = "n".repeat(300);
        let rows = [
            ["orders:42", "mutex", COMMAND, "1m 02s", "9s", "12", "1764000000000000"],
            [&long, "semaphore", "b pid 1", "5s", "9s", "0", "1764000000000001"],
            ["订单锁订单锁", "rw", "主机 pid 1", "5s", "9s", "0", "1764000000000001"],
        ];
        for room in 20..200 {
            for line in lines(&rows, Some(room)) {
                assert!(line.width() <= room, "{room}: {line}");
            }
            let shown = lines(&rows, Some(room));
            assert!(shown[1].starts_with("orders:42 ") || shown[1] == "orders:42", "{room}: {shown:?}");
            assert!(shown[2].starts_with("nnnnnnnnn"), "{room}: {shown:?}");
        }
        let narrow = lines(&rows, Some(60));
        assert!(narrow[0].contains("HOLDER") && narrow[0].contains("WAITING"), "{narrow:?}");
        assert!(narrow[1].contains("build7 pid 4711") && narrow[2].contains("nnnn…"), "{narrow:?}");
    }

    #[test]
    fn without_a_terminal_everything_is_printed_and_a_long_name_moves_only_its_row() {
        let long = "n".repeat(300);
        let rows =
            [["a", "mutex", COMMAND, "1s", "9s", "0", "1"], [&long, "mutex", "b", "1s", "9s", "0", "1"]];
        let shown = lines(&rows, None);
        assert!(shown[2].starts_with(&format!("{long}  mutex")) && shown[1].contains(COMMAND), "{shown:?}");
        assert!(shown[1].len() < 160, "{shown:?}");
        assert_eq!(shown[0].find("KIND"), shown[1].find("mutex"));
    }

    #[test]
    fn wide_characters_are_counted_by_the_cells_that_they_take() {
        assert_eq!(
            (cut("订单锁", 6), cut("订单锁", 5), cut("订单锁", 1)),
            ("订单锁".to_owned(), "订单…".to_owned(), "…".to_owned())
        );
        let rows =
            [["订单锁", "mutex", "h", "1s", "9s", "0", "1"], ["abcdef", "mutex", "h", "1s", "9s", "0", "1"]];
        let shown = lines(&rows, Some(80));
        assert_eq!(shown[1].replace("订单锁", "abcdef"), shown[2]);
    }
}
