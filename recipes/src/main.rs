//! The program: arguments, then what they ask for, then the exit code.

use std::io::{IsTerminal as _, stderr};
use std::process::ExitCode;

use clap::Parser as _;
use recipes::args::{Action, Cli, Explore, Which};
use recipes::recipe::Terms;
use recipes::recipes::leasehold::{OWN, unaltered};
use recipes::recipes::{ROWS, Variant};
use recipes::run::{Outcome, find, run};
use recipes::verdict::{Verdict, examine};
use recipes::{report, timeline};

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.action {
        Action::List => {
            list();
            Ok(())
        }
        Action::Run(args) => run(&args).await.map(|summary| {
            println!(
                "{} of {} clients got it; at most {} inside at once",
                summary.got, args.clients, summary.most_inside
            );
        }),
        Action::Explore(args) => explore(&args),
        Action::Report { out } => report::write(&report::files(&report::examine_all(progress)), &out)
            .map_err(|error| format!("{}: {error}: choose another folder with --out", out.display()).into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("recipes: {error}");
            ExitCode::FAILURE
        }
    }
}

fn list() {
    for row in ROWS {
        println!("{:24} {}", row.id, row.acquire);
        for variant in row.variants.iter().filter(|variant| !variant.switches.is_empty()) {
            println!("{:24}   with {}", "", variant.switches);
        }
    }
    for own in OWN {
        println!("{:24} leasehold's own {}, to be explored", own.id, own.title);
    }
}

fn explore(args: &Explore) -> Outcome<()> {
    let id = &args.which.id;
    let verdict = match OWN.iter().find(|own| own.id == *id) {
        Some(own) => examine(&own.subject(unaltered), &own.scenarios()),
        None => examine_recipe(&args.which)?,
    };
    println!("{} states{}", verdict.states, bound(&verdict));
    if verdict.findings.is_empty() {
        println!("nothing breaks");
    }
    let mut pictures = Vec::new();
    for finding in &verdict.findings {
        let title = format!("{id}: {}?", finding.check());
        let follows =
            finding.violation.follows.map_or(String::new(), |first| format!(", after this one: {first}"));
        println!("\n✗ {} breaks {}{follows}\n", finding.check(), finding.fault);
        print!("{}", timeline::text(&finding.violation));
        pictures.push((finding.brief(), timeline::svg(&title, &finding.violation)));
    }
    let Some(folder) = &args.out else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for (brief, picture) in &pictures {
        let name = brief.trim_start_matches('~').replace(' ', "-").to_lowercase();
        std::fs::write(folder.join(format!("{id}-{name}.svg")), picture)?;
    }
    let pictures: Vec<_> = pictures.into_iter().map(|(_, picture)| picture).collect();
    std::fs::write(folder.join(format!("{id}.html")), timeline::html(id, &pictures))?;
    println!("\nwritten to {}", folder.display());
    Ok(())
}

fn examine_recipe(which: &Which) -> Outcome<Verdict> {
    let row = find(&which.id)?;
    let mut asked = Terms::default();
    which.set(&mut asked);
    let is_asked = |variant: &&Variant| {
        let mut terms = Terms::default();
        (variant.set)(&mut terms);
        terms == asked
    };
    let variant = row.variants.iter().find(is_asked).ok_or_else(|| {
        let ways: Vec<_> =
            row.variants.iter().map(|variant| variant.switches).filter(|way| !way.is_empty()).collect();
        format!(
            "{} has no such variant; it has {}",
            row.id,
            if ways.is_empty() { "none".to_owned() } else { ways.join(", or ") }
        )
    })?;
    Ok(examine(&row.subject(variant), &row.scenarios()))
}

fn bound(verdict: &Verdict) -> String {
    match verdict.bound {
        Some(bound) => format!(", all schedules of up to {bound} events"),
        None => ", every interleaving".to_owned(),
    }
}

fn progress(done: usize, all: usize) {
    if stderr().is_terminal() {
        eprint!("\r{done} of {all} explored");
        if done == all {
            eprintln!();
        }
    }
}
