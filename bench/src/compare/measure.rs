//! One group of cells: every peer connects once, then all run in turn, round by round.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use leasehold_bench_peer::acquisition;
use leasehold_bench_peer::clock::{now_ns, until};
use leasehold_bench_peer::counter::Counter;
use leasehold_bench_peer::protocol::{Answer, Order, Run};
use tempfile::TempDir;

use super::Bench;
use super::catalog::Row;
use super::environment::Environment;
use super::figures::{Rule, Window, figures};
use super::meter::{Listener, Used};
use super::results::{Cell, Figures, RowResult};
use super::scenarios::{Group, Work};

const TTL: Duration = Duration::from_secs(10);
/// Time until all tasks are ready: a fixed part, and a part for each task.
const READY: Duration = Duration::from_millis(30);
const READY_EACH: Duration = Duration::from_micros(300);
/// From this number of tasks on, a warm-up precedes the measurement.
const CROWD: u32 = 100;
/// The first warm-up takes longer, since the clients open further connections.
const COLD_CROWD: u32 = 1_000;
const COLD: Duration = Duration::from_secs(2);
/// Time in which a process that was paused catches up.
const SETTLING: Duration = Duration::from_millis(300);
/// Maximum number of repetitions of a run on a slow machine.
const REPEATS: u32 = 2;
/// Minimum duration of a warm-up: the Java compiler needs it.
const WARM_UP: Duration = Duration::from_millis(500);

/// The environments of a group, by program. Locks of one library share its processes, so that all run warmed up.
type Environments = BTreeMap<&'static str, Result<Environment, String>>;

/// Runs all cells of a group.
pub(crate) fn run(bench: &mut Bench, group: &Group) {
    let mut environments = Environments::new();
    for row in &group.rows {
        bench.progress(&format!("({}) connecting {}", group.scenario.letter(), row.program));
        let start = || Environment::start(row.program, (group.processes, group.clients), group.way, TTL);
        match environments.entry(row.program).or_insert_with(start) {
            Ok(environment) => {
                environment.pause(true);
                bench.is_there(row.program, &environment.processes[0].hello);
            }
            Err(why) => bench.is_missing(row.program, why),
        }
    }
    for work in &group.cells {
        if work.one_is_stopped {
            environments.values_mut().flatten().for_each(Environment::stop_one);
        }
        let cell = cell(bench, group, work, &mut environments);
        bench.found(cell);
    }
}

fn cell(bench: &mut Bench, group: &Group, work: &Work, environments: &mut Environments) -> Cell {
    let mut rows: Vec<RowResult> = group.rows.iter().map(|row| RowResult::of(row.name)).collect();
    let mut warm: Vec<Figures> = vec![Figures::new(); rows.len()];
    // The first round is the warm-up. It only counts commands.
    for round in 0..=work.rounds {
        for ((row, result), warm) in group.rows.iter().zip(&mut rows).zip(&mut warm) {
            if result.missing.is_some() {
                continue;
            }
            let letter = group.scenario.letter();
            let (name, rounds) = (row.name, work.rounds);
            bench.progress(&format!("({letter}) {}: {name}, round {round} of {rounds}", work.title));
            let environment = match environments.get_mut(row.program) {
                Some(Ok(environment)) => environment,
                Some(Err(why)) => {
                    result.missing = Some(why.clone());
                    continue;
                }
                None => continue,
            };
            let found = if round == 0 {
                awake(environment, |environment| warm_up(environment, *row, work))
            } else {
                repeat_if_disturbed(bench, environment, *row, work)
            };
            match found {
                Ok((found, failure)) if round == 0 => {
                    let is_kept = |name: &str| matches!(name, "sent" | "sent_for");
                    *warm = found.into_iter().filter(|(name, _)| is_kept(name)).collect();
                    result.failure = failure;
                }
                Ok((mut found, failure)) => {
                    found.append(&mut warm.clone());
                    result.push(found);
                    result.failure = result.failure.take().or(failure);
                }
                Err(why) => {
                    result.missing = Some(why);
                    match environment.restart() {
                        Ok(()) => environment.pause(true),
                        Err(why) => drop(environments.insert(row.program, Err(why))),
                    }
                }
            }
        }
    }
    Cell {
        scenario: group.scenario.letter().to_owned(),
        title: work.title.clone(),
        size: work.size,
        series: work.series.clone(),
        is_contended: work.rule != Rule::Alone && work.tasks * group.processes > 1,
        rows,
    }
}

/// Runs while the processes of this environment are awake.
fn awake<T>(environment: &mut Environment, run: impl FnOnce(&mut Environment) -> T) -> T {
    environment.pause(false);
    sleep(SETTLING);
    let found = run(environment);
    environment.pause(true);
    found
}

/// The figures of a run, and the first failure that its library reported.
type Found = (Figures, Option<String>);

fn warm_up(environment: &mut Environment, row: Row, work: &Work) -> Result<Found, String> {
    let listeners: Vec<Listener> = environment
        .servers
        .iter()
        .map(Listener::on)
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    let span = work.span.max(WARM_UP);
    once(environment, row, &Work { span, ..work.clone() }, &listeners)
}

