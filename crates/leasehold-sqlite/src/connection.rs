//! A connection to the file. What others have put into the file does not run over it for long: each use has a time limit.
//!
//! The limit is set only within a [`Limited`] or an open [`Transaction`], and never while a transaction begins or ends. These steps run
//! no other user's code, and SQLite may ask for the limit when they are done already: BEGIN would be reported as ended, with its transaction open.

use std::cell::Cell;
use std::ops::Deref;
use std::time::Duration;

use rusqlite::Connection;

use super::foreign_code::{self, TIME_LIMIT, TimeLimit};

/// A connection to the file.
pub(super) struct FileConnection {
    sqlite: Connection,
    clock: TimeLimit,
    /// How long a use may take.
    pub(super) limit: Duration,
    /// The version of the schema that was checked last. SQLite has read the schema of that version.
    checked: Cell<Option<i64>>,
    /// Whether it must be closed: SQLite has read a schema that is not leasehold's, which may run later, even if the file is mended; or a
    /// transaction could not be ended.
    is_spoiled: Cell<bool>,
}

impl FileConnection {
    /// Nothing was read over the connection yet.
    pub(super) fn new(mut sqlite: Connection) -> rusqlite::Result<Self> {
        let clock = foreign_code::run_no_code_of_others(&mut sqlite)?;
        let (checked, is_spoiled) = (Cell::new(None), Cell::new(false));
        Ok(Self { sqlite, clock, limit: TIME_LIMIT, checked, is_spoiled })
    }

    /// For a use without a transaction of its own.
    pub(super) fn limited(&self) -> Limited<'_> {
        Limited { connection: self, before: self.clock.start(self.limit) }
    }

    /// Begins a transaction that may write. Fails if another connection has one.
    pub(super) fn begin(&self) -> rusqlite::Result<Transaction<'_>> {
        // It is made first: whatever BEGIN reports, dropping it leaves no transaction open.
        let mut transaction = Transaction { connection: self, limited: None };
        self.sqlite.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        transaction.limited = Some(self.limited());
        Ok(transaction)
    }

    /// What decides, after so many tries, whether SQLite tries once more to lock a busy file. None: it never does.
    pub(super) fn when_busy(&mut self, try_again: Option<fn(i32) -> bool>) -> rusqlite::Result<()> {
        self.sqlite.busy_handler(try_again)
    }

    /// Whether it must be closed.
    pub(super) fn is_spoiled(&self) -> bool {
        self.is_spoiled.get()
    }
}

/// The connection during one use.
pub(super) struct Limited<'c> {
    connection: &'c FileConnection,
    before: (u64, u64),
}

impl Limited<'_> {
    /// Says what another person has changed since the schema was checked, if it was changed. Within a transaction it stays as it is
    /// until the transaction ends.
    pub(super) fn changed_by_others(&self) -> rusqlite::Result<Option<String>> {
        let FileConnection { sqlite, checked, is_spoiled, .. } = self.connection;
        let mut version = sqlite.prepare_cached("PRAGMA schema_version")?;
        let version: i64 = version.query_row([], |row| row.get(0))?;
        if checked.get() == Some(version) {
            return Ok(None);
        }
        // Until it is known to be sound.
        is_spoiled.set(true);
        let changed = foreign_code::changed_by_others(sqlite)?;
        if changed.is_none() {
            is_spoiled.set(false);
            checked.set(Some(version));
        }
        Ok(changed)
    }
}

impl Deref for Limited<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection.sqlite
    }
}

impl Drop for Limited<'_> {
    fn drop(&mut self) {
        self.connection.clock.set(self.before);
    }
}

/// An open transaction. Dropped, it is rolled back, in a panic too.
pub(super) struct Transaction<'c> {
    connection: &'c FileConnection,
    /// While it is open.
    limited: Option<Limited<'c>>,
}

impl Transaction<'_> {
    /// See [`Limited::changed_by_others`].
    pub(super) fn changed_by_others(&self) -> rusqlite::Result<Option<String>> {
        self.limited.as_ref().map_or(Ok(None), Limited::changed_by_others)
    }

    pub(super) fn commit(mut self) -> rusqlite::Result<()> {
        self.limited = None;
        self.prepare_cached("COMMIT")?.execute([]).map(drop)
    }
}

impl Deref for Transaction<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection.sqlite
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        self.limited = None;
        if self.is_autocommit() {
            return;
        }
        if let Err(error) = self.execute_batch("ROLLBACK") {
            tracing::error!(%error, "a transaction could not be rolled back");
        }
        if !self.is_autocommit() {
            // Only its end ends the transaction.
            self.connection.is_spoiled.set(true);
        }
    }
}
