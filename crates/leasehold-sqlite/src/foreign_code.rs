//! Others may write the file, and its schema with it: their triggers, views, indices and columns do not run in this process, or not for
//! long.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use rusqlite::config::DbConfig;
use rusqlite::limits::Limit;

use super::tables::TABLES;

/// The longest value, in bytes. The longest of leasehold's own has a few thousand.
const MAX_LENGTH: i32 = 64 << 10;

/// Steps of SQLite between two looks at the clock. A step may be a call of a function, which takes long with long values.
const STEPS: i32 = 100;

/// After this time SQLite gives up, if it is not waiting. Its own statements take some microseconds, and a second in a very large file.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// As [`TIME_LIMIT`], to read the whole file.
const WHOLE_TIME_LIMIT: Duration = Duration::from_secs(30);

/// A connection to the file.
pub(super) struct FileConnection {
    sqlite: Connection,
    clock: RunClock,
    /// The version of the schema that was checked last. SQLite has read the schema of that version.
    checked: Cell<Option<i64>>,
    /// Whether SQLite has read a schema that is not leasehold's, which may run later, even if the file is mended.
    is_spoiled: Cell<bool>,
}

impl FileConnection {
    /// Nothing was read over the connection yet.
    pub(super) fn new(mut sqlite: Connection) -> rusqlite::Result<Self> {
        let clock = run_no_code_of_others(&mut sqlite, TIME_LIMIT)?;
        Ok(Self { sqlite, clock, checked: Cell::new(None), is_spoiled: Cell::new(false) })
    }

    /// For each use.
    pub(super) fn restart_clock(&self) {
        self.clock.restart();
    }

    /// Whether it must be closed.
    pub(super) fn is_spoiled(&self) -> bool {
        self.is_spoiled.get()
    }

    /// Says what another person has changed since the schema was checked, if it was changed. It stays as it is until the transaction ends.
    pub(super) fn changed_by_others(&self) -> rusqlite::Result<Option<String>> {
        let mut version = self.sqlite.prepare_cached("PRAGMA schema_version")?;
        let version: i64 = version.query_row([], |row| row.get(0))?;
        if self.checked.get() == Some(version) {
            return Ok(None);
        }
        // Until it is known to be sound.
        self.is_spoiled.set(true);
        let changed = changed_by_others(&self.sqlite)?;
        if changed.is_none() {
            self.is_spoiled.set(false);
            self.checked.set(Some(version));
        }
        Ok(changed)
    }
}

impl Deref for FileConnection {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.sqlite
    }
}

/// When the connection was used last, for the handler that ends what takes too long.
#[derive(Clone)]
struct RunClock {
    base: Instant,
    since: Arc<AtomicU64>,
}

impl RunClock {
    fn new() -> Self {
        Self { base: Instant::now(), since: Arc::default() }
    }

    fn restart(&self) {
        self.since.store(self.now(), Ordering::Relaxed);
    }

    fn is_over(&self, limit: Duration) -> bool {
        let since = self.since.load(Ordering::Relaxed);
        Duration::from_nanos(self.now().saturating_sub(since)) > limit
    }

    fn now(&self) -> u64 {
        u64::try_from(self.base.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// For a connection over which `doctor` reads the whole file.
pub(super) fn prepare_to_read_all(sqlite: &mut Connection) -> rusqlite::Result<()> {
    run_no_code_of_others(sqlite, WHOLE_TIME_LIMIT).map(drop)
}

/// No trigger and no view runs. SQLite reads the schema and the statistics of `ANALYZE` before anything can be checked, and evaluates what
/// stands in them: it has little to work with, and is ended after some time.
fn run_no_code_of_others(sqlite: &mut Connection, limit: Duration) -> rusqlite::Result<RunClock> {
    let clock = RunClock::new();
    let handler = clock.clone();
    // What they return depends on rusqlite's version. They fail for a connection of others only.
    let _ = sqlite.progress_handler(STEPS, Some(move || handler.is_over(limit)));
    let _ = sqlite.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_LENGTH);
    let _ = sqlite.set_limit(Limit::SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1);
    sqlite.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false)?;
    sqlite.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false)?;
    sqlite.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
    sqlite.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    Ok(clock)
}

/// Says what was added to the schema, or replaced: another person's constraint, index or generated column would run with each command.
fn changed_by_others(connection: &Connection) -> rusqlite::Result<Option<String>> {
    static OWN: OnceLock<Schema> = OnceLock::new();
    let own = match OWN.get() {
        Some(own) => own,
        None => {
            let own = Connection::open_in_memory()?;
            own.execute_batch(TABLES)?;
            let own = schema_of(&own)?;
            OWN.get_or_init(|| own)
        }
    };
    let found = schema_of(connection)?;
    let differing = found.symmetric_difference(own).next();
    Ok(differing.map(|(kind, name, ..)| {
        format!(
            "the {kind} {name:?} in it is not as leasehold makes it, and its code would run here: undo this change, or name another file"
        )
    }))
}

/// Type, name, table and SQL.
type Schema = BTreeSet<(String, String, String, String)>;

/// Everything but what SQLite makes by itself: indices without SQL, and the statistics of `ANALYZE`.
fn schema_of(connection: &Connection) -> rusqlite::Result<Schema> {
    let mut statement = connection.prepare(
        "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema
        WHERE sql IS NOT NULL AND sql NOT IN ('CREATE TABLE sqlite_stat1(tbl,idx,stat)',
            'CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)')",
    )?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?;
    rows.collect()
}
