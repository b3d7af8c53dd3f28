//! Removes expired leases, and resources that have been unused for long.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use leasehold_core::model::{CommandContext, TOKEN_RETENTION, sweep};
use leasehold_core::{Kind, Name, Now, Resource};
use rusqlite::{Connection, params};

use super::connection::FileConnection;
use super::rows::SqliteRows;
use super::shared::commit;
use super::{PendingPushes, Shared, TransactionError, schema};

/// Max number of rows in a transaction that only sweeps.
const BATCH: u32 = 256;

/// Min time until a row that is kept is visited again; the max is [`TOKEN_RETENTION`].
const SOONEST: Duration = Duration::from_secs(60);

impl Shared {
    /// Sweeps up to this many resources whose visit is due, within the open transaction.
    pub(super) fn sweep(
        &self,
        connection: &Connection,
        now: Now,
        most: u32,
        pending: &mut PendingPushes,
    ) -> rusqlite::Result<u32> {
        let mut visited = 0;
        for (id, resource) in due(connection, now, most)? {
            visited += 1;
            let is_kept = match &resource {
                // Another version stored it, and this one does not know its kind.
                None => Some(true),
                Some(resource) => self.sweep_one(connection, now, resource, pending)?,
            };
            match is_kept {
                Some(true) => visit_again(connection, now, id)?,
                Some(false) => {}
                None => {
                    let name = resource.as_ref().map(|resource| resource.name.as_str());
                    tracing::warn!(name, "the rows of a lock contradict each other, and are kept");
                    postpone(connection, now, id)?;
                }
            }
        }
        Ok(visited)
    }

    /// Returns whether the row is kept. `None` if rows that others have written contradict each other, which are left as they are: neither
    /// the sweep of other rows nor the command that has the sweep done may fail of them.
    fn sweep_one(
        &self,
        connection: &Connection,
        now: Now,
        resource: &Resource,
        pending: &mut PendingPushes,
    ) -> rusqlite::Result<Option<bool>> {
        let run = |sql| connection.prepare_cached(sql)?.execute([]);
        run("SAVEPOINT sweep")?;
        let PendingPushes { pushes, reached, .. } = pending;
        let known = pushes.len();
        let swept = catch_unwind(AssertUnwindSafe(|| {
            let mut is_reachable = |client| self.is_reachable(client, reached);
            let context = CommandContext { now, is_reachable: &mut is_reachable, pushes };
            sweep(&mut SqliteRows::new(connection, resource, now.wall), context)
        }));
        match swept {
            Ok(Ok(is_kept)) => {
                run("RELEASE sweep")?;
                Ok(Some(is_kept))
            }
            // The store's own.
            Ok(Err(error)) if error.sqlite_error().is_some() => Err(error),
            Ok(Err(_)) | Err(_) => {
                pending.pushes.truncate(known);
                run("ROLLBACK TO sweep")?;
                run("RELEASE sweep")?;
                Ok(None)
            }
        }
    }

    /// Sweeps a batch in a transaction of its own. Returns whether there may be more.
    pub(super) fn sweep_batch(
        &self,
        connection: &FileConnection,
        until: Instant,
    ) -> Result<(bool, PendingPushes), TransactionError> {
        let failed = |error: rusqlite::Error| TransactionError::Failed(schema::not_done(error));
        // Usually there is nothing to do: check without the write lock first.
        if due(&connection.limited(), self.clock.embedded(), 1).map_err(failed)?.is_empty() {
            return Ok((false, PendingPushes::default()));
        }
        let transaction = self.begin(connection, until)?;
        let mut pending = PendingPushes::default();
        let visited = self.sweep(&transaction, self.clock.embedded(), BATCH, &mut pending).map_err(failed)?;
        commit(transaction)?;
        Ok((visited == BATCH, pending))
    }
}

/// The resources whose visit is due, the longest overdue first. `None` in place of a name that this version can't read.
fn due(connection: &Connection, now: Now, most: u32) -> rusqlite::Result<Vec<(i64, Option<Resource>)>> {
    let sql = "SELECT id, kind, name FROM resource WHERE visit <= ? ORDER BY visit LIMIT ?";
    let mut statement = connection.prepare_cached(sql)?;
    let mut rows = statement.query(params![now.wall.as_micros().cast_signed(), most])?;
    let mut due = Vec::new();
    while let Some(row) = rows.next()? {
        let kind = row.get_ref(1)?.as_str().ok().and_then(Kind::parse);
        let name = row.get_ref(2)?.as_str().ok().and_then(|name| Name::new(name).ok());
        due.push((row.get(0)?, kind.zip(name).map(|(kind, name)| Resource { kind, name })));
    }
    Ok(due)
}

/// Schedules the next visit of a row: when its last token may be forgotten. If the row is in use for longer: when the first of
/// its leases ends.
fn visit_again(connection: &Connection, now: Now, id: i64) -> rusqlite::Result<()> {
    let sql = "UPDATE resource SET visit = max(remember_until, ?1 + max(?3, min(?4, next_expiry - ?2))) WHERE id = ?5";
    let (wall, time) = (now.wall.as_micros().cast_signed(), now.time.as_micros().cast_signed());
    let span = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    connection.prepare_cached(sql)?.execute(params![wall, time, span(SOONEST), span(TOKEN_RETENTION), id])?;
    Ok(())
}

/// Leaves a row alone for some time, whatever is in it.
fn postpone(connection: &Connection, now: Now, id: i64) -> rusqlite::Result<()> {
    let visit = (now.wall + TOKEN_RETENTION).as_micros().cast_signed();
    connection.prepare_cached("UPDATE resource SET visit = ? WHERE id = ?")?.execute([visit, id])?;
    Ok(())
}
