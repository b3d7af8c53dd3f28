//! The cost model: what one pair, one renewal and one lease cost, from runs of seconds, and what it predicts of the large runs.

use std::time::Duration;

use leasehold_bench_peer::protocol::Open;
use leasehold_testkit::Cluster;

use super::held::{self, Holding};
use super::plan::{Plan, milliseconds};
use super::results::ScaleResults;
use super::{cluster, killed, pairs, restart, waiting};
use crate::compare::environment::Environment;
use crate::compare::results::{Cell, Figures, RowResult};

/// Sizes of the calibration runs.
const LEASES: u32 = 16_000;
const CLUSTER_LEASES: u32 = 8_000;
const RECOVERING: u32 = 400;
const WAITING: [u32; 2] = [100, 1_000];
/// Their ttl, and how long each lasts.
const TTL: Duration = Duration::from_secs(6);
const SPAN: Duration = Duration::from_secs(12);
/// Server CPU that the predictions for a reader's own cluster assume.
const USABLE: f64 = 0.7;
/// Tolerated deviation of a prediction.
pub const TOLERANCE: f64 = 0.2;

/// The calibration.
pub(super) fn run(plan: &Plan) -> Result<Cell, String> {
    let span = plan.span(SPAN);
    let plan = Plan { ttl: TTL.min(plan.ttl), seconds: plan.seconds.or(Some(SPAN)), ..*plan };
    let leases = plan.count(LEASES);
    let mut row = RowResult::of("calibration");
    row.push(renewals(&plan, leases, span)?);
    row.push(single(&plan, leases, span)?);
    row.push(contended(&plan, span)?);
    row.push(in_cluster(&plan, span)?);
    let title = format!("runs of {} s each, ttl {} s", span.as_secs(), plan.ttl.as_secs());
    Ok(Cell { scenario: "model".into(), title, size: leases, rows: vec![row], ..Cell::default() })
}

/// Costs of a held lease. Memory is the difference of two sizes, since a process without leases needs some, too.
fn renewals(plan: &Plan, leases: u32, span: Duration) -> Result<Figures, String> {
    let few = held::measure_redis(plan, leases, span)?;
    let many = held::measure_redis(plan, leases * 3, span)?;
    let bytes = |name: &str| {
        (many[name] * many["leases"] - few[name] * few["leases"]) / (many["leases"] - few["leases"])
    };
    Ok(Figures::from([
        ("renewal_us".to_owned(), cost(&many, "server_us")),
        ("client_renewal_us".to_owned(), cost(&many, "client_us")),
        ("renewals_per_ttl".to_owned(), per_ttl(plan, &many)),
        ("lease_bytes".to_owned(), bytes("server_bytes")),
        ("client_lease_bytes".to_owned(), bytes("client_bytes")),
    ]))
}

/// Costs at one server, besides.
fn single(plan: &Plan, leases: u32, span: Duration) -> Result<Figures, String> {
    let few = Plan { seconds: Some(Duration::from_secs(2)), ..*plan };
    let calm = killed::measure(&few, "leasehold", "mutex", 1)?;
    let server = plan.program.start();
    let busy = pairs::measure(plan, (std::slice::from_ref(&server), server.url()), pairs::BUSY, span)?;
    drop(server);
    let recovery = restart::measure(plan, plan.count(RECOVERING).max(8))?;
    Ok(Figures::from([
        ("pair_us".to_owned(), calm["server_seconds"] * 1e6 / calm["pairs_during"]),
        ("busy_pair_us".to_owned(), busy["server_us"]),
        ("expiry_us".to_owned(), killed::expiry(plan, leases)?),
        ("recovery_us".to_owned(), recovery["recovery_us"]),
    ]))
}

/// Costs of an acquisition of one lock by two numbers of waiting clients.
fn contended(plan: &Plan, span: Duration) -> Result<Figures, String> {
    let mut costs = Figures::new();
    for (name, clients) in [("few_waiting", WAITING[0]), ("many_waiting", WAITING[1])] {
        let clients = plan.count(clients).max(2);
        let found = waiting::measure(plan, ("leasehold-blocking", "mutex"), clients, span)?;
        costs.insert(name.to_owned(), found["clients"]);
        costs.insert(format!("{name}_us"), found["server_us"]);
    }
    Ok(costs)
}

