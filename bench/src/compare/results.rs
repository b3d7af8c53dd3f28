//! What a run found: one JSON file, which the report is written from.

use std::collections::BTreeMap;
use std::path::Path;

use leasehold_bench_peer::protocol::Hello;
use serde::{Deserialize, Serialize};

use crate::median;

/// Named figures of one round.
pub type Figures = BTreeMap<String, f64>;

/// Everything that one run found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Results {
    /// What it ran on.
    pub machine: Machine,
    /// Less of everything, for a first look.
    pub is_quick: bool,
    /// How long it took.
    pub minutes: f64,
    /// Who took part, by program.
    pub peers: BTreeMap<String, Presence>,
    /// Runs of one row that were thrown away since the machine was slower just then.
    pub discarded: u32,
    /// Runs that were kept although the machine was slower just then, since it was so again and again.
    pub disturbed: u32,
    /// What was measured.
    pub cells: Vec<Cell>,
}

/// What it ran on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// Its processor.
    pub processor: String,
    /// How many of them.
    pub cores: usize,
    /// Its kernel.
    pub kernel: String,
    /// The server.
    pub server: String,
    /// When, in seconds since 1970.
    pub at: u64,
}

/// Whether a peer could be started.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Presence {
    /// It said who it is.
    There(Hello),
    /// It could not.
    Missing {
        /// Why.
        missing: String,
    },
}

/// One setting of one scenario, and how everybody did in it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Cell {
    /// The scenario's letter.
    pub scenario: String,
    /// What is particular about this cell: `100 clients, hold 1 ms`.
    pub title: String,
    /// The number by which a plot orders cells; zero if none does.
    pub size: u32,
    /// Which cells of the scenario belong to one line of a plot.
    pub series: String,
    /// Whether tasks want the same lock.
    #[serde(default)]
    pub is_contended: bool,
    /// Everybody.
    pub rows: Vec<RowResult>,
}

/// How one row did in one cell.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RowResult {
    /// Its name.
    pub row: String,
    /// Why there is nothing to see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// The first failure that its library reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// What was found, a number for each round that found it.
    #[serde(default)]
    pub figures: BTreeMap<String, Vec<f64>>,
}

impl RowResult {
    /// Of this row, and nothing yet.
    #[must_use]
    pub fn of(row: &str) -> Self {
        Self { row: row.to_owned(), ..Self::default() }
    }

    /// Adds a round.
    pub fn push(&mut self, round: Figures) {
        for (name, value) in round {
            self.figures.entry(name).or_default().push(rounded(value));
        }
    }

    /// The median over the rounds.
    #[must_use]
    pub fn median(&self, figure: &str) -> Option<f64> {
        let all = self.all(figure);
        (!all.is_empty()).then(|| median(all))
    }

    /// The lowest and the highest of the rounds.
    #[must_use]
    pub fn spread(&self, figure: &str) -> Option<(f64, f64)> {
        let all = self.all(figure);
        let low = all.iter().copied().min_by(f64::total_cmp)?;
        let high = all.iter().copied().max_by(f64::total_cmp)?;
        Some((low, high))
    }

    /// Whether the lock let in more than it may, in any round.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        ["overlaps", "lost_counts"]
            .iter()
            .any(|figure| self.spread(figure).is_some_and(|(_, high)| high > 0.0))
    }

    fn all(&self, figure: &str) -> Vec<f64> {
        self.figures.get(figure).cloned().unwrap_or_default()
    }
}

/// Five digits say more than the machine can.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

impl Results {
    /// Reads what a run wrote.
    ///
    /// # Errors
    ///
    /// What the file system says, or that it is nothing that a run wrote.
    pub fn read(path: &Path) -> std::io::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }

    /// Writes it in one line.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(path, serde_json::to_vec(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_told_by_their_median_and_spread() {
        let mut row = RowResult::of("x");
        for rate in [3.0, 1.000_000_1, 2.0] {
            row.push(Figures::from([("rate".to_owned(), rate)]));
        }
        assert_eq!((row.median("rate"), row.spread("rate")), (Some(2.0), Some((1.0, 3.0))));
        assert_eq!(row.median("jain"), None);
        assert!(!row.is_broken());
    }

    #[test]
    fn one_round_in_which_a_lock_let_two_in_breaks_it() {
        let mut row = RowResult::of("x");
        for overlaps in [0.0, 0.0, 1.0] {
            row.push(Figures::from([("overlaps".to_owned(), overlaps)]));
        }
        assert!(row.is_broken());
    }
}
