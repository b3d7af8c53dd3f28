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
    /// What `--only` selects.
    pub name: &'static str,
    /// Its peer, as `bench/setup` names it.
    pub program: &'static str,
    /// The kind of lock, as the peer names it.
    pub lock: &'static str,
    /// Its lock in the text of a bridge.
    pub scheme: &'static str,
    /// How many servers vote; 1 if none does.
    pub servers: usize,
    /// Percentage of sections that are those of readers.
    pub reads: u32,
}

impl Library {
    const fn new(name: &'static str, scheme: &'static str) -> Self {
        Self { name, program: name, lock: "mutex", scheme, servers: 1, reads: 0 }
    }

    const fn voting(name: &'static str, program: &'static str, scheme: &'static str) -> Self {
        Self { name, program, servers: 3, ..Self::new(name, scheme) }
    }

    /// The lock of leasehold with a bridge, as its peer names it.
    fn bridged(&self, urls: &[String]) -> String {
        match urls {
            [_] => format!("bridge:{}", self.scheme),
            urls => format!("bridge:{}@{}", self.scheme, urls.join(",")),
        }
    }
}

/// Every library whose bridge is tested against it.
pub const LIBRARIES: [Library; 17] = [
    Library::new("redisson", "redisson"),
    Library { program: "redisson", lock: "fenced", ..Library::new("redisson-fenced", "redisson-fenced") },
    Library {
        program: "redisson",
        lock: "read-write",
        reads: 50,
        ..Library::new("redisson-rw", "redisson-rw")
    },
    // Its waiters poll by default.
    Library::new("spring", "spring:registry"),
    Library { program: "spring", lock: "pub-sub", ..Library::new("spring-pub-sub", "spring:registry") },
    Library::new("redis-py", "redis-py"),
    Library::new("redsync", "redsync"),
    Library::new("redlock", "node-redlock"),
    Library::new("rslock", "rslock"),
    // With three keys, the default, and with one.
    Library { lock: "majority", ..Library::new("rueidislock", "rueidislock") },
    Library { program: "rueidislock", ..Library::new("rueidislock-1", "rueidislock") },
    Library::new("bsm", "bsm"),
    Library::new("pottery", "pottery"),
    Library::new("python-redis-lock", "python-redis-lock"),
    Library::voting("redsync-3", "redsync", "redlock"),
    Library::voting("redlock-3", "redlock", "redlock"),
    Library::voting("redisson-3", "redisson", "redisson-redlock"),
];

/// The libraries whose deployment is replayed step by step.
pub const REPLACED: [&str; 3] = ["redisson", "redsync", "redis-py"];

const NAME: &str = "bridged";
/// How long leasehold goes on alone: a key that is left after that is not the other library's.
const TAIL: Duration = Duration::from_secs(2);
const TTL: Duration = Duration::from_secs(10);
/// The ttl while processes are replaced: one that is ended may have taken the lock, and leaves it for so long.
const SHORT_TTL: Duration = Duration::from_secs(3);
/// How long a process runs at least before the next one is replaced.
const STEP: Duration = Duration::from_secs(2);
/// How many processes are replaced.
const PROCESSES: u32 = 4;
/// Time for the last releases. A key that is not released lasts longer.
const RELEASED: Duration = Duration::from_secs(1);
/// Time until all processes are ready.
const READY: Duration = Duration::from_secs(1);

