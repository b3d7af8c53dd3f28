//! What an uncontended lock and its release cost the servers, on one server or on the masters of a cluster.

use std::thread;
use std::time::Duration;

use leasehold_bench_peer::acquisition;
use leasehold_bench_peer::clock::{now_ns, until};
use leasehold_bench_peer::protocol::{Open, Order, Run};
use leasehold_testkit::Server;

use super::limits::prefer;
use super::observe::Watch;
use super::plan::{Plan, milliseconds};
use crate::compare::environment::Environment;
use crate::compare::results::Figures;
use crate::server_cost::server_seconds;

const PROCESSES: u32 = 2;
/// Time in which a server's own work is measured, before any client comes.
const IDLE: Duration = Duration::from_secs(3);

/// Tasks for each server. Each has a lock of its own, holds it, and starts again.
#[derive(Clone, Copy)]
pub(super) struct Load {
    pub(super) tasks: u32,
    pub(super) hold_us: u64,
}

/// So few that every command comes by itself, at any number of servers.
pub(super) const PACED: Load = Load { tasks: 8, hold_us: 10_000 };
/// So many that a server has always work.
pub(super) const BUSY: Load = Load { tasks: 64, hold_us: 0 };

/// Server CPU per lock and release, without what idle servers spend. One client in each process, for `span` after half of it.
pub(super) fn measure(
    plan: &Plan,
    (servers, url): (&[Server], String),
    load: Load,
    span: Duration,
) -> Result<Figures, String> {
    prefer(servers);
    let spent = || -> f64 { servers.iter().map(|server| server_seconds(server.pid())).sum() };
    let before = spent();
    let idle = IDLE.min(span);
    thread::sleep(idle);
    let idle = (spent() - before) / idle.as_secs_f64();
    let open = Open { urls: vec![url], clients: 1, ttl_ms: milliseconds(plan.ttl) };
    let mut environment = Environment::over("leasehold", PROCESSES, Vec::new(), open)?;
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let log = |process: u32| folder.path().join(process.to_string()).display().to_string();
    let count = u32::try_from(servers.len()).unwrap_or(u32::MAX);
    let tasks = count * load.tasks / PROCESSES;
    // Not measured at first: scripts are loaded, and inboxes subscribed.
    let start_ns = now_ns();
    let from_ns = start_ns + milliseconds(span / 2) * 1_000_000;
    let to_ns = from_ns + milliseconds(span) * 1_000_000;
    environment.tell_all(|process, _| {
        Order::Run(Run {
            lock: "mutex".into(),
            name: format!("scale:pairs:{process}"),
            own_names: true,
            tasks,
            first_task: process * tasks,
            all_tasks: tasks * PROCESSES,
            hold_us: load.hold_us,
            start_ns,
            end_ns: to_ns + 100_000_000,
            permits: 1,
            log: log(process),
            ..Run::default()
        })
    })?;
    thread::sleep(until(from_ns));
    let pids = environment.pids();
    let (from_ns, watch) = (now_ns(), Watch::start(servers, None, &pids));
    thread::sleep(until(to_ns));
    let (to_ns, (used, _, others)) = (now_ns(), watch.end(servers, None, &pids));
    let answers = environment.answers(Duration::from_secs(30))?;
    let mut pairs = 0.0;
    for process in 0..PROCESSES {
        let all = acquisition::read(log(process).as_ref()).map_err(|error| error.to_string())?;
        pairs += all.iter().filter(|one| (from_ns..to_ns).contains(&one.entered)).count() as f64;
    }
    if pairs == 0.0 {
        return Err(format!("{count} servers: no lock was acquired within {span:?}"));
    }
    let seconds = (to_ns - from_ns) as f64 / 1e9;
    Ok(Figures::from([
        ("masters".to_owned(), f64::from(count)),
        ("rate".to_owned(), pairs / seconds),
        ("rate_per_master".to_owned(), pairs / seconds / f64::from(count)),
        ("idle_share".to_owned(), idle / f64::from(count)),
        ("server_us".to_owned(), (used.server - idle * seconds) * 1e6 / pairs),
        ("others".to_owned(), others),
        ("failures".to_owned(), answers.iter().map(|answer| answer.failures as f64).sum()),
    ]))
}
