//! The program: arguments, then what they ask for, then the exit code.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;
use recipes::args::{Action, Cli, Driver, Explore, FlashSale, Lottery, Which};
use recipes::lottery::{self, LockChoice};
use recipes::outcome::{Outcome, find};
use recipes::recipe::LockOptions;
use recipes::recipes::leasehold::{OWN, unmodified};
use recipes::recipes::{ROWS, Row, Variant, articles};
use recipes::run::run;
use recipes::sale::driver::Load;
use recipes::sale::measure::measure_contender;
use recipes::sale::{Contender, Retry, ab, chart, raise_file_limit, service, summary};
use recipes::verdict::{Verdict, explore_scenarios};
use recipes::{progress, report, timeline};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.action {
        Action::List { articles } => {
            list(articles);
            Ok(())
        }
        Action::Run(args) => run(&args).await.map(|summary| {
            println!(
                "{} of {} clients acquired the lock; at most {} in the critical section at once",
                summary.acquired, args.clients, summary.most_inside
            );
        }),
        Action::Explore(args) => explore(&args),
        Action::Report { out } => write_report(&out),
        Action::FlashSale(args) => flash_sale(&args).await,
        Action::Lottery(args) => draw(&args).await,
        Action::Instance { lock, database, urls } => match LockChoice::named(&lock) {
            Ok(choice) => lottery::instance(choice, &database, &urls).await,
            Err(error) => Err(error),
        },
        Action::Service { lock, retry, urls } => match contender(&lock, retry) {
            Ok(contender) => service::serve(contender, &urls).await,
            Err(error) => Err(error),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("recipes: {error}");
            ExitCode::FAILURE
        }
    }
}

fn list(wants_articles: bool) {
    if wants_articles {
        print!("{}", articles::text());
        return;
    }
    for row in ROWS {
        println!("{}\n  acquire: {}\n  release: {}", row.id, row.acquire, row.release);
        for variant in row.variants.iter().filter(|variant| !variant.switches.is_empty()) {
            println!("  variant: {} {}", row.id, variant.switches);
        }
        print_advice(row);
        println!();
    }
    println!("leasehold's own locks, to be explored in the same choice:");
    for own in OWN {
        println!("  {:24} {}", own.id, own.title);
    }
}

fn print_advice(row: &Row) {
    println!("  known problem: {}\n  use: {}", row.problems(), row.instead);
}

fn explore(args: &Explore) -> Outcome<()> {
    let id = &args.which.id;
    let verdict = match OWN.iter().find(|own| own.id == *id) {
        Some(own) => explore_scenarios(&own.subject(unmodified), &own.scenarios()),
        None => explore_recipe(&args.which)?,
    };
    println!("{id}: {} states{}", verdict.states, bound(&verdict));
    if verdict.findings.is_empty() {
        println!("every check holds");
    }
    let mut pictures = Vec::new();
    for finding in &verdict.findings {
        let title = format!("{id}: {}?", finding.check());
        println!("\n✗ {}: {}\n", finding.check(), report::broken(finding));
        print!("{}", timeline::text(&finding.violation));
        pictures.push((finding.brief(), timeline::svg(&title, &finding.violation)));
    }
    if let Some(row) = recipes::recipes::find(id) {
        println!("\n{id}");
        print_advice(row);
    }
    let Some(folder) = &args.out else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for (brief, picture) in &pictures {
        let name = brief.trim_start_matches('~').replace(' ', "-").to_lowercase();
        std::fs::write(folder.join(format!("{id}-{name}.svg")), picture)?;
    }
    let pictures: Vec<_> = pictures.into_iter().map(|(_, picture)| picture).collect();
    std::fs::write(folder.join(format!("{id}.html")), timeline::html(id, &pictures))?;
    println!("\npictures written to {}", folder.display());
    Ok(())
}

