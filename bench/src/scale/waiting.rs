//! Many waiting clients in many processes on one name, beside the bare chain: a release that is a script which publishes, and an
//! acquisition that is an empty script, over as many connections.

use std::thread;
use std::time::Duration;

use leasehold_bench_peer::acquisition::{self, Acquisition};
use leasehold_bench_peer::clock::{now_ns, until};
use leasehold_bench_peer::protocol::{Open, Order, Run};

use super::limits::Need;
use super::observe::{Info, Watch};
use super::plan::{Plan, milliseconds};
use super::restart::{CONNECTIONS, server_for};
use crate::compare::environment::Environment;
use crate::compare::results::{Cell, Figures, RowResult};

const CLIENTS: u32 = 10_000;
const PROCESSES: u32 = 100;
/// The clients of the second measurement, which the growth is relative to.
const FEW: u32 = 2;
const SPAN: Duration = Duration::from_secs(60);
/// Time in which the clients arrive, one process after the other, for each thousand of them.
const ARRIVING: Duration = Duration::from_secs(1);
/// Time until all clients wait, for each thousand of them, and how soon one tries again after a failure.
const RETRY: Duration = Duration::from_millis(500);
const QUEUEING: Duration = Duration::from_secs(2);
/// What an attempt that is not behind any other one takes to arrive at the server, on a machine whose cores are all busy.
const ARRIVAL_NS: u64 = 1_000_000_000;
/// Every waiter asks again after this time at the latest.
const RECHECK: f64 = 27.0;
/// Commands that clients send while they wait; those within scripts have other names.
const SENT: [&str; 6] = ["evalsha", "eval", "ping", "subscribe", "ssubscribe", "delex"];

/// The scenario: two sizes of leasehold and of the chain.
pub(super) fn run(plan: &Plan) -> Result<Cell, String> {
    let clients = plan.count(CLIENTS).max(FEW);
    let span = plan.span(SPAN);
    let mut rows = Vec::new();
    let mut growth = Vec::new();
    for (program, lock, name) in
        [("leasehold-blocking", "mutex", "leasehold"), ("chain", "chain", "bare chain")]
    {
        let mut costs = Vec::new();
        for (count, span) in [(FEW, (span / 6).max(2 * RETRY)), (clients, span)] {
            let name = format!("{name}, {} clients", plan.shown(count));
            rows.push(match measure(plan, (program, lock), count, span) {
                Ok(figures) => {
                    costs.push(figures["server_us"]);
                    plan.row(&name, figures)
                }
                Err(why) => RowResult { missing: Some(why), ..RowResult::of(&name) },
            });
        }
        growth.extend(costs.get(1).map(|many| many / costs[0]));
    }
    if let [own, chain] = growth[..] {
        let mut against = RowResult::of("leasehold against the chain");
        against.push(Figures::from([("growth_ratio".to_owned(), own / chain)]));
        rows.push(against);
    }
    let title = format!(
        "{} clients in {} processes wait for one lock, hold 0, for {} s",
        plan.shown(clients),
        processes_of(clients),
        span.as_secs()
    );
    Ok(Cell { scenario: "waiting".into(), title, size: clients, rows, ..Cell::default() })
}

pub(super) fn need(plan: &Plan) -> Need {
    let clients = plan.count(CLIENTS);
    let connections = u64::from(clients) * CONNECTIONS;
    Need { leases: 0, connections, most: connections, processes: u64::from(processes_of(clients)) + 1 }
}

/// As many clients in each as in the full scenario, or one.
fn processes_of(clients: u32) -> u32 {
    (clients / (CLIENTS / PROCESSES)).max(2)
}

