//! `cargo bench`: what the README and docs claim about performance.
//!
//! `cargo bench -- PART…` runs some of it: uncontended, redis, program, handoff, waiting, idle.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use leasehold::blocking::Client;
use leasehold_bench::{Contestant, bar, compare, median, processor_time, show};
use leasehold_core::model::{CommandContext, Table, apply};
use leasehold_core::{
    Acquire, Acquisition, ClientId, Command as StoreCommand, Now, Push, Release, StoreTime,
};
use leasehold_testkit::Server;
use rusqlite::Connection;

fn main() {
    let parts: [(&str, fn()); 6] = [
        ("uncontended", uncontended),
        ("redis", redis_pair),
        ("program", program),
        ("handoff", handoff),
        ("waiting", waiting),
        ("idle", idle),
    ];
    let chosen: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    for (name, run) in parts {
        if chosen.is_empty() || chosen.iter().any(|word| word == name) {
            run();
        }
    }
}

/// The model alone: the two commands that a lock and a release are.
struct Model {
    table: Table,
    sequence: u64,
    now: u64,
    pushes: Vec<Push>,
}

impl Model {
    fn pair(&mut self) {
        self.sequence += 1;
        self.now += 1;
        let acquisition = Acquisition { client: ClientId::new(7), sequence: self.sequence };
        let (ttl, metadata) = (Duration::from_secs(10), Arc::from(""));
        let acquire = Acquire { metadata, ..Acquire::exclusive(acquisition, ttl) };
        self.apply(&acquire.into());
        let release = Release::now(acquisition);
        self.apply(&StoreCommand::Release(release));
    }

    fn apply(&mut self, command: &StoreCommand) {
        let now = Now::same(StoreTime::from_micros(1_700_000_000_000_000 + self.now));
        let context = CommandContext { now, is_reachable: &mut |_| true, pushes: &mut self.pushes };
        let Ok(answer) = apply(&mut self.table, context, command);
        std::hint::black_box(answer);
    }
}

/// Lock and release, this often, from async code.
fn pairs(mutex: &leasehold::Mutex, count: u32) {
    pollster::block_on(async {
        for _ in 0..count {
            let guard = mutex.lock().await.expect("granted");
            std::hint::black_box(guard.token());
            guard.release().await.expect("released");
        }
    });
}

fn connect(url: &str) -> leasehold::Client {
    pollster::block_on(leasehold::Client::connect(url)).expect("opens")
}

/// The least that anything on the same engine could do: two transactions that change a row each.
fn bare_pair(connection: &Connection) {
    let run = |sql: &str| connection.prepare_cached(sql).expect("prepares").execute([]).expect("runs");
    for update in ["UPDATE bare SET holder = 1 WHERE id = 1", "UPDATE bare SET holder = 0 WHERE id = 1"] {
        run("BEGIN IMMEDIATE");
        run(update);
        run("COMMIT");
    }
}

/// As the store has it: prepared statements, and no checkpoint on the way.
fn bare(path: &Path) -> Connection {
    let connection = Connection::open(path).expect("opens");
    connection
        .execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA wal_autocheckpoint = 0;
             CREATE TABLE bare (id INTEGER PRIMARY KEY, holder INTEGER); INSERT INTO bare VALUES (1, 0);",
        )
        .expect("prepares");
    connection
}

fn uncontended() {
    const PAIRS: u32 = 20_000;
    const FILE_PAIRS: u32 = 500;
    let mut model = Model { table: Table::new(), sequence: 0, now: 0, pushes: Vec::new() };
    let memory = connect("memory:").mutex("bench");
    let result = compare(
        "uncontended lock + release in memory",
        51,
        vec![
            Contestant::new("the model alone", PAIRS, || (0..PAIRS).for_each(|_| model.pair())),
            Contestant::new("memory:", PAIRS, || pairs(&memory, PAIRS)),
        ],
    );
    bar("memory: against the model alone", result.ratios[1], 4.0);
    bar("memory: in microseconds", result.seconds[1] * 1e6, 3.0);

    let folder = tempfile::tempdir().expect("a folder");
    let bare = bare(&folder.path().join("bare.db"));
    let url = format!("sqlite:{}", folder.path().join("locks.db").display());
    let sqlite = connect(&url).mutex("bench");
    let result = compare(
        "uncontended lock + release in a file",
        51,
        vec![
            Contestant::new("two bare SQLite transactions", FILE_PAIRS, || {
                (0..FILE_PAIRS).for_each(|_| bare_pair(&bare));
            }),
            Contestant::new("sqlite:", FILE_PAIRS, || pairs(&sqlite, FILE_PAIRS)),
        ],
    );
    bar("sqlite: against two bare transactions", result.ratios[1], 2.0);
}