/// Costs at three masters.
fn in_cluster(plan: &Plan, span: Duration) -> Result<Figures, String> {
    let paced = cluster::pairs(plan, cluster::MASTERS[0], pairs::PACED, span)?;
    let busy = cluster::pairs(plan, cluster::MASTERS[0], pairs::BUSY, span)?;
    let held = cluster_renewals(plan, span)?;
    Ok(Figures::from([
        ("cluster_pair_us".to_owned(), paced["server_us"]),
        ("busy_cluster_pair_us".to_owned(), busy["server_us"]),
        ("cluster_renewal_us".to_owned(), cost(&held, "server_us")),
        ("cluster_renewals_per_ttl".to_owned(), per_ttl(plan, &held)),
        ("cluster_lease_bytes".to_owned(), held["server_bytes"]),
    ]))
}

/// Renewals of a lease within its ttl.
fn per_ttl(plan: &Plan, figures: &Figures) -> f64 {
    cost(figures, "renewals") * plan.ttl.as_secs_f64() / figures["leases"]
}

/// A figure that is missing if nothing was renewed.
fn cost(figures: &Figures, name: &str) -> f64 {
    figures.get(name).copied().unwrap_or(f64::NAN)
}

fn cluster_renewals(plan: &Plan, span: Duration) -> Result<Figures, String> {
    let cluster = Cluster::with_masters(&plan.program.builder(), 3, true);
    let open = Open { urls: vec![cluster.url()], clients: 1, ttl_ms: milliseconds(plan.ttl) };
    let mut environment = Environment::over("leasehold", 1, Vec::new(), open)?;
    let holding = Holding { lock: "mutex", leases: plan.count(CLUSTER_LEASES), span };
    holding.measure(&mut environment, &cluster.nodes[..3])
}

/// One figure of a large run, and what the model says of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// What it is, with its unit.
    pub what: String,
    /// By the model.
    pub predicted: f64,
    /// As measured.
    pub measured: f64,
}

impl Prediction {
    /// Deviation of the prediction, as a share of what was measured.
    #[must_use]
    pub fn deviation(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }

    /// Whether it is within the tolerance.
    #[must_use]
    pub fn is_close(&self) -> bool {
        self.deviation().abs() <= TOLERANCE
    }
}

/// What the calibration says of all other scenarios in the results.
#[must_use]
pub fn predictions(results: &ScaleResults) -> Vec<Prediction> {
    let mut all = Vec::new();
    let cost = |name: &str| results.figure("model", name);
    let mut add = |what: &str, predicted: Option<f64>, measured: Option<f64>| {
        if let (Some(predicted), Some(measured)) = (predicted, measured) {
            all.push(Prediction { what: what.to_owned(), predicted, measured });
        }
    };
    let of = |scenario: &str, figure: &str| results.figure(scenario, figure);
    let renewals =
        |scenario: &str, per_ttl: &str| Some(of(scenario, "leases")? * cost(per_ttl)? / of(scenario, "ttl")?);
    let share =
        |scenario: &str, per_ttl: &str, each: &str| Some(renewals(scenario, per_ttl)? * cost(each)? / 1e6);
    add("1: renewals per second", renewals("held", "renewals_per_ttl"), of("held", "renewals"));
    add(
        "1: server CPU for renewals, cores",
        share("held", "renewals_per_ttl", "renewal_us"),
        of("held", "server_share"),
    );
    add(
        "1: clients' CPU for renewals, cores",
        share("held", "renewals_per_ttl", "client_renewal_us"),
        of("held", "client_share"),
    );
    add("1: bytes per lease at the server", cost("lease_bytes"), of("held", "server_bytes"));
    add("1: bytes per lease in its client", cost("client_lease_bytes"), of("held", "client_bytes"));
    add("2: server CPU per client that recovers, µs", cost("recovery_us"), of("restart", "recovery_us"));
    let expiring = || {
        let pairs = of("killed", "pairs_during")? * cost("pair_us")?;
        Some((pairs + of("killed", "leases")? * cost("expiry_us")?) / 1e6)
    };
    add("3: server CPU until all have expired, s", expiring(), of("killed", "server_seconds"));
    let crowd = results.cell("waiting").and_then(|cell| cell.rows.get(1));
    add(
        "4: server CPU per acquisition, µs",
        crowd.and_then(|row| waiting_us(results, row.median("clients")?)),
        crowd.and_then(|row| row.median("server_us")),
    );
    add(
        "5: server CPU for renewals in a cluster, cores",
        share("cluster-moves", "cluster_renewals_per_ttl", "cluster_renewal_us"),
        of("cluster-moves", "server_share"),
    );
    for masters in cluster::MASTERS {
        let row = results.row("cluster-masters", &format!("{masters} masters"));
        add(
            &format!("5: server CPU per pair with {masters} masters, µs"),
            cost("cluster_pair_us"),
            row.and_then(|row| row.median("server_us")),
        );
    }
    all
}

