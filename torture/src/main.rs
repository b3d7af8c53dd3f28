//! `leasehold-torture`: tries to break a lock with real servers, real processes and faults.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand, ValueEnum as _};
use leasehold_bench::peers::{self, Peer};
use leasehold_torture::faults::{Fault, StoreKind};
use leasehold_torture::options::{Options, TASKS, TTL, WORKERS, WRITE, millis};
use leasehold_torture::run::run;
use leasehold_torture::serve::Repeats;
use leasehold_torture::targets::Target;
use leasehold_torture::{kinds, page, serve, specimens};

/// Tries to break a lock. The exit code is 1 if a promise was broken that the guarantees do not exempt, and 2 if the run failed,
/// or says less than was asked for: no task has held the lock, a fault was not injected, or it is unknown what is left.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The lock: leasehold, a peer that bench/setup builds, or a specimen that is broken on purpose
    #[arg(long, default_value = "leasehold", value_parser = PossibleValuesParser::new(Target::all().map(|target| target.name)))]
    target: String,
    /// The store
    #[arg(long, value_enum, default_value = "redis")]
    store: StoreKind,
    /// Faults to inject, separated by commas; `all` that apply to the store, or `none`
    #[arg(long, value_delimiter = ',', default_value = "all")]
    faults: Vec<String>,
    /// Time for new attempts
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Repeats the faults and the lengths of sections [default: by chance]
    #[arg(long)]
    seed: Option<u64>,
    /// The folder for the report [default: target/torture/TARGET-STORE]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The ttl of the leases, in milliseconds
    #[arg(long, default_value_t = millis(TTL))]
    ttl_ms: u64,
    /// How long the write at the end of a section is on its way, in milliseconds
    #[arg(long, default_value_t = millis(WRITE))]
    write_ms: u64,
    /// Worker processes
    #[arg(long, default_value_t = WORKERS)]
    workers: u32,
    /// Tasks of each worker process
    #[arg(long, default_value_t = TASKS)]
    tasks: u32,
    /// Print each fault
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Run as a worker
    #[command(hide = true)]
    Peer { name: String },
    /// Run as a server of `leasehold serve` on this store
    #[command(hide = true)]
    Server { store: String },
    /// Write docs/torture.md from the reports in these folders
    Report {
        /// Folders with `report.json`, also within folders in them [default: only the reports in docs/torture]
        folders: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.command {
        Some(Command::Peer { name }) => peer(name).map(|()| false),
        Some(Command::Server { store }) => serve::run_server(store).map(|()| false),
        Some(Command::Report { folders }) => publish(folders).map(|()| false),
        None => torture(&args),
    };
    match done {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("leasehold-torture: {why}");
            ExitCode::from(2)
        }
    }
}

fn peer(name: &str) -> Result<(), String> {
    match name {
        "leasehold" => peers::run(Peer::Leasehold),
        "leasehold-kinds" => kinds::run(),
        "leasehold-serve" => serve::run_caller(Repeats::UntilAnswered),
        "broken-asks-once" => serve::run_caller(Repeats::Never),
        specimen => return specimens::run(specimen),
    }
    Ok(())
}

fn publish(folders: &[PathBuf]) -> Result<(), String> {
    let page = page::publish(folders).map_err(|error| error.to_string())?;
    println!("{}", page.display());
    Ok(())
}

/// Returns whether a promise was broken.
fn torture(args: &Args) -> Result<bool, String> {
    let target = Target::find(&args.target).ok_or("no such target")?;
    let seed = args.seed.unwrap_or_else(|| leasehold_bench_peer::clock::now_ns() % 1_000_000);
    let options = Options {
        target,
        store: args.store,
        faults: faults(&args.faults, &target, args.store)?,
        time: Duration::from_secs_f64(args.minutes * 60.0),
        seed,
        ttl: Duration::from_millis(args.ttl_ms),
        write: Duration::from_millis(args.write_ms),
        workers: (args.workers, args.tasks),
        is_verbose: args.verbose,
    };
    // The testkit panics if a server does not come back within its limit: that is no violation, but a run that failed.
    let ran = std::panic::catch_unwind(|| run(&options));
    let (report, history) = ran.map_err(|_| "the run failed; the panic above has the reason")??;
    let out = args.out.clone().unwrap_or_else(|| {
        PathBuf::from("target/torture").join(format!("{}-{}", target.name, args.store.name()))
    });
    report.write(&out, &history).map_err(|error| format!("{}: {error}", out.display()))?;
    println!("{}{}", report.text(), out.display());
    match report.shortfall() {
        Some(why) if !report.is_violated => Err(why),
        _ => Ok(report.is_violated),
    }
}

fn faults(names: &[String], target: &Target, store: StoreKind) -> Result<Vec<Fault>, String> {
    match names {
        [all] if all == "all" => Ok(target.faults(store)),
        [none] if none == "none" => Ok(Vec::new()),
        names => names.iter().map(|name| fault(name, target, store)).collect(),
    }
}

fn fault(name: &str, target: &Target, store: StoreKind) -> Result<Fault, String> {
    let (fault, all) = (Fault::from_str(name, false)?, target.faults(store));
    if all.contains(&fault) {
        return Ok(fault);
    }
    let all: Vec<String> = all.into_iter().map(Fault::name).collect();
    Err(format!(
        "{name} does not apply to {} on {}; there are: {}",
        target.name,
        store.name(),
        all.join(", ")
    ))
}
