//! One run for each lock: a Redis of its own, the service processes, the load, and the result.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_testkit::{Postgres, Server};
use tokio::process::Command;

use super::driver::{Load, LoadResult, drive};
use super::service::COUNT;
use super::{Contender, ab};
use crate::outcome::{Outcome, find};
use crate::progress;
use crate::worker::Worker;

/// How often progress is shown.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// The result of one run.
#[derive(Clone, Debug)]
pub struct Run {
    /// What the load driver measured.
    pub result: LoadResult,
    /// Commands per sale as Redis counts them, those within scripts included.
    pub commands_per_sale: f64,
    /// Sales that were reported to a client but not counted.
    pub oversold: i64,
}

/// Runs one lock once. The services are processes of this program.
///
/// # Errors
///
/// A process that does not start, or a server that fails.
pub async fn measure_contender(
    program: &Path,
    contender: &Contender,
    services: usize,
    load: Load,
    with_ab: bool,
) -> Outcome<Run> {
    let nodes = match contender {
        Contender::Recipe { id, .. } => find(id)?.nodes,
        Contender::Leasehold | Contender::LeaseholdPostgres | Contender::Nothing => 1,
    };
    let servers: Vec<_> = (0..nodes).map(|_| Server::on_port()).collect();
    let postgres = (*contender == Contender::LeaseholdPostgres).then(Postgres::on_port);
    let urls: Vec<_> = servers.iter().map(Server::url).chain(postgres.as_ref().map(Postgres::url)).collect();
    let mut processes = Vec::new();
    for _ in 0..services {
        processes.push(ServiceProcess::start(program, contender, &urls).await?);
    }
    let ports: Vec<_> = processes.iter().map(|process| process.port).collect();
    let before = commands(&servers)?;
    let label = format!("{contender}, services: {services}");
    let result = match ports[..] {
        [port] if with_ab => {
            progress::show(&label, "ab is running");
            ab::drive(port, load).await?
        }
        _ => drive_with_progress(&ports, load, &label).await,
    };
    progress::done(&label);
    let commands = commands(&servers)? - before;
    let counted: Option<i64> = servers[0].query(&["GET", COUNT])?;
    let sold = i64::try_from(result.sold())?;
    #[allow(clippy::cast_precision_loss, reason = "some millions")]
    let commands_per_sale = commands as f64 / result.sold().max(1) as f64;
    // A sale that was counted but whose response was lost is not an oversale.
    let oversold = (sold - counted.unwrap_or(0)).max(0);
    Ok(Run { result, commands_per_sale, oversold })
}

async fn drive_with_progress(ports: &[u16], load: Load, label: &str) -> LoadResult {
    let completed = Arc::new(AtomicUsize::new(0));
    let driving = drive(ports, load, &completed);
    tokio::pin!(driving);
    loop {
        tokio::select! {
            result = &mut driving => return result,
            () = tokio::time::sleep(PROGRESS_INTERVAL) => {
                let (completed, all) = (completed.load(Ordering::Relaxed), load.requests);
                progress::show(label, format_args!("{completed} of {all}"));
            }
        }
    }
}

fn commands(servers: &[Server]) -> Outcome<u64> {
    let mut all = 0;
    for server in servers {
        let info: String = server.query(&["INFO", "stats"])?;
        let count = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
        all += count.ok_or("INFO has no total_commands_processed")?.trim().parse::<u64>()?;
    }
    Ok(all)
}

/// A service in a process of its own, which exits when its standard input is closed.
struct ServiceProcess {
    port: u16,
    _process: Worker,
}

impl ServiceProcess {
    async fn start(program: &Path, contender: &Contender, urls: &[String]) -> Outcome<Self> {
        let mut command = Command::new(program);
        command.arg("service");
        match contender {
            Contender::Recipe { id, retry } => command.args(["--lock", id, "--retry", &retry.to_string()]),
            other => command.args(["--lock", &other.to_string()]),
        };
        let mut process = Worker::start(command.args(urls))?;
        let port = process.read_line().await?.trim().parse().map_err(|_| "the service did not start")?;
        Ok(Self { port, _process: process })
    }
}
