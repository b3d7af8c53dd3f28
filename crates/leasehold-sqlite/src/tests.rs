//! The store against the model, against bad files, and against its neighbours.

mod bad_files;
mod file_changes;
#[cfg(target_os = "linux")]
mod side_files;
mod worker;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use leasehold_core::model::{CommandContext, Table, apply, apply_all, sweep as model_sweep};
use leasehold_core::{
    Acquisition, Answer, Effect, Grant, Kind, Name, Now, Push, PushKind, Release, Renew, Reply, StoreTime,
    Token, TokenRange, View, WaitFor,
};
use leasehold_store::histories::{Joint, RESOURCES, Step, client_id, joint_steps, steps, with_tokens};
use proptest::prelude::*;
use rusqlite::Connection;

use super::mailbox::Reached;
use super::rows::SqliteRows;
use super::schema::Boot;
use super::*;

const TTL: Duration = Duration::from_secs(10);

fn resource(name: &str) -> Resource {
    Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() }
}

fn id(client: u128, sequence: u64) -> Acquisition {
    Acquisition { client: ClientId::new(client), sequence }
}

fn acquire(acquisition: Acquisition, wait: bool) -> Command {
    Command::from(Acquire {
        wait: wait.then_some(WaitFor { entry_ttl: TTL, max_queue: 100 }),
        metadata: Arc::from("metadata"),
        ..Acquire::exclusive(acquisition, TTL)
    })
}

fn release(acquisition: Acquisition) -> Command {
    Command::Release(Release::now(acquisition))
}

/// Ignores all pushes.
struct IgnoredInbox;

impl Inbox for IgnoredInbox {
    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}

    fn deliver(&self, _push: Push) {}
}

fn open_with(path: &Path, client: u128, inbox: Weak<dyn Inbox>) -> Result<Arc<Sqlite>, OpenError> {
    let url = SqliteUrl::new(path, false).unwrap();
    Sqlite::open(&url, Clock::System, ClientId::new(client), inbox)
}

fn open(path: &Path, client: u128) -> Result<Arc<Sqlite>, OpenError> {
    let inbox: Arc<dyn Inbox> = Arc::new(IgnoredInbox);
    let opened = open_with(path, client, Arc::downgrade(&inbox));
    // It lives as long as the process.
    std::mem::forget(inbox);
    opened
}

fn callers_connection(store: &Sqlite) -> MutexGuard<'_, FileConnection> {
    store.connection.as_ref().expect("not root in another user's directory").lock().unwrap()
}

/// A user without root's rights.
const ALICE: u32 = 12_345;

/// Only root can give files away: whether this is root.
fn give_to_alice(path: &Path) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        std::os::unix::fs::chown(path, Some(ALICE), Some(ALICE)).unwrap();
    }
    is_root
}

fn refusal(path: &Path) -> String {
    let Err(error) = open(path, 1) else { panic!("{} was opened", path.display()) };
    let message = error.to_string();
    assert!(message.contains(&path.display().to_string()) && message.lines().count() == 1, "{message}");
    message
}

// --- Against the model ---------------------------------------------------------------------------

/// How many histories are compared: `scripts/test --long` wants more.
fn cases() -> u32 {
    leasehold_testkit::extent(100, 1_000, 20_000)
}

/// Both do the same, and must say the same.
struct Twins<'c> {
    connection: &'c Connection,
    resources: Vec<(Resource, Table)>,
    is_shared: bool,
    now: Now,
    stepped_back: Duration,
    absent: Vec<ClientId>,
}

