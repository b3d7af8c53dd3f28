//! Scale: a million leases, thousands of clients and waiters, and clusters of many masters, each on servers of its own.
//!
//! Every scenario has processes of the comparison's peers (`bench/peers/README.md`). It is bounded in time, and checks before it begins whether the
//! machine can hold it. Its processes and servers end with it, also if it fails.

mod cluster;
mod held;
mod killed;
mod limits;
pub mod model;
mod observe;
mod pairs;
mod plan;
mod restart;
pub mod results;
mod waiting;

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use crate::compare::machine;
use crate::compare::process::built;
use crate::compare::results::Cell;
use crate::program::Program;
use limits::Need;
use plan::Plan;
use results::ScaleResults;

/// A scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// A million held leases on one server
    Held,
    /// 10,000 clients with a lease each; the server is killed and restarted
    Restart,
    /// A process with 100,000 leases is killed
    Killed,
    /// 10,000 clients in 100 processes wait for one lock
    Waiting,
    /// Clusters: slots move, a master fails; 3, 6 and 12 masters
    Cluster,
    /// Unit costs from short runs, for the cost model
    Model,
}

const ALL: [Part; 6] = [Part::Held, Part::Restart, Part::Killed, Part::Waiting, Part::Cluster, Part::Model];

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The scenarios. Empty: all.
    pub parts: Vec<Part>,
    /// Size relative to the full one.
    pub size: f64,
    /// Duration of each measurement. None: the scenario's own.
    pub seconds: Option<u64>,
    /// The ttl of all leases.
    pub ttl: Duration,
    /// leasehold, or peers, which take part in `held` and `killed`. Empty: all.
    pub programs: Vec<String>,
    /// The server of leasehold.
    pub program: Program,
    /// The file for the results.
    pub output: PathBuf,
}

/// The default file for the results.
#[must_use]
pub fn output() -> PathBuf {
    built().with_file_name("bench").join("scale.json")
}

/// The programs that can take part.
#[must_use]
pub fn programs() -> Vec<&'static str> {
    std::iter::once("leasehold").chain(held::PEERS.into_iter().map(|(program, _, _)| program)).collect()
}

/// Runs the scenarios, and writes the results after each of them. Returns all results in the file.
///
/// # Errors
///
/// The machine cannot hold a scenario, a peer or a server fails, or the file has results of another machine.
pub fn run(options: &Options, shows_progress: bool) -> Result<ScaleResults, String> {
    let plan = Plan {
        size: options.size,
        seconds: options.seconds.map(Duration::from_secs),
        ttl: options.ttl,
        program: options.program,
    };
    let parts = if options.parts.is_empty() { ALL.to_vec() } else { options.parts.clone() };
    for part in &parts {
        part.need(&plan).check().map_err(|why| format!("{part:?}: {why}"))?;
    }
    let machine = machine::look(&[options.program]);
    let path = options.output.display();
    let mut results = match options.output.exists() {
        true => ScaleResults::read(&options.output).map_err(|error| format!("{path}: {error}"))?,
        false => ScaleResults { machine: machine.clone(), ..ScaleResults::default() },
    };
    let is_same = results.machine.processor == machine.processor
        && results.machine.cores == machine.cores
        && results.machine.server == machine.server;
    if !is_same {
        return Err(format!("{path}: these are results of another machine or server"));
    }
    results.machine = machine;
    let mut found = |cells: Vec<Cell>| {
        cells.into_iter().for_each(|cell| results.put(cell));
        results.write(&options.output).map_err(|error| format!("{path}: {error}"))
    };
    let takes_part =
        |program: &str| options.programs.is_empty() || options.programs.iter().any(|one| one == program);
    for part in parts {
        if shows_progress {
            eprintln!("{part:?}");
        }
        if takes_part("leasehold") {
            found(part.run(&plan)?)?;
        }
        for peer in held::PEERS.into_iter().filter(|(program, _, _)| takes_part(program)) {
            match part {
                Part::Held => found(vec![held::run_peer(&plan, peer)])?,
                Part::Killed => found(vec![killed::run_peer(&plan, peer)])?,
                _ => {}
            }
        }
    }
    Ok(results)
}

impl Part {
    fn need(self, plan: &Plan) -> Need {
        match self {
            Self::Held => held::need(plan),
            Self::Restart => restart::need(plan),
            Self::Killed => killed::need(plan),
            Self::Waiting => waiting::need(plan),
            Self::Cluster => cluster::need(plan),
            Self::Model => Need { leases: 100_000, connections: 4_000, most: 4_000, processes: 20 },
        }
    }

    fn run(self, plan: &Plan) -> Result<Vec<Cell>, String> {
        Ok(match self {
            Self::Held => vec![held::run(plan)?],
            Self::Restart => vec![restart::run(plan)?],
            Self::Killed => vec![killed::run(plan)?],
            Self::Waiting => vec![waiting::run(plan)?],
            Self::Cluster => cluster::run(plan)?,
            Self::Model => vec![model::run(plan)?],
        })
    }
}
