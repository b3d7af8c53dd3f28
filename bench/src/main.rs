//! `leasehold-bench`: measures the speed of leasehold on Redis against the same work without a lock library, in turn, on
//! servers of its own.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand, ValueEnum};
use leasehold_bench::bridges;
use leasehold_bench::compare::catalog;
use leasehold_bench::compare::scenarios::Scenario;
use leasehold_bench::compare::{self, Options};
use leasehold_bench::page;
use leasehold_bench::peers::{self, Peer};
use leasehold_bench::program::Program;
use leasehold_bench::report::Report;
use leasehold_bench::{handoff, local, pair, redlock, renewals, scale, server_cost};

/// Measures leasehold on Redis. Its results are ratios within one run, since absolute figures depend on the machine.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The measurements to run [default: all]
    parts: Vec<Part>,
    /// The server program
    #[arg(long, value_enum, default_value_t)]
    server: Program,
    /// Print one JSON value instead of text
    #[arg(long)]
    json: bool,
    /// Duration of `renewals`, `renewals-redisson` and `fairness`, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Run as the second process of `handoff`
    #[arg(long, hide = true, value_name = "URL")]
    peer: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Compare all lock libraries that `bench/setup` has built, side by side (100 minutes)
    Compare {
        /// The scenarios to run [default: all]
        #[arg(value_enum)]
        scenarios: Vec<Scenario>,
        /// Run fewer and shorter rounds
        #[arg(long)]
        quick: bool,
        /// The programs to run: leasehold, bounds, or one that bench/setup builds [default: all]
        #[arg(long, value_delimiter = ',', value_name = "PROGRAM", value_parser = PossibleValuesParser::new(catalog::programs()))]
        only: Vec<String>,
        /// Measure only the cell of this title again, with all programs, and replace it in the results: for a cell during which the machine was
        /// slow. May be repeated
        #[arg(long, value_name = "TITLE", conflicts_with_all = ["only", "scenarios"])]
        again: Vec<String>,
        /// The server program of all libraries
        #[arg(long, value_enum, default_value_t)]
        server: Program,
        /// The file for the results [default: target/bench/run.json, or part.json beside it for a part of the comparison]
        #[arg(long, value_name = "PATH")]
        output: Option<PathBuf>,
    },
    /// Write docs/benchmarks.md and its charts from the results of `compare`
    Report {
        /// The file with the results [default: target/bench/run.json]
        #[arg(long, value_name = "PATH")]
        from: Option<PathBuf>,
    },
    /// Measure at large scale: a million leases, 10,000 clients, clusters of many masters (25 minutes and 10 GB of memory at full size)
    Scale(ScaleArgs),
    /// Write docs/scale.md from the results of `scale`
    ScaleReport {
        /// The file with the results [default: target/bench/scale.json]
        #[arg(long, value_name = "PATH")]
        from: Option<PathBuf>,
    },
    /// Run each library with a bridge and leasehold on one lock, and print who got how many turns
    Bridges {
        /// Duration for each library, in seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 60)]
        seconds: u64,
        /// Duration of a critical section, in microseconds
        #[arg(long, value_name = "MICROSECONDS", default_value_t = 5_000)]
        hold: u64,
        /// Only these peers
        #[arg(long, value_delimiter = ',', value_name = "PROGRAM")]
        only: Vec<String>,
        /// Replace the processes one by one instead, first by leasehold with a bridge and then by leasehold alone
        #[arg(long)]
        replace: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run as one of the peers that are part of this program
    #[command(hide = true)]
    Peer { peer: Peer },
}

#[derive(clap::Args)]
struct ScaleArgs {
    /// The scenarios to run [default: all]
    #[arg(value_enum)]
    parts: Vec<scale::Part>,
    /// Size relative to the full one: 0.01 for 10,000 leases instead of a million
    #[arg(long, value_name = "SHARE", default_value = "1", value_parser = share)]
    size: f64,
    /// Duration of each measurement, in seconds [default: that of the scenario, 300 at most]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: Option<u64>,
    /// The ttl of all leases, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(2..=600))]
    ttl: u64,
    /// The programs to run; peers, which bench/setup builds, take part in `held` and `killed` [default: all]
    #[arg(long, value_delimiter = ',', value_name = "PROGRAM", value_parser = PossibleValuesParser::new(scale::programs()))]
    only: Vec<String>,
    /// The server program
    #[arg(long, value_enum, default_value_t)]
    server: Program,
    /// The file for the results, in which a scenario replaces its earlier result [default: target/bench/scale.json]
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
}

