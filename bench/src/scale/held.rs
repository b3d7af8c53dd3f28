//! Many held leases: what their renewal costs server and clients, what a lease takes in memory, and how many are lost.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_bench_peer::protocol::{Hold, Open, Order};
use leasehold_testkit::Server;

use super::limits::{Need, prefer};
use super::observe::{Info, Watch, resident};
use super::plan::{Plan, milliseconds};
use crate::compare::environment::Environment;
use crate::compare::results::{Cell, Figures, RowResult};
use crate::compare::scenarios::near;

/// Leases of the scenario, and processes that hold them.
const LEASES: u32 = 1_000_000;
const PROCESSES: u32 = 8;
const SPAN: Duration = Duration::from_secs(300);

/// Sizes for the peers, in turn.
const PEER_SIZES: [u32; 5] = [10_000, 25_000, 50_000, 100_000, 200_000];
/// Max time to acquire all leases.
const TAKING: Duration = Duration::from_secs(120);
/// Max time to ask for all leases.
const ASKING: Duration = Duration::from_secs(60);
/// A server that is busier than this has no time for anything else.
const BUSY: f64 = 0.9;

/// The commands of a script that renew a plain lease, one for each.
const RENEWALS: [&str; 2] = ["pexpire", "pexpireat"];

/// The peers, and the kind of lock of each of which one client holds many.
pub(super) const PEERS: [(&str, &str, &str); 2] =
    [("redisson", "mutex", "Redisson RLock"), ("etcd", "lease", "etcd lease")];

/// Leases to hold.
#[derive(Clone, Copy)]
pub(super) struct Holding {
    pub(super) lock: &'static str,
    pub(super) leases: u32,
    pub(super) span: Duration,
}

/// The scenario.
pub(super) fn run(plan: &Plan) -> Result<Cell, String> {
    let leases = plan.count(LEASES).max(PROCESSES);
    let span = plan.span(SPAN);
    let row = measure_redis(plan, leases, span).map(|figures| plan.row("leasehold", figures))?;
    let title = format!(
        "{} leases in {PROCESSES} processes, ttl {} s, held for {} s",
        plan.shown(leases),
        plan.ttl.as_secs(),
        span.as_secs()
    );
    Ok(Cell { scenario: "held".into(), title, size: leases, rows: vec![row], ..Cell::default() })
}

pub(super) fn need(plan: &Plan) -> Need {
    Need { leases: plan.count(LEASES).into(), connections: 30, most: 30, processes: u64::from(PROCESSES) + 1 }
}

/// This many leases on one server of its own.
pub(super) fn measure_redis(plan: &Plan, leases: u32, span: Duration) -> Result<Figures, String> {
    let server = plan.program.start();
    let open = Open { urls: vec![server.url()], clients: 1, ttl_ms: milliseconds(plan.ttl) };
    let mut environment = Environment::over("leasehold", PROCESSES, Vec::new(), open)?;
    let holding = Holding { lock: "mutex", leases: leases / PROCESSES, span };
    holding.measure(&mut environment, &[server])
}