impl<'c> Twins<'c> {
    fn rows<'a>(&self, resource: &'a Resource) -> SqliteRows<'a>
    where
        'c: 'a,
    {
        let mut rows = SqliteRows::new(self.connection, resource, self.now.wall);
        rows.is_shared = self.is_shared;
        rows
    }

    fn run(&mut self, at: usize, command: &Command) {
        let command = &with_tokens(command, &mut self.resources[at].1);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let absent = &self.absent;
        let mut is_reachable = |client| !absent.contains(&client);
        let (resource, mut table) = self.resources[at].clone();
        let context = CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut theirs };
        let Ok(expected) = apply(&mut table, context, command);
        let context = CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut ours };
        let found = apply(&mut self.rows(&resource), context, command).unwrap();
        assert_eq!(found, expected, "after {command:?}");
        assert_eq!(ours, theirs, "pushed after {command:?}");
        self.resources[at].1 = table;
    }

    fn run_all(&mut self, attempts: &[Arc<Acquire>]) {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let absent = &self.absent;
        let mut is_reachable = |client| !absent.contains(&client);
        let (resources, mut tables): (Vec<_>, Vec<_>) = self.resources.clone().into_iter().unzip();
        let context = CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut theirs };
        let mut steps: Vec<_> = tables.iter_mut().zip(attempts).collect();
        let Ok(expected) = apply_all(context, &mut steps);
        let mut rows: Vec<_> = resources.iter().map(|resource| self.rows(resource)).collect();
        let context = CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut ours };
        let mut steps: Vec<_> = rows.iter_mut().zip(attempts).collect();
        let found = apply_all(context, &mut steps).unwrap();
        assert_eq!(found, expected, "after {attempts:?}");
        assert_eq!(ours, theirs, "pushed after {attempts:?}");
        self.resources = resources.into_iter().zip(tables).collect();
        (0..attempts.len()).for_each(|at| self.run(at, &Command::Inspect));
    }

    fn sweep(&mut self, at: usize) -> bool {
        let mut is_reachable = |_| true;
        let (resource, mut table) = self.resources[at].clone();
        let context =
            CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut Vec::new() };
        let Ok(expected) = model_sweep(&mut table, context);
        let context =
            CommandContext { now: self.now, is_reachable: &mut is_reachable, pushes: &mut Vec::new() };
        assert_eq!(model_sweep(&mut self.rows(&resource), context).unwrap(), expected);
        self.resources[at].1 = table;
        expected
    }

    fn step(&mut self, at: usize, step: &Step) {
        match step {
            Step::Do(command) => {
                self.run(at, command);
                self.run(at, &Command::Inspect);
            }
            Step::Sweep => drop(self.sweep(at)),
            Step::Pass(ms) => self.pass(Duration::from_millis(*ms)),
            // The boot clock, by which leases end, never does that.
            Step::SetBack(ms) => self.step_back(Duration::from_millis(*ms)),
            Step::Raise(ms) => {
                self.now.floor = Token::new((self.now.wall + Duration::from_millis(*ms)).as_micros());
            }
            Step::Leave(client) => self.absent.push(client_id(*client)),
            Step::Return(client) => self.absent.retain(|absent| *absent != client_id(*client)),
        }
    }

    fn pass(&mut self, span: Duration) {
        self.now = Now { time: self.now.time + span, wall: self.now.wall + span, ..self.now };
    }

    fn step_back(&mut self, span: Duration) {
        self.now.wall = self.now.wall.saturating_sub(span);
        self.stepped_back += span;
    }
}

fn empty() -> Connection {
    let connection = Connection::open_in_memory().unwrap();
    connection.execute_batch(tables::TABLES).unwrap();
    connection
}

fn count_rows(connection: &Connection) -> i64 {
    let count = |table| {
        connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get::<_, i64>(0))
    };
    ["resource", "lease", "waiter", "tombstone"].iter().map(|table| count(table).unwrap()).sum()
}

fn says_the_same(connection: &Connection, is_shared: bool, steps: &[Joint]) {
    let start = StoreTime::from_micros(5_000_000);
    let wall = StoreTime::from_micros(1_700_000_000_000_000);
    let now = Now { wall, ..Now::same(start) };
    let resources = (0..RESOURCES).map(|number| (resource(&number.to_string()), Table::new())).collect();
    let mut twins =
        Twins { connection, resources, is_shared, now, stepped_back: Duration::ZERO, absent: Vec::new() };
    for step in steps {
        match step {
            Joint::At(at, step) => twins.step(*at, step),
            Joint::Together(attempts) => twins.run_all(attempts),
            Joint::Renewals(renewals) => {
                for (at, renew) in renewals {
                    twins.step(*at, &Step::Do(Command::Renew(renew.clone())));
                }
            }
        }
    }
    // Long after, nothing is left of it.
    twins.pass(Duration::from_secs(3_600) + twins.stepped_back);
    for at in 0..RESOURCES {
        twins.sweep(at);
    }
    twins.pass(Duration::from_secs(8_000));
    assert!((0..RESOURCES).all(|at| !twins.sweep(at)));
    assert_eq!(count_rows(connection), 0);
}

