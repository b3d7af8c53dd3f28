//! What happened in a run: a hash of all of it, and the lines of it if they are asked for.

use std::fmt::Write as _;

use crate::plan::Micros;

/// Whose column a line belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// The servers and the network.
    Server,
    /// A client.
    Client(usize),
}

/// The history of a run.
#[derive(Debug)]
pub struct History {
    hash: u64,
    lines: Option<Vec<(Micros, Column, String)>>,
}

impl History {
    /// An empty history, with or without lines.
    #[must_use]
    pub fn new(has_lines: bool) -> Self {
        Self { hash: 0xcbf2_9ce4_8422_2325, lines: has_lines.then(Vec::new) }
    }

    /// Adds numbers to the hash: all that distinguishes an event.
    pub fn note(&mut self, now: Micros, numbers: &[u64]) {
        for number in std::iter::once(&now).chain(numbers) {
            self.hash = (self.hash ^ number).wrapping_mul(0x0100_0000_01B3).rotate_left(29);
        }
    }

    /// Adds a line, if there are lines.
    pub fn line(&mut self, now: Micros, column: Column, text: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push((now, column, text()));
        }
    }

    /// Equal for equal runs.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// A diagram with one column for each client, time downwards. `last`: only that many lines.
    #[must_use]
    pub fn timeline(&self, last: usize) -> String {
        const WIDTH: usize = 46;
        let lines = self.lines.as_deref().unwrap_or(&[]);
        let shown = &lines[lines.len().saturating_sub(last)..];
        let mut columns: Vec<usize> = shown
            .iter()
            .filter_map(|(_, column, _)| match column {
                Column::Client(client) => Some(*client),
                Column::Server => None,
            })
            .collect();
        columns.sort_unstable();
        columns.dedup();
        let mut text = format!("{:>13}  {:WIDTH$}", "seconds", "server");
        for client in &columns {
            let _ = write!(text, "{:WIDTH$}", format!("client {client}"));
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
        if shown.len() < lines.len() {
            let _ = writeln!(text, "{:>13}  ({} earlier lines)", "", lines.len() - shown.len());
        }
        for (now, column, line) in shown {
            let column = match column {
                Column::Server => 0,
                Column::Client(client) => {
                    columns.iter().position(|other| other == client).map_or(0, |at| at + 1)
                }
            };
            let seconds = format!("{}.{:06}", now / 1_000_000, now % 1_000_000);
            let _ = writeln!(text, "{seconds:>13}  {}{line}", " ".repeat(column * WIDTH));
        }
        text
    }
}
