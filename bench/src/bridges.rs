//! Bridges under load: processes of another library and of leasehold on one lock, whose critical sections count in one file.
//!
//! The counter has no other protection, so it shows every overlap, and so do the moments in the logs.

use std::path::Path;
use std::time::Duration;

use leasehold_bench_peer::acquisition::{self, Acquisition};
use leasehold_bench_peer::clock::now_ns;
use leasehold_bench_peer::counter::Counter;
use leasehold_bench_peer::protocol::{Open, Order, Run};
use leasehold_testkit::Server;
use serde::Serialize;

use crate::compare::process::Process;

/// A library that has a bridge.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    /// Its peer, as `bench/setup` names it.
    pub program: &'static str,
    /// Its lock in the text of a bridge.
    pub scheme: &'static str,
}

/// Every library whose bridge is tested against it.
pub const LIBRARIES: [Library; 6] = [
    Library { program: "redisson", scheme: "redisson" },
    Library { program: "redis-py", scheme: "redis-py" },
    Library { program: "redsync", scheme: "redsync" },
    Library { program: "redlock", scheme: "node-redlock" },
    Library { program: "rslock", scheme: "rslock" },
    // With one key, as its peer is set.
    Library { program: "rueidislock", scheme: "set-nx-px:rueidislock:0" },
];

/// The libraries whose deployment is replayed step by step.
pub const REPLACED: [&str; 3] = ["redisson", "redsync", "redis-py"];

const NAME: &str = "bridged";
const TTL: Duration = Duration::from_secs(10);
/// The ttl while processes are replaced: one that is ended may have taken the lock, and leaves it for so long.
const SHORT_TTL: Duration = Duration::from_secs(3);
/// How long a process runs at least before the next one is replaced.
const STEP: Duration = Duration::from_secs(2);
/// How many processes are replaced.
const PROCESSES: u32 = 4;
/// Time until all processes are ready.
const READY: Duration = Duration::from_secs(1);

/// What a run has shown.
#[derive(Clone, Debug, Serialize)]
pub struct Mixed {
    /// The other library with its version.
    pub library: String,
    /// Critical sections of the other library, of leasehold with a bridge, and of leasehold alone.
    pub turns: [usize; 3],
    /// What the counter says.
    pub counted: u64,
    /// Pairs of sections that overlapped in time.
    pub overlaps: usize,
    /// Attempts that failed, with the first reason.
    pub failures: Vec<String>,
    /// Own leases that are left on the server.
    pub left: Vec<String>,
    /// The median time from a release by one side until the other side has entered, if it waited: to the other library, and to
    /// leasehold.
    pub handover: [Option<Duration>; 2],
}

/// One process: its side, and when it works, from the start of the run.
struct Shift {
    side: usize,
    from: Duration,
    until: Duration,
}

/// Runs four processes of both sides for this long, with critical sections of `hold`.
///
/// # Errors
///
/// Why a peer does not run.
pub fn run(library: Library, span: Duration, hold: Duration) -> Result<Mixed, String> {
    let shift = |side| Shift { side, from: Duration::ZERO, until: span };
    let shifts = (0..2 * PROCESSES).map(|number| shift(usize::from(number >= PROCESSES))).collect();
    work(library, shifts, hold, TTL)
}

/// Replaces four processes of the library one by one: first by leasehold with a bridge, and those by leasehold alone.
///
/// # Errors
///
/// Why a peer does not run.
pub fn replace(library: Library, hold: Duration) -> Result<Mixed, String> {
    let all = STEP * (PROCESSES + 1);
    let shifts = (0..PROCESSES).flat_map(|number| {
        let (bridged, alone) = (STEP * (number + 1), all + STEP * (number + 1));
        [(Duration::ZERO, bridged), (bridged, alone), (alone, 2 * all + STEP)]
            .into_iter()
            .enumerate()
            .map(|(side, (from, until))| Shift { side, from, until })
    });
    work(library, shifts.collect(), hold, SHORT_TTL)
}

