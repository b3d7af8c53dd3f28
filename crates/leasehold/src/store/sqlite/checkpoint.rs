//! The write-ahead log beside the file: how it is kept from growing for ever.
//!
//! SQLite would have a writer move it into the file after every thousand pages, and wait for the disk. Here workers do that,
//! after some hundred commands. What bounds the log:
//!
//! - **Whoever writes faster than the disk** is slowed: a large log is moved as a whole, and meanwhile nobody writes.
//! - **Processes that live shorter than a flush takes** have workers that come to no end. So whoever opens a file whose log
//!   is very large moves it before anything else: one process in some thousand waits for the disk.
//!
//! A process that was stopped while it read keeps the log as it is, until it goes on or is killed (`doctor` tells).

use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;

/// A log of this size is moved into the file as a whole, and begun anew.
const LARGE: u64 = 4 << 20;

/// A log of this size has had no worker for a long time.
const VERY_LARGE: u64 = 16 << 20;

/// How long writers and readers may be waited for, to begin a new log.
const TRUNCATE_TIMEOUT: Duration = Duration::from_millis(100);

/// Moves what it can without a wait for others, and a large log as a whole. Failures are for the next time.
pub(super) fn truncate_log(path: &Path, connection: &Connection) {
    let is_large = is_large(path);
    let mut done = checkpoint(connection, "PASSIVE");
    if is_large && done.is_ok() {
        // Whoever writes all the time keeps it from ever coming to its end: for the little that is left they wait.
        done = connection.busy_timeout(TRUNCATE_TIMEOUT).and_then(|()| checkpoint(connection, "TRUNCATE"));
        done = done.and(connection.busy_timeout(Duration::ZERO));
    }
    if let Err(error) = done {
        tracing::warn!(%error, "the write-ahead log could not be moved into the file");
    }
}

/// As `truncate_log`, on behalf of those who did not live long enough.
pub(super) fn truncate_leftover_log(path: &Path, connection: &Connection) {
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

fn checkpoint(connection: &Connection, how: &str) -> rusqlite::Result<()> {
    connection.query_row(&format!("PRAGMA wal_checkpoint({how})"), [], |_| Ok(()))
}

#[cfg(test)]
mod tests {
    use super::super::schema;
    use super::*;

    #[test]
    fn very_large_log_is_checkpointed_first() {
        let folder = tempfile::tempdir().unwrap();
        // Nobody who does so has a worker.
        let come = || schema::prepare(&folder.path().join("locks.db"), false).unwrap();
        let (path, first) = come();
        let grow = || {
            // As many bytes as digits, and new ones each time, since what is the same is not written.
            let sql = "INSERT OR REPLACE INTO meta VALUES ('large', hex(randomblob(?)))";
            first.execute(sql, [i64::try_from(VERY_LARGE / 4).unwrap()]).unwrap();
        };
        grow();
        drop(come());
        assert!(is_large(&path), "for so little nobody waits");
        grow();
        grow();
        drop(come());
        assert_eq!(size(&path), 0);
    }
}
