//! The comparison: every library does the same work, side by side in one run.
//!
//! Every library has a process (`bench/peers/README.md` has the protocol) and servers of its own. In each round all rows run one
//! after the other. Only ratios within one run count; a calibration monitors the machine's speed.

pub mod calibration;
pub mod catalog;
mod course;
pub mod figures;
mod leases;
mod machine;
mod meter;
pub mod process;
pub mod results;
pub mod scenarios;
mod stage;
pub mod store;
mod takeover;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use leasehold_bench_peer::protocol::Hello;

use calibration::Calibration;
use results::{Cell, Presence, Results};
use scenarios::{Scale, Scenario};

/// The options of a comparison.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Short rounds: minutes instead of an hour.
    pub is_quick: bool,
    /// The scenarios. Empty: all.
    pub scenarios: Vec<Scenario>,
    /// The programs. Empty: all.
    pub programs: Vec<String>,
    /// The file for the results.
    pub output: PathBuf,
}

/// The default file for the results. A part of the comparison has a file of its own and does not overwrite a complete run.
#[must_use]
pub fn output(is_whole: bool) -> PathBuf {
    process::built().with_file_name("bench").join(if is_whole { "run.json" } else { "part.json" })
}

const ALL: [Scenario; 10] = [
    Scenario::A,
    Scenario::B,
    Scenario::C,
    Scenario::E,
    Scenario::F,
    Scenario::H,
    Scenario::G,
    Scenario::D,
    Scenario::J,
    Scenario::I,
];

/// A run in progress.
pub struct Bench {
    options: Options,
    calibration: Calibration,
    results: Results,
    began: Instant,
    /// Time spent on discarded runs.
    repeated: Duration,
    shows_progress: bool,
}

/// Runs the comparison. Returns the results, which are also in the file.
#[must_use]
pub fn run(options: Options, shows_progress: bool) -> Results {
    let machine = machine::look();
    let calibration = Calibration::new(machine.cores);
    let results = Results { machine, is_quick: options.is_quick, ..Results::default() };
    let (began, repeated) = (Instant::now(), Duration::ZERO);
    let mut bench = Bench { options, calibration, results, began, repeated, shows_progress };
    let scale = Scale { is_quick: bench.options.is_quick };
    for scenario in ALL {
        if !bench.options.scenarios.is_empty() && !bench.options.scenarios.contains(&scenario) {
            continue;
        }
        match scenario {
            Scenario::E => takeover::run(&mut bench, scale),
            Scenario::F => leases::run(&mut bench, scale),
            _ => {
                for mut group in scale.groups(scenario) {
                    group.rows.retain(|row| bench.takes_part(row.program));
                    course::run(&mut bench, &group);
                }
            }
        }
    }
    bench.progress("done");
    if bench.shows_progress {
        eprintln!();
    }
    bench.results
}

impl Bench {
    fn takes_part(&self, program: &str) -> bool {
        self.options.programs.is_empty() || self.options.programs.iter().any(|one| one == program)
    }

    fn is_there(&mut self, program: &str, hello: &Hello) {
        self.results.peers.insert(program.to_owned(), Presence::There(hello.clone()));
    }

    /// No process of this peer could be started and connected. The peer may be present in other groups.
    fn is_missing(&mut self, program: &str, why: &str) {
        let missing = Presence::Missing { missing: why.to_owned() };
        self.results.peers.entry(program.to_owned()).or_insert(missing);
    }

    /// Limits repeated runs to a tenth of the elapsed time, or half of it in a short run. Repetition helps against a short disturbance, not
    /// on a machine that is always busy.
    fn may_repeat(&mut self, span: Duration) -> bool {
        let part = if self.options.is_quick { 20 } else { 10 };
        let may = self.repeated + span < self.began.elapsed() / part;
        self.repeated += if may { span } else { Duration::ZERO };
        may
    }

    /// Writes the results after each cell, so that an interrupted run loses little.
    fn found(&mut self, cell: Cell) {
        self.results.cells.push(cell);
        self.results.minutes = self.began.elapsed().as_secs_f64() / 60.0;
        let path: &Path = &self.options.output;
        if let Err(error) = self.results.write(path) {
            eprintln!("{}: {error}", path.display());
        }
    }

    fn progress(&self, what: &str) {
        if self.shows_progress {
            let seconds = self.began.elapsed().as_secs();
            // Back to the line's start, and what was there before is wiped.
            eprint!("\r\x1b[K{:3}:{:02} {what}", seconds / 60, seconds % 60);
        }
    }
}
