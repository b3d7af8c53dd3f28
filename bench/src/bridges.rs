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
pub const LIBRARIES: [Library; 5] = [
    Library { program: "redisson", scheme: "redisson" },
    Library { program: "redis-py", scheme: "redis-py" },
    Library { program: "redsync", scheme: "redsync" },
    Library { program: "redlock", scheme: "node-redlock" },
    Library { program: "rslock", scheme: "rslock" },
];

const NAME: &str = "bridged";
const TTL: Duration = Duration::from_secs(10);
/// Time until all processes are ready.
const READY: Duration = Duration::from_secs(1);

/// What a run has shown.
#[derive(Clone, Debug, Serialize)]
pub struct Mixed {
    /// The other library with its version.
    pub library: String,
    /// Critical sections of the other library and of leasehold.
    pub turns: [usize; 2],
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

/// Runs processes of both sides for this long, with critical sections of `hold`.
///
/// # Errors
///
/// Why a peer does not run.
pub fn run(library: Library, processes: [u32; 2], span: Duration, hold: Duration) -> Result<Mixed, String> {
    let server = Server::on_port();
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let counter = folder.path().join("counter");
    let file = Counter::create(&counter).map_err(|error| error.to_string())?;
    let own_lock = format!("bridge:{}", library.scheme);
    let sides = [(library.program, "mutex"), ("leasehold", own_lock.as_str())];
    let mut peers = Vec::new();
    for (side, ((program, lock), count)) in sides.into_iter().zip(processes).enumerate() {
        for _ in 0..count {
            let mut peer = Process::start(program)?;
            let ttl_ms = u64::try_from(TTL.as_millis()).unwrap_or(u64::MAX);
            peer.ask(&Order::Open(Open { urls: vec![server.url()], clients: 1, ttl_ms }), TTL)?;
            peers.push((side, lock, peer));
        }
    }
    let library = peers.first().map(|(_, _, peer)| peer.hello.library.clone()).unwrap_or_default();
    let start_ns = now_ns() + nanos(READY);
    let all_tasks = u32::try_from(peers.len()).unwrap_or(u32::MAX);
    let log = |task: u32| folder.path().join(format!("log-{task}"));
    for (task, (_, lock, peer)) in (0..).zip(&mut peers) {
        peer.tell(&Order::Run(Run {
            lock: (*lock).to_owned(),
            name: NAME.to_owned(),
            tasks: 1,
            first_task: task,
            all_tasks,
            hold_us: u64::try_from(hold.as_micros()).unwrap_or(u64::MAX),
            start_ns,
            end_ns: start_ns + nanos(span),
            permits: 1,
            counter: counter.display().to_string(),
            log: log(task).display().to_string(),
            ..Run::default()
        }))?;
    }
    let (mut sections, mut failures) = (Vec::new(), Vec::new());
    for (task, (side, _, peer)) in (0..).zip(&peers) {
        let answer = peer.answer(READY + span + TTL)?;
        failures.extend(answer.failure);
        sections.extend(read(&log(task))?.into_iter().map(|section| (*side, section)));
    }
    drop(peers);
    sections.sort_by_key(|(_, section)| section.entered);
    let turns = [0, 1].map(|side| sections.iter().filter(|(of, _)| *of == side).count());
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
        let sections = self.turns[0] + self.turns[1];
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
        let mixed = run(library, [4, 4], span, hold).map_err(|why| format!("{}: {why}", library.program))?;
        mixed.check()?;
        if is_json {
            println!("{}", serde_json::to_string(&mixed).map_err(|error| error.to_string())?);
            continue;
        }
        let [old, new] = mixed.turns;
        let [to_old, to_new] = mixed.handover.map(shown);
        println!("| {} | {old} | {new} | {to_old} | {to_new} |", mixed.library);
        for failure in &mixed.failures {
            eprintln!("{}: {failure}", mixed.library);
        }
    }
    Ok(())
}

fn shown(time: Option<Duration>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| format!("{:.1} ms", time.as_secs_f64() * 1e3))
}
