//! Clusters: leases while slots move and a master fails, and what a pair costs as the number of masters grows.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_bench_peer::acquisition;
use leasehold_bench_peer::clock::{now_ns, until};
use leasehold_bench_peer::protocol::{Open, Order, Run};
use leasehold_testkit::Cluster;

use super::held::{Holding, held};
use super::limits::Need;
use super::plan::{Plan, milliseconds};
use crate::compare::environment::Environment;
use crate::compare::results::{Cell, Figures, RowResult};
use crate::server_cost::server_seconds;

/// Leases while slots move and a master fails, and processes that hold them.
const LEASES: u32 = 100_000;
const PROCESSES: u32 = 2;
const SLOTS: u16 = 4_096;
const HOLDING: Duration = Duration::from_secs(30);

/// Masters, and the tasks for each: they hold a lock of their own for a while, so that masters have the same load at any number.
pub(super) const MASTERS: [u32; 3] = [3, 6, 12];
const TASKS: u32 = 8;
const HOLD_US: u64 = 10_000;
const SPAN: Duration = Duration::from_secs(20);
/// Time in which a server's own work is measured, before any client comes.
const IDLE: Duration = Duration::from_secs(3);

/// The two parts of the scenario.
pub(super) fn run(plan: &Plan) -> Result<Vec<Cell>, String> {
    let leases = plan.count(LEASES).max(PROCESSES);
    let slots = u16::try_from(plan.count(SLOTS.into()).min(SLOTS.into())).unwrap_or(SLOTS);
    let row = plan.row("leasehold", moving(plan, leases, slots)?);
    let title = format!(
        "3 masters with replicas, {} leases in {PROCESSES} processes, ttl {} s",
        plan.shown(leases),
        plan.ttl.as_secs()
    );
    let moves =
        Cell { scenario: "cluster-moves".into(), title, size: leases, rows: vec![row], ..Cell::default() };
    let mut rows = Vec::new();
    let mut costs = Vec::new();
    for masters in MASTERS {
        let figures = pairs(plan, masters)?;
        costs.push(figures["server_us"]);
        let mut row = RowResult::of(&format!("{masters} masters"));
        row.push(figures);
        rows.push(row);
    }
    let most = costs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    if let Some(row) = rows.last_mut() {
        row.push(Figures::from([("flat".to_owned(), most / least)]));
    }
    let title = format!(
        "masters without replicas, {TASKS} tasks for each master, hold {} ms, for {} s",
        HOLD_US / 1_000,
        plan.span(SPAN).as_secs()
    );
    Ok(vec![moves, Cell { scenario: "cluster-masters".into(), title, rows, ..Cell::default() }])
}

pub(super) fn need(plan: &Plan) -> Need {
    // Replicas have the leases, too.
    let leases = u64::from(plan.count(LEASES)) * 2;
    Need { leases, connections: 500, most: 500, processes: u64::from(MASTERS[2]) + u64::from(PROCESSES) }
}

fn open(plan: &Plan, cluster: &Cluster) -> Open {
    Open { urls: vec![cluster.url()], clients: 1, ttl_ms: milliseconds(plan.ttl) }
}

/// Leases are held, then a quarter of the slots moves from the first master to the second, then the third master is killed.
fn moving(plan: &Plan, leases: u32, slots: u16) -> Result<Figures, String> {
    let mut cluster = Cluster::with_masters(&plan.program.builder(), 3, true);
    let mut environment = Environment::over("leasehold", PROCESSES, Vec::new(), open(plan, &cluster))?;
    let holding = Holding { lock: "mutex", leases: leases / PROCESSES, span: plan.span(HOLDING) };
    let mut figures = holding.measure(&mut environment, &cluster.nodes[..3])?;
    let all = figures["leases"];
    let began = Instant::now();
    let from: Vec<u16> = (0..slots).collect();
    cluster.move_slots(&from, 1);
    figures.insert("moving".to_owned(), began.elapsed().as_secs_f64());
    thread::sleep(plan.ttl);
    let after_moving = held(&mut environment)?;
    let began = Instant::now();
    cluster.kill(2);
    figures.insert("failover".to_owned(), began.elapsed().as_secs_f64());
    thread::sleep(plan.ttl);
    let after_failover = held(&mut environment)?;
    figures.extend([
        ("slots".to_owned(), f64::from(slots)),
        ("lost_moving".to_owned(), all - after_moving),
        ("lost_failover".to_owned(), after_moving - after_failover),
    ]);
    Ok(figures)
}

/// Server CPU per lock and release, without what idle servers spend.
pub(super) fn pairs(plan: &Plan, masters: u32) -> Result<Figures, String> {
    let span = plan.span(SPAN);
    let cluster = Cluster::with_masters(&plan.program.builder(), masters as usize, false);
    let spent = || -> Vec<f64> { cluster.nodes.iter().map(|node| server_seconds(node.pid())).collect() };
    let total = |all: &[f64]| all.iter().sum::<f64>();
    let before = total(&spent());
    let idle = IDLE.min(span);
    thread::sleep(idle);
    let idle = (total(&spent()) - before) / idle.as_secs_f64();
    let mut environment = Environment::over("leasehold", PROCESSES, Vec::new(), open(plan, &cluster))?;
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let log = |process: u32| folder.path().join(process.to_string()).display().to_string();
    let tasks = masters * TASKS / PROCESSES;
    // The first seconds are not measured: the scripts are loaded, and the inboxes subscribed.
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
            hold_us: HOLD_US,
            start_ns,
            end_ns: to_ns + 100_000_000,
            permits: 1,
            log: log(process),
            ..Run::default()
        })
    })?;
    thread::sleep(until(from_ns));
    let (from_ns, before) = (now_ns(), spent());
    thread::sleep(until(to_ns));
    let (to_ns, after) = (now_ns(), spent());
    let answers = environment.answers(Duration::from_secs(30))?;
    let mut count = 0_u32;
    for process in 0..PROCESSES {
        let all = acquisition::read(log(process).as_ref()).map_err(|error| error.to_string())?;
        let within = all.iter().filter(|one| (from_ns..to_ns).contains(&one.entered)).count();
        count += u32::try_from(within).unwrap_or(u32::MAX);
    }
    if count == 0 {
        return Err(format!("{masters} masters: no lock was acquired within {span:?}"));
    }
    let (seconds, count) = ((to_ns - from_ns) as f64 / 1e9, f64::from(count));
    let busy = total(&after) - total(&before) - idle * seconds;
    Ok(Figures::from([
        ("masters".to_owned(), f64::from(masters)),
        ("rate".to_owned(), count / seconds),
        ("rate_per_master".to_owned(), count / seconds / f64::from(masters)),
        ("idle_share".to_owned(), idle / f64::from(masters)),
        ("server_us".to_owned(), busy * 1e6 / count),
        ("failures".to_owned(), answers.iter().map(|answer| answer.failures as f64).sum()),
    ]))
}
