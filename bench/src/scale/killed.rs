//! A process with many leases is killed: what the others notice while its leases expire.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_bench_peer::acquisition::{self, Acquisition};
use leasehold_bench_peer::clock::{now_ns, until};
use leasehold_bench_peer::protocol::{Open, Order, Run};

use super::held::Holding;
use super::limits::{Need, prefer};
use super::observe::{Info, Watch};
use super::plan::{Plan, milliseconds};
use crate::compare::environment::Environment;
use crate::compare::results::{Cell, Figures, RowResult};
use crate::compare::scenarios::near;
use crate::percentile;
use crate::server_cost::server_seconds;

const LEASES: u32 = 100_000;
/// Leases of the killed process of a peer: fewer, since some need a minute to acquire more.
const PEER_LEASES: u32 = 10_000;
/// The others: each has a lock of its own, holds it for a millisecond, and starts again.
const TASKS: u32 = 4;
const HOLD_US: u64 = 1_000;
/// Time before the kill, and after the last lease has expired.
const CALM: Duration = Duration::from_secs(10);
const AFTER: Duration = Duration::from_secs(2);
const SECOND: u64 = 1_000_000_000;

/// The scenario.
pub(super) fn run(plan: &Plan) -> Result<Cell, String> {
    let leases = plan.count(LEASES);
    let row = plan.row("leasehold", measure(plan, "leasehold", "mutex", leases)?);
    Ok(Cell {
        scenario: "killed".into(),
        title: title(plan, leases),
        size: leases,
        rows: vec![row],
        ..Cell::default()
    })
}

/// The same with a peer.
pub(super) fn run_peer(plan: &Plan, (program, lock, name): (&'static str, &'static str, &str)) -> Cell {
    let leases = plan.count(PEER_LEASES);
    let mut row = RowResult::of(name);
    match measure(plan, program, lock, leases) {
        Ok(figures) => row.push(figures),
        Err(why) => row.missing = Some(why),
    }
    Cell {
        scenario: format!("killed-{program}"),
        title: title(plan, leases),
        rows: vec![row],
        ..Cell::default()
    }
}

fn title(plan: &Plan, leases: u32) -> String {
    format!("a process with {} leases, ttl {} s", plan.shown(leases), plan.ttl.as_secs())
}

pub(super) fn need(plan: &Plan) -> Need {
    Need { leases: plan.count(LEASES).into(), connections: 50, most: 50, processes: 20 }
}

/// Two processes of the program: one holds the leases and is killed, the other one works.
pub(super) fn measure(
    plan: &Plan,
    program: &'static str,
    lock: &'static str,
    leases: u32,
) -> Result<Figures, String> {
    let calm = plan.span(CALM);
    let mut environment = Environment::start(program, (2, TASKS), near(plan.program), plan.ttl)?;
    let servers = std::mem::take(&mut environment.servers);
    prefer(&servers);
    let log = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    let holding = Holding { lock, leases, span: Duration::ZERO };
    let [holder, other] = environment.processes.as_mut_slice() else {
        return Err("two processes are needed".into());
    };
    let taking = Instant::now();
    holder.ask(&Order::Hold(holding.order(0)), Duration::from_secs(120))?;
    let taking = taking.elapsed().as_secs_f64();
    let start_ns = now_ns();
    let kill_ns = start_ns + milliseconds(calm) * 1_000_000;
    let end_ns = kill_ns + milliseconds(plan.ttl + AFTER) * 1_000_000;
    other.tell(&Order::Run(work((start_ns, end_ns), log.path().display().to_string())))?;
    thread::sleep(until(kill_ns));
    holder.kill();
    let pid = other.pid();
    let store = environment.store_pid();
    let (watch, counted) = (Watch::start(&servers, store, &[pid]), Info::of(&servers)?);
    thread::sleep(until(end_ns));
    let (spent, _, others) = watch.end(&servers, store, &[pid]);
    let expired = Info::of(&servers)?.get("expired_keys") - counted.get("expired_keys");
    let answer = environment.processes[1].answer(Duration::from_secs(30))?;
    let acquisitions = acquisition::read(log.path()).map_err(|error| error.to_string())?;
    let (calm, dying): (Vec<_>, Vec<_>) = acquisitions.into_iter().partition(|one| one.done < kill_ns);
    let pairs = dying.len() as f64;
    let mut figures = Figures::from([
        ("leases".to_owned(), f64::from(leases)),
        ("taking".to_owned(), taking),
        ("pairs_before".to_owned(), calm.len() as f64 * 1e9 / (kill_ns - start_ns) as f64),
        ("pairs".to_owned(), pairs * 1e9 / (end_ns - kill_ns) as f64),
        ("server_share".to_owned(), spent.server * 1e9 / (end_ns - kill_ns) as f64),
        ("server_seconds".to_owned(), spent.server),
        ("pairs_during".to_owned(), pairs),
        ("failures".to_owned(), answer.failures as f64),
        ("others".to_owned(), others),
    ]);
    if store.is_none() {
        figures.insert("expired".to_owned(), expired);
    }
    for (suffix, acquisitions) in [("before", &calm), ("after", &dying)] {
        latencies(&mut figures, suffix, acquisitions);
    }
    Ok(figures)
}

