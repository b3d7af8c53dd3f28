//! `sqlite:PATH`: the lease table in a file that all processes of one machine share.
//!
//! **Layout.** One row per resource ([`Header`](leasehold_core::model::Header)), and one per lease, queue entry
//! and tombstone. A command is one immediate transaction in which the model changes the rows, so its cost does not depend on
//! the number of waiters. `schema.rs` opens the file, `rows.rs` reads and writes it.
//!
//! **Where it runs.** A command runs on its caller's thread when the file is free within `INLINE_TIMEOUT`: some ten
//! microseconds and no switch of threads. Otherwise, and for batches, it goes to the worker, a thread with a
//! connection of its own that may wait.
//!
//! **Waiting.** A release also grants, in the same transaction, and writes the whole grant into the pipe of the next waiter's
//! client (`mailbox.rs`). That client's worker sleeps in `poll` on its pipe, so a waiter costs nothing until its grant, and no
//! other client is woken. A pipe without a reader means that its client is gone.
//!
//! **Time.** Leases run on the boot clock, which all processes of the machine share, and end with the boot. Tokens follow
//! the wall clock, and persist.
//!
//! **What a power cut costs.** With the write-ahead log and `synchronous=NORMAL` the file stays whole, and the last
//! transactions before the cut may be missing. The leases in them have ended with the boot. A lost token is lower than the
//! wall clock after the restart. `?synchronous=full` flushes each transaction.
//!
//! **Errors.** A transaction that fails before its COMMIT has changed nothing (`NotSent`). Whether a failed COMMIT took effect
//! is unknown. A file that was removed or replaced under a client is noticed before each command, as are its log
//! and its shared memory (`files.rs`), because a client that opened the new ones would not see this client's leases. What another user has put
//! beside the file is refused (`side_files.rs`).
//!
//! **Size.** An index finds the rows whose last token need not be remembered any more. Each transaction that inserts rows sweeps
//! twice as many due ones, and the worker sweeps all others once a minute (`sweep.rs`).

#![cfg(unix)]
#![forbid(unsafe_code)]

mod access_lists;
mod checkpoint;
mod connection;
mod doctor;
mod files;
mod foreign_code;
mod jobs;
mod limits;
mod list;
mod location;
mod mailbox;
mod rows;
mod schema;
mod shared;
mod side_files;
mod sweep;
mod tables;
mod url;
mod worker;

use std::future::ready;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::thread;
use std::time::Instant;

use leasehold_core::{Acquire, ClientId, Command, Failure, Resource};
use leasehold_store::clock::Clock;
use leasehold_store::identity::Identity;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, Diagnose, Diagnosis, EMBEDDED_POLL_INTERVALS, Inbox,
    OpenError, Store, StoreError, trial,
};
use tokio::sync::oneshot;

use connection::FileConnection;
use files::{Files, Opening};
use jobs::Job;
use limits::{BUSY_TIMEOUT, CHECKPOINT_AFTER, INLINE_TIMEOUT};
use mailbox::{Mailbox, Mailboxes};
use schema::not_sent;
use shared::{PendingPushes, Shared, TransactionError};
pub use url::SqliteUrl;
use worker::Worker;

/// Not for users: see `fuzz/`.
#[cfg(feature = "_fuzzing")]
#[doc(hidden)]
pub use mailbox::fuzz as fuzz_pipe_record;

/// The lease tables of one file, for one client.
pub struct Sqlite {
    shared: Arc<Shared>,
    /// The connection of callers' threads. The worker has its own. `None` if root uses the file with another user's rights, which only the
    /// worker's thread has.
    connection: Option<Mutex<FileConnection>>,
    worker: Worker,
}

/// What a client opens.
struct Opened {
    path: PathBuf,
    connection: FileConnection,
    files: Arc<Files>,
    mailboxes: Mailboxes,
    mailbox: Mailbox,
}

