//! `sqlite:PATH`, the lease table in a file that all processes of one machine share.
//!
//! **Layout.** One row per resource ([`Header`](leasehold_core::model::Header)), and one per lease, place in the queue
//! and tombstone. A command is one immediate transaction in which the model steps the rows, so that it costs the same
//! however many wait. `schema.rs` opens the file, `rows.rs` reads and writes it.
//!
//! **Where it runs.** A command runs on its caller's thread when the file is free within [`INLINE_TIMEOUT`]: some ten
//! microseconds and no switch of threads. Otherwise, and for batches, it goes to the worker, a thread with a
//! connection of its own that may wait.
//!
//! **Waiting.** Who releases also grants, in the same transaction, and writes the whole grant into the pipe of the one
//! client that is next (`mailbox.rs`). That client's worker sleeps in `poll` on its pipe, so a waiter costs nothing
//! until it is its turn, and nobody else is woken. A pipe that nobody reads says that its client is gone.
//!
//! **Time.** Leases run on the boot clock, which all processes of the machine share, and end with the boot; tokens follow
//! the wall clock, and stay.
//!
//! **What a power cut costs.** With the write-ahead log and `synchronous=NORMAL` the file stays whole, and the last
//! transactions before the cut may be missing. The leases in them are over anyway. A forgotten token is lower than the
//! wall clock after the restart. `?synchronous=full` flushes each transaction.
//!
//! **What goes wrong.** Before its COMMIT a transaction that fails has changed nothing (`NotSent`); whether a COMMIT that
//! fails has is unknown. A file that was removed or replaced under a client is noticed before each command, as are its log
//! and its shared memory (`files.rs`), because a client that opened the new ones would not see this client's leases.
//!
//! **Size.** A row is visited when its last token need not be remembered any more, by an index. Each transaction that makes
//! rows visits twice as many that are due, and the worker visits all others that are, once a minute (`sweep.rs`).

mod checkpoint;
mod doctor;
mod files;
mod mailbox;
mod rows;
mod schema;
mod sweep;
mod worker;

use std::future::ready;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_core::model::{CommandContext, apply, apply_all};
use leasehold_core::{Acquire, Answer, ClientId, Command, Failure, Now, Push, Reply, Resource};
use rusqlite::Connection;
use tokio::sync::oneshot;

use super::{BoxFuture, CallResult, EMBEDDED_POLL_INTERVALS, Inbox, PollIntervals, Store, StoreError};
use crate::diagnostics::Diagnosis;
use crate::engine::clock;
use crate::error::{Error, ErrorKind};
use files::Files;
use mailbox::{Mailboxes, PipeWriter, Reached};
use rows::SqliteRows;
use worker::{Job, Worker};

/// How long a caller's thread may be held up by others who write.
const INLINE_TIMEOUT: Duration = Duration::from_millis(1);

/// How long anybody sleeps between two looks at whether a file is free.
const MAX_BUSY_PAUSE: Duration = Duration::from_millis(2);

/// How long the worker waits for others who write.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// After this many commands the write-ahead log is worth moving into the file.
const CHECKPOINT_AFTER: u32 = 500;

/// The lease tables of one file, for one client.
pub(crate) struct Sqlite {
    shared: Arc<Shared>,
    /// For callers' threads. The worker has its own.
    connection: Mutex<Connection>,
    worker: Worker,
}

/// What callers and the worker have in common.
struct Shared {
    path: PathBuf,
    files: Arc<Files>,
    is_durable: bool,
    client: ClientId,
    inbox: Weak<dyn Inbox>,
    mailboxes: Mailboxes,
    /// Commands since the last checkpoint.
    commands: AtomicU32,
}