/// Server CPU per acquisition with this many waiting clients: it grows with the logarithm.
fn waiting_us(results: &ScaleResults, clients: f64) -> Option<f64> {
    let cost = |name: &str| results.figure("model", name);
    let (few, many) = (cost("few_waiting")?, cost("many_waiting")?);
    let (low, high) = (cost("few_waiting_us")?, cost("many_waiting_us")?);
    Some(low + (high - low) * (clients / few).ln() / (many / few).ln())
}

/// What a deployment can do, by the model: a name and a value.
#[must_use]
pub fn capacities(results: &ScaleResults) -> Vec<(String, f64)> {
    let cost = |name: &str| results.figure("model", name);
    let mut all = Vec::new();
    let mut add = |what: String, value: Option<f64>| all.extend(value.map(|value| (what, value)));
    let per_second = |each: &str| Some(USABLE * 1e6 / cost(each)?);
    let leases = |each: &str, per_ttl: &str, ttl: f64| Some(per_second(each)? * ttl / cost(per_ttl)?);
    add(
        "one server: locks and releases per second by clients with many tasks".to_owned(),
        per_second("busy_pair_us"),
    );
    add(
        "one server: locks and releases per second, every command by itself".to_owned(),
        per_second("pair_us"),
    );
    add(
        "one server: acquisitions per second of one lock that 1,000 clients want, by the server".to_owned(),
        per_second("many_waiting_us"),
    );
    for ttl in [10.0, 30.0] {
        let name = format!("one server: leases with a ttl of {ttl} s, if nothing else is done");
        add(name, leases("renewal_us", "renewals_per_ttl", ttl));
    }
    add(
        "one server: leases per GiB of its memory".to_owned(),
        cost("lease_bytes").map(|bytes| 1.074e9 / bytes),
    );
    for masters in cluster::MASTERS.map(f64::from) {
        let many = |one: Option<f64>| one.map(|one| one * masters);
        add(
            format!("cluster of {masters} masters: locks and releases per second by clients with many tasks"),
            many(per_second("busy_cluster_pair_us")),
        );
        add(
            format!("cluster of {masters} masters: leases with a ttl of 30 s, if nothing else is done"),
            many(leases("cluster_renewal_us", "cluster_renewals_per_ttl", 30.0)),
        );
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> ScaleResults {
        let cell = |scenario: &str, figures: &[(&str, f64)]| {
            let mut row = RowResult::of("leasehold");
            row.push(figures.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect());
            Cell { scenario: scenario.into(), rows: vec![row], ..Cell::default() }
        };
        let costs = [("renewal_us", 2.0), ("renewals_per_ttl", 3.0), ("busy_pair_us", 35.0)];
        let measured = [("leases", 1e6), ("ttl", 30.0), ("server_share", 0.25), ("renewals", 1e5)];
        ScaleResults {
            cells: vec![cell("model", &costs), cell("held", &measured)],
            ..ScaleResults::default()
        }
    }

    #[test]
    fn unit_costs_predict_what_was_measured_and_a_miss_is_seen() {
        let found = predictions(&results());
        let shown: Vec<_> =
            found.iter().map(|one| (one.what.as_str(), one.predicted, one.is_close())).collect();
        assert_eq!(
            shown,
            [("1: renewals per second", 1e5, true), ("1: server CPU for renewals, cores", 0.2, true)]
        );
        let mut slow = results();
        slow.cells[1].rows[0].figures.insert("server_share".into(), vec![0.3]);
        assert!(!predictions(&slow)[1].is_close());
    }

    #[test]
    fn capacities_follow_from_unit_costs() {
        let found = capacities(&results());
        assert_eq!(
            found[0],
            ("one server: locks and releases per second by clients with many tasks".to_owned(), 20_000.0)
        );
        assert_eq!(found[1].1, 0.7e6 / 2.0 * 10.0 / 3.0);
    }

    #[test]
    fn cost_of_a_crowd_grows_with_its_logarithm() {
        let mut results = results();
        for (name, value) in [
            ("few_waiting", 100.0),
            ("many_waiting", 1_000.0),
            ("few_waiting_us", 80.0),
            ("many_waiting_us", 90.0),
        ] {
            results.cells[0].rows[0].figures.insert(name.into(), vec![value]);
        }
        assert_eq!(waiting_us(&results, 10_000.0).map(f64::round), Some(100.0));
    }
}