fn work(library: Library, mut shifts: Vec<Shift>, hold: Duration, ttl: Duration) -> Result<Mixed, String> {
    let server = Server::on_port();
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let counter = folder.path().join("counter");
    let file = Counter::create(&counter).map_err(|error| error.to_string())?;
    let bridged = format!("bridge:{}", library.scheme);
    let sides = [(library.program, "mutex"), ("leasehold", bridged.as_str()), ("leasehold", "mutex")];
    // The first one to end is the first one to be ended.
    shifts.sort_by_key(|shift| (shift.until, shift.side));
    let mut peers = Vec::new();
    for shift in shifts {
        let (program, lock) = sides[shift.side];
        let mut peer = Process::start(program)?;
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        peer.ask(&Order::Open(Open { urls: vec![server.url()], clients: 1, ttl_ms }), TTL)?;
        peers.push((shift, lock, peer));
    }
    let of_library = peers.iter().find(|(shift, ..)| shift.side == 0);
    let library = of_library.map(|(_, _, peer)| peer.hello.library.clone()).unwrap_or_default();
    let start_ns = now_ns() + nanos(READY);
    let all_tasks = u32::try_from(peers.len()).unwrap_or(u32::MAX);
    let log = |task: u32| folder.path().join(format!("log-{task}"));
    for (task, (shift, lock, peer)) in (0..).zip(&mut peers) {
        peer.tell(&Order::Run(Run {
            lock: (*lock).to_owned(),
            name: NAME.to_owned(),
            tasks: 1,
            first_task: task,
            all_tasks,
            hold_us: u64::try_from(hold.as_micros()).unwrap_or(u64::MAX),
            start_ns: start_ns + nanos(shift.from),
            end_ns: start_ns + nanos(shift.until),
            permits: 1,
            counter: counter.display().to_string(),
            log: log(task).display().to_string(),
            ..Run::default()
        }))?;
    }
    let (mut sections, mut failures) = (Vec::new(), Vec::new());
    for (task, (shift, _, peer)) in (0..).zip(peers) {
        let answer = peer.answer(READY + shift.until + TTL)?;
        failures.extend(answer.failure);
        sections.extend(read(&log(task))?.into_iter().map(|section| (shift.side, section)));
    }
    sections.sort_by_key(|(_, section)| section.entered);
    let turns = [0, 1, 2].map(|side| sections.iter().filter(|(of, _)| *of == side).count());
    let overlaps = sections.windows(2).filter(|pair| pair[1].1.entered < pair[0].1.left).count();
    let handover = [0, 1].map(|to| handover(&sections, to));
    let left = left_over(&server);
    let counted = file.get().map_err(|error| error.to_string())?;
    Ok(Mixed { library, turns, counted, overlaps, failures, left, handover })
}

fn read(log: &Path) -> Result<Vec<Acquisition>, String> {
    acquisition::read(log).map_err(|error| error.to_string())
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// The median time from the end of a section of the other side until this side, which was waiting, has entered.
fn handover(sections: &[(usize, Acquisition)], to: usize) -> Option<Duration> {
    let waited = |pair: &[(usize, Acquisition)]| {
        let ((from, last), (next_side, next)) = (pair[0], pair[1]);
        let is_counted = from != to && next_side == to && next.asked < last.left;
        is_counted.then(|| next.entered.saturating_sub(last.left))
    };
    let mut times: Vec<u64> = sections.windows(2).filter_map(waited).collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().map(Duration::from_nanos)
}

/// The own leases that are left. A key of the other library may be left by its processes, which are killed in the end.
fn left_over(server: &Server) -> Vec<String> {
    let keys: Vec<String> = server.query(&["KEYS", "*"]).unwrap_or_default();
    keys.into_iter().filter(|key| key.contains(":mutex:")).collect()
}

impl Mixed {
    /// Whether the lock has excluded both sides from each other, and nothing is left of it.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        let sections: usize = self.turns.iter().sum();
        let is_exact = self.overlaps == 0 && usize::try_from(self.counted) == Ok(sections);
        if is_exact && self.left.is_empty() { Ok(()) } else { Err(format!("{self:?}")) }
    }
}

/// Runs the libraries one after the other, four processes of each side, and prints a table, or a JSON value for each.
///
/// # Errors
///
/// A library that can't be run, or a lock that let two in.
pub fn report(span: Duration, hold: Duration, only: &[String], is_json: bool) -> Result<(), String> {
    if !is_json {
        println!(
            "| library | its turns | leasehold's turns | a waiting library enters after | a waiting leasehold enters after |"
        );
        println!("|---|---|---|---|---|");
    }
    let is_selected = |library: &Library| only.is_empty() || only.iter().any(|name| name == library.program);
    for library in LIBRARIES.into_iter().filter(is_selected) {
        let mixed = run(library, span, hold).map_err(|why| format!("{}: {why}", library.program))?;
        mixed.check()?;
        if is_json {
            println!("{}", serde_json::to_string(&mixed).map_err(|error| error.to_string())?);
            continue;
        }
        let [old, new, _] = mixed.turns;
        let [to_old, to_new] = mixed.handover.map(shown);
        println!("| {} | {old} | {new} | {to_old} | {to_new} |", mixed.library);
        for failure in &mixed.failures {
            eprintln!("{}: {failure}", mixed.library);
        }
    }
    Ok(())
}

/// Replaces the processes of each library one by one, and prints a table, or a JSON value for each.
///
/// # Errors
///
/// As [`report`].
pub fn report_replaced(hold: Duration, only: &[String], is_json: bool) -> Result<(), String> {
    if !is_json {
        println!("| library | its turns | leasehold's turns with a bridge | leasehold's turns alone |");
        println!("|---|---|---|---|");
    }
    let is_selected = |library: &Library| {
        REPLACED.contains(&library.program)
            && (only.is_empty() || only.iter().any(|name| name == library.program))
    };
    for library in LIBRARIES.into_iter().filter(is_selected) {
        let mixed = replace(library, hold).map_err(|why| format!("{}: {why}", library.program))?;
        mixed.check()?;
        if is_json {
            println!("{}", serde_json::to_string(&mixed).map_err(|error| error.to_string())?);
        } else {
            let [old, bridged, alone] = mixed.turns;
            println!("| {} | {old} | {bridged} | {alone} |", mixed.library);
        }
    }
    Ok(())
}

fn shown(time: Option<Duration>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| format!("{:.1} ms", time.as_secs_f64() * 1e3))
}