impl Sqlite {
    /// Opens the file for this client, and makes it if it is missing.
    pub(crate) fn open(
        path: &Path,
        is_durable: bool,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
    ) -> Result<Arc<Self>, Error> {
        let (path, connection) = schema::prepare(path, is_durable)?;
        let failed = |what: &str, error: std::io::Error| {
            Error::new(ErrorKind::Unavailable, format!("sqlite:{}: {what}: {error}", path.display()))
                .with_source(error)
        };
        let files =
            Files::identify(&path).map_err(|error| failed("it went away while it was opened", error))?;
        let no_inbox = |error| failed("no pipe could be made in the directory beside it", error);
        let mailboxes = Mailboxes::beside(&path).map_err(no_inbox)?;
        let mailbox = mailboxes.open(client, &path).map_err(no_inbox)?;
        let commands = AtomicU32::new(0);
        let path = path.clone();
        let shared = Arc::new(Shared { path, files, is_durable, client, inbox, mailboxes, commands });
        let worker = Worker::start(shared.clone(), &Arc::new(mailbox))
            .map_err(|error| failed("no thread could be started", error))?;
        Ok(Arc::new(Self { shared, connection: Mutex::new(connection), worker }))
    }

    /// The callers' connection, unless others use it for too long.
    fn connection(&self, until: Instant) -> Option<MutexGuard<'_, Connection>> {
        loop {
            match self.connection.try_lock() {
                Ok(connection) => return Some(connection),
                // A panic inside the model has rolled its transaction back.
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::yield_now(),
                Err(TryLockError::WouldBlock) => return None,
            }
        }
    }

    /// On this very thread, unless others use the file for too long.
    fn run_inline(
        &self,
        transact: impl FnOnce(&Connection, Instant) -> Result<(Vec<Answer>, PendingPushes), TransactionError>,
    ) -> Option<Result<Vec<Answer>, TransactionError>> {
        let until = Instant::now() + INLINE_TIMEOUT;
        let connection = self.connection(until)?;
        let (answers, pending) = match transact(&connection, until) {
            Ok(done) => done,
            Err(TransactionError::Busy) => return None,
            Err(trouble) => return Some(Err(trouble)),
        };
        drop(connection);
        self.shared.send(pending);
        if self.shared.commands.load(Ordering::Relaxed) > CHECKPOINT_AFTER {
            self.worker.wake();
        }
        Some(Ok(answers))
    }

    /// Has the worker do it, which may wait for the file.
    fn submit(
        &self,
        count: usize,
        job: impl FnOnce(oneshot::Sender<Vec<CallResult>>) -> Job,
    ) -> BoxFuture<Vec<CallResult>> {
        let (tell, told) = oneshot::channel();
        let is_taken = self.worker.submit(job(tell));
        Box::pin(async move {
            if is_taken && let Ok(answers) = told.await {
                return answers;
            }
            (0..count)
                .map(|_| Err(not_sent("too much waits for the file, or its worker has ended")))
                .collect()
        })
    }
}

impl Store for Sqlite {
    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult> {
        let commands = [(resource, command)];
        let answered = self.run_inline(|connection, until| {
            self.shared.transact(connection, clock::embedded, until, &commands)
        })?;
        match answered {
            Ok(mut answers) => answers.pop().map(Ok),
            Err(trouble) => Some(trouble.answer_to(command)),
        }
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        let answered = self.run_inline(|connection, until| {
            self.shared.transact_all(connection, clock::embedded, until, attempts)
        });
        match answered {
            Some(Ok(answers)) => Some(Box::pin(ready(answers.into_iter().map(Ok).collect()))),
            Some(Err(trouble)) => {
                let error = trouble.into_error();
                Some(Box::pin(ready(attempts.iter().map(|_| Err(error.clone())).collect())))
            }
            None => Some(self.submit(attempts.len(), |tell| Job::AcquireAll(attempts.to_vec(), tell))),
        }
    }

