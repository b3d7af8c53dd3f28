//! Others may write the file, and its schema with it: their triggers, views, indices and columns do not run in this process, or not for
//! long.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use rusqlite::config::DbConfig;
use rusqlite::limits::Limit;
use rustix::time::{ClockId, clock_gettime};

use super::tables::TABLES;

/// The longest value, in bytes. The longest of leasehold's own has a few thousand.
const MAX_LENGTH: i32 = 64 << 10;

/// Steps of SQLite between two looks at the clock. A step may be a call of a function, which takes long with long values.
const STEPS: i32 = 100;

/// After this time of the processor SQLite gives up. Its own statements take some microseconds, and a second in a very large file.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(5);

/// As [`TIME_LIMIT`], to read the whole file.
pub(super) const WHOLE_TIME_LIMIT: Duration = Duration::from_secs(30);

/// Until when the present use of a connection may take, for the handler that ends what takes too long.
#[derive(Clone)]
pub(super) struct TimeLimit {
    base: Instant,
    until: Arc<Until>,
}

/// Both must be over: a process that is paused, or a machine that is busy, is no reason to end a use, but the processor's time costs a system
/// call to read. In nanoseconds; the highest number while the connection is not in use.
struct Until {
    /// Since `base`.
    time: AtomicU64,
    /// For which the thread has run that uses the connection.
    thread_time: AtomicU64,
}

impl TimeLimit {
    fn new() -> Self {
        let until = Until { time: AtomicU64::new(u64::MAX), thread_time: AtomicU64::new(u64::MAX) };
        Self { base: Instant::now(), until: Arc::new(until) }
    }

    /// Ends what takes longer than this from now on. Returns what was set before, for `set`.
    pub(super) fn start(&self, limit: Duration) -> (u64, u64) {
        let limit = nanos(limit);
        let before = (&self.until.time, &self.until.thread_time);
        let before = (before.0.load(Ordering::Relaxed), before.1.load(Ordering::Relaxed));
        self.set((self.time().saturating_add(limit), thread_time().saturating_add(limit)));
        before
    }

    pub(super) fn set(&self, until: (u64, u64)) {
        self.until.time.store(until.0, Ordering::Relaxed);
        self.until.thread_time.store(until.1, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.time() > self.until.time.load(Ordering::Relaxed)
            && thread_time() > self.until.thread_time.load(Ordering::Relaxed)
    }

    fn time(&self) -> u64 {
        nanos(self.base.elapsed())
    }
}

/// For how long this thread has run, in nanoseconds.
fn thread_time() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    nanos(Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0)))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX - 1)
}

/// For a connection over which `doctor` reads the whole file.
pub(super) fn prepare_to_read_all(sqlite: &mut Connection) -> rusqlite::Result<()> {
    run_no_code_of_others(sqlite)?.start(WHOLE_TIME_LIMIT);
    Ok(())
}

/// No trigger and no view runs. SQLite reads the schema and the statistics of `ANALYZE` before anything can be checked, and evaluates what
/// stands in them: it has little to work with, and is ended once the limit is over.
pub(super) fn run_no_code_of_others(sqlite: &mut Connection) -> rusqlite::Result<TimeLimit> {
    let limit = TimeLimit::new();
    let handler = limit.clone();
    // What they return depends on rusqlite's version. They fail for a connection of others only.
    let _ = sqlite.progress_handler(STEPS, Some(move || handler.is_over()));
    let _ = sqlite.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_LENGTH);
    let _ = sqlite.set_limit(Limit::SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1);
    sqlite.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false)?;
    sqlite.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false)?;
    sqlite.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
    sqlite.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    Ok(limit)
}

/// Says what was added to the schema, or replaced: another person's constraint, index or generated column would run with each command.
pub(super) fn changed_by_others(connection: &Connection) -> rusqlite::Result<Option<String>> {
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

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn pause_of_the_process_ends_no_use() {
        let limit = TimeLimit::new();
        let before = limit.start(Duration::from_millis(20));
        thread::sleep(Duration::from_millis(100));
        assert!(!limit.is_over());
        let began = thread_time();
        while thread_time() - began < nanos(Duration::from_millis(30)) {}
        assert!(limit.is_over());
        limit.set(before);
        assert!(!limit.is_over());
    }
}
