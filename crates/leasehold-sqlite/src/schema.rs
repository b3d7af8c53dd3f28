//! Opens the file: checks that it is leasehold's, intact, and from this boot.

#[cfg(target_os = "linux")]
use std::fs;
use std::io;
#[cfg(target_os = "linux")]
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_core::{Effect, Failure};
use leasehold_store::clock::Clock;
use leasehold_store::{OpenError, StoreError};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Transaction, TransactionBehavior};

use super::connection::{FileConnection, Limited};
use super::mailbox::Mailboxes;
use super::side_files::{self, Refused, SideFiles};
use super::tables::TABLES;
use super::{BUSY_TIMEOUT, checkpoint, files, location};

/// Written into the file's header, so that a database of another program is never touched: "LSHD".
const APPLICATION_ID: i32 = 0x4c53_4844;

/// Schema version.
const LAYOUT: i32 = 4;

/// Max time that a new client waits for clients of its process with removed files to end, and for another client to give a new file its rights.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(1);

/// Page size in bytes.
const PAGE: u32 = 1024;

/// Ends the leases of another boot, whose clock they used. Tokens use the wall clock, and persist.
const NEW_BOOT: &str = "
    DELETE FROM lease; DELETE FROM waiter; DELETE FROM tombstone;
    UPDATE resource SET in_use = 0, head = 0, leases = 0, waiters = 0, parked = 0, tombstones = 0,
        next_expiry = 9223372036854775807;
";

/// Checks the file, creates the schema if it is new, and ends the leases of another boot.
pub(super) fn prepare(path: &Path, is_durable: bool) -> Result<(PathBuf, FileConnection), OpenError> {
    let path = location::check(path)?;
    let path = path.as_path();
    if files::are_open_in_parent(path) {
        let what = "the process from which this one was forked has the file open, and SQLite's locks on files do not pass a fork: start \
            this process by exec instead, or open the file only after the fork";
        return Err(OpenError::forked(format!("sqlite:{}: {what}", path.display())));
    }
    let boot = Boot::read(path)?;
    retry_while_busy(path, || {
        if files::are_stale_in_process(path) {
            return Err(TransactionError::Stale);
        }
        side_files::reserve_journal(path).map_err(|error| {
            TransactionError::Foreign(match error.get_ref() {
                // In words of its own.
                Some(refused) => refused.to_string(),
                None => format!("no file could be made in the directory beside it: {error}"),
            })
        })?;
        let mut connection = open_beside_own_files(path, is_durable, |connection| {
            make_ours(&connection.limited(), path, &boot)
        })?;
        checkpoint::truncate_leftover_log(path, &mut connection);
        Ok((path.to_path_buf(), connection))
    })
}

/// A further connection to a prepared file.
pub(super) fn connect(path: &Path, is_durable: bool) -> Result<FileConnection, OpenError> {
    retry_while_busy(path, || open_beside_own_files(path, is_durable, |_| Ok(())))
}

/// Opens the file, and uses it for the first time, if no other user has anything to do with the files beside it. They must be in place before.
fn open_beside_own_files(
    path: &Path,
    is_durable: bool,
    first_use: impl FnOnce(&FileConnection) -> Result<(), TransactionError>,
) -> Result<FileConnection, TransactionError> {
    let before = SideFiles::look(path)?;
    let connection = open(path, is_durable)?;
    first_use(&connection)?;
    if SideFiles::look(path)? == before { Ok(connection) } else { Err(TransactionError::Changed) }
}

/// Retries while other clients open the file too: SQLite cannot wait by itself while a new file is initialized.
fn retry_while_busy<T>(
    path: &Path,
    attempt: impl Fn() -> Result<T, TransactionError>,
) -> Result<T, OpenError> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(error) if begun.elapsed() < error.retry_timeout() => thread::sleep(Duration::from_millis(1)),
            Err(error) => {
                let what = error.into_store_error(path);
                return Err(OpenError::from_store(format_args!("sqlite:{}", path.display()), &what));
            }
        }
    }
}

fn open(path: &Path, is_durable: bool) -> rusqlite::Result<FileConnection> {
    // The path has no link, and another user may put one there.
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let opened = FileConnection::new(Connection::open_with_flags(path, flags)?)?;
    let connection = opened.limited();
    // Callers decide how long they wait.
    connection.busy_timeout(Duration::ZERO)?;
    // A checkpoint waits for the disk, so the worker runs it, and never a process that ends.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    connection.set_prepared_statement_cache_capacity(64);
    connection.pragma_update(None, "synchronous", if is_durable { "FULL" } else { "NORMAL" })?;
    drop(connection);
    Ok(opened)
}

