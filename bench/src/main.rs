//! `leasehold-bench`: what is claimed about speed on Redis, measured against the same work without a lock library, in
//! turn, on servers of its own.

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

/// Measures leasehold on Redis, as ratios within one run.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// What to measure; everything when nothing is named.
    parts: Vec<Part>,
    /// One JSON value instead of text.
    #[arg(long)]
    json: bool,
    /// How long the leases of `renewals` are watched, and how long clients compete in `fairness`.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Be the other process of `handoff`.
    #[arg(long, hide = true, value_name = "URL")]
    peer: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    /// The same work by every lock library that `bench/setup` has built, side by side.
    Compare {
        /// Only these scenarios.
        #[arg(value_enum)]
        scenarios: Vec<Scenario>,
        /// A first look, within five minutes instead of an hour.
        #[arg(long)]
        quick: bool,
        /// Only these programs: leasehold, bounds, and what bench/setup names.
        #[arg(long, value_delimiter = ',', value_name = "PROGRAM", value_parser = PossibleValuesParser::new(catalog::programs()))]
        only: Vec<String>,
        /// Where the results go [default: target/bench/run.json, and part.json beside it where only some are named].
        #[arg(long, value_name = "PATH")]
        output: Option<PathBuf>,
    },
    /// Write docs/benchmarks.md from what `compare` found.
    Report {
        /// What it found [default: target/bench/run.json].
        #[arg(long, value_name = "PATH")]
        from: Option<PathBuf>,
    },
    /// Be one of the peers that are part of this program.
    #[command(hide = true)]
    Peer { peer: Peer },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Uncontended lock and release, against round trips.
    Pair,
    /// From the release in one process to the critical section in another; what waiting costs.
    Handoff,
    /// Tasks of one client that hand a lease on among themselves.
    Local,
    /// Who gets how many turns, and how long others wait.
    Fairness,
    /// Several servers that vote, against one.
    Redlock,
    /// What the server's processor spends.
    ServerCost,
    /// What 100,000 held leases cost the server.
    Renewals,
}

fn main() {
    let args = Args::parse();
    if let Some(command) = args.command {
        return obey(command);
    }
    if let Some(url) = args.peer {
        return handoff::peer(&url);
    }
    let mut report = Report::new(args.json);
    let is_chosen = |part| args.parts.is_empty() || args.parts.contains(&part);
    if is_chosen(Part::Pair) {
        pair::run(&mut report);
    }
    if is_chosen(Part::Handoff) {
        handoff::run(&mut report);
    }
    if is_chosen(Part::Local) {
        local::run(&mut report);
    }
    if is_chosen(Part::Fairness) {
        local::fairness(&mut report, Duration::from_secs(args.seconds));
    }
    if is_chosen(Part::Redlock) {
        redlock::run(&mut report);
    }
    if is_chosen(Part::ServerCost) {
        server_cost::run(&mut report);
    }
    if is_chosen(Part::Renewals) {
        renewals::run(&mut report, Duration::from_secs(args.seconds));
    }
    report.end();
}

fn obey(command: Command) {
    match command {
        Command::Compare { scenarios, quick, only, output } => {
            let is_whole = scenarios.is_empty() && only.is_empty();
            let output = output.unwrap_or_else(|| compare::output(is_whole));
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
