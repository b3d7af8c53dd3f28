//! Clusters: leases while slots move and a master fails, and what a pair costs as the number of masters grows.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_bench_peer::protocol::Open;
use leasehold_testkit::Cluster;

use super::held::{Holding, held};
use super::limits::Need;
use super::pairs::{self, Load, PACED};
use super::plan::{Plan, milliseconds};
use crate::compare::environment::Environment;
use crate::compare::results::{Cell, Figures, RowResult};

/// Leases while slots move and a master fails, and processes that hold them.
const LEASES: u32 = 100_000;
const PROCESSES: u32 = 2;
const SLOTS: u16 = 4_096;
const HOLDING: Duration = Duration::from_secs(30);

/// Numbers of masters, and how long each is loaded.
pub(super) const MASTERS: [u32; 3] = [3, 6, 12];
const SPAN: Duration = Duration::from_secs(20);

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
        let figures = pairs(plan, masters, PACED, plan.span(SPAN))?;
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
        "masters without replicas, {} tasks for each master, hold {} ms, for {} s",
        PACED.tasks,
        PACED.hold_us / 1_000,
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

/// What a lock and its release cost the masters of a cluster.
pub(super) fn pairs(plan: &Plan, masters: u32, load: Load, span: Duration) -> Result<Figures, String> {
    let cluster = Cluster::with_masters(&plan.program.builder(), masters as usize, false);
    pairs::measure(plan, (&cluster.nodes, cluster.url()), load, span)
}