/// Why a file cannot be used.
#[derive(Debug)]
enum TransactionError {
    Sqlite(rusqlite::Error),
    /// Another client of this process still uses removed files.
    Stale,
    /// The files beside it are not those that were there before it was opened: SQLite has made them, or removed its journal.
    Changed,
    /// See [`Refused::Closed`].
    Closed(String),
    Foreign(String),
}

impl TransactionError {
    /// For how long it may pass.
    fn retry_timeout(&self) -> Duration {
        match self {
            Self::Sqlite(error) if is_busy(error) => BUSY_TIMEOUT,
            Self::Changed => BUSY_TIMEOUT,
            Self::Stale | Self::Closed(_) => OTHERS_TIMEOUT,
            Self::Sqlite(_) | Self::Foreign(_) => Duration::ZERO,
        }
    }

    fn into_store_error(self, path: &Path) -> StoreError {
        match self {
            Self::Sqlite(error) => not_sent(explain_opening(path, &error)).caused_by(error),
            Self::Stale => not_sent(files::GONE),
            Self::Changed => {
                not_sent("another program makes and removes its -journal, -wal or -shm again and again")
            }
            Self::Closed(what) | Self::Foreign(what) => not_sent(what),
        }
    }
}

impl From<Refused> for TransactionError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Foreign(what) => Self::Foreign(what),
            Refused::Closed(what) => Self::Closed(what),
        }
    }
}

impl From<rusqlite::Error> for TransactionError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// The room of a new file, which its rows use later: 256 rows of 1 KiB. Without it, a full disk has no room for what a checkpoint adds to the file, so
/// that the write-ahead log, which may have taken the last of it, stays as it is.
const TAKE_ROOM: &str = "
    WITH RECURSIVE row(number) AS (VALUES (1) UNION ALL SELECT number + 1 FROM row WHERE number < 256)
    INSERT INTO meta SELECT 'room ' || number, hex(zeroblob(512)) FROM row";
const HAS_ROOM_ROWS: &str = "SELECT EXISTS (SELECT 1 FROM meta WHERE key BETWEEN 'room ' AND 'room!')";
const LEAVE_ROOM: &str = "DELETE FROM meta WHERE key BETWEEN 'room ' AND 'room!'";

fn make_ours(connection: &Limited<'_>, path: &Path, boot: &Boot) -> Result<(), TransactionError> {
    // Nothing is written before the owner is known.
    check_owner(connection)?;
    // Each command writes some rows of a hundred bytes, and each write is a page: a new file gets small ones.
    connection.pragma_update(None, "page_size", PAGE)?;
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    if count_tables(connection)? > 0 && boot_of(connection)?.is_some_and(|known| known == boot.id) {
        leave_room(connection);
        return Ok(());
    }
    let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
    let is_new = count_tables(&transaction)? == 0;
    if is_new {
        transaction.execute_batch(TABLES)?;
        transaction.execute(TAKE_ROOM, [])?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", LAYOUT)?;
    }
    let (known, booted_at) = (boot_of(&transaction)?, booted_at());
    if known.as_deref() != Some(&boot.id) {
        if let Some(known) = known
            && let Some(why) = why_same_boot(&transaction, path, &known, boot, booted_at)?
        {
            return Err(TransactionError::Foreign(format!(
                "it is from another boot, by its boot id, but {why}: a container that has a boot id of its own (LXC, systemd-nspawn) needs the \
                 host's, mounted over /proc/sys/kernel/random/boot_id; on a machine without a clock, whose boots all begin at the same \
                 moment, set the clock first"
            )));
        }
        transaction.execute_batch(NEW_BOOT)?;
        let mut set = transaction.prepare("INSERT OR REPLACE INTO meta VALUES (?, ?)")?;
        set.execute(["boot", &boot.id])?;
        set.execute(["booted_at", &booted_at.to_string()])?;
        if boot.is_of_kernel {
            set.execute([KERNEL_BOOT, &boot.id])?;
        }
    }
    transaction.commit()?;
    if is_new {
        checkpoint::write_log(connection);
    }
    leave_room(connection);
    Ok(())
}

/// Removes the rows that have made the room. If another process writes at this moment, the next one that opens the file does it.
fn leave_room(connection: &Connection) {
    let has_rows = connection.query_row(HAS_ROOM_ROWS, [], |row| row.get(0));
    if has_rows.unwrap_or(false) {
        let _ = connection.execute(LEAVE_ROOM, []);
    }
}

/// When this machine was booted, in microseconds of its wall clock. It moves if that clock is set.
fn booted_at() -> i64 {
    let now = Clock::System.embedded();
    now.wall.as_micros().cast_signed() - now.time.as_micros().cast_signed()
}

