//! Transactions: what callers and the worker do with the file, each with a connection of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_core::model::{CommandContext, apply, apply_all};
use leasehold_core::{Acquire, Answer, ClientId, Command, Effect, Failure, Now, Push, Reply, Resource};
use leasehold_store::clock::Clock;
use leasehold_store::digest::client_name;
use leasehold_store::identity::Identity;
use leasehold_store::{Call, CallResult, Inbox, StoreError};
use rusqlite::Connection;

use super::connection::{FileConnection, Transaction};
use super::files::{self, Files};
use super::limits::{BUSY_TIMEOUT, MAX_BUSY_PAUSE};
use super::mailbox::{Mailboxes, PipeWriter, Reached};
use super::rows::SqliteRows;
use super::schema;

/// State shared by callers and the worker.
pub(super) struct Shared {
    pub(super) path: PathBuf,
    /// With whose rights the file is used. The worker's thread has them.
    pub(super) identity: Identity,
    pub(super) files: Arc<Files>,
    pub(super) is_durable: bool,
    pub(super) clock: Clock,
    pub(super) client: ClientId,
    pub(super) inbox: Weak<dyn Inbox>,
    pub(super) mailboxes: Mailboxes,
    /// A test may use a schema of its own.
    #[cfg(test)]
    pub(super) has_own_schema: std::sync::atomic::AtomicBool,
    /// Commands since the last checkpoint.
    pub(super) commands: AtomicU32,
}

/// Why a transaction did not run.
pub(super) enum TransactionError {
    /// The file is locked by another writer. Nothing was changed.
    Busy,
    /// The files that this client opened were removed or replaced.
    Gone,
    Failed(StoreError),
}

impl TransactionError {
    pub(super) fn into_error(self) -> StoreError {
        match self {
            Self::Busy => StoreError::new(
                Failure::Busy,
                format!(
                    "another process has kept the file busy for {BUSY_TIMEOUT:?}: is one of its users stopped?"
                ),
            ),
            Self::Gone => StoreError::new(Failure::Gone, files::GONE),
            Self::Failed(error) => error,
        }
    }
}

/// Pushes to deliver after COMMIT.
#[derive(Default)]
pub(super) struct PendingPushes {
    pub(super) pushes: Vec<Push>,
    /// Writers to the clients that are reachable.
    pub(super) reached: Vec<(ClientId, PipeWriter)>,
    /// Number of resources that got a row.
    pub(super) created_rows: u32,
}

impl Shared {
    /// A further connection.
    pub(super) fn connect(&self) -> Result<FileConnection, TransactionError> {
        // It would connect to other files.
        if !self.files.are_in_place() {
            return Err(TransactionError::Gone);
        }
        let failed = |error| TransactionError::Failed(schema::not_sent(format!("{error:#}")));
        schema::connect(&self.path, self.is_durable).map_err(failed)
    }

    /// Runs one command in a transaction of its own.
    pub(super) fn transact_one(
        &self,
        connection: &FileConnection,
        now: impl Fn() -> Now,
        until: Instant,
        (resource, command): (&Resource, &Command),
    ) -> Result<(Answer, PendingPushes), TransactionError> {
        self.transact_as(connection, now, until, 1, |transaction, now, pending| {
            self.apply(transaction, now, (resource, command), pending)
        })
    }

    /// Runs commands in one transaction: all take effect, or none does.
    pub(super) fn transact(
        &self,
        connection: &FileConnection,
        until: Instant,
        commands: &[Call],
    ) -> Result<(Vec<Answer>, PendingPushes), TransactionError> {
        let now = || self.clock.embedded();
        self.transact_as(connection, now, until, commands.len(), |transaction, now, pending| {
            let apply = |Call { resource, command }: &Call| {
                self.apply(transaction, now, (resource, command), pending)
            };
            commands.iter().map(apply).collect()
        })
    }