fn of_one(steps: Vec<Step>) -> Vec<Joint> {
    steps.into_iter().map(|step| Joint::At(0, step)).collect()
}

thread_local! {
    static CONNECTION: Connection = empty();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn file_matches_the_model(steps in steps(1)) {
        CONNECTION.with(|connection| says_the_same(connection, false, &of_one(steps)));
    }

    #[test]
    fn file_matches_the_model_for_shared_locks(steps in steps(4)) {
        CONNECTION.with(|connection| says_the_same(connection, true, &of_one(steps)));
    }

    #[test]
    fn file_matches_the_model_for_acquire_all(steps in joint_steps(1)) {
        CONNECTION.with(|connection| says_the_same(connection, false, &steps));
    }

    #[test]
    fn file_matches_the_model_for_shared_acquire_all(steps in joint_steps(4)) {
        CONNECTION.with(|connection| says_the_same(connection, true, &steps));
    }
}

#[test]
#[should_panic(expected = "after")]
fn file_that_forgets_a_row_fails_the_check() {
    let connection = empty();
    connection
        .execute_batch("CREATE TRIGGER forgets AFTER INSERT ON lease BEGIN DELETE FROM lease; END")
        .unwrap();
    let steps = [Step::Do(acquire(id(1, 1), false)), Step::Do(acquire(id(2, 1), false))];
    says_the_same(&connection, false, &of_one(steps.to_vec()));
}

// --- Against its neighbours ----------------------------------------------------------------------

fn granted(store: &Sqlite, acquisition: Acquisition) -> Reply {
    store.try_call_inline(&resource("a"), &acquire(acquisition, true)).unwrap().unwrap().reply
}

fn inspect(store: &Sqlite, name: &str) -> View {
    match store.try_call_inline(&resource(name), &Command::Inspect).unwrap().unwrap().reply {
        Reply::View(view) => view,
        other => panic!("{other:?}"),
    }
}

struct PipeWriter(std::sync::mpsc::Sender<Push>);

impl Inbox for PipeWriter {
    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}

    fn deliver(&self, push: Push) {
        let _ = self.0.send(push);
    }
}

#[test]
fn release_reaches_the_next_client_and_skips_a_dead_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let (sender, receiver) = std::sync::mpsc::channel();
    let inbox: Arc<dyn Inbox> = Arc::new(PipeWriter(sender));
    let first = open(&path, 1).unwrap();
    let dead = open(&path, 2).unwrap();
    let last = open_with(&path, 3, Arc::downgrade(&inbox)).unwrap();
    assert!(matches!(granted(&first, id(1, 1)), Reply::Granted(_)));
    assert!(matches!(granted(&dead, id(2, 1)), Reply::Queued(_)));
    assert!(matches!(granted(&last, id(3, 7)), Reply::Queued(_)));
    drop(dead);
    first.try_call_inline(&resource("a"), &release(id(1, 1))).unwrap().unwrap();
    let pushed = receiver.recv_timeout(Duration::from_secs(10)).expect("the push arrives");
    assert!(pushed.acquisition == id(3, 7) && matches!(pushed.kind, PushKind::Granted(..)), "{pushed:?}");
    assert!(receiver.try_recv().is_err(), "once");
    let view = inspect(&first, "a");
    assert!(view.waiters.len() == 1 && view.waiters[0].skipped, "the dead one keeps its place: {view:?}");
}

