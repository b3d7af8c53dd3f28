//! The comparison: the same work, by every library, side by side in one run.
//!
//! Everybody works in a process of its own (`bench/peers/README.md` says how), on servers of its own, in turn: one row, the
//! next row, and when all had their round, again. Ratios within one run are what counts; the machine's own speed is watched.

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

/// What to compare.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A first look, within minutes.
    pub is_quick: bool,
    /// Only these scenarios; all if none is named.
    pub scenarios: Vec<Scenario>,
    /// Only these programs; all if none is named.
    pub programs: Vec<String>,
    /// Where the results go.
    pub output: PathBuf,
}

/// Where results go unless told otherwise: a look at some of it does not cost those of an hour.
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

/// A run on its way.
pub struct Bench {
    options: Options,
    calibration: Calibration,
    results: Results,
    began: Instant,
    /// What was spent on runs that were thrown away.
    repeated: Duration,
    shows_progress: bool,
}

/// Compares, and returns what was found, which is also in a file by then.
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

    /// Not even one of its processes could be started and connected. It may be there in other groups.
    fn is_missing(&mut self, program: &str, why: &str) {
        let missing = Presence::Missing { missing: why.to_owned() };
        self.results.peers.entry(program.to_owned()).or_insert(missing);
    }

    /// Repeating may take a tenth of the time, and half as much of a short one: it helps against a hiccup, and not on a machine
    /// that is busy all along.
    fn may_repeat(&mut self, span: Duration) -> bool {
        let part = if self.options.is_quick { 20 } else { 10 };
        let may = self.repeated + span < self.began.elapsed() / part;
        self.repeated += if may { span } else { Duration::ZERO };
        may
    }

    /// Writes down what a cell found at once, so that whoever interrupts a long run loses little.
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
