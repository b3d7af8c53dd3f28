//! Runs seeds on all cores, or one seed with its diagram, or looks for planted bugs.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold_sim::checks::{Promise, Violation};
use leasehold_sim::plan::{Case, Part, Plan};
use leasehold_sim::planted::Planted;
use leasehold_sim::quorum;
use leasehold_sim::run::{Outcome, hours, run, run_twice};
use leasehold_sim::shrink::shrink;

const USAGE: &str = "\
usage: leasehold-sim [--quorum | --rate] [--seeds N] [--minutes M] [--from SEED] [--threads N]
       leasehold-sim [--quorum | --rate] --seed CASE [--lines N]
       leasehold-sim [--quorum] --planted [NAME]

  --quorum      Redlock over three or five nodes, not one server
  --rate        a contended lock over a quorum, with and without a slow or silent minority of the nodes
  --seeds N     run this many seeds (1000)
  --minutes M   stop after this many minutes
  --from SEED   begin with this seed (1)
  --seed CASE   run one case, as a failure prints it, and print its diagram
  --lines N     show at most the last N lines of it (200)
  --planted     look for each planted bug, or for one, in at most 10,000 seeds";

/// Every so many seeds one is run twice, and the histories are compared.
const TWICE: u64 = 100;

/// Which simulation: one server, or a quorum.
#[derive(Clone, Copy)]
struct Model {
    run: fn(&Case, Option<usize>) -> Outcome,
    run_twice: fn(&Case) -> Outcome,
    parts: fn(&Case) -> Vec<Part>,
    describe: fn(&Case) -> String,
    fresh: fn(u64) -> Case,
}

const SERVER: Model = Model {
    run: |case, lines| run(case, None, lines),
    run_twice,
    parts: Plan::parts,
    describe: |case| format!("{:#?}", Plan::new(case)),
    fresh: Case::fresh,
};

const QUORUM: Model = Model {
    run: |case, lines| quorum::run::run(case, None, lines),
    run_twice: quorum::run::run_twice,
    parts: quorum::plan::Plan::parts,
    describe: |case| format!("{:#?}", quorum::plan::Plan::new(case)),
    fresh: |seed| Case { seed, ..Case::default() },
};

const RATE: Model = Model {
    run: |case, lines| quorum::rate::run(case, None, lines),
    run_twice: |case| quorum::rate::run(case, None, None),
    parts: |_| Vec::new(),
    describe: |case| {
        let plan = quorum::plan::Plan::contended(case.seed, true);
        format!("{:#?} {:#?} {:?}", plan.faults, plan.nodes.len(), plan.tasks.len())
    },
    fresh: |seed| Case { seed, ..Case::default() },
};

/// Runs a case, up to a step.
type Run = Box<dyn Fn(&Case, Option<usize>) -> Outcome + Sync>;

/// A planted bug: its name, the check that must find it, the violation that must be its, and a run with it.
struct Bug {
    name: String,
    breaks: Promise,
    explains: Box<dyn Fn(&Violation) -> bool + Sync>,
    run: Run,
    case: Box<dyn Fn(u64) -> Case + Sync>,
}

fn bugs(is_quorum: bool) -> Vec<Bug> {
    if is_quorum {
        let bug = |bug: quorum::planted::Planted| Bug {
            name: bug.to_string(),
            breaks: bug.breaks(),
            explains: Box::new(move |violation| bug.explains(violation)),
            run: Box::new(move |case, lines| quorum::run::run(case, Some(bug), lines)),
            case: Box::new(QUORUM.fresh),
        };
        quorum::planted::Planted::ALL.into_iter().map(bug).collect()
    } else {
        let bug = |bug: Planted| Bug {
            name: bug.to_string(),
            breaks: bug.breaks(),
            explains: Box::new(move |violation| bug.explains(violation)),
            run: Box::new(move |case, lines| run(case, Some(bug), lines)),
            case: Box::new(move |seed| bug.case(seed)),
        };
        Planted::ALL.into_iter().map(bug).collect()
    }
}

struct Args {
    model: Model,
    seeds: u64,
    minutes: Option<f64>,
    from: u64,
    threads: usize,
    case: Option<Case>,
    lines: usize,
    planted: Option<Vec<Bug>>,
}

fn parse() -> Result<Args, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let is_quorum = std::env::args().any(|word| word == "--quorum");
    let is_rate = std::env::args().any(|word| word == "--rate");
    let model = match (is_rate, is_quorum) {
        (true, _) => RATE,
        (false, true) => QUORUM,
        (false, false) => SERVER,
    };
    let mut args =
        Args { model, seeds: 1000, minutes: None, from: 1, threads, case: None, lines: 200, planted: None };
    let mut words = std::env::args().skip(1).filter(|word| word != "--quorum" && word != "--rate").peekable();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text:?} is no number"));
        match &*word {
            "--seeds" => args.seeds = number(value()?)?,
            "--from" => args.from = number(value()?)?,
            "--threads" => args.threads = usize::try_from(number(value()?)?).unwrap_or(1),
            "--lines" => args.lines = usize::try_from(number(value()?)?).unwrap_or(200),
            "--minutes" => args.minutes = Some(value()?.parse().map_err(|_| "how many minutes?".to_owned())?),
            "--seed" => args.case = Some(value()?.parse()?),
            "--planted" => {
                let name = words.next_if(|word| !word.starts_with("--"));
                let chosen = bugs(is_quorum).into_iter();
                let chosen = chosen.filter(|bug| name.as_ref().is_none_or(|name| *name == bug.name));
                let chosen: Vec<Bug> = chosen.collect();
                if chosen.is_empty() {
                    let names: Vec<String> = bugs(is_quorum).into_iter().map(|bug| bug.name).collect();
                    let name = name.unwrap_or_default();
                    return Err(format!("no planted bug is called {name:?}; there are {}", names.join(", ")));
                }
                args.planted = Some(chosen);
            }
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(args)
}