/// Each of its boots begins with the same time.
#[test]
fn machine_without_a_clock_uses_its_file_after_a_boot() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    drop(open(&path, 1).unwrap());
    let is_refused = |change: &str| {
        leasehold_testkit::wait_until("the client has ended", || !Mailboxes::are_read(&path));
        let connection = Connection::open(&path).unwrap();
        connection.execute_batch("UPDATE meta SET value = 'another' WHERE key = 'boot'").unwrap();
        connection.execute_batch(change).unwrap();
        open(&path, 1).is_err_and(|error| error.to_string().contains("began at the same moment"))
    };
    assert!(!is_refused(""), "nothing in it could be of this boot");
    let lease = |granted_at: i64, expires_at: i64| {
        format!(
            "INSERT OR REPLACE INTO resource VALUES (1, 'mutex', 'a', 1, 1, 1, 1, 0, 1, 0, 0, 0, {expires_at}, 0, 1);
            INSERT OR REPLACE INTO lease VALUES (1, zeroblob(16), 1, NULL, 1, 1, {granted_at}, {expires_at}, 1, 0, '', 0, NULL)"
        )
    };
    let now = Clock::System.embedded().time.as_micros().cast_signed();
    let (earlier, later) = (now - 1_000_000, now + 600_000_000);
    assert!(!is_refused(&lease(earlier - 1_000_000, earlier)), "it has expired");
    assert!(!is_refused(&lease(later, later + 1)), "it was granted at a time that this boot has not reached");
    assert!(is_refused(&lease(earlier, later)));
    // Where the kernel itself names the boots, as outside of containers, nothing has to be guessed.
    let of_kernel = "UPDATE meta SET value = 'another' WHERE key = 'kernel_boot'";
    let Boot { is_of_kernel, .. } = Boot::read(&path).unwrap();
    assert_eq!(is_refused(&format!("{}; {of_kernel}", lease(earlier, later))), !is_of_kernel);
}

#[test]
fn tokens_rise_over_restarts_and_a_reboot_ends_leases() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    let Reply::Granted(before) = granted(&store, id(1, 1)) else { panic!("it is free") };
    drop(store);
    let store = open(&path, 2).unwrap();
    assert!(matches!(granted(&store, id(2, 1)), Reply::Queued(_)), "the lease outlives its process");
    drop(store);
    // A token from a wall clock that was ahead, in a file from another boot.
    let ahead = before.tokens.last.get() + 3_600_000_000;
    let connection = Connection::open(&path).unwrap();
    connection.execute("UPDATE resource SET last_token = ?", [ahead.cast_signed()]).unwrap();
    connection.execute("UPDATE meta SET value = 'another' WHERE key = 'boot'", []).unwrap();
    // A container with a boot id of its own would end the leases of others.
    let said = refusal(&path);
    assert!(said.contains("began at the same moment") && said.contains("boot_id"), "{said}");
    connection.execute("UPDATE meta SET value = value - 2000000 WHERE key = 'booted_at'", []).unwrap();
    let (mailboxes, nine) = (Mailboxes::beside(&path).unwrap(), ClientId::new(9));
    let running = mailboxes.open(nine, &path).unwrap();
    assert!(refusal(&path).contains("a client that uses it is running"));
    drop(running);
    drop(connection);
    let store = open(&path, 3).unwrap();
    let Reply::Granted(Grant { tokens: TokenRange { first, .. }, .. }) = granted(&store, id(3, 1)) else {
        panic!("the lease ended with its boot")
    };
    assert!(first.get() > ahead);
    assert_eq!(inspect(&store, "a").waiters.len(), 0);
}

#[test]
fn busy_file_blocks_the_worker_and_not_the_caller() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert!(store.try_call_inline(&resource("a"), &acquire(id(1, 1), false)).is_none());
    let batch = vec![
        Call::new(Arc::new(resource("a")), acquire(id(1, 1), false)),
        Call::new(Arc::new(resource("b")), acquire(id(1, 2), false)),
    ];
    let pending = store.call_batch(batch, 0);
    thread::scope(|scope| {
        let answers = scope.spawn(|| pollster::block_on(pending));
        thread::sleep(Duration::from_millis(50));
        assert!(!answers.is_finished());
        other.execute_batch("COMMIT").unwrap();
        let answers = answers.join().unwrap();
        assert!(answers.iter().all(|answer| matches!(answer.as_ref().unwrap().reply, Reply::Granted(_))));
    });
    assert_eq!(pollster::block_on(store.list()).unwrap(), [resource("a"), resource("b")]);
}