/// Why this may be the same boot as that of the file, although the ids differ. Those of one kernel differ only if the boots do.
fn why_same_boot(
    connection: &Connection,
    path: &Path,
    known_id: &str,
    boot: &Boot,
    booted_at: i64,
) -> rusqlite::Result<Option<&'static str>> {
    const SAME: u64 = 1_000_000;
    if Mailboxes::are_read(path) {
        return Ok(Some("a client that uses it is running"));
    }
    let of_kernel =
        connection.query_row("SELECT value FROM meta WHERE key = ?", [KERNEL_BOOT], |row| row.get(0));
    let of_kernel: Option<String> = of_kernel.optional()?;
    if boot.is_of_kernel && of_kernel.as_deref() == Some(known_id) {
        return Ok(None);
    }
    let known = connection.query_row("SELECT value FROM meta WHERE key = 'booted_at'", [], |row| row.get(0));
    let known: Option<String> = known.optional()?;
    let known = known.and_then(|known| known.parse::<i64>().ok());
    // A machine without a clock that runs while it is off begins with the same time at each boot.
    let is_same = known.is_some_and(|known| known.abs_diff(booted_at) < SAME) && may_have_leases(connection)?;
    Ok(is_same.then_some(
        "that boot began at the same moment as this one, and a lease or a waiter of it has not expired",
    ))
}

/// Whether something in the file counts if it is of this boot. The clock of leases never goes back within one, so what began later than now is
/// of another.
fn may_have_leases(connection: &Connection) -> rusqlite::Result<bool> {
    let now = Clock::System.embedded().time.as_micros().cast_signed();
    let sql = "SELECT coalesce(max(began) <= ?1 AND max(ends) > ?1, 0) FROM (
        SELECT granted_at AS began, expires_at AS ends FROM lease
        UNION ALL SELECT since, deadline FROM waiter
        UNION ALL SELECT 0, until FROM tombstone)";
    connection.query_row(sql, [now], |row| row.get(0))
}

/// The boot of the file's leases; `None` for a new file.
fn boot_of(connection: &Connection) -> rusqlite::Result<Option<String>> {
    connection.query_row("SELECT value FROM meta WHERE key = 'boot'", [], |row| row.get(0)).optional()
}

fn count_tables(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
}

/// Refuses a database of another program or of another version of this one. A database without tables counts as new.
fn check_owner(connection: &Limited<'_>) -> Result<(), TransactionError> {
    // In one transaction, because another client may create the schema meanwhile.
    let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Deferred)?;
    let number = |pragma| transaction.pragma_query_value(None, pragma, |row| row.get::<_, i32>(0));
    let tables = count_tables(&transaction)?;
    match (number("application_id")?, number("user_version")?) {
        (0, 0) if tables == 0 => Ok(()),
        (APPLICATION_ID, LAYOUT) => {
            connection.changed_by_others()?.map_or(Ok(()), |what| Err(TransactionError::Foreign(what)))
        }
        (APPLICATION_ID, other) => Err(TransactionError::Foreign(format!(
            "another version of leasehold wrote it (layout {other}, this one knows {LAYOUT}): use that, or another file"
        ))),
        _ => Err(TransactionError::Foreign(
            "it is a database of another program: name another file".to_owned(),
        )),
    }
}

/// The key of the file's boot id if it is the kernel's own.
const KERNEL_BOOT: &str = "kernel_boot";

/// Names this boot of this machine: the clock of leases starts anew with each.
pub(super) struct Boot {
    id: String,
    /// Whether the kernel says so itself, and not a file that a container has in its place.
    pub(super) is_of_kernel: bool,
}

impl Boot {
    /// A guess could end the leases of others, so without an id there is no store.
    pub(super) fn read(path: &Path) -> Result<Self, OpenError> {
        read_boot_id().map(|(id, is_of_kernel)| Self { id: id.trim().to_owned(), is_of_kernel }).map_err(
            |error| {
                let shown = path.display();
                let what =
                    format!("sqlite:{shown}: this system reports no boot id, which the store needs: {error}");
                OpenError::unsupported(what).with_source(error)
            },
        )
    }
}

/// The id, and whether it is the kernel's own.
#[cfg(target_os = "linux")]
fn read_boot_id() -> io::Result<(String, bool)> {
    let mut file = fs::File::open("/proc/sys/kernel/random/boot_id")?;
    let mut id = String::new();
    file.read_to_string(&mut id)?;
    let is_of_kernel = rustix::fs::fstatfs(&file)?.f_type == rustix::fs::PROC_SUPER_MAGIC;
    Ok((id, is_of_kernel))
}