impl Holding {
    /// Each process holds `leases`.
    pub(super) fn measure(
        self,
        environment: &mut Environment,
        servers: &[Server],
    ) -> Result<Figures, String> {
        prefer(servers);
        let usage = |environment: &Environment| -> Result<(f64, f64), String> {
            let store = match environment.store_pid() {
                Some(pid) => resident(&[pid]),
                None => Info::of(servers)?.get("used_memory"),
            };
            Ok((store, resident(&environment.pids())))
        };
        let (store_before, clients_before) = usage(environment)?;
        let taking = self.take(environment)?;
        let (store, pids) = (environment.store_pid(), environment.pids());
        let (watch, counted) = (Watch::start(servers, store, &pids), Info::of(servers)?);
        thread::sleep(self.span);
        let ((spent, seconds, others), after) = (watch.end(servers, store, &pids), Info::of(servers)?);
        let (store_after, clients_after) = usage(environment)?;
        let processes = u32::try_from(environment.processes.len()).unwrap_or(u32::MAX);
        let all = f64::from(self.leases) * f64::from(processes);
        let held = held(environment)?;
        let renewals = after.calls(&RENEWALS) - counted.calls(&RENEWALS);
        let mut figures = Figures::from([
            ("leases".to_owned(), all),
            ("taking".to_owned(), taking.as_secs_f64()),
            ("server_share".to_owned(), spent.server / seconds),
            ("client_share".to_owned(), spent.peers / seconds),
            ("server_bytes".to_owned(), (store_after - store_before) / all),
            ("client_bytes".to_owned(), (clients_after - clients_before) / all),
            ("network_bytes".to_owned(), spent.bytes / seconds),
            ("lost".to_owned(), all - held),
            ("others".to_owned(), others),
        ]);
        if renewals > 0.0 {
            figures.extend([
                ("renewals".to_owned(), renewals / seconds),
                ("server_us".to_owned(), spent.server * 1e6 / renewals),
                ("client_us".to_owned(), spent.peers * 1e6 / renewals),
            ]);
        }
        Ok(figures)
    }

    /// Acquires all leases. Returns the time that it took.
    pub(super) fn take(self, environment: &mut Environment) -> Result<Duration, String> {
        let began = Instant::now();
        environment.tell_all(|number, _| Order::Hold(self.order(number)))?;
        environment.answers(TAKING)?;
        Ok(began.elapsed())
    }

    /// The order for the process of this number.
    pub(super) fn order(self, process: u32) -> Hold {
        Hold {
            lock: self.lock.to_owned(),
            is_tuned: false,
            name: format!("scale:held:{process}"),
            count: self.leases,
        }
    }
}

/// How many leases the processes report as held.
pub(super) fn held(environment: &mut Environment) -> Result<f64, String> {
    environment.tell_all(|_, _| Order::Held)?;
    Ok(environment.answers(ASKING)?.iter().map(|answer| f64::from(answer.held)).sum())
}

/// One peer at growing sizes, until it gives up or the sizes end.
pub(super) fn run_peer(plan: &Plan, (program, lock, name): (&'static str, &'static str, &str)) -> Cell {
    let mut rows = Vec::new();
    let span = plan.span(plan.ttl * 3);
    for leases in PEER_SIZES.map(|size| plan.count(size)) {
        let mut row = RowResult::of(&format!("{} leases", plan.shown(leases)));
        let found = peer(plan, program, Holding { lock, leases, span });
        let ended = match &found {
            Err(why) => Some(format!("ended with {leases} leases: {why}")),
            Ok(figures) if figures["lost"] > 0.0 => Some("leases were lost".to_owned()),
            Ok(figures) if figures["server_share"] > BUSY => {
                Some("the server was busy with renewals".to_owned())
            }
            Ok(_) => None,
        };
        match found {
            Ok(figures) => row.push(figures),
            Err(_) => row.missing.clone_from(&ended),
        }
        row.failure = ended.filter(|_| row.missing.is_none());
        let is_over = row.failure.is_some() || row.missing.is_some();
        rows.push(row);
        if is_over {
            break;
        }
    }
    let title = format!("{name}: one client, ttl {} s, held for {} s", plan.ttl.as_secs(), span.as_secs());
    Cell { scenario: format!("held-{program}"), title, rows, ..Cell::default() }
}

fn peer(plan: &Plan, program: &'static str, holding: Holding) -> Result<Figures, String> {
    Need { leases: holding.leases.into(), connections: 200, most: 200, processes: 20 }.check()?;
    let mut environment = Environment::start(program, (1, 1), near(plan.program), plan.ttl)?;
    let servers = std::mem::take(&mut environment.servers);
    holding.measure(&mut environment, &servers)
}
