//! (e) A holder is killed: the time until the waiter has the lock, against the ttl.

use std::thread;
use std::time::Duration;

use leasehold_bench_peer::acquisition;
use leasehold_bench_peer::clock::now_ns;
use leasehold_bench_peer::protocol::{Hold, Order, Run};

use super::Bench;
use super::catalog::{self, Row};
use super::environment::Environment;
use super::results::{Cell, Figures, RowResult};
use super::scenarios::{Scale, near};
use crate::program::Program;

const TTL: Duration = Duration::from_secs(4);
/// Maximum time of a takeover.
const LIMIT: Duration = Duration::from_secs(20);
/// Time from the waiter's request until the holder is killed.
const WAITING: Duration = Duration::from_millis(500);
const NAME: &str = "bench:takeover";

/// Runs all rows at the same time, since they only wait.
pub(crate) fn run(bench: &mut Bench, scale: Scale) {
    let rows = catalog::contended().into_iter().chain(catalog::OTHER_STORES);
    let rows: Vec<Row> = rows.filter(|row| bench.takes_part(row.program)).collect();
    let mut results: Vec<RowResult> = rows.iter().map(|row| RowResult::of(row.name)).collect();
    let rounds = if scale.is_quick { 1 } else { 5 };
    for round in 1..=rounds {
        bench.progress(&format!("(e) a killed holder, round {round} of {rounds}"));
        let found: Vec<Result<f64, String>> = thread::scope(|scope| {
            let all: Vec<_> = rows.iter().map(|row| scope.spawn(|| once(*row, scale.program))).collect();
            all.into_iter()
                .map(|one| one.join().unwrap_or_else(|_| Err("its measurement failed".into())))
                .collect()
        });
        for (result, found) in results.iter_mut().zip(found) {
            match found {
                Ok(seconds) => result.push(Figures::from([
                    ("takeover".to_owned(), seconds),
                    ("of_ttl".to_owned(), seconds / TTL.as_secs_f64()),
                ])),
                Err(why) => result.missing = Some(why),
            }
        }
    }
    let title = format!("ttl {} s", TTL.as_secs());
    bench.found(Cell { scenario: "e".into(), title, rows: results, ..Cell::default() });
}

/// Seconds from the kill to the next critical section.
fn once(row: Row, program: Program) -> Result<f64, String> {
    let mut environment = Environment::start(row.program, (2, 1), near(program), TTL)?;
    let log = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    let (lock, is_tuned) = (row.lock.to_owned(), row.is_tuned);
    let [holder, next] = environment.processes.as_mut_slice() else {
        return Err("a takeover needs two processes".into());
    };
    holder.ask(&Order::Hold(Hold { lock: lock.clone(), is_tuned, name: NAME.into(), count: 1 }), LIMIT)?;
    let start_ns = now_ns();
    next.tell(&Order::Run(Run {
        lock,
        is_tuned,
        name: NAME.into(),
        tasks: 1,
        all_tasks: 1,
        start_ns,
        end_ns: start_ns + u64::try_from(LIMIT.as_nanos()).unwrap_or(u64::MAX),
        max_acquisitions: 1,
        permits: 1,
        log: log.path().display().to_string(),
        ..Run::default()
    }))?;
    // The measurement starts at the kill; before that the waiter only has to be in the queue.
    thread::sleep(WAITING);
    let killed = now_ns();
    holder.kill();
    next.answer(LIMIT)?;
    let acquisitions = acquisition::read(log.path()).map_err(|error| error.to_string())?;
    let acquisition =
        acquisitions.first().ok_or_else(|| format!("no client acquired the lock within {LIMIT:?}"))?;
    if acquisition.entered < killed {
        return Err("broken: two holders at the same time".into());
    }
    Ok(Duration::from_nanos(acquisition.entered - killed).as_secs_f64())
}