    fn call(&self, batch: Vec<(Arc<Resource>, Command)>) -> BoxFuture<Vec<CallResult>> {
        self.submit(batch.len(), |tell| Job::Commands(batch, tell))
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        let (tell, told) = oneshot::channel();
        let is_taken = self.worker.submit(Job::List(tell));
        Box::pin(async move {
            if is_taken && let Ok(listed) = told.await {
                return listed;
            }
            Err(not_sent("too much waits for the file, or its worker has ended"))
        })
    }

    fn shard(&self, _resource: &Resource, command: &Command) -> u64 {
        // What holders send does not wait for waiters, of which there may be thousands.
        u64::from(matches!(command, Command::Acquire(_)))
    }

    fn poll_intervals(&self) -> PollIntervals {
        EMBEDDED_POLL_INTERVALS
    }

    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        let (tell, told) = oneshot::channel();
        let (path, is_durable) = (self.shared.path.clone(), self.shared.is_durable);
        // It reads the whole file: that is no work for the worker, whom others wait for.
        let started = thread::Builder::new()
            .name("leasehold-doctor".to_owned())
            .spawn(move || tell.send(doctor::diagnose(&path, is_durable)));
        Box::pin(async move {
            started
                .map_err(|error| not_sent(format!("no thread could be started: {error}")).caused_by(error))?;
            told.await.unwrap_or_else(|_| Err(not_sent("the thread that looks at the file has ended")))
        })
    }
}

/// Why a transaction did not take place.
enum TransactionError {
    /// Somebody else writes. Nothing was changed.
    Busy,
    /// The files that this client has opened are not in place any more.
    Gone,
    Failed(StoreError),
}

impl TransactionError {
    fn into_error(self) -> StoreError {
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

    /// What a client had in files that have gone it does not have any more.
    fn answer_to(self, command: &Command) -> CallResult {
        match (self, command) {
            (Self::Gone, Command::Renew(_) | Command::Release(_)) => {
                Ok(Answer { at: clock::embedded().time, reply: Reply::NotHeld })
            }
            (trouble, _) => Err(trouble.into_error()),
        }
    }
}

/// What is to be delivered once a transaction stands.
#[derive(Default)]
struct PendingPushes {
    pushes: Vec<Push>,
    /// The ways to those clients that were found to be there.
    reached: Vec<(ClientId, PipeWriter)>,
    /// How many resources got a row.
    created_rows: u32,
}

impl Shared {
    /// Runs commands in one transaction: all of them, or none.
    fn transact(
        &self,
        connection: &Connection,
        now: impl Fn() -> Now,
        until: Instant,
        commands: &[(&Resource, &Command)],
    ) -> Result<(Vec<Answer>, PendingPushes), TransactionError> {
        self.transact_as(connection, now, until, |now, pending| {
            let step = |(resource, command): &(&Resource, &Command)| {
                let PendingPushes { pushes, reached, created_rows } = pending;
                let mut is_reachable = |client| self.is_reachable(client, reached);
                // The model looks through the pushes of its own command for those that the answer makes needless.
                let mut own = Vec::new();
                let turn = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut own };
                let mut rows = SqliteRows::new(connection, resource, now.wall);
                let answer = apply(&mut rows, turn, command)?;
                *created_rows += u32::from(rows.is_created);
                pushes.append(&mut own);
                Ok(answer)
            };
            commands.iter().map(step).collect()
        })
    }