/// Server CPU for the expiry of a lease, in microseconds: a process that holds them is killed, and no other client sends commands.
pub(super) fn expiry(plan: &Plan, leases: u32) -> Result<f64, String> {
    let server = plan.program.start();
    let spent = || server_seconds(server.pid());
    let before = spent();
    thread::sleep(AFTER);
    let idle = (spent() - before) / AFTER.as_secs_f64();
    let open = Open { urls: vec![server.url()], clients: 1, ttl_ms: milliseconds(plan.ttl) };
    let mut environment = Environment::over("leasehold", 1, Vec::new(), open)?;
    Holding { lock: "mutex", leases, span: Duration::ZERO }.take(&mut environment)?;
    environment.processes[0].kill();
    let (before, span) = (spent(), plan.ttl + AFTER);
    thread::sleep(span);
    let busy = spent() - before - idle * span.as_secs_f64();
    Ok(busy.max(0.0) * 1e6 / f64::from(leases))
}

fn work((start_ns, end_ns): (u64, u64), log: String) -> Run {
    Run {
        lock: "mutex".into(),
        name: "scale:other".into(),
        own_names: true,
        tasks: TASKS,
        all_tasks: TASKS,
        hold_us: HOLD_US,
        start_ns,
        end_ns,
        permits: 1,
        log,
        ..Run::default()
    }
}

/// p99 over all, the p99 of the worst second, and the maximum, in microseconds.
fn latencies(figures: &mut Figures, suffix: &str, acquisitions: &[Acquisition]) {
    type Span = fn(&Acquisition) -> f64;
    let of: [(&str, Span); 2] = [
        ("lock", |one| (one.entered - one.asked) as f64 / 1e3),
        ("release", |one| (one.done - one.left) as f64 / 1e3),
    ];
    let mut by_second: std::collections::BTreeMap<u64, Vec<&Acquisition>> = std::collections::BTreeMap::new();
    for one in acquisitions {
        by_second.entry(one.asked / SECOND).or_default().push(one);
    }
    for (name, span) in of {
        let mut all: Vec<f64> = acquisitions.iter().map(span).collect();
        let worst = by_second.values().map(|second| {
            let mut spans: Vec<f64> = second.iter().map(|one| span(one)).collect();
            percentile(&mut spans, 0.99)
        });
        figures.insert(format!("{name}_worst_{suffix}"), worst.fold(f64::NAN, f64::max));
        figures.insert(format!("{name}_p99_{suffix}"), percentile(&mut all, 0.99));
        figures.insert(format!("{name}_max_{suffix}"), all.last().copied().unwrap_or(f64::NAN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bad_second_is_seen_although_the_whole_hides_it() {
        let acquisitions: Vec<Acquisition> = (0..10_000_u64)
            .map(|number| {
                let asked = number * SECOND / 200;
                let is_bad = asked / SECOND == 7 && number % 20 == 0;
                let entered = asked + if is_bad { 900_000 } else { 50_000 };
                Acquisition {
                    task: 0,
                    is_shared: false,
                    asked,
                    entered,
                    left: entered,
                    done: entered + 20_000,
                }
            })
            .collect();
        let mut figures = Figures::new();
        latencies(&mut figures, "after", &acquisitions);
        let all = ["lock_p99_after", "lock_worst_after", "lock_max_after", "release_worst_after"];
        assert_eq!(all.map(|name| figures[name]), [50.0, 900.0, 900.0, 20.0]);
    }
}