impl Opened {
    fn new(url: &SqliteUrl, client: ClientId) -> Result<Self, OpenError> {
        let _opening = Opening::begin();
        let (path, connection) = schema::prepare(url.path(), url.is_durable())?;
        let files = Files::identify(&path)
            .map_err(|error| failed(&path, "it was removed while it was opened", error))?;
        let no_inbox = |error| failed(&path, "no pipe could be made in the directory beside it", error);
        let mailboxes = Mailboxes::beside(&path).map_err(no_inbox)?;
        let mailbox = mailboxes.open(client, &path).map_err(no_inbox)?;
        Ok(Self { path, connection, files, mailboxes, mailbox })
    }
}

fn failed(path: &Path, what: &str, error: std::io::Error) -> OpenError {
    OpenError::unavailable(format!("sqlite:{}: {what}: {error}", path.display())).with_source(error)
}

impl Sqlite {
    /// Opens the file for this client, and creates it if it is missing. Blocks while the file is busy.
    ///
    /// # Errors
    ///
    /// The file can't be opened, is no store, or is on a file system that can't share it.
    pub fn open(
        url: &SqliteUrl,
        clock: Clock,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
    ) -> Result<Arc<Self>, OpenError> {
        let failed = |error: std::io::Error| {
            let what = format!("sqlite:{}: {error}", url.path().display());
            OpenError::unavailable(what).with_source(error)
        };
        let identity = Identity::for_file(url.path()).map_err(failed)?;
        let opened = identity.run(|| Self::open_as(identity.clone(), url, clock, client, inbox));
        opened.map_err(failed)?.map_err(|mut error| {
            let note = identity.note().map(|note| format!(" ({note})"));
            error.message.extend(note);
            error
        })
    }

    /// On a thread with these rights, which its own threads get.
    fn open_as(
        identity: Identity,
        url: &SqliteUrl,
        clock: Clock,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
    ) -> Result<Arc<Self>, OpenError> {
        let is_durable = url.is_durable();
        let Opened { path, connection, files, mailboxes, mailbox } = Opened::new(url, client)?;
        let (of_callers, of_worker) =
            if identity.is_other() { (None, Some(connection)) } else { (Some(connection), None) };
        let commands = AtomicU32::new(0);
        let shared = Arc::new(Shared {
            path,
            identity,
            files,
            is_durable,
            clock,
            client,
            inbox,
            mailboxes,
            #[cfg(test)]
            has_own_schema: std::sync::atomic::AtomicBool::new(false),
            commands,
        });
        let worker = Worker::start(shared.clone(), mailbox, of_worker)
            .map_err(|error| failed(&shared.path, "no thread could be started", error))?;
        Ok(Arc::new(Self { shared, connection: of_callers.map(Mutex::new), worker }))
    }

    /// The callers' connection; `None` if it is in use for too long, or if there is none.
    fn connection(&self, until: Instant) -> Option<MutexGuard<'_, FileConnection>> {
        let connection = self.connection.as_ref()?;
        loop {
            match connection.try_lock() {
                Ok(connection) => return Some(connection),
                // A panic inside the model has rolled its transaction back.
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::yield_now(),
                Err(TryLockError::WouldBlock) => return None,
            }
        }
    }

    /// Runs on this thread; `None` if the file is busy for too long, or only the worker may use it.
    fn run_inline<T>(
        &self,
        transact: impl FnOnce(&FileConnection, Instant) -> Result<(T, PendingPushes), TransactionError>,
    ) -> Option<Result<T, TransactionError>> {
        let until = Instant::now() + INLINE_TIMEOUT;
        let mut connection = self.connection(until)?;
        if connection.is_spoiled() {
            match self.shared.connect() {
                Ok(sound) => *connection = sound,
                Err(error) => return Some(Err(error)),
            }
        }
        let (answer, pending) = match transact(&connection, until) {
            Ok(done) => done,
            Err(TransactionError::Busy) => return None,
            Err(error) => return Some(Err(error)),
        };
        drop(connection);
        self.shared.send(pending);
        if self.shared.commands.load(Ordering::Relaxed) > CHECKPOINT_AFTER {
            self.worker.wake();
        }
        Some(Ok(answer))
    }

    /// Runs on the worker, which may wait for the file. `otherwise` makes the answer if the worker gives none.
    fn submit<T: Send + 'static>(
        &self,
        job: impl FnOnce(oneshot::Sender<T>) -> Job,
        otherwise: impl FnOnce(StoreError) -> T + Send + 'static,
    ) -> BoxFuture<T> {
        let (sender, receiver) = oneshot::channel();
        let is_taken = self.worker.submit(job(sender));
        Box::pin(async move {
            if !is_taken {
                return otherwise(not_sent("too many commands wait for the file, or its worker has ended"));
            }
            receiver.await.unwrap_or_else(|_| {
                // It may have done the command before.
                otherwise(StoreError::new(
                    Failure::Unknown,
                    "the worker of the file ended before it answered",
                ))
            })
        })
    }
}