fn main() -> ExitCode {
    let args = match parse() {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let is_fine = match (&args.case, &args.planted) {
        (Some(case), planted) => replay(&args, case, planted.as_ref().and_then(|planted| planted.first())),
        (None, Some(planted)) => planted.iter().filter(|bug| !find(bug, &args)).count() == 0,
        (None, None) => match explore(&args) {
            Some(is_fine) => is_fine,
            None => {
                eprintln!("no seed was run");
                return ExitCode::from(2);
            }
        },
    };
    if is_fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Shows a case. Returns whether it is as it must be: without a violation, or with the one of the planted bug.
fn replay(args: &Args, case: &Case, planted: Option<&Bug>) -> bool {
    println!("{}", (args.model.describe)(case));
    let outcome = match planted {
        Some(bug) => (bug.run)(case, Some(args.lines)),
        None => (args.model.run)(case, Some(args.lines)),
    };
    println!("{}", outcome.timeline);
    println!(
        "{:.3} simulated hours, {} grants, {} polls, history {:016x}",
        hours(outcome.simulated),
        outcome.grants,
        outcome.polls,
        outcome.hash
    );
    match &outcome.violation {
        None => println!("no promise was broken"),
        Some(violation) => println!("✗ {} ({} µs): {}", violation.promise, violation.at, violation.what),
    }
    match planted {
        Some(bug) => outcome.violation.is_some_and(|violation| (bug.explains)(&violation)),
        None => outcome.violation.is_none(),
    }
}

/// Runs many seeds. Returns whether none broke a promise, or `None` if none was run.
fn explore(args: &Args) -> Option<bool> {
    let began = Instant::now();
    let (next, done, simulated, grants) =
        (AtomicU64::new(args.from), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let is_over = AtomicBool::new(false);
    let failed = Mutex::new(Vec::new());
    let limit = args.minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0));
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) && limit.is_none_or(|limit| began.elapsed() < limit) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= args.from + args.seeds {
                        break;
                    }
                    let case = (args.model.fresh)(seed);
                    let outcome = if seed.is_multiple_of(TWICE) {
                        (args.model.run_twice)(&case)
                    } else {
                        (args.model.run)(&case, None)
                    };
                    done.fetch_add(1, Ordering::Relaxed);
                    simulated.fetch_add(outcome.simulated, Ordering::Relaxed);
                    grants.fetch_add(outcome.grants, Ordering::Relaxed);
                    if let Some(violation) = outcome.violation {
                        println!("seed {case}: {}: {}", violation.promise, violation.what);
                        let mut failed = failed.lock().expect("no thread panicked");
                        failed.push((case, violation));
                        is_over.store(failed.len() >= 50, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let (done, simulated) = (done.into_inner(), hours(simulated.into_inner()));
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    let failed = failed.into_inner().expect("no thread panicked");
    println!(
        "{done} seeds, {simulated:.1} simulated hours in {minutes:.2} minutes on {} threads: {:.0} hours a minute; {} grants; {} violations",
        args.threads,
        simulated / minutes,
        grants.into_inner(),
        failed.len()
    );
    if let Some((case, violation)) = failed.first() {
        let small =
            shrink(case, violation.promise, 2_000, args.model.parts, |case| (args.model.run)(case, None));
        let outcome = (args.model.run)(&small, Some(args.lines));
        println!("\nmade smaller: --seed \"{small}\"\n{}", outcome.timeline);
        if let Some(violation) = outcome.violation {
            println!("✗ {}: {}", violation.promise, violation.what);
        }
    }
    (done > 0).then_some(failed.is_empty())
}

/// Looks for a planted bug. Returns whether the check found it.
fn find(bug: &Bug, args: &Args) -> bool {
    const LIMIT: u64 = 10_000;
    let from = args.from;
    let next = AtomicU64::new(from);
    let found = Mutex::new(None::<u64>);
    let others = Mutex::new(std::collections::BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + LIMIT
                        || found.lock().expect("no thread panicked").is_some_and(|found| found < seed)
                    {
                        break;
                    }
                    let outcome = (bug.run)(&(bug.case)(seed), None);
                    let Some(violation) = outcome.violation else { continue };
                    if (bug.explains)(&violation) {
                        let mut found = found.lock().expect("no thread panicked");
                        *found = Some(found.map_or(seed, |found| found.min(seed)));
                    } else {
                        *others.lock().expect("no thread panicked").entry(violation.promise).or_insert(0) +=
                            1;
                    }
                }
            });
        }
    });
    let others: Vec<String> = others
        .into_inner()
        .expect("no thread panicked")
        .iter()
        .map(|(promise, count)| format!("{promise}: {count}"))
        .collect();
    let others =
        if others.is_empty() { String::new() } else { format!("; others before: {}", others.join(", ")) };
    let found = found.into_inner().expect("no thread panicked");
    match found {
        Some(seed) => {
            println!("{}: found after {} seeds ({}){others}", bug.name, seed - from + 1, bug.breaks);
        }
        None => println!("{}: NOT found in {LIMIT} seeds ({}){others}", bug.name, bug.breaks),
    }
    found.is_some()
}
