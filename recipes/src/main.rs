//! The program: arguments, then what they ask for, then the exit code.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;
use recipes::args::{Action, Cli, Driver, Explore, FlashSale, Lottery, Which};
use recipes::lottery::{self, Way};
use recipes::recipe::Terms;
use recipes::recipes::leasehold::{OWN, unaltered};
use recipes::recipes::{ROWS, Variant};
use recipes::run::{Outcome, find, run};
use recipes::sale::driver::Load;
use recipes::sale::{Contender, Retry, ab, contest, picture, raise_file_limit, service};
use recipes::verdict::{Verdict, examine};
use recipes::{progress, report, timeline};

#[tokio::main(flavor = "current_thread")]
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
        Action::Report { out } => write_report(&out),
        Action::FlashSale(args) => flash_sale(&args).await,
        Action::Lottery(args) => draw(&args).await,
        Action::Instance { lock, database, urls } => match Way::named(&lock) {
            Ok(way) => lottery::instance(way, &database, &urls).await,
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

fn write_report(out: &Path) -> Outcome<()> {
    let say = |done, all| progress::show("exploring", format_args!("{done} of {all}"));
    let files = report::files(&report::examine_all(say));
    progress::done("exploring");
    report::write(&files, out)
        .map_err(|error| format!("{}: {error}: choose another folder with --out", out.display()).into())
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

fn contender(lock: &str, retry: Option<Retry>) -> Outcome<Contender> {
    let mut named = Contender::named(lock, retry.as_slice())?;
    named.pop().filter(|_| named.is_empty()).ok_or_else(|| format!("{lock} needs --retry").into())
}

async fn flash_sale(args: &FlashSale) -> Outcome<()> {
    raise_file_limit();
    let contenders = args.contenders()?;
    let has_ab = args.driver != Driver::BuiltIn && ab::is_there().await;
    if args.driver == Driver::Ab && !has_ab {
        return Err("ab is not installed: apt-get install apache2-utils, or leave out --driver".into());
    }
    let load = Load {
        requests: usize::try_from(args.requests)?,
        customers: usize::try_from(args.customers.min(args.requests))?,
        limit: Duration::from_secs(args.limit),
    };
    let program = std::env::current_exe()?;
    let mut rows = Vec::new();
    for services in args.services.iter().copied().map(usize::from) {
        for contender in &contenders {
            rows.push(contest::compete(&program, contender, services, load, has_ab).await?);
        }
    }
    print!("{}\n{}", contest::table(&rows), contest::comparison(&rows));
    let Some(folder) = &args.out else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for services in args.services.iter().copied().map(usize::from) {
        std::fs::write(folder.join(format!("flash-sale-{services}.svg")), picture::svg(&rows, services))?;
    }
    Ok(())
}

async fn draw(args: &Lottery) -> Outcome<()> {
    let ways: Outcome<Vec<_>> = args.lock.iter().map(|name| Way::named(name)).collect();
    let ways = if args.lock.is_empty() { Way::all().collect() } else { ways? };
    let program = std::env::current_exe()?;
    let mut tallies = Vec::new();
    for way in ways {
        tallies.push(lottery::play(&program, way, args.processes, args.rounds).await?);
    }
    print!("{}", lottery::table(&tallies));
    Ok(())
}