#[cfg(not(target_os = "linux"))]
fn read_boot_id() -> io::Result<(String, bool)> {
    let output =
        std::process::Command::new("/usr/sbin/sysctl").args(["-n", "kern.bootsessionuuid"]).output()?;
    let id = String::from_utf8(output.stdout).map_err(io::Error::other)?;
    if output.status.success() {
        Ok((id, true))
    } else {
        Err(io::Error::other("sysctl knows no kern.bootsessionuuid"))
    }
}

pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// As [`explain`], for a client that opens the file. If the log was removed, the file can't be opened while processes use the removed
/// log, because the shared memory that is still in place describes that log.
fn explain_opening(path: &Path, error: &rusqlite::Error) -> String {
    let is_unreadable = error.sqlite_error_code() == Some(ErrorCode::SystemIoFailure);
    let strays = if is_unreadable { files::find_strays(path) } else { Vec::new() };
    if strays.is_empty() {
        return explain(error);
    }
    let pids: Vec<String> = strays.iter().map(u32::to_string).collect();
    format!(
        "its -wal or -shm was removed under processes that use it, and which have to end first: kill {}",
        pids.join(" ")
    )
}

/// Maps an SQLite error to a message with a remedy.
pub(super) fn explain(error: &rusqlite::Error) -> String {
    match error.sqlite_error_code() {
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => format!(
            "the file is damaged or no database ({}): move it away, and a new one is created; tokens keep rising with the \
             wall clock",
            class_of(error)
        ),
        Some(ErrorCode::DiskFull) => "the disk is full: free some space".to_owned(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            format!("another process has kept the file busy for {BUSY_TIMEOUT:?}")
        }
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::CannotOpen) => {
            format!("the file and its directory must be writable for you ({})", class_of(error))
        }
        Some(ErrorCode::SystemIoFailure) => format!(
            "{}: the disk fails, this is no ordinary file, or its -wal or -shm was removed while other processes use it \
             (`leasehold doctor` names them to root)",
            class_of(error)
        ),
        Some(ErrorCode::OperationInterrupted) => {
            "SQLite took too long: this process was paused, the machine is overloaded, or another \
                                                  person's code is in the file"
                .to_owned()
        }
        _ => format!("SQLite failed ({}): {error}", class_of(error)),
    }
}

/// The class of an error by SQLite's number. The error itself, which is the cause, has the words.
fn class_of(error: &rusqlite::Error) -> String {
    error
        .sqlite_error()
        .map_or_else(|| "no SQLite error".to_owned(), |code| format!("SQLite error {}", code.extended_code))
}

pub(super) fn not_sent(message: impl Into<String>) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}

/// Explains an error of SQLite before anything was changed, and keeps it as the cause.
pub(super) fn not_done(error: rusqlite::Error) -> StoreError {
    let failure = match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Failure::NotSent,
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => Failure::Permanent(Effect::None),
        _ => Failure::Transient(Effect::None),
    };
    StoreError::new(failure, explain(&error)).caused_by(error)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::chown;

    use super::*;
    use crate::files::beside;

    #[test]
    fn files_that_appear_while_the_file_is_opened_are_seen() {
        let folder = tempfile::tempdir().unwrap();
        let (path, first) = prepare(&folder.path().join("locks.db"), false).unwrap();
        let open_while = |change: &dyn Fn()| {
            let opened = open_beside_own_files(&path, false, |_| {
                change();
                Ok(())
            });
            opened.map(drop).map_err(|error| format!("{error:?}"))
        };
        assert_eq!(open_while(&|| {}), Ok(()));
        let (log, copy) = (beside(&path, "-wal"), beside(&path, "-copy"));
        let replaced = open_while(&|| {
            fs::copy(&log, &copy).unwrap();
            fs::rename(&copy, &log).unwrap();
        });
        assert_eq!(replaced, Err("Changed".to_owned()));
        drop(first);
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            eprintln!("not tested: files of another user, which only root can make");
        }
        for suffix in ["-journal", "-inbox"].into_iter().filter(|_| is_root) {
            let name = beside(&path, suffix);
            let appeared = open_while(&|| {
                let made = if suffix == "-inbox" { fs::create_dir(&name) } else { fs::write(&name, "") };
                made.and_then(|()| chown(&name, Some(12_346), None)).unwrap();
            });
            assert!(appeared.as_ref().is_err_and(|said| said.contains("uid 12346")), "{appeared:?}");
            if suffix == "-inbox" { fs::remove_dir(&name).unwrap() } else { fs::remove_file(&name).unwrap() }
        }
    }
}
