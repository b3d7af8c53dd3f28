//! `leasehold-bench`: measures the speed of leasehold on Redis against the same work without a lock library, in turn, on
//! servers of its own.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand, ValueEnum};
use leasehold_bench::compare::catalog;
use leasehold_bench::compare::scenarios::Scenario;
use leasehold_bench::compare::{self, Options};
use leasehold_bench::page;
use leasehold_bench::peers::{self, Peer};
use leasehold_bench::report::Report;
use leasehold_bench::{handoff, local, pair, redlock, renewals, server_cost};

/// Measures leasehold on Redis. Its results are ratios within one run, since absolute figures depend on the machine.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The measurements to run [default: all]
    parts: Vec<Part>,
    /// Print one JSON value instead of text
    #[arg(long)]
    json: bool,
    /// Duration of `renewals` and `fairness`, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Run as the second process of `handoff`
    #[arg(long, hide = true, value_name = "URL")]
    peer: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Compare all lock libraries that `bench/setup` has built, side by side (about an hour)
    Compare {
        /// The scenarios to run [default: all]
        #[arg(value_enum)]
        scenarios: Vec<Scenario>,
        /// Run short rounds: five minutes instead of an hour
        #[arg(long)]
        quick: bool,
        /// The programs to run: leasehold, bounds, or one that bench/setup builds [default: all]
        #[arg(long, value_delimiter = ',', value_name = "PROGRAM", value_parser = PossibleValuesParser::new(catalog::programs()))]
        only: Vec<String>,
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
    /// Run as one of the peers that are part of this program
    #[command(hide = true)]
    Peer { peer: Peer },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Uncontended lock + release against bare round trips
    Pair,
    /// Hand-off between two processes, and the cost of waiting
    Handoff,
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
}

fn main() {
    let args = Args::parse();
    if let Some(command) = args.command {
        return run_command(command);
    }
    if let Some(url) = args.peer {
        return handoff::peer(&url);
    }
    let mut report = Report::new(args.json);
    let is_selected = |part| args.parts.is_empty() || args.parts.contains(&part);
    if is_selected(Part::Pair) {
        pair::run(&mut report);
    }
    if is_selected(Part::Handoff) {
        handoff::run(&mut report);
    }
    if is_selected(Part::Local) {
        local::run(&mut report);
    }
    if is_selected(Part::Fairness) {
        local::fairness(&mut report, Duration::from_secs(args.seconds));
    }
    if is_selected(Part::Redlock) {
        redlock::run(&mut report);
    }
    if is_selected(Part::ServerCost) {
        server_cost::run(&mut report);
    }
    if is_selected(Part::Renewals) {
        renewals::run(&mut report, Duration::from_secs(args.seconds));
    }
    report.end();
}

fn run_command(command: Command) {
    match command {
        Command::Compare { scenarios, quick, only, output } => {
            let is_complete = scenarios.is_empty() && only.is_empty();
            let output = output.unwrap_or_else(|| compare::output(is_complete));
            let path = output.clone();
            let results = compare::run(Options { is_quick: quick, scenarios, programs: only, output }, true);
            println!("{} cells in {:.1} minutes: {}", results.cells.len(), results.minutes, path.display());
        }
        Command::Report { from } => {
            if let Err(error) = page::publish(&from.unwrap_or_else(|| compare::output(true))) {
                eprintln!("leasehold-bench: {error}");
                std::process::exit(1);
            }
        }
        Command::Peer { peer } => peers::run(peer),
    }
}