pub(super) fn measure(
    plan: &Plan,
    (program, lock): (&'static str, &str),
    clients: u32,
    span: Duration,
) -> Result<Figures, String> {
    let processes = processes_of(clients);
    let each = clients / processes;
    let all = each * processes;
    let server = server_for(plan, u64::from(all) * CONNECTIONS);
    let open = Open { urls: vec![server.url()], clients: each, ttl_ms: milliseconds(plan.ttl) };
    let mut environment = Environment::over(program, processes, Vec::new(), open)?;
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let log = |process: u32| folder.path().join(process.to_string()).display().to_string();
    let queueing = Duration::from_secs(1) + QUEUEING * all / 1_000;
    let start_ns = now_ns() + 200_000_000;
    let arriving_ns = milliseconds(ARRIVING * all) * 1_000;
    let from_ns = start_ns + milliseconds(queueing) * 1_000_000;
    let to_ns = from_ns + milliseconds(span) * 1_000_000;
    environment.tell_all(|process, _| {
        Order::Run(Run {
            lock: lock.to_owned(),
            name: "scale:waiting".into(),
            tasks: each,
            first_task: process * each,
            all_tasks: all,
            start_ns: start_ns + arriving_ns * u64::from(process) / u64::from(processes),
            end_ns: to_ns + 100_000_000,
            permits: 1,
            log: log(process),
            retry_ms: milliseconds(RETRY),
            ..Run::default()
        })
    })?;
    let servers = std::slice::from_ref(&server);
    thread::sleep(until(from_ns));
    let pids = environment.pids();
    let (from_ns, watch, counted) = (now_ns(), Watch::start(servers, None, &pids), Info::of(servers)?);
    thread::sleep(until(to_ns));
    let (to_ns, (spent, _, others), after) = (now_ns(), watch.end(servers, None, &pids), Info::of(servers)?);
    let cpu = spent.server;
    let answers = environment.answers(Duration::from_secs(60))?;
    let mut acquisitions = Vec::new();
    for process in 0..processes {
        acquisitions.extend(acquisition::read(log(process).as_ref()).map_err(|error| error.to_string())?);
    }
    acquisitions.sort_unstable_by_key(|one| one.entered);
    let overlaps = acquisitions.windows(2).filter(|two| two[0].left > two[1].entered).count();
    let overtaken = overtaken(&acquisitions);
    acquisitions.retain(|one| (from_ns..to_ns).contains(&one.entered));
    let count = acquisitions.len() as f64;
    if acquisitions.is_empty() {
        return Err(format!("{all} clients: no lock was acquired within {span:?}"));
    }
    let waited = acquisitions.iter().map(|one| (one.entered - one.asked) as f64 / 1e9).sum::<f64>() / count;
    let seconds = (to_ns - from_ns) as f64 / 1e9;
    let sent = (after.calls(&SENT) - counted.calls(&SENT)) / count;
    let mut figures = Figures::from([
        ("clients".to_owned(), f64::from(all)),
        ("connections".to_owned(), counted.get("connected_clients")),
        ("rate".to_owned(), count / seconds),
        ("server_us".to_owned(), cpu * 1e6 / count),
        ("server_share".to_owned(), cpu / seconds),
        ("waited".to_owned(), waited),
        ("commands".to_owned(), sent),
        ("others".to_owned(), others),
        ("failures".to_owned(), answers.iter().map(|answer| answer.failures as f64).sum()),
    ]);
    if lock != "chain" {
        figures.extend([
            ("commands_of_limit".to_owned(), sent / (2.0 + waited / RECHECK)),
            ("overtaken".to_owned(), overtaken as f64),
            ("overlaps".to_owned(), overlaps as f64),
        ]);
    }
    Ok(figures)
}

/// Acquisitions, in the order in which they entered, that another one was before although it had asked clearly later.
fn overtaken(acquisitions: &[Acquisition]) -> usize {
    let mut latest = 0;
    let is_overtaken = |one: &&Acquisition| {
        latest = latest.max(one.asked);
        one.asked + ARRIVAL_NS < latest
    };
    acquisitions.iter().filter(is_overtaken).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acquisition_behind_one_that_asked_later_is_overtaken() {
        let one = |asked: u64| Acquisition { task: 0, is_shared: false, asked, entered: 0, left: 0, done: 0 };
        let second = ARRIVAL_NS;
        let all = [0, second, second / 2, 3 * second, second, 4 * second].map(one);
        assert_eq!((overtaken(&all), overtaken(&all[..4])), (1, 0));
    }

    #[test]
    fn processes_have_a_hundred_clients_each() {
        assert_eq!([2, 150, 1_000, 10_000].map(processes_of), [2, 2, 10, 100]);
    }
}
