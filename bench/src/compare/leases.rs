//! (f) Many held leases that nobody touches: what renewing them costs, and how many are lost.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_bench_peer::protocol::{Hold, Order};

use super::Bench;
use super::catalog::{RENEWING, Row};
use super::meter::Used;
use super::results::{Cell, Figures, RowResult};
use super::scenarios::{Scale, Way};
use super::stage::Stage;

const TTL: Duration = Duration::from_secs(30);
/// Taking all of them.
const TAKING: Duration = Duration::from_secs(300);
const ASKING: Duration = Duration::from_secs(60);

/// Everybody once for each number of leases, one after the other.
pub(crate) fn run(bench: &mut Bench, scale: Scale) {
    let counts: &[u32] = if scale.is_quick { &[10_000] } else { &[10_000, 100_000] };
    // Twice a third of the ttl, and a bit, or twice the ttl.
    let span = Duration::from_secs(if scale.is_quick { 12 } else { 60 });
    for count in counts {
        let mut cell = Cell {
            scenario: "f".into(),
            title: format!("{count} leases with a ttl of {} s, for {} s", TTL.as_secs(), span.as_secs()),
            size: *count,
            ..Cell::default()
        };
        for row in RENEWING {
            if !bench.takes_part(row.program) {
                continue;
            }
            bench.progress(&format!("(f) {count} leases: {}", row.name));
            let mut result = RowResult::of(row.name);
            match once(row, *count, span) {
                Ok(found) => result.push(found),
                Err(why) => result.missing = Some(why),
            }
            cell.rows.push(result);
        }
        bench.found(cell);
    }
}

fn once(row: Row, count: u32, span: Duration) -> Result<Figures, String> {
    let way = Way { servers: 1, delay: Duration::ZERO };
    let mut stage = Stage::set(row.program, (1, 1), way, TTL)?;
    let hold = Hold { lock: row.lock.into(), is_tuned: row.is_tuned, name: "bench:lease".into(), count };
    let began = Instant::now();
    stage.ask_all(|_, _| Order::Hold(hold.clone()), TAKING)?;
    let taking = began.elapsed();
    let before = Used::now(&stage.servers, &stage.pids());
    thread::sleep(span);
    let used = Used::now(&stage.servers, &stage.pids()).since(before);
    let held = stage.ask_all(|_, _| Order::Held, ASKING)?.first().map_or(0, |answer| answer.held);
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