/// More than the full size has not been tried.
fn share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|share| *share > 0.0 && *share <= 1.0)
        .ok_or_else(|| "it is above 0, and 1 at most".to_owned())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Uncontended lock + release against bare round trips
    Pair,
    /// Hand-off between two processes, and among up to 1,000 clients
    Handoff,
    /// Commands of waiting clients
    Waiting,
    /// Local hand-off among the tasks of one client
    Local,
    /// Distribution of acquisitions and waiting times among clients
    Fairness,
    /// A quorum of servers against a single server
    Redlock,
    /// CPU time of the server per operation
    ServerCost,
    /// CPU time of the server for renewing 100,000 leases
    Renewals,
    /// CPU time of the server for renewing 10,000 leases, against Redisson, which bench/setup builds
    RenewalsRedisson,
}

fn main() {
    let args = Args::parse();
    if let Some(command) = args.command {
        return run_command(command);
    }
    if let Some(url) = args.peer {
        return handoff::peer(&url);
    }
    if let Err(missing) = args.server.check() {
        fail(&missing);
    }
    let mut report = Report::new(args.json);
    let is_complete = run_parts(&mut report, &args);
    report.end();
    if !is_complete {
        std::process::exit(1);
    }
}

/// Returns false if a part could not measure.
fn run_parts(report: &mut Report, args: &Args) -> bool {
    let (server, span) = (args.server, Duration::from_secs(args.seconds));
    let is_selected = |part| args.parts.is_empty() || args.parts.contains(&part);
    if is_selected(Part::Pair) {
        pair::run(report, server);
    }
    if is_selected(Part::Handoff) {
        handoff::run(report, server);
    }
    if is_selected(Part::Waiting) {
        handoff::run_waiting(report, server);
    }
    if is_selected(Part::Local) {
        local::run(report, server);
    }
    if is_selected(Part::Fairness) {
        local::fairness(report, server, span);
    }
    if is_selected(Part::Redlock) {
        redlock::run(report, server);
    }
    if is_selected(Part::ServerCost) {
        server_cost::run(report, server);
    }
    if is_selected(Part::Renewals) {
        renewals::run(report, server, span);
    }
    !is_selected(Part::RenewalsRedisson) || renewals::against_redisson(report, server, span)
}

fn fail(why: &str) -> ! {
    eprintln!("leasehold-bench: {why}");
    std::process::exit(1);
}

fn run_command(command: Command) {
    match command {
        Command::Compare { scenarios, quick, only, again, server, output } => {
            if let Err(missing) = server.check() {
                fail(&missing);
            }
            let is_complete = scenarios.is_empty() && only.is_empty();
            let output = output.unwrap_or_else(|| compare::output(is_complete));
            let path = output.clone();
            let options =
                Options { is_quick: quick, scenarios, programs: only, again, program: server, output };
            let results = compare::run(options, true).unwrap_or_else(|error| fail(&error));
            println!("{} cells in {:.1} minutes: {}", results.cells.len(), results.minutes, path.display());
        }
        Command::Report { from } => {
            if let Err(error) = page::publish(&from.unwrap_or_else(|| compare::output(true))) {
                fail(&error.to_string());
            }
        }
        Command::Scale(args) => run_scale(args),
        Command::ScaleReport { from } => {
            if let Err(error) = page::scale::publish(&from.unwrap_or_else(scale::output)) {
                fail(&error.to_string());
            }
        }
        Command::Bridges { seconds, hold, only, replace, json } => {
            let (span, hold) = (Duration::from_secs(seconds), Duration::from_micros(hold));
            let done = match replace {
                true => bridges::report_replaced(hold, &only, json),
                false => bridges::report(span, hold, &only, json),
            };
            if let Err(error) = done {
                fail(&error);
            }
        }
        Command::Peer { peer } => peers::run(peer),
    }
}

fn run_scale(args: ScaleArgs) {
    if let Err(missing) = args.server.check() {
        fail(&missing);
    }
    let options = scale::Options {
        parts: args.parts,
        size: args.size,
        seconds: args.seconds,
        ttl: Duration::from_secs(args.ttl),
        programs: args.only,
        program: args.server,
        output: args.output.unwrap_or_else(scale::output),
    };
    if let Err(error) = scale::run(&options, true) {
        fail(&error);
    }
    println!("{}", options.output.display());
}
