//! Checkpoints, which keep the write-ahead log small.
//!
//! By default SQLite makes a writer run a checkpoint after every thousand pages, and wait for the disk. Here the workers run the
//! checkpoints, after a few hundred commands. Two more rules bound the log:
//!
//! - **Writers that are faster than the disk** are slowed: the checkpoint of a large log blocks all writers.
//! - **Processes that end sooner than a flush takes** never complete a checkpoint. A process that opens a file with a very large
//!   log therefore runs a checkpoint first: one process in a few thousand waits for the disk.
//!
//! A process that is stopped while it reads keeps the log from shrinking, until it continues or is killed (`doctor` reports it).

use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;

use super::connection::FileConnection;

/// A log of this size is written to the file as a whole, and truncated.
const LARGE: u64 = 4 << 20;

/// A log of this size has had no worker for a long time.
const VERY_LARGE: u64 = 16 << 20;

/// Pause between two tries to lock the file before a log is truncated. SQLite's own pauses grow to 25 ms and more: a single constant writer
/// then has the file at each of the few tries within 100 ms.
const TRUNCATE_PAUSE: Duration = Duration::from_micros(100);

/// Max number of these tries.
const TRUNCATE_TRIES: i32 = 1_000;

/// Writes what it can to the file without waiting, and a large log as a whole. The next checkpoint repeats what fails.
pub(super) fn truncate_log(path: &Path, connection: &mut FileConnection) {
    let is_large = is_large(path);
    let mut done = checkpoint(&connection.limited(), "PASSIVE");
    if is_large && done.is_ok() {
        // Constant writers would keep it from completing, so they wait for the small rest.
        done = connection
            .when_busy(Some(try_again))
            .and_then(|()| checkpoint(&connection.limited(), "TRUNCATE"));
        done = done.and(connection.when_busy(None));
    }
    warn_of(done);
}

/// Writes what it can to the file without waiting.
pub(super) fn write_log(connection: &Connection) {
    warn_of(checkpoint(connection, "PASSIVE"));
}

fn warn_of(done: rusqlite::Result<()>) {
    if let Err(error) = done {
        tracing::warn!(%error, "the write-ahead log could not be moved into the file");
    }
}

/// As `truncate_log`, for processes that ended before their checkpoint.
pub(super) fn truncate_leftover_log(path: &Path, connection: &mut FileConnection) {
    if size(path) > VERY_LARGE {
        truncate_log(path, connection);
    }
}

pub(super) fn is_large(path: &Path) -> bool {
    size(path) > LARGE
}

pub(super) fn size(path: &Path) -> u64 {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    std::fs::metadata(log).map_or(0, |found| found.len())
}

/// Whether SQLite is to try once more for the lock of the file, after so many tries.
fn try_again(tries: i32) -> bool {
    std::thread::sleep(TRUNCATE_PAUSE);
    tries < TRUNCATE_TRIES
}

fn checkpoint(connection: &Connection, how: &str) -> rusqlite::Result<()> {
    connection.query_row(&format!("PRAGMA wal_checkpoint({how})"), [], |_| Ok(()))
}

#[cfg(test)]
mod tests {
    use super::super::schema;
    use super::*;

    /// A checkpoint adds nothing to it, for which a full disk would have no room.
    #[test]
    fn new_file_has_room_for_its_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("locks.db");
        let (path, mut connection) = schema::prepare(&path, false).unwrap();
        let length = || std::fs::metadata(&path).unwrap().len();
        let new = length();
        assert!((256 << 10..600 << 10).contains(&new), "{new}");
        let fill = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 200)
            INSERT INTO meta SELECT 'row ' || i, hex(randomblob(200)) FROM n";
        connection.limited().execute(fill, []).unwrap();
        truncate_log(&path, &mut connection);
        assert_eq!(length(), new);
        // Of a process that was killed before it had removed them.
        connection.limited().execute("INSERT INTO meta VALUES ('room 1', '')", []).unwrap();
        let (_, again) = schema::prepare(&path, false).unwrap();
        let left: u32 = again
            .limited()
            .query_row("SELECT count(*) FROM meta WHERE key BETWEEN 'room ' AND 'room!'", [], |row| {
                row.get(0)
            })
            .unwrap();
        assert_eq!(left, 0);
    }

    #[test]
    fn very_large_log_is_checkpointed_first() {
        let folder = tempfile::tempdir().unwrap();
        // Such a process has no worker.
        let come = || schema::prepare(&folder.path().join("locks.db"), false).unwrap();
        let (path, first) = come();
        let grow = || {
            // As many bytes as digits, and new ones each time, since what is the same is not written.
            const BYTES: u64 = 16_000;
            let sql = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < ?)
                INSERT OR REPLACE INTO meta SELECT 'large ' || i, hex(randomblob(?)) FROM n";
            first
                .limited()
                .execute(sql, [VERY_LARGE / 4 / BYTES, BYTES].map(|number| i64::try_from(number).unwrap()))
                .unwrap();
        };
        grow();
        drop(come());
        assert!(is_large(&path), "a small log is left alone");
        grow();
        grow();
        drop(come());
        assert_eq!(size(&path), 0);
    }
}
