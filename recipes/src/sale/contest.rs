//! Everybody's run, one after the other: a Redis of its own, the services, the customers, and what came of it.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_testkit::Server;
use tokio::process::Command;

use super::driver::{Load, Seen, drive};
use super::service::COUNT;
use super::{Contender, ab};
use crate::progress;
use crate::run::{Outcome, find};
use crate::worker::Worker;

/// How often progress is shown.
const LOOK: Duration = Duration::from_millis(250);

/// What one run came to.
#[derive(Clone, Debug)]
pub struct Row {
    /// How the services lock.
    pub contender: Contender,
    /// How many processes they are.
    pub services: usize,
    /// What the customers saw.
    pub seen: Seen,
    /// What Redis did for each sale, as it counts commands: those within scripts too.
    pub commands_per_sale: f64,
    /// Sales that were told to customers and not counted.
    pub oversold: i64,
}

/// One run. The services are processes of this program.
///
/// # Errors
///
/// A process that can't be started, a server that fails.
pub async fn compete(
    program: &Path,
    contender: &Contender,
    services: usize,
    load: Load,
    with_ab: bool,
) -> Outcome<Row> {
    let nodes = match contender {
        Contender::Recipe { id, .. } => find(id)?.nodes,
        Contender::Leasehold | Contender::Nothing => 1,
    };
    let servers: Vec<_> = (0..nodes).map(|_| Server::on_port()).collect();
    let urls: Vec<_> = servers.iter().map(Server::url).collect();
    let mut shops = Vec::new();
    for _ in 0..services {
        shops.push(Shop::open(program, contender, &urls).await?);
    }
    let ports: Vec<_> = shops.iter().map(|shop| shop.port).collect();
    let before = commands(&servers)?;
    let label = format!("{contender}, services: {services}");
    let seen = match ports[..] {
        [port] if with_ab => {
            progress::show(&label, "ab is under way");
            ab::drive(port, load).await?
        }
        _ => driven(&ports, load, &label).await,
    };
    progress::done(&label);
    let done = commands(&servers)? - before;
    let counted: Option<i64> = servers[0].query(&["GET", COUNT])?;
    let sold = i64::try_from(seen.sold())?;
    #[allow(clippy::cast_precision_loss, reason = "some millions")]
    let commands_per_sale = done as f64 / seen.sold().max(1) as f64;
    // What was counted for customers who were not told is no harm.
    let oversold = (sold - counted.unwrap_or(0)).max(0);
    Ok(Row { contender: contender.clone(), services, seen, commands_per_sale, oversold })
}

async fn driven(ports: &[u16], load: Load, label: &str) -> Seen {
    let answered = Arc::new(AtomicUsize::new(0));
    let driving = drive(ports, load, &answered);
    tokio::pin!(driving);
    loop {
        tokio::select! {
            seen = &mut driving => return seen,
            () = tokio::time::sleep(LOOK) => {
                let (answered, all) = (answered.load(Ordering::Relaxed), load.requests);
                progress::show(label, format_args!("{answered} of {all}"));
            }
        }
    }
}

fn commands(servers: &[Server]) -> Outcome<u64> {
    let mut all = 0;
    for server in servers {
        let info: String = server.query(&["INFO", "stats"])?;
        let count = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
        all += count.ok_or("the server does not count its commands")?.trim().parse::<u64>()?;
    }
    Ok(all)
}

/// A service in a process of its own. It ends when its standard input does.
struct Shop {
    port: u16,
    _process: Worker,
}

impl Shop {
    async fn open(program: &Path, contender: &Contender, urls: &[String]) -> Outcome<Self> {
        let mut command = Command::new(program);
        command.arg("service");
        match contender {
            Contender::Recipe { id, retry } => command.args(["--lock", id, "--retry", &retry.to_string()]),
            other => command.args(["--lock", &other.to_string()]),
        };
        let mut process = Worker::start(command.args(urls))?;
        let port = process.hear().await?.trim().parse().map_err(|_| "the service did not start")?;
        Ok(Self { port, _process: process })
    }
}

/// The table of all runs.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut out = String::from(
        "| lock and policy | services | driver | sales/s | failed | p50 | p90 | p99 | max | commands/sale | oversold |\n",
    );
    out += "|---|---|---|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let Row { contender, services, seen, commands_per_sale, oversold } = row;
        let (driver, failed, rate) = (seen.driver, seen.failed, seen.rate());
        let [p50, p90, p99, max] = [500, 900, 990, 1_000].map(|part| span(seen.quantile(part)));
        let _ = writeln!(
            out,
            "| {contender} | {services} | {driver} | {rate:.0} | {failed} | {p50} | {p90} | {p99} | {max} | {commands_per_sale:.1} | {oversold} |"
        );
    }
    out
}

/// How leasehold stands beside the best of the others, for each number of services.
#[must_use]
pub fn comparison(rows: &[Row]) -> String {
    let mut out = String::new();
    for own in rows.iter().filter(|row| row.contender == Contender::Leasehold) {
        let others = rows
            .iter()
            .filter(|row| row.services == own.services && matches!(row.contender, Contender::Recipe { .. }));
        let others: Vec<_> = others.collect();
        let rate = others.iter().map(|row| row.seen.rate()).fold(0.0, f64::max);
        let p99 = others.iter().map(|row| row.seen.quantile(990)).min();
        if let Some(p99) = p99.filter(|_| rate > 0.0) {
            let (times, part) =
                (own.seen.rate() / rate, p99.as_secs_f64() / own.seen.quantile(990).as_secs_f64());
            let _ = writeln!(
                out,
                "services: {}: {times:.1} × the sales of the best published policy, 1/{part:.1} of the best p99",
                own.services
            );
        }
    }
    out
}

/// In milliseconds, or seconds.
pub(super) fn span(span: Duration) -> String {
    let ms = span.as_secs_f64() * 1_000.0;
    match ms {
        ..10.0 => format!("{ms:.1} ms"),
        ..1_000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.1} s", ms / 1_000.0),
    }
}