/// The same pair of round trips: nothing, what most libraries do, and ours with queue and token.
fn redis_pair() {
    const PAIRS: u32 = 500;
    let server = Server::on_socket();
    let url = server.url();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let client = redis::Client::open(url.as_str()).expect("an address");
    let connection = runtime.block_on(client.get_multiplexed_async_connection()).expect("connects");
    let delete = redis::Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end",
    );
    let mutex = connect(&url).mutex("bench");
    let result = compare(
        "uncontended lock + release on one Redis server, one after the other",
        31,
        vec![
            Contestant::new("two PINGs", PAIRS, || {
                runtime.block_on(async {
                    let mut connection = connection.clone();
                    for _ in 0..2 * PAIRS {
                        let _: String =
                            redis::cmd("PING").query_async(&mut connection).await.expect("answers");
                    }
                });
            }),
            Contestant::new("SET NX PX, compare and delete", PAIRS, || {
                runtime.block_on(async {
                    let mut connection = connection.clone();
                    for _ in 0..PAIRS {
                        let mut set = redis::cmd("SET");
                        set.arg("bare").arg("token").arg("NX").arg("PX").arg(10_000);
                        let _: String = set.query_async(&mut connection).await.expect("is set");
                        let call = delete.key("bare").arg("token").invoke_async::<i64>(&mut connection).await;
                        assert_eq!(call.expect("answers"), 1);
                    }
                });
            }),
            Contestant::new("redis+unix:", PAIRS, || pairs(&mutex, PAIRS)),
        ],
    );
    let stats: String = runtime
        .block_on(redis::cmd("INFO").arg("commandstats").query_async(&mut connection.clone()))
        .expect("answers");
    for line in stats.lines().filter(|line| line.contains("evalsha") || line.contains("cmdstat_set:")) {
        println!("  {line}");
    }
    bar("redis: against two PINGs", result.ratios[2], 1.4);
    bar("redis: against SET NX PX, compare and delete", result.ratios[2] / result.ratios[1], 1.25);
}

/// The program, built with the settings of this benchmark.
fn binary() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--release", "--quiet", "-p", "leasehold-cli", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml"))
        .status()
        .expect("cargo runs");
    assert!(built.success(), "the program is built");
    let mut path = std::env::current_exe().expect("this program has a path");
    path.pop();
    path.pop();
    path.push("leasehold");
    assert!(path.exists(), "{} is missing", path.display());
    path
}

fn program() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = format!("sqlite:{}", folder.path().join("locks.db").display());
    let program = binary();
    let run = |command: &mut Command| assert!(command.status().expect("it starts").success());
    let result = compare(
        "a command under a lock",
        41,
        vec![
            Contestant::new("true", 1, || run(&mut Command::new("true"))),
            Contestant::new("leasehold run x -- true", 1, || {
                run(Command::new(&program).args(["run", "--store", &store, "x", "--", "true"]));
            }),
        ],
    );
    bar("milliseconds more than plain true", (result.seconds[1] - result.seconds[0]) * 1e3, 15.0);
}

/// From the release in one process to the moment when another one, which waited, has the lock.
fn handoff() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("locks.db");
    let program = binary();
    let client = Client::connect(&format!("sqlite:{}", path.display())).expect("opens");
    let mutex = client.mutex("x");
    let store = format!("sqlite:{}", path.display());
    let mut times = Vec::new();
    for _ in 0..51 {
        let guard = mutex.lock().expect("granted");
        // It prints the clock that both processes share the moment it runs.
        let mut child = Command::new(&program)
            .args(["run", "--store", &store, "x", "--", "cat", "/proc/uptime"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        while mutex.inspect().expect("answers").waiters.is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        let began = Instant::now();
        guard.release().expect("released");
        let mut first = [0];
        child.stdout.take().expect("piped").read_exact(&mut first).expect("it prints");
        times.push(began.elapsed().as_secs_f64());
        child.wait().expect("it ends");
    }
    println!("\nhand-off from one process to another, until the other's command prints (51 rounds)");
    println!("  median {}, with starting the command", show(median(times)));
}

/// What waiting costs, in percent of a core for 100 waiters, each a process of its own.
fn waiting() {
    const WAITERS: u32 = 20;
    const SPAN: Duration = Duration::from_secs(12);
    let folder = tempfile::tempdir().expect("a folder");
    let store = format!("sqlite:{}", folder.path().join("locks.db").display());
    let program = binary();
    let client = Client::connect(&store).expect("opens");
    let mutex = client.mutex("x");
    let guard = mutex.lock().expect("granted");
    let mut waiters: Vec<Child> = (0..WAITERS)
        .map(|_| {
            let mut command = Command::new(&program);
            command.args(["run", "--store", &store, "x", "--", "true"]);
            command.spawn().expect("it starts")
        })
        .collect();
    while mutex.inspect().expect("answers").waiters.len() < WAITERS as usize {
        thread::sleep(Duration::from_millis(5));
    }
    let used = || waiters.iter().map(|child| ticks(child.id())).sum::<u64>();
    let before = used();
    thread::sleep(SPAN);
    // A tick of /proc is 10 ms.
    let ticks = u32::try_from(used() - before).unwrap_or(u32::MAX);
    let percent = f64::from(ticks) * 0.01 / SPAN.as_secs_f64() * 100.0 * 100.0 / f64::from(WAITERS);
    println!("\nwaiting: {WAITERS} processes for {SPAN:?}");
    bar("percent of a core for 100 waiters", percent, 1.0);
    guard.release().expect("released");
    for child in &mut waiters {
        child.wait().expect("it ends");
    }
}

/// User and system time of a process, in ticks.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    [11, 12].iter().filter_map(|index| fields.get(*index)?.parse::<u64>().ok()).sum()
}

/// The cost of 10,000 idle leases.
fn idle() {
    const LEASES: usize = 10_000;
    const SPAN: Duration = Duration::from_secs(20);
    let client = Client::connect("memory:").expect("opens");
    let guards: Vec<_> =
        (0..LEASES).map(|number| client.mutex(number.to_string()).lock().expect("granted")).collect();
    let before = processor_time();
    thread::sleep(SPAN);
    let used = (processor_time() - before).as_secs_f64();
    assert!(guards.iter().all(leasehold::blocking::Guard::is_held), "each is renewed");
    println!("\nidle: {LEASES} held leases with a ttl of 10 s in one client for {SPAN:?}");
    bar("percent of a core", used / SPAN.as_secs_f64() * 100.0, 5.0);
}
