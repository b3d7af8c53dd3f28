//! The comparison: every library does the same work, side by side in one run.
//!
//! Every library has a process (`bench/peers/README.md` has the protocol) and servers of its own. In each round all rows run one
//! after the other, while the processes of the others are paused. Only ratios within one run count; a calibration monitors the machine's speed.

mod bench;
pub mod calibration;
pub mod catalog;
pub(crate) mod environment;
pub mod figures;
pub(crate) mod leases;
pub(crate) mod machine;
mod measure;
mod meter;
pub mod process;
pub mod results;
pub mod scenarios;
pub mod store;
mod takeover;

use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use bench::{Bench, Options};
use calibration::Calibration;
pub(crate) use meter::Used;
use results::{Machine, Results};
use scenarios::{Scale, Scenario};

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

/// Runs the comparison. Returns the results, which are also in the file.
///
/// # Errors
///
/// If cells are to be measured again, and there are none of that title, or the earlier results cannot be read, or are those of another machine or
/// method.
pub fn run(options: Options, shows_progress: bool) -> Result<Results, String> {
    let scale = Scale { is_quick: options.is_quick, program: options.program };
    let machine = machine::look(&scale.programs());
    let calibration = Calibration::new(machine.cores);
    let results = match options.again.is_empty() {
        true => {
            Results { machine, is_quick: options.is_quick, others_are_paused: true, ..Results::default() }
        }
        false => earlier(&options, scale, &machine)?,
    };
    let (began, minutes_before, repeated) = (Instant::now(), results.minutes, Duration::ZERO);
    let mut bench = Bench { options, calibration, results, began, minutes_before, repeated, shows_progress };
    for scenario in ALL {
        if !bench.options.scenarios.is_empty() && !bench.options.scenarios.contains(&scenario) {
            continue;
        }
        match scenario {
            Scenario::E if !bench.options.again.is_empty() => {}
            Scenario::E => takeover::run(&mut bench, scale),
            Scenario::F => leases::run(&mut bench, scale),
            _ => {
                for mut group in scale.groups(scenario) {
                    group.rows.retain(|row| bench.takes_part(row.program));
                    group.cells.retain(|work| bench.is_wanted(&work.title));
                    if !group.cells.is_empty() {
                        measure::run(&mut bench, &group);
                    }
                }
            }
        }
    }
    bench.progress("done");
    if bench.shows_progress {
        eprintln!();
    }
    Ok(bench.results)
}

/// The results in which cells are replaced.
fn earlier(options: &Options, scale: Scale, machine: &Machine) -> Result<Results, String> {
    let groups = ALL.into_iter().flat_map(|scenario| scale.groups(scenario));
    let mut titles: Vec<String> = groups.flat_map(|group| group.cells).map(|work| work.title).collect();
    titles.extend(leases::titles(scale));
    if let Some(unknown) = options.again.iter().find(|again| !titles.contains(again)) {
        return Err(format!(
            "no cell to measure again has the title '{unknown}'; these have: {}",
            titles.join("; ")
        ));
    }
    let path = options.output.display();
    let results = Results::read(&options.output).map_err(|error| format!("{path}: {error}"))?;
    let is_same = results.machine.processor == machine.processor
        && results.machine.cores == machine.cores
        && results.machine.server == machine.server
        && (results.is_quick, results.others_are_paused) == (options.is_quick, true);
    if is_same {
        Ok(results)
    } else {
        Err(format!("{path}: these are results of another machine, server, duration or method"))
    }
}