#[test]
fn write_ahead_log_stays_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    let mut largest = 0;
    for round in 0..40 {
        for number in 0..500 {
            let acquisition = id(1, round * 500 + number);
            // The worker may be at the file just now.
            while store.try_call_inline(&resource("a"), &acquire(acquisition, false)).is_none() {}
            while store.try_call_inline(&resource("a"), &release(acquisition)).is_none() {}
        }
        largest = checkpoint::size(&path).max(largest);
        // The worker gets its turn, in bounded time.
        let give_up = Instant::now() + Duration::from_secs(10);
        while store.shared.commands.load(Ordering::Relaxed) > CHECKPOINT_AFTER && Instant::now() < give_up {
            thread::yield_now();
        }
    }
    // 40,000 transactions of two pages would be more than 80 MB.
    assert!(largest < 20 << 20, "the log grew to {largest} bytes");
}

#[test]
fn write_ahead_log_stays_bounded_while_the_worker_is_never_idle() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    let largest = AtomicU64::new(0);
    thread::scope(|scope| {
        for client in 0..20 {
            let (store, path, largest) = (&store, &path, &largest);
            scope.spawn(move || {
                let resource = Arc::new(resource(&format!("a {client}")));
                let call = |command| {
                    pollster::block_on(store.call(Call::new(resource.clone(), command), 0)).unwrap()
                };
                for number in 0..300 {
                    let acquisition = id(1, client * 1_000 + number);
                    call(acquire(acquisition, false));
                    call(release(acquisition));
                    largest.fetch_max(checkpoint::size(path), Ordering::Relaxed);
                }
            });
        }
    });
    // 12,000 transactions of two pages would be almost 100 MB.
    let largest = largest.into_inner();
    assert!(largest < 20 << 20, "the log grew to {largest} bytes");
}

/// Wall clocks that the worker, who goes by the real one, takes for the far future and for long ago.
const FUTURE: u64 = 4_000_000_000;
const PAST: u64 = 1_000_000_000;

fn at(base: u64, seconds: u64) -> Now {
    let of = |seconds| StoreTime::from_micros(0) + Duration::from_secs(seconds);
    Now { wall: of(base + seconds), ..Now::same(of(seconds)) }
}

fn run_at(store: &Sqlite, now: Now, name: &str, command: &Command) -> Reply {
    let (until, resource) = (Instant::now() + BUSY_TIMEOUT, resource(name));
    let connection = callers_connection(store);
    let done = store.shared.transact_one(&connection, || now, until, (&resource, command));
    drop(connection);
    let Ok((answer, pending)) = done else { panic!("the file is free") };
    store.shared.send(pending);
    answer.reply
}

#[test]
fn unused_resources_are_swept_by_other_commands() {
    const OLD: u32 = 1_000;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    let left = |name: &str| {
        let connection = callers_connection(&store);
        let sql = "SELECT count(*) FROM resource WHERE instr(name, ?) = 1";
        connection.limited().query_row(sql, [name], |row| row.get::<_, u32>(0)).unwrap()
    };
    for number in 0..OLD {
        let reply =
            run_at(&store, at(FUTURE, 0), &format!("old {number}"), &acquire(id(1, number.into()), false));
        assert!(matches!(reply, Reply::Granted(_)));
    }
    // While a token is to be remembered, nothing goes.
    run_at(&store, at(FUTURE, 3_000), "early", &acquire(id(1, OLD.into()), false));
    assert_eq!(left("old "), OLD);
    // After that it goes as fast as new things come, in the same transactions.
    for number in 0..OLD / 2 + 1 {
        run_at(
            &store,
            at(FUTURE, 7_300),
            &format!("new {number}"),
            &acquire(id(1, (2 * OLD + number).into()), false),
        );
    }
    assert_eq!((left("old "), left("new ")), (0, OLD / 2 + 1));
}

