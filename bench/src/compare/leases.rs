//! (f) Many idle leases: the cost of their renewal, and how many are lost.

use std::slice;
use std::thread;
use std::time::{Duration, Instant};

use leasehold_bench_peer::protocol::{Hold, Order};

use super::Bench;
use super::catalog::{RENEWING, Row};
use super::environment::Environment;
use super::results::{Cell, Figures, RowResult};
use super::scenarios::{Scale, near};
use crate::program::Program;

/// Maximum time to acquire all leases and to receive all replies.
const TAKING: Duration = Duration::from_secs(60);
const ASKING: Duration = Duration::from_secs(60);

/// The numbers of leases, their ttl, and for how long they are held.
struct Plan {
    counts: &'static [u32],
    ttl: Duration,
    span: Duration,
}

impl Plan {
    // Some libraries renew at a third of the ttl, some half a second before the expiry: the span covers at least one renewal of each.
    fn of(scale: Scale) -> Self {
        let seconds = Duration::from_secs;
        match scale.is_quick {
            true => Self { counts: &[10_000], ttl: seconds(15), span: seconds(16) },
            false => Self { counts: &[10_000, 100_000], ttl: seconds(30), span: seconds(60) },
        }
    }

    fn title(&self, count: u32) -> String {
        format!("{count} leases with a ttl of {} s, for {} s", self.ttl.as_secs(), self.span.as_secs())
    }
}

/// The titles of the cells.
pub(crate) fn titles(scale: Scale) -> Vec<String> {
    let plan = Plan::of(scale);
    plan.counts.iter().map(|count| plan.title(*count)).collect()
}

/// Runs every peer once for each number of leases.
pub(crate) fn run(bench: &mut Bench, scale: Scale) {
    let plan = Plan::of(scale);
    let rows: Vec<Row> = RENEWING.into_iter().filter(|row| bench.takes_part(row.program)).collect();
    for count in plan.counts.iter().copied() {
        let title = plan.title(count);
        if !bench.is_wanted(&title) {
            continue;
        }
        let mut cell = Cell { scenario: "f".into(), title, size: count, ..Cell::default() };
        // One after the other: while thousands of locks are acquired, a core is busy with each library.
        for row in &rows {
            bench.progress(&format!("(f) {count} leases: {}", row.name));
            cell.rows.extend(together(slice::from_ref(row), count, plan.ttl, plan.span, scale.program));
        }
        bench.found(cell);
    }
}

/// Runs these rows at the same time, each with a server of its own.
pub(crate) fn together(
    rows: &[Row],
    count: u32,
    ttl: Duration,
    span: Duration,
    program: Program,
) -> Vec<RowResult> {
    thread::scope(|scope| {
        let all: Vec<_> =
            rows.iter().map(|row| scope.spawn(move || once(*row, count, ttl, span, program))).collect();
        let found =
            all.into_iter().map(|one| one.join().unwrap_or_else(|_| Err("its measurement failed".into())));
        rows.iter()
            .zip(found)
            .map(|(row, found)| {
                let mut result = RowResult::of(row.name);
                match found {
                    Ok(found) => result.push(found),
                    Err(why) => result.missing = Some(why),
                }
                result
            })
            .collect()
    })
}

fn once(row: Row, count: u32, ttl: Duration, span: Duration, program: Program) -> Result<Figures, String> {
    let mut environment = Environment::start(row.program, (1, 1), near(program), ttl)?;
    let hold = Hold { lock: row.lock.into(), is_tuned: row.is_tuned, name: "bench:lease".into(), count };
    let began = Instant::now();
    environment.tell_all(|_, _| Order::Hold(hold.clone()))?;
    environment.answers(TAKING)?;
    let taking = began.elapsed();
    let before = environment.used();
    thread::sleep(span);
    let used = environment.used().since(before);
    environment.tell_all(|_, _| Order::Held)?;
    let held = environment.answers(ASKING)?.first().map_or(0, |answer| answer.held);
    let seconds = span.as_secs_f64();
    Ok(Figures::from([
        ("taking".to_owned(), taking.as_secs_f64()),
        ("server_percent".to_owned(), used.server / seconds * 100.0),
        ("client_percent".to_owned(), used.peers / seconds * 100.0),
        ("calls_per_second".to_owned(), used.calls / seconds),
        ("bytes_per_second".to_owned(), used.bytes / seconds),
        ("lost".to_owned(), f64::from(count) - f64::from(held)),
    ]))
}
