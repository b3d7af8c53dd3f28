//! The results of the scale scenarios: one JSON file, in which a scenario that runs again replaces its earlier result.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::compare::results::{Cell, Machine, RowResult};

/// The results of all scenarios that have run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ScaleResults {
    /// The machine, at the last run.
    pub machine: Machine,
    /// A cell for each part of a scenario.
    pub cells: Vec<Cell>,
}

impl ScaleResults {
    /// Reads the results of earlier runs.
    ///
    /// # Errors
    ///
    /// An IO error, or a file that contains no results.
    pub fn read(path: &Path) -> std::io::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }

    /// Writes them, a line for each cell.
    ///
    /// # Errors
    ///
    /// An IO error.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let cells: Result<Vec<String>, _> = self.cells.iter().map(serde_json::to_string).collect();
        let machine = serde_json::to_string(&self.machine)?;
        std::fs::write(path, format!("{{\"machine\": {machine}, \"cells\": [\n{}\n]}}\n", cells?.join(",\n")))
    }

    /// Adds a cell, in the place of that of the same scenario.
    pub(super) fn put(&mut self, cell: Cell) {
        match self.cells.iter_mut().find(|other| other.scenario == cell.scenario) {
            Some(place) => *place = cell,
            None => self.cells.push(cell),
        }
    }

    /// The cell of a scenario.
    #[must_use]
    pub fn cell(&self, scenario: &str) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.scenario == scenario)
    }

    /// A row of a scenario, by the beginning of its name.
    pub(super) fn row(&self, scenario: &str, name: &str) -> Option<&RowResult> {
        self.cell(scenario)?.rows.iter().find(|row| row.row.starts_with(name))
    }

    /// A figure of leasehold's first row.
    pub(super) fn figure(&self, scenario: &str, figure: &str) -> Option<f64> {
        self.cell(scenario)?.rows.first()?.median(figure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenario_that_runs_again_replaces_its_result_and_a_file_is_read_as_written() {
        let cell = |scenario: &str, size| Cell { scenario: scenario.into(), size, ..Cell::default() };
        let mut results = ScaleResults::default();
        for (scenario, size) in [("held", 1), ("killed", 2), ("held", 3)] {
            results.put(cell(scenario, size));
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        results.write(file.path()).unwrap();
        let read = ScaleResults::read(file.path()).unwrap();
        let found: Vec<_> = read.cells.iter().map(|cell| (cell.scenario.as_str(), cell.size)).collect();
        assert_eq!(found, [("held", 3), ("killed", 2)]);
    }
}
