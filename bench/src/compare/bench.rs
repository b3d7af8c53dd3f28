//! A run of the comparison: its options, its results so far, and the time it may spend on repeats.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use leasehold_bench_peer::protocol::Hello;

use super::calibration::Calibration;
use super::results::{Cell, Presence, Results};
use super::scenarios::Scenario;
use crate::program::Program;

/// The options of a comparison.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Fewer and shorter rounds.
    pub is_quick: bool,
    /// The scenarios. Empty: all.
    pub scenarios: Vec<Scenario>,
    /// The programs. Empty: all.
    pub programs: Vec<String>,
    /// Titles of cells that are measured again and replaced in the file. Empty: a new run.
    pub again: Vec<String>,
    /// The server of all libraries.
    pub program: Program,
    /// The file for the results.
    pub output: PathBuf,
}

/// A run in progress.
pub struct Bench {
    pub(super) options: Options,
    pub(super) calibration: Calibration,
    pub(super) results: Results,
    pub(super) began: Instant,
    /// The duration of the run that had these cells before, in minutes.
    pub(super) minutes_before: f64,
    /// Time spent on discarded runs.
    pub(super) repeated: Duration,
    pub(super) shows_progress: bool,
}

impl Bench {
    pub(super) fn takes_part(&self, program: &str) -> bool {
        self.options.programs.is_empty() || self.options.programs.iter().any(|one| one == program)
    }

    /// Whether this cell is to be measured.
    pub(super) fn is_wanted(&self, title: &str) -> bool {
        self.options.again.is_empty() || self.options.again.iter().any(|again| again == title)
    }

    pub(super) fn is_there(&mut self, program: &str, hello: &Hello) {
        self.results.peers.insert(program.to_owned(), Presence::There(hello.clone()));
    }

    /// No process of this peer could be started and connected. The peer may be present in other groups.
    pub(super) fn is_missing(&mut self, program: &str, why: &str) {
        let missing = Presence::Missing { missing: why.to_owned() };
        self.results.peers.entry(program.to_owned()).or_insert(missing);
    }

    /// Limits repeated runs to a tenth of the elapsed time, or half of it in a short run. Repetition helps against a short disturbance, not
    /// on a machine that is always busy.
    pub(super) fn may_repeat(&mut self, span: Duration) -> bool {
        let part = if self.options.is_quick { 20 } else { 10 };
        let may = self.repeated + span < self.began.elapsed() / part;
        self.repeated += if may { span } else { Duration::ZERO };
        may
    }

    /// Writes the results after each cell, so that an interrupted run loses little.
    pub(super) fn found(&mut self, cell: Cell) {
        self.results.put(cell);
        self.results.minutes = self.minutes_before + self.began.elapsed().as_secs_f64() / 60.0;
        let path: &Path = &self.options.output;
        if let Err(error) = self.results.write(path) {
            eprintln!("{}: {error}", path.display());
        }
    }

    pub(super) fn progress(&self, what: &str) {
        if self.shows_progress {
            let seconds = self.began.elapsed().as_secs();
            // Back to the line's start, and what was there before is wiped.
            eprint!("\r\x1b[K{:3}:{:02} {what}", seconds / 60, seconds % 60);
        }
    }
}