fn write_report(out: &Path) -> Outcome<()> {
    let progress = |done, all| progress::show("exploring", format_args!("{done} of {all}"));
    let files = report::files(&report::explore_all(progress));
    progress::done("exploring");
    report::write(&files, out)
        .map_err(|error| format!("{}: {error}: choose another folder with --out", out.display()).into())
}

fn explore_recipe(which: &Which) -> Outcome<Verdict> {
    let row = find(&which.id)?;
    let mut requested = LockOptions::default();
    which.set(&mut requested);
    let is_requested = |variant: &&Variant| {
        let mut options = LockOptions::default();
        (variant.set)(&mut options);
        options == requested
    };
    let variant = row.variants.iter().find(is_requested).ok_or_else(|| {
        let variants: Vec<_> = row
            .variants
            .iter()
            .map(|variant| variant.switches)
            .filter(|switches| !switches.is_empty())
            .collect();
        format!(
            "{} has no such variant; it has {}",
            row.id,
            if variants.is_empty() { "none".to_owned() } else { variants.join(", or ") }
        )
    })?;
    Ok(explore_scenarios(&row.subject(variant), &row.scenarios()))
}

fn bound(verdict: &Verdict) -> String {
    match verdict.bound {
        Some(bound) => format!(", all schedules of up to {bound} events"),
        None => ", every interleaving".to_owned(),
    }
}

fn contender(lock: &str, retry: Option<Retry>) -> Outcome<Contender> {
    let mut named = Contender::named(lock, retry.as_slice())?;
    named.pop().filter(|_| named.is_empty()).ok_or_else(|| format!("{lock} needs --retry").into())
}

async fn flash_sale(args: &FlashSale) -> Outcome<()> {
    raise_file_limit();
    let contenders = args.contenders()?;
    let has_ab = args.driver != Driver::BuiltIn && ab::is_installed().await;
    if args.driver == Driver::Ab && !has_ab {
        return Err("ab is not installed: apt-get install apache2-utils, or leave out --driver".into());
    }
    let load = Load {
        requests: usize::try_from(args.requests)?,
        clients: usize::try_from(args.clients.min(args.requests))?,
        limit: Duration::from_secs(args.limit),
    };
    let program = std::env::current_exe()?;
    let mut rows = Vec::new();
    for services in args.services.iter().copied().map(usize::from) {
        let new_row =
            |contender: &Contender| summary::Row { contender: contender.clone(), services, runs: Vec::new() };
        let mut measured: Vec<_> = contenders.iter().map(new_row).collect();
        for round in 1..=args.runs {
            eprintln!("round {round} of {}", args.runs);
            for row in &mut measured {
                row.runs.push(measure_contender(&program, &row.contender, services, load, has_ab).await?);
            }
        }
        rows.extend(measured);
    }
    print!("{}\n{}", summary::table(&rows), summary::comparison(&rows));
    if let Some(page) = &args.page {
        let text = std::fs::read_to_string(page).map_err(|error| format!("{}: {error}", page.display()))?;
        std::fs::write(page, summary::replace_in(&text, &rows)?)?;
    }
    let Some(folder) = &args.out else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for services in args.services.iter().copied().map(usize::from) {
        let charts = [
            ("", chart::latencies(&rows, services, load.clients)),
            ("-rates", chart::rates(&rows, services, load.clients)),
        ];
        for (suffix, svg) in charts {
            std::fs::write(folder.join(format!("flash-sale-{services}{suffix}.svg")), svg)?;
        }
    }
    Ok(())
}

async fn draw(args: &Lottery) -> Outcome<()> {
    let choices: Outcome<Vec<_>> = args.lock.iter().map(|name| LockChoice::named(name)).collect();
    let choices = if args.lock.is_empty() { LockChoice::all().collect() } else { choices? };
    let program = std::env::current_exe()?;
    let mut tallies = Vec::new();
    for choice in choices {
        tallies.push(lottery::play(&program, choice, args.processes, args.rounds).await?);
    }
    print!("{}", lottery::table(&tallies));
    Ok(())
}
