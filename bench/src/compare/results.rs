//! The results of a run: one JSON file, from which the report is written.

use std::collections::BTreeMap;
use std::path::Path;

use leasehold_bench_peer::protocol::Hello;
use serde::{Deserialize, Serialize};

use crate::median;

/// The figures of one round by name.
pub type Figures = BTreeMap<String, f64>;

/// The results of one run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Results {
    /// The machine.
    pub machine: Machine,
    /// Whether it was a quick run.
    pub is_quick: bool,
    /// Its duration.
    pub minutes: f64,
    /// The peers, by program.
    pub peers: BTreeMap<String, Presence>,
    /// Runs that were discarded because the machine was slow.
    pub discarded: u32,
    /// Runs that were kept although the machine was slow, because it stayed slow.
    pub disturbed: u32,
    /// Whether the processes of the other programs were paused while a row was measured.
    #[serde(default)]
    pub others_are_paused: bool,
    /// Titles of the cells that were measured again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub again: Vec<String>,
    /// The cells.
    pub cells: Vec<Cell>,
}

/// The machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// Its processor.
    pub processor: String,
    /// Number of cores.
    pub cores: usize,
    /// Its kernel.
    pub kernel: String,
    /// The server.
    pub server: String,
    /// Time of the run, in seconds since 1970.
    pub at: u64,
}

/// Whether a peer could be started.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Presence {
    /// It started.
    There(Hello),
    /// It did not start.
    Missing {
        /// The reason.
        missing: String,
    },
}

/// One configuration of a scenario, with the results of all rows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Cell {
    /// The scenario's letter.
    pub scenario: String,
    /// Its title: `100 clients, hold 1 ms`.
    pub title: String,
    /// Its position on the x axis of a chart, or zero.
    pub size: u32,
    /// The line of a chart that it belongs to.
    pub series: String,
    /// Whether tasks compete for the same lock.
    #[serde(default)]
    pub is_contended: bool,
    /// The rows.
    pub rows: Vec<RowResult>,
}

/// The result of one row in one cell.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RowResult {
    /// Its name.
    pub row: String,
    /// Why it has no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// The first failure that its library reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// The figures, with a number for each round.
    #[serde(default)]
    pub figures: BTreeMap<String, Vec<f64>>,
}

impl RowResult {
    /// An empty result of this row.
    #[must_use]
    pub fn of(row: &str) -> Self {
        Self { row: row.to_owned(), ..Self::default() }
    }

    /// Adds a round. A figure that is not a number is left out, since JSON has none.
    pub fn push(&mut self, round: Figures) {
        for (name, value) in round.into_iter().filter(|(_, value)| value.is_finite()) {
            self.figures.entry(name).or_default().push(rounded(value));
        }
    }

    /// The median over the rounds.
    #[must_use]
    pub fn median(&self, figure: &str) -> Option<f64> {
        let all = self.all(figure);
        (!all.is_empty()).then(|| median(all))
    }

    /// Minimum and maximum over the rounds.
    #[must_use]
    pub fn spread(&self, figure: &str) -> Option<(f64, f64)> {
        let all = self.all(figure);
        let low = all.iter().copied().min_by(f64::total_cmp)?;
        let high = all.iter().copied().max_by(f64::total_cmp)?;
        Some((low, high))
    }

    /// Whether the lock violated its exclusion in any round.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        ["overlaps", "lost_counts"]
            .iter()
            .any(|figure| self.spread(figure).is_some_and(|(_, high)| high > 0.0))
    }

    /// Whether the lock was acquired in fewer than half of the rounds, so that a cost per acquisition says nothing.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.median("rate") == Some(0.0)
    }

    fn all(&self, figure: &str) -> Vec<f64> {
        self.figures.get(figure).cloned().unwrap_or_default()
    }
}

/// Rounds to five digits, which is more than the machine's precision.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

impl Results {
    /// Reads the results of a run.
    ///
    /// # Errors
    ///
    /// An IO error, or a file that contains no results.
    pub fn read(path: &Path) -> std::io::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }

    /// Adds a cell, in the place of its earlier result if there is one.
    pub(super) fn put(&mut self, cell: Cell) {
        let is_same = |other: &&mut Cell| other.scenario == cell.scenario && other.title == cell.title;
        let Some(place) = self.cells.iter_mut().find(is_same) else { return self.cells.push(cell) };
        *place = cell;
        let title = &place.title;
        if !self.again.contains(title) {
            self.again.push(title.clone());
        }
    }

    /// Writes it in one line.
    ///
    /// # Errors
    ///
    /// An IO error.
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
        row.push(Figures::from([("jain".to_owned(), f64::NAN)]));
        assert_eq!(row.median("jain"), None);
        assert!(!row.is_broken());
    }

    #[test]
    fn cell_that_is_measured_again_takes_its_earlier_place() {
        let cell = |scenario: &str, title: &str, size| Cell {
            scenario: scenario.to_owned(),
            title: title.to_owned(),
            size,
            ..Cell::default()
        };
        let mut results = Results::default();
        for (size, (scenario, title)) in
            (0..).zip([("a", "one"), ("b", "two"), ("c", "two"), ("c", "three"), ("b", "two"), ("b", "two")])
        {
            results.put(cell(scenario, title, size));
        }
        let found: Vec<_> = results.cells.iter().map(|cell| (cell.scenario.as_str(), cell.size)).collect();
        assert_eq!(found, [("a", 0), ("b", 5), ("c", 2), ("c", 3)]);
        assert_eq!(results.again, ["two"]);
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
