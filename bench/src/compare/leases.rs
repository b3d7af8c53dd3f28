//! (f) Many idle leases: the cost of their renewal, and how many are lost.

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

/// Up to this number the CPU stays idle, so all peers run at the same time.
const FEW: u32 = 10_000;

/// Runs every peer once for each number of leases.
pub(crate) fn run(bench: &mut Bench, scale: Scale) {
    let counts: &[u32] = if scale.is_quick { &[FEW] } else { &[FEW, 100_000] };
    // Some libraries renew at a third of the ttl, some half a second before the expiry: the span covers at least one renewal of each.
    let (ttl, span) = if scale.is_quick { (15, 16) } else { (30, 60) };
    let (ttl, span) = (Duration::from_secs(ttl), Duration::from_secs(span));
    let rows: Vec<Row> = RENEWING.into_iter().filter(|row| bench.takes_part(row.program)).collect();
    for count in counts {
        let mut cell = Cell {
            scenario: "f".into(),
            title: format!("{count} leases with a ttl of {} s, for {} s", ttl.as_secs(), span.as_secs()),
            size: *count,
            ..Cell::default()
        };
        let at_once = if *count <= FEW { rows.len().max(1) } else { 1 };
        for some in rows.chunks(at_once) {
            let names: Vec<&str> = some.iter().map(|row| row.name).collect();
            bench.progress(&format!("(f) {count} leases: {}", names.join(", ")));
            cell.rows.extend(together(some, *count, ttl, span, scale.program));
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