    /// Runs attempts in one transaction: all are granted, or none.
    fn transact_all<'a>(
        &self,
        connection: &'a Connection,
        now: impl Fn() -> Now,
        until: Instant,
        attempts: &'a [(Arc<Resource>, Arc<Acquire>)],
    ) -> Result<(Vec<Answer>, PendingPushes), TransactionError> {
        self.transact_as(connection, now, until, |now, PendingPushes { pushes, reached, created_rows }| {
            let mut is_reachable = |client| self.is_reachable(client, reached);
            let rows =
                |(resource, _): &'a (Arc<Resource>, _)| SqliteRows::new(connection, resource, now.wall);
            let mut rows: Vec<_> = attempts.iter().map(rows).collect();
            let acquires = attempts.iter().map(|(_, acquire)| acquire);
            let mut steps: Vec<_> = rows.iter_mut().zip(acquires).collect();
            let answers =
                apply_all(CommandContext { now, is_reachable: &mut is_reachable, pushes }, &mut steps)?;
            *created_rows += rows.iter().map(|rows| u32::from(rows.is_created)).sum::<u32>();
            Ok(answers)
        })
    }

    fn transact_as(
        &self,
        connection: &Connection,
        now: impl Fn() -> Now,
        until: Instant,
        step: impl FnOnce(Now, &mut PendingPushes) -> rusqlite::Result<Vec<Answer>>,
    ) -> Result<(Vec<Answer>, PendingPushes), TransactionError> {
        let transaction = self.begin(connection, until)?;
        let mut pending = PendingPushes::default();
        // The clock is read with the write lock held, so that time never goes backwards in the file.
        let now = now();
        let stepped = step(now, &mut pending).and_then(|answers| {
            // What is left behind goes as fast as new things come.
            if pending.created_rows > 0 {
                self.sweep(connection, now, 2 * pending.created_rows, &mut pending)?;
            }
            Ok(answers)
        });
        let answers = stepped.map_err(|error| TransactionError::Failed(schema::not_done(error)))?;
        transaction.commit()?;
        self.commands.fetch_add(u32::try_from(answers.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
        Ok((answers, pending))
    }

    fn begin<'c>(
        &self,
        connection: &'c Connection,
        until: Instant,
    ) -> Result<Transaction<'c>, TransactionError> {
        let mut pause = Duration::from_micros(20);
        loop {
            let begun = connection.prepare_cached("BEGIN IMMEDIATE").and_then(|mut begin| begin.execute([]));
            match begun {
                Ok(_) => break,
                Err(error) if !schema::is_busy(&error) => {
                    return Err(TransactionError::Failed(schema::not_done(error)));
                }
                Err(_) if Instant::now() >= until => return Err(TransactionError::Busy),
                // Another's transaction takes some ten microseconds, unless it takes very long.
                Err(_) => {
                    thread::sleep(pause.min(until.saturating_duration_since(Instant::now())));
                    pause = (pause * 2).min(MAX_BUSY_PAUSE);
                }
            }
        }
        let transaction = Transaction(connection);
        if self.files.are_in_place() { Ok(transaction) } else { Err(TransactionError::Gone) }
    }

    fn is_reachable(&self, client: ClientId, reached: &mut Vec<(ClientId, PipeWriter)>) -> bool {
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
            // Why it can't be written to is our trouble: it keeps its turn, and hears of it when it looks again.
            Reached::Closed(error) => {
                tracing::warn!(%error, %client, "a waiter can't be told of its grant");
                true
            }
            Reached::Gone => false,
        }
    }

    /// Delivers what a transaction that stands has to tell. No lock is held.
    fn send(&self, pending: PendingPushes) {
        let PendingPushes { pushes, mut reached, .. } = pending;
        for push in pushes {
            let to = push.to();
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

/// An open transaction. Dropped, it is rolled back, in a panic too.
struct Transaction<'c>(&'c Connection);

impl Transaction<'_> {
    fn commit(self) -> Result<(), TransactionError> {
        let committed = self.0.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        committed.map(drop).map_err(|error| {
            let message = schema::explain(&error);
            // A full disk is found out before anything counts. What else fails here may or may not have been written.
            let is_full = error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull);
            let failure = if is_full { Failure::NotSent } else { Failure::Unknown };
            TransactionError::Failed(StoreError::new(failure, message).caused_by(error))
        })
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if !self.0.is_autocommit()
            && let Err(error) = self.0.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "a transaction could not be rolled back");
        }
    }
}

fn not_sent(message: impl Into<String>) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}

#[cfg(test)]
mod tests;