/// What a run has shown.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Mixed {
    /// The other library with its version.
    pub library: String,
    /// Critical sections of the other library, of leasehold with a bridge, and of leasehold alone.
    pub turns: [usize; 3],
    /// Sections of leasehold after the other library has ended.
    pub after: usize,
    /// For both sides, the share of turns in percent that went to the process which had just released the lock.
    pub repeated: [usize; 2],
    /// Those of readers, among all of them. They do not count in the file.
    pub readers: usize,
    /// Readers that entered while a reader of the other side was inside.
    pub together: usize,
    /// What the counter says.
    pub counted: u64,
    /// Pairs of sections that overlapped in time.
    pub overlaps: usize,
    /// Attempts that failed, with the first reason.
    pub failures: Vec<String>,
    /// Own leases that are left on the server, and keys of the other library that leasehold has left.
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
    let shift = |side, until| Shift { side, from: Duration::ZERO, until };
    let both = (0..PROCESSES).flat_map(|_| [shift(0, span), shift(1, span + TAIL)]);
    let shifts = both.collect();
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
    let servers: Vec<Server> = (0..library.servers).map(|_| Server::on_port()).collect();
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let counter = folder.path().join("counter");
    let file = Counter::create(&counter).map_err(|error| error.to_string())?;
    let bridged = library.bridged(&urls);
    let own = &urls[..1];
    let sides = [
        (library.program, library.lock, &urls[..]),
        ("leasehold", &bridged, own),
        ("leasehold", "mutex", own),
    ];
    // The first one to end is the first one to be ended.
    shifts.sort_by_key(|shift| (shift.until, shift.side));
    let mut peers = Vec::new();
    for shift in shifts {
        let (program, lock, urls) = sides[shift.side];
        let mut peer = Process::start(program)?;
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        peer.ask(&Order::Open(Open { urls: urls.to_vec(), clients: 1, ttl_ms }), TTL)?;
        peers.push((shift, lock, peer));
    }
    let of_library = peers.iter().find(|(shift, ..)| shift.side == 0);
    let shown = of_library.map(|(_, _, peer)| peer.hello.library.clone()).unwrap_or_default();
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
            reads_percent: library.reads,
            counter: counter.display().to_string(),
            log: log(task).display().to_string(),
            ..Run::default()
        }))?;
    }
    let (mut sections, mut failures) = (Vec::new(), Vec::new());
    let (mut old_end, mut is_old_gone) = (start_ns, start_ns);
    let mut ours = Vec::new();
    for (task, (shift, _, peer)) in (0..).zip(peers) {
        let answer = peer.answer(READY + shift.until + TTL)?;
        if shift.side == 0 {
            // Its process ends here.
            drop(peer);
            old_end = old_end.max(start_ns + nanos(shift.until));
            is_old_gone = now_ns();
        } else {
            // What its last attempt has taken is released behind its answer.
            ours.push(peer);
        }
        failures.extend(answer.failure);
        sections.extend(read(&log(task))?.into_iter().map(|section| (shift.side, section)));
    }
    sections.sort_by_key(|(_, section)| section.entered);
    // After the last process of the other library: its key was leasehold's then.
    let is_ours = sections
        .iter()
        .any(|(side, section)| *side == 1 && !section.is_shared && section.entered > is_old_gone);
    let (released_by, mut left) = (now_ns() + nanos(RELEASED), left_over(&servers, is_ours));
    while !left.is_empty() && now_ns() < released_by {
        std::thread::sleep(RELEASED / 20);
        left = left_over(&servers, is_ours);
    }
    drop(ours);
    let counted = file.get().map_err(|error| error.to_string())?;
    let summary = Mixed { library: shown, counted, failures, left, ..Mixed::default() };
    Ok(summary.of(&sections, old_end))
}

impl Mixed {
    fn of(self, sections: &[(usize, Acquisition)], old_end: u64) -> Self {
        // Where processes are replaced, leasehold's turns after the last one of the other library count, too.
        let has_tail = !sections.iter().any(|(side, _)| *side == 2);
        let is_tail = |side: usize, section: &Acquisition| {
            has_tail && side > 0 && (old_end..old_end + nanos(TAIL)).contains(&section.entered)
        };
        let count = |side: usize| {
            sections.iter().filter(|(of, section)| *of == side && !is_tail(side, section)).count()
        };
        let after = sections.iter().filter(|(side, section)| is_tail(*side, section)).count();
        let repeated = |side: usize| {
            let same =
                sections.windows(2).filter(|pair| pair[1].0 == side && pair[0].1.task == pair[1].1.task);
            100 * same.count() / count(side).max(1)
        };
        Self {
            turns: [count(0), count(1), count(2)],
            after,
            repeated: [repeated(0), repeated(1)],
            readers: sections.iter().filter(|(_, section)| section.is_shared).count(),
            together: together(sections),
            overlaps: overlaps(sections),
            handover: [0, 1].map(|to| handover(sections, to)),
            ..self
        }
    }
}