/// Repeats a run before or after which the machine was slow.
fn repeat_if_disturbed(
    bench: &mut Bench,
    environment: &mut Environment,
    row: Row,
    work: &Work,
) -> Result<Found, String> {
    for repeat in 0..=REPEATS {
        let (was_slow, began) = (bench.calibration.is_slow(), Instant::now());
        let found = awake(environment, |environment| once(environment, row, work, &[]))?;
        if !was_slow && !bench.calibration.is_slow() {
            return Ok(found);
        }
        if repeat == REPEATS || !bench.may_repeat(began.elapsed()) {
            bench.results.disturbed += 1;
            return Ok(found);
        }
        bench.results.discarded += 1;
    }
    unreachable!("the last repeat returns")
}

/// The files of one run.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new() -> Result<Self, String> {
        // In memory if possible: no disk in the measured path.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        folder.map(|folder| Self { folder }).map_err(|error| error.to_string())
    }

    fn counter(&self) -> PathBuf {
        self.folder.path().join("counter")
    }

    fn log(&self, process: u32) -> PathBuf {
        self.folder.path().join(format!("log{process}"))
    }
}

/// One run of one row.
fn once(
    environment: &mut Environment,
    row: Row,
    work: &Work,
    listeners: &[Listener],
) -> Result<Found, String> {
    let files = Files::new()?;
    let processes = u32::try_from(environment.processes.len()).unwrap_or(1);
    let counts = work.rule == Rule::Exclusive && row.lock != "ping";
    let counter = Counter::create(&files.counter()).map_err(|error| error.to_string())?;
    let start_ns = now_ns() + nanos(READY + READY_EACH * work.tasks);
    let lead = lead(work, !listeners.is_empty());
    let from_ns = start_ns + nanos(lead);
    let end_ns = from_ns + nanos(work.span);
    let window = Window { start_ns, from_ns, end_ns, tasks: work.tasks * processes, rule: work.rule };
    environment.tell_all(|process, _| Order::Run(order(row, work, window, process, &files)))?;
    sleep(until(from_ns));
    let (before, sent) = (environment.used(), sent(listeners));
    sleep(until(end_ns));
    let sent = self::sent(listeners) - sent;
    let used = environment.used().since(before);
    let answers = environment.answers(work.span)?;
    let mut acquisitions = Vec::new();
    for process in 0..processes {
        acquisitions
            .extend(acquisition::read(&files.log(process)).map_err(|error| format!("its log: {error}"))?);
    }
    let counter = counts.then(|| counter.get().unwrap_or(0));
    let mut found = figures(acquisitions, window, counter);
    cost(&mut found, used, !environment.servers.is_empty());
    let acquisitions = found.get("acquisitions").copied().unwrap_or(0.0);
    if !listeners.is_empty() && acquisitions > 0.0 {
        found.insert("sent".into(), sent / acquisitions);
        found.insert("sent_for".into(), acquisitions);
    }
    let failures: u64 = answers.iter().map(|answer| answer.failures).sum();
    found.insert("failures".into(), f64::from(u32::try_from(failures).unwrap_or(u32::MAX)));
    let failure = answers.iter().find_map(|answer: &Answer| answer.failure.clone());
    environment.renew(&answers)?;
    Ok((found, failure))
}

/// Duration of the warm-up before the measurement.
fn lead(work: &Work, is_warm_up: bool) -> Duration {
    let lead = if work.tasks >= CROWD { work.span / 2 } else { Duration::ZERO };
    if is_warm_up && work.size >= COLD_CROWD && work.rule == Rule::Exclusive { lead.max(COLD) } else { lead }
}

fn order(row: Row, work: &Work, window: Window, process: u32, files: &Files) -> Run {
    let counts = work.rule == Rule::Exclusive && row.lock != "ping";
    Run {
        lock: row.lock.to_owned(),
        is_tuned: row.is_tuned,
        name: format!("bench:{}", window.start_ns),
        own_names: work.rule == Rule::Alone,
        tasks: work.tasks,
        first_task: process * work.tasks,
        all_tasks: window.tasks,
        hold_us: u64::try_from(work.hold.as_micros()).unwrap_or(0),
        start_ns: window.start_ns,
        end_ns: window.end_ns,
        max_acquisitions: 0,
        reads_percent: work.reads_percent,
        permits: if let Rule::Permits(permits) = work.rule { permits } else { 1 },
        counter: if counts { files.counter().display().to_string() } else { String::new() },
        log: files.log(process).display().to_string(),
        retry_ms: 0,
    }
}

fn sent(listeners: &[Listener]) -> f64 {
    listeners.iter().map(|listener| f64::from(u32::try_from(listener.sent()).unwrap_or(u32::MAX))).sum()
}

/// The cost per acquisition. CPU times are in microseconds.
fn cost(found: &mut Figures, used: Used, is_on_redis: bool) {
    let Some(acquisitions) = found.get("acquisitions").copied().filter(|acquisitions| *acquisitions > 0.0)
    else {
        return;
    };
    if is_on_redis {
        found.insert("calls".into(), used.calls / acquisitions);
        found.insert("bytes".into(), used.bytes / acquisitions);
    }
    found.insert("server_us".into(), used.server * 1e6 / acquisitions);
    found.insert("client_us".into(), used.peers * 1e6 / acquisitions);
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