#[test]
fn unused_resources_are_swept_by_an_idle_client() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    for number in 0..5_000 {
        run_at(&store, at(PAST, 0), &number.to_string(), &acquire(id(1, number), false));
    }
    drop(store);
    // The worker of a client that only comes sweeps all of it, in batches. Before that it moves the log into the file, for which it
    // waits for the disk. The next sweep is after 60 s.
    let connection = Connection::open(&path).unwrap();
    let _store = open(&path, 2).unwrap();
    let give_up = Instant::now() + Duration::from_secs(50);
    while count_rows(&connection) > 0 {
        assert!(Instant::now() < give_up, "{} rows are left", count_rows(&connection));
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn rows_in_use_are_rarely_visited() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    let month = Duration::from_secs(30 * 24 * 3_600);
    run_at(&store, at(FUTURE, 0), "long", &Acquire::exclusive(id(1, 1), month).into());
    let connection = callers_connection(&store);
    let sweep = |minute: u64| {
        store
            .shared
            .sweep(&connection.limited(), at(FUTURE, 60 * minute), 10, &mut PendingPushes::default())
            .unwrap()
    };
    let visits: u32 = (0..600).map(sweep).sum();
    assert!((8..=11).contains(&visits), "visited {visits} times in ten hours");
}

#[test]
fn waiter_survives_a_busy_file_and_try_lock_fails() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let client = leasehold::blocking::Client::connect(&format!("sqlite:{}", path.display())).unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| client.mutex("a").lock());
        let waits_with_limit = scope.spawn(|| client.mutex("b").lock_timeout(Duration::from_secs(2)));
        let tried = client.mutex("c").try_lock();
        let limited = waits_with_limit.join().unwrap();
        let still_waits = !waits.is_finished();
        // Before anything is asserted: a thread that waits for the file would keep a failure from being reported.
        other.execute_batch("COMMIT").unwrap();
        let error = tried.unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("kept the file busy"), "{error}");
        let error = limited.unwrap_err();
        assert!(error.is_unavailable(), "its time was over without a word from the store: {error}");
        assert!(still_waits);
        waits.join().unwrap().unwrap().release().unwrap();
    });
    client.close().unwrap();
}

#[test]
fn symlinks_share_one_store_and_hard_links_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let link = folder.path().join("link.db");
    let first = open(&path, 1).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let inbox: Arc<dyn Inbox> = Arc::new(PipeWriter(sender));
    let second = open_with(&link, 2, Arc::downgrade(&inbox)).unwrap();
    assert!(matches!(granted(&first, id(1, 1)), Reply::Granted(_)));
    assert!(matches!(granted(&second, id(2, 1)), Reply::Queued(_)));
    first.try_call_inline(&resource("a"), &release(id(1, 1))).unwrap().unwrap();
    assert!(receiver.recv_timeout(Duration::from_secs(10)).is_ok(), "it is there, by whichever name");
    let mut beside = link.into_os_string();
    beside.push("-inbox");
    assert!(!Path::new(&beside).exists());

    let twin = folder.path().join("twin.db");
    fs::hard_link(&path, &twin).unwrap();
    assert!(refusal(&twin).contains("second name"));
}

#[test]
#[cfg(target_os = "linux")]
fn second_client_keeps_the_first_clients_file_locks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let _first = open(&path, 1).unwrap();
    // What keeps another program from taking the log away when it closes the file. While other programs lock files, /proc/locks may
    // lack a lock that is held; the list of one open file does not.
    let locks = || {
        let inode = format!(":{} ", fs::metadata(&path).unwrap().ino());
        let files = fs::read_dir("/proc/self/fdinfo").unwrap().map(|file| file.unwrap().path());
        // Other threads close files meanwhile.
        let facts: String = files.filter_map(|file| fs::read_to_string(file).ok()).collect();
        facts.lines().filter(|line| line.starts_with("lock:") && line.contains(&inode)).count()
    };
    assert!(locks() > 0);
    let second = open(&path, 2).unwrap();
    assert!(locks() > 0);
    drop(second);
    assert!(locks() > 0);
}