impl Store for Sqlite {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(EMBEDDED_POLL_INTERVALS)
    }

    fn try_call_inline(&self, resource: &Resource, command: &Command) -> Option<CallResult> {
        let now = || self.shared.clock.embedded();
        let answered = self.run_inline(|connection, until| {
            self.shared.transact_one(connection, now, until, (resource, command))
        })?;
        Some(answered.or_else(|error| self.shared.answer_to(error, command)))
    }

    fn acquire_all(&self, attempts: &[(Arc<Resource>, Arc<Acquire>)]) -> Option<BoxFuture<Vec<CallResult>>> {
        let count = attempts.len();
        let failed = move |error| vec![Err(error); count];
        let answered =
            self.run_inline(|connection, until| self.shared.transact_all(connection, until, attempts));
        Some(match answered {
            Some(Ok(answers)) => Box::pin(ready(answers.into_iter().map(Ok).collect())),
            Some(Err(error)) => Box::pin(ready(failed(error.into_error()))),
            None => self.submit(|sender| Job::AcquireAll(attempts.to_vec(), sender), failed),
        })
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        self.submit(|sender| Job::Call(call, sender), Err)
    }

    fn call_batch(&self, batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        let count = batch.len();
        self.submit(|sender| Job::Batch(batch, sender), move |error| vec![Err(error); count])
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        let (sender, receiver) = oneshot::channel();
        let shared = self.shared.clone();
        // The worker's renewals do not wait for it.
        let started = thread::Builder::new()
            .name("leasehold-list".to_owned())
            .spawn(move || sender.send(shared.list()));
        Box::pin(async move {
            started
                .map_err(|error| not_sent(format!("no thread could be started: {error}")).caused_by(error))?;
            receiver.await.unwrap_or_else(|_| Err(not_sent("the thread that lists the locks has ended")))
        })
    }

    fn shard(&self, _resource: &Resource, command: &Command) -> u64 {
        // Commands of holders do not wait for those of waiters, of which there may be thousands.
        u64::from(matches!(command, Command::Acquire(_)))
    }

    fn doctor(&self) -> Option<&dyn Diagnose> {
        Some(self)
    }
}

impl Diagnose for Sqlite {
    fn diagnose(&self) -> BoxFuture<Result<Diagnosis, StoreError>> {
        let (sender, receiver) = oneshot::channel();
        let shared = self.shared.clone();
        // It reads the whole file, which would delay the worker's other jobs.
        let started = thread::Builder::new()
            .name("leasehold-doctor".to_owned())
            .spawn(move || sender.send(doctor::diagnose(&shared.path, &shared.identity, shared.is_durable)));
        let tried = self.call_batch(trial::commands(false), 0);
        Box::pin(async move {
            started
                .map_err(|error| not_sent(format!("no thread could be started: {error}")).caused_by(error))?;
            let checked = receiver.await;
            let mut diagnosis =
                checked.unwrap_or_else(|_| Err(not_sent("the thread that checks the file has ended")))?;
            let results = tried.await;
            diagnosis.components.iter_mut().take(1).for_each(|file| trial::judge(&results, file));
            Ok(diagnosis)
        })
    }
}

#[cfg(test)]
mod tests;