    fn apply(
        &self,
        connection: &Connection,
        now: Now,
        (resource, command): (&Resource, &Command),
        pending: &mut PendingPushes,
    ) -> rusqlite::Result<Answer> {
        let PendingPushes { pushes, reached, created_rows } = pending;
        let mut is_reachable = |client| self.is_reachable(client, reached);
        // The model looks through the pushes of its own command for those that the answer makes needless.
        let mut own = Vec::new();
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut own };
        let mut rows = SqliteRows::new(connection, resource, now.wall);
        let answer = apply(&mut rows, context, command)?;
        *created_rows += u32::from(rows.is_created);
        pushes.append(&mut own);
        Ok(answer)
    }

    /// The answer to a command whose transaction did not run. A client's leases in removed files are lost.
    pub(super) fn answer_to(&self, error: TransactionError, command: &Command) -> CallResult {
        match (error, command) {
            (TransactionError::Gone, Command::Renew(_) | Command::Release(_)) => {
                Ok(Answer { at: self.clock.embedded().time, reply: Reply::NotHeld })
            }
            (error, _) => Err(error.into_error()),
        }
    }

    /// Runs attempts in one transaction: all are granted, or none.
    pub(super) fn transact_all(
        &self,
        connection: &FileConnection,
        until: Instant,
        attempts: &[(Arc<Resource>, Arc<Acquire>)],
    ) -> Result<(Vec<Answer>, PendingPushes), TransactionError> {
        let now = || self.clock.embedded();
        self.transact_as(connection, now, until, attempts.len(), |transaction, now, pending| {
            let PendingPushes { pushes, reached, created_rows } = pending;
            let mut is_reachable = |client| self.is_reachable(client, reached);
            let mut rows: Vec<_> = attempts
                .iter()
                .map(|(resource, _)| SqliteRows::new(transaction, resource, now.wall))
                .collect();
            let acquires = attempts.iter().map(|(_, acquire)| acquire);
            let mut steps: Vec<_> = rows.iter_mut().zip(acquires).collect();
            let answers =
                apply_all(CommandContext { now, is_reachable: &mut is_reachable, pushes }, &mut steps)?;
            *created_rows += rows.iter().map(|rows| u32::from(rows.is_created)).sum::<u32>();
            Ok(answers)
        })
    }

    fn transact_as<T>(
        &self,
        connection: &FileConnection,
        now: impl Fn() -> Now,
        until: Instant,
        count: usize,
        step: impl FnOnce(&Connection, Now, &mut PendingPushes) -> rusqlite::Result<T>,
    ) -> Result<(T, PendingPushes), TransactionError> {
        let transaction = self.begin(connection, until)?;
        let mut pending = PendingPushes::default();
        // The clock is read with the write lock held, so that time never goes backwards in the file.
        let now = now();
        // Rows that contradict each other were not written by leasehold, and the model refuses them by a panic. It must not end the program: the
        // guard that is dropped then would run into the same.
        let stepped = catch_unwind(AssertUnwindSafe(|| {
            let answer = step(&transaction, now, &mut pending)?;
            // Old rows are removed at least as fast as new ones are inserted.
            if pending.created_rows > 0 {
                self.sweep(&transaction, now, 2 * pending.created_rows, &mut pending)?;
            }
            Ok(answer)
        }));
        let stepped = stepped.map_err(|_| {
            let what = "the rows of a lock in the file contradict each other: find out who writes it besides leasehold";
            TransactionError::Failed(StoreError::new(Failure::Permanent(Effect::None), what))
        })?;
        let answer = stepped.map_err(|error| TransactionError::Failed(schema::not_done(error)))?;
        commit(transaction)?;
        self.commands.fetch_add(u32::try_from(count).unwrap_or(u32::MAX), Ordering::Relaxed);
        Ok((answer, pending))
    }

    pub(super) fn begin<'c>(
        &self,
        connection: &'c FileConnection,
        until: Instant,
    ) -> Result<Transaction<'c>, TransactionError> {
        let mut pause = Duration::from_micros(20);
        let transaction = loop {
            match connection.begin() {
                Ok(begun) => break begun,
                Err(error) if !schema::is_busy(&error) => {
                    return Err(TransactionError::Failed(schema::not_done(error)));
                }
                Err(_) if Instant::now() >= until => return Err(TransactionError::Busy),
                // Another client's transaction usually takes some ten microseconds.
                Err(_) => {
                    thread::sleep(pause.min(until.saturating_duration_since(Instant::now())));
                    pause = (pause * 2).min(MAX_BUSY_PAUSE);
                }
            }
        };
        if !self.files.are_in_place() {
            return Err(TransactionError::Gone);
        }
        #[cfg(test)]
        if self.has_own_schema.load(Ordering::Relaxed) {
            return Ok(transaction);
        }
        match transaction.changed_by_others() {
            Ok(None) => Ok(transaction),
            Ok(Some(what)) => {
                Err(TransactionError::Failed(StoreError::new(Failure::Permanent(Effect::None), what)))
            }
            Err(error) => Err(TransactionError::Failed(schema::not_done(error))),
        }
    }

    pub(super) fn is_reachable(&self, client: ClientId, reached: &mut Vec<(ClientId, PipeWriter)>) -> bool {
        if client == self.client {
            return self.inbox.strong_count() > 0;
        }
        if reached.iter().any(|(known, _)| *known == client) {
            return true;
        }
        match self.mailboxes.reach(client) {
            Reached::Open(writer) => {
                reached.push((client, writer));
                true
            }
            // The client lives, but its pipe can't be written: the waiter keeps its grant, and detects it at its next re-check.
            Reached::Closed(error) => {
                // The id itself is the client's proof of identity.
                let client = client_name(client);
                tracing::warn!(%error, client, "a grant can't be pushed to its waiter");
                true
            }
            Reached::Gone => false,
        }
    }

    /// Delivers the pushes of a committed transaction. No lock is held.
    pub(super) fn send(&self, pending: PendingPushes) {
        let PendingPushes { pushes, mut reached, .. } = pending;
        for push in pushes {
            let to = push.inbox;
            if to == self.client {
                if let Some(inbox) = self.inbox.upgrade() {
                    inbox.deliver(push);
                }
            } else if self.is_reachable(to, &mut reached)
                && let Some((_, writer)) = reached.iter().find(|(known, _)| *known == to)
            {
                writer.write_push(&push);
            }
        }
    }
}

pub(super) fn commit(transaction: Transaction<'_>) -> Result<(), TransactionError> {
    transaction.commit().map_err(|error| {
        let message = schema::explain(&error);
        // A full disk fails before COMMIT has any effect. After another error it may have been written.
        let is_full = error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull);
        let failure = Failure::Transient(if is_full { Effect::None } else { Effect::Possible });
        TransactionError::Failed(StoreError::new(failure, message).caused_by(error))
    })
}
