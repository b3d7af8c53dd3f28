//! Many clients, each with connections and a lease of its own: the server is killed and started again with its files.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_bench_peer::acquisition;
use leasehold_bench_peer::clock::now_ns;
use leasehold_bench_peer::protocol::{Open, Order, Run};
use leasehold_testkit::Server;

use super::held::{Holding, held};
use super::limits::{Need, prefer};
use super::observe::{Info, Sampler, Watch};
use super::plan::{Plan, milliseconds};
use crate::compare::environment::Environment;
use crate::compare::results::{Cell, Figures};
use crate::server_cost::server_seconds;

const CLIENTS: u32 = 10_000;
const PROCESSES: u32 = 8;
/// Each client has two, since it is opened outside of a tokio runtime.
pub(super) const CONNECTIONS: u64 = 2;
/// How long the server is down.
const DOWN: Duration = Duration::from_secs(1);
/// Time from the kill until all clients want a second lock, and how soon they try again after a failure.
const LEAD: Duration = Duration::from_millis(50);
const RETRY: Duration = Duration::from_millis(500);
/// How often it is asked whether the server answers.
const LOOK: Duration = Duration::from_millis(10);
/// Max time until all clients are healthy.
const LIMIT: Duration = Duration::from_secs(60);

/// The scenario.
pub(super) fn run(plan: &Plan) -> Result<Cell, String> {
    let clients = plan.count(CLIENTS).max(PROCESSES);
    let row = plan.row("leasehold", measure(plan, clients)?);
    let title = format!(
        "{} clients in {PROCESSES} processes with a lease each, ttl {} s, the server down for {} s",
        plan.shown(clients),
        plan.ttl.as_secs(),
        DOWN.as_secs()
    );
    Ok(Cell { scenario: "restart".into(), title, size: clients, rows: vec![row], ..Cell::default() })
}

pub(super) fn need(plan: &Plan) -> Need {
    let connections = u64::from(plan.count(CLIENTS)) * CONNECTIONS;
    Need { leases: 0, connections, most: connections, processes: u64::from(PROCESSES) + 1 }
}

/// A server for this many connections.
pub(super) fn server_for(plan: &Plan, connections: u64) -> Server {
    let builder = plan.program.builder().setting("maxclients", &(connections + 64).to_string());
    // The kernel takes the lower one of this and net.core.somaxconn.
    let builder = builder.setting("tcp-backlog", "16384");
    let server = builder.setting("appendonly", "yes").setting("appendfsync", "everysec").start();
    prefer(std::slice::from_ref(&server));
    server
}

/// Kills the server of this many clients, and starts it again.
pub(super) fn measure(plan: &Plan, clients: u32) -> Result<Figures, String> {
    let each = clients / PROCESSES;
    let all = each * PROCESSES;
    let mut server = server_for(plan, u64::from(all) * CONNECTIONS);
    let open = Open { urls: vec![server.url()], clients: each, ttl_ms: milliseconds(plan.ttl) };
    let opening = Instant::now();
    let mut environment = Environment::over("leasehold-blocking", PROCESSES, Vec::new(), open)?;
    let opening = opening.elapsed().as_secs_f64();
    let holding = Holding { lock: "mutex", leases: each, span: Duration::ZERO };
    // One process after the other: how all acquire at once is measured after the restart.
    for (number, process) in (0..).zip(&mut environment.processes) {
        process.ask(&Order::Hold(holding.order(number)), LIMIT)?;
    }
    let connections = Info::of(std::slice::from_ref(&server))?.get("connected_clients");
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let log = |process: u32| folder.path().join(process.to_string()).display().to_string();
    let start_ns = now_ns() + milliseconds(LEAD) * 1_000_000;
    let end_ns = start_ns + milliseconds(DOWN + LIMIT) * 1_000_000;
    environment.tell_all(|process, _| Order::Run(probe(process, each, (start_ns, end_ns), log(process))))?;
    server.stop();
    let killed = Instant::now();
    thread::sleep(DOWN);
    let started_ns = now_ns();
    server.start_loading();
    let servers = std::slice::from_ref(&server);
    prefer(servers);
    let pids = environment.pids();
    let watch = Watch::start(servers, None, &pids);
    let answers_ns = until_loaded(&server)?;
    let (sampler, loaded) = (Sampler::start(&server), server_seconds(server.pid()));
    let answers = environment.answers(DOWN + LIMIT)?;
    let spent = server_seconds(server.pid()) - loaded;
    let (_, _, others) = watch.end(servers, None, &pids);
    let peak = sampler.peak();
    let mut healthy_ns = Vec::new();
    for process in 0..PROCESSES {
        let acquisitions = acquisition::read(log(process).as_ref()).map_err(|error| error.to_string())?;
        healthy_ns.extend(acquisitions.iter().map(|acquisition| acquisition.done));
    }
    let unhealthy = all - u32::try_from(healthy_ns.len()).unwrap_or(all).min(all);
    // By then a lease that was not renewed has expired.
    thread::sleep((plan.ttl + DOWN).saturating_sub(killed.elapsed()));
    let lost = f64::from(all) - held(&mut environment)?;
    healthy_ns.sort_unstable();
    let since = |at: Option<&u64>| at.map_or(f64::NAN, |at| at.saturating_sub(started_ns) as f64 / 1e9);
    Ok(Figures::from([
        ("clients".to_owned(), f64::from(all)),
        ("connections".to_owned(), connections),
        ("opening".to_owned(), opening),
        ("loading".to_owned(), since(Some(&answers_ns))),
        ("half_healthy".to_owned(), since(healthy_ns.get(healthy_ns.len() / 2))),
        ("all_healthy".to_owned(), since(healthy_ns.last())),
        ("unhealthy".to_owned(), f64::from(unhealthy)),
        ("peak".to_owned(), peak),
        ("recovery_us".to_owned(), spent * 1e6 / f64::from(all)),
        ("failures".to_owned(), answers.iter().map(|answer| answer.failures as f64).sum()),
        ("lost".to_owned(), lost),
        ("others".to_owned(), others),
    ]))
}

/// When the server has read its files, and answers.
fn until_loaded(server: &Server) -> Result<u64, String> {
    let limit = Instant::now() + LIMIT;
    while server.query::<String>(&["PING"]).is_err() {
        if Instant::now() > limit {
            return Err(format!("the server does not answer {LIMIT:?} after its start"));
        }
        thread::sleep(LOOK);
    }
    Ok(now_ns())
}

/// Each client wants a second lock, has it once, and is healthy when it has released it.
fn probe(process: u32, clients: u32, (start_ns, end_ns): (u64, u64), log: String) -> Run {
    Run {
        lock: "mutex".into(),
        name: format!("scale:probe:{process}"),
        own_names: true,
        tasks: clients,
        all_tasks: clients,
        start_ns,
        end_ns,
        max_acquisitions: 1,
        permits: 1,
        log,
        retry_ms: milliseconds(RETRY),
        ..Run::default()
    }
}