fn read(log: &Path) -> Result<Vec<Acquisition>, String> {
    acquisition::read(log).map_err(|error| error.to_string())
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Sections that began while another one was inside, and one of both was a writer's. The sections are in the order of their beginnings.
fn overlaps(sections: &[(usize, Acquisition)]) -> usize {
    let (mut writer_until, mut all_until, mut count) = (0, 0, 0);
    for (_, section) in sections {
        let until = if section.is_shared { writer_until } else { all_until };
        count += usize::from(section.entered < until);
        all_until = section.left.max(all_until);
        if !section.is_shared {
            writer_until = section.left.max(writer_until);
        }
    }
    count
}

/// Readers that entered while one of the other side was inside.
fn together(sections: &[(usize, Acquisition)]) -> usize {
    let mut until = [0; 3];
    let mut count = 0;
    for (side, section) in sections.iter().filter(|(_, section)| section.is_shared) {
        let others = (0..until.len()).filter(|other| other != side);
        count += usize::from(others.map(|other| until[other]).any(|until| section.entered < until));
        until[*side] = section.left.max(until[*side]);
    }
    count
}

/// The median time from the end of a section of the other side until this side, which was waiting, has entered.
fn handover(sections: &[(usize, Acquisition)], to: usize) -> Option<Duration> {
    let waited = |pair: &[(usize, Acquisition)]| {
        let ((from, last), (next_side, next)) = (pair[0], pair[1]);
        // Readers overlap, so the end of one wakes no writer.
        let is_counted = from != to && next_side == to && next.asked < last.left && !last.is_shared;
        is_counted.then(|| next.entered.saturating_sub(last.left))
    };
    let mut times: Vec<u64> = sections.windows(2).filter_map(waited).collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().map(Duration::from_nanos)
}

/// The own leases that are left, and the keys of the other library if leasehold was the last one to have them: processes of the
/// library that are killed in the end may leave it, too. Where several servers vote, they may leave it on a minority at any time.
fn left_over(servers: &[Server], is_ours: bool) -> Vec<String> {
    let keys = |server: &Server| server.query::<Vec<String>>(&["KEYS", "*"]).unwrap_or_default();
    let mut all: Vec<String> = servers.iter().flat_map(keys).collect();
    all.sort();
    let is_left = |keys: &[String]| {
        let key = &keys[0];
        let lasts = ["leasehold:", "signal", "token", "latch"].iter().any(|part| key.contains(part));
        let is_foreign = key.contains(NAME) && !lasts;
        key.contains(":mutex:")
            || key.contains(":rw:")
            || is_ours && is_foreign && keys.len() > servers.len() / 2
    };
    all.chunk_by(|one, next| one == next).filter(|keys| is_left(keys)).map(|keys| keys[0].clone()).collect()
}

impl Mixed {
    /// Whether the lock has excluded both sides from each other, and nothing is left of it.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        let sections: usize = self.turns.iter().sum::<usize>() + self.after;
        let is_exact = self.overlaps == 0 && usize::try_from(self.counted) == Ok(sections - self.readers);
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
            "| library | its turns | leasehold's turns | by the last process again | a waiting library enters after | a waiting leasehold enters after |"
        );
        println!("|---|---|---|---|---|---|");
    }
    let is_selected = |library: &Library| only.is_empty() || only.iter().any(|name| name == library.name);
    for library in LIBRARIES.into_iter().filter(is_selected) {
        let mixed = run(library, span, hold).map_err(|why| format!("{}: {why}", library.name))?;
        mixed.check()?;
        if is_json {
            println!("{}", serde_json::to_string(&mixed).map_err(|error| error.to_string())?);
            continue;
        }
        let [old, new, _] = mixed.turns;
        let [to_old, to_new] = mixed.handover.map(shown);
        let [again, _] = mixed.repeated;
        let votes = if library.servers > 1 { ", three servers" } else { "" };
        println!("| {}{votes} | {old} | {new} | {again} % | {to_old} | {to_new} |", mixed.library);
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
        REPLACED.contains(&library.name) && (only.is_empty() || only.iter().any(|name| name == library.name))
    };
    for library in LIBRARIES.into_iter().filter(is_selected) {
        let mixed = replace(library, hold).map_err(|why| format!("{}: {why}", library.name))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn section(is_shared: bool, entered: u64, left: u64) -> Acquisition {
        Acquisition { task: 0, is_shared, asked: 0, entered, left, done: left }
    }

    #[test]
    fn readers_may_overlap_and_writers_may_not() {
        let readers = [(0, section(true, 1, 9)), (1, section(true, 2, 4)), (1, section(true, 5, 6))];
        assert_eq!((overlaps(&readers), together(&readers)), (0, 2));
        // The first reader is inside for longer than those after it.
        let writer = (1, section(false, 7, 8));
        assert_eq!(overlaps(&[&readers[..], &[writer]].concat()), 1);
        assert_eq!(overlaps(&[writer, (0, section(true, 7, 9))]), 1);
        assert_eq!(overlaps(&[writer, (0, section(false, 8, 9))]), 0);
    }

    /// A process that waited when its time was over may still be granted the lock.
    #[test]
    fn every_section_counts_once_those_after_the_end_too() {
        let sections = [(0, section(false, 1, 2)), (0, section(false, 11, 12)), (1, section(false, 13, 14))];
        let mixed = Mixed { counted: 3, ..Mixed::default() }.of(&sections, 10);
        assert_eq!((mixed.turns, mixed.after), ([2, 0, 0], 1));
        assert_eq!(mixed.check(), Ok(()));
        let replaced = [&sections[..], &[(2, section(false, 15, 16))]].concat();
        let mixed = Mixed { counted: 4, ..Mixed::default() }.of(&replaced, 10);
        assert_eq!((mixed.turns, mixed.after), ([2, 1, 1], 0));
        assert_eq!(mixed.check(), Ok(()));
    }
}
