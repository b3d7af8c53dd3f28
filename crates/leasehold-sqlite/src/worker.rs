//! The store's own thread: it receives pushes, runs jobs that have to wait, and keeps the file small.
//!
//! It sleeps in `poll` on its client's pipe and the wake pipe of the job queue, for at most [`FILE_CHECK_INTERVAL`] at a time.
//! Everything that waits for the disk runs here: checkpoints, and writes to a busy file.

use std::fs::File;
use std::io::{self};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use leasehold_core::{Acquire, Command, Resource};
use leasehold_store::identity::Identity;
use leasehold_store::{Call, CallResult};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};

use super::connection::FileConnection;
use super::jobs::{Job, JobQueue, are_of_holders};
use super::mailbox::{Mailbox, MailboxName, Mailboxes};
use super::{CHECKPOINT_AFTER, PendingPushes, Shared, TransactionError, checkpoint, files, not_sent};

/// Max number of commands in one transaction.
const MAX_TRANSACTION_COMMANDS: usize = 256;

/// Target duration of a transaction of several commands, because it locks the file. The size of the next one is adapted.
const TRANSACTION_TARGET: Duration = Duration::from_millis(5);

/// Interval between two sweeps.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(60);

/// Interval between two checks whether the files are still in place.
pub(super) const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Pause between two transactions of one job, so that other writers get the file. They check every few milliseconds.
const TRANSACTION_PAUSE: Duration = Duration::from_micros(200);

/// Pause between two batches of a sweep, so that other writers get the file.
const SWEEP_PAUSE: Duration = Duration::from_millis(10);

/// Handle of the thread. After a drop the thread ends by itself: the drop does not wait, because the file may be busy.
pub(super) struct Worker {
    queue: Arc<JobQueue>,
    mailbox: MailboxName,
    identity: Identity,
}

impl Worker {
    /// The thread has the rights of the one that calls this. `connection`: its first one.
    pub(super) fn start(
        shared: Arc<Shared>,
        mailbox: Mailbox,
        connection: Option<FileConnection>,
    ) -> io::Result<Self> {
        let (wake_reader, wake_pipe) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC)?;
        let queue = Arc::new(JobQueue::new(File::from(wake_pipe)));
        let (identity, name) = (shared.identity.clone(), mailbox.name.clone());
        let worker = Self { queue: queue.clone(), mailbox: name, identity };
        let thread = WorkerThread {
            shared,
            mailbox,
            queue,
            wake_pipe: wake_reader,
            connection,
            chunk: MAX_TRANSACTION_COMMANDS / 8,
            maintained: Instant::now(),
            is_behind: false,
            are_files_gone: false,
        };
        thread::Builder::new().name("leasehold-sqlite".to_owned()).spawn(move || thread.work())?;
        Ok(worker)
    }

    /// Enqueues a job. Fails if the queue is full, or the thread has ended.
    pub(super) fn submit(&self, job: Job) -> bool {
        self.queue.push(job)
    }

    pub(super) fn wake(&self) {
        self.queue.wake();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.end();
        // At once, because the process may end before the thread does.
        if let Err(error) = self.identity.run(|| self.mailbox.remove()) {
            tracing::debug!(%error, "this client's pipe is left to its thread");
        }
    }
}

/// The thread itself.
struct WorkerThread {
    shared: Arc<Shared>,
    mailbox: Mailbox,
    queue: Arc<JobQueue>,
    wake_pipe: OwnedFd,
    /// Opened on first use, which a short-lived process may never need.
    connection: Option<FileConnection>,
    /// Max number of commands in the next transaction.
    chunk: usize,
    /// When it swept last.
    maintained: Instant,
    /// The last sweep left rows for the next one.
    is_behind: bool,
    /// The files were found to be removed or replaced, and the client was informed.
    are_files_gone: bool,
}

impl Drop for WorkerThread {
    /// Runs after a panic too, so that no caller waits for a dead thread.
    fn drop(&mut self) {
        self.queue.close();
        // No thread receives this client's pushes any more, so the client must not count as reachable.
        self.mailbox.name.remove();
    }
}

impl WorkerThread {
    fn work(mut self) {
        self.maintain();
        while !self.queue.is_ending() {
            self.sleep();
            self.receive_pushes();
            self.run_jobs();
            self.watch_files();
            self.watch_mailbox();
            if self.are_files_gone {
                continue;
            }
            self.keep_small();
            if self.is_behind {
                self.sweep();
            }
        }
        self.run_jobs();
    }

    /// The checkpoint and the sweep, if they are due.
    fn keep_small(&mut self) {
        if self.are_files_gone {
            return;
        }
        if self.shared.commands.load(Ordering::Relaxed) > CHECKPOINT_AFTER {
            self.checkpoint();
        }
        if self.maintained.elapsed() >= MAINTENANCE_INTERVAL {
            self.maintain();
        }
    }

    /// After the files were removed the client's leases are lost, and its waiters get no push: all of them must re-check.
    fn watch_files(&mut self) {
        let are_gone = !self.shared.files.are_in_place();
        if are_gone && !self.are_files_gone {
            tracing::warn!(path = %self.shared.path.display(), "{}", files::GONE);
            if let Some(inbox) = self.shared.inbox.upgrade() {
                inbox.reconnected(&|_| true);
            }
        }
        self.are_files_gone = are_gone;
        self.is_behind &= !are_gone;
    }

    /// Without its pipe the client would be skipped at each grant.
    fn watch_mailbox(&mut self) {
        if self.are_files_gone || self.mailbox.is_in_place() || self.queue.is_ending() {
            return;
        }
        let Shared { path, client, inbox, .. } = &*self.shared;
        let opened = Mailboxes::beside(path).and_then(|mailboxes| mailboxes.open(*client, path));
        match opened {
            Ok(mailbox) => self.mailbox = mailbox,
            Err(error) => {
                tracing::error!(%error, path = %path.display(), "this client's pipe was removed, and can't be made again");
                return;
            }
        }
        tracing::warn!(path = %path.display(), "this client's pipe in the -inbox was removed, and is made again");
        if let Some(inbox) = inbox.upgrade() {
            inbox.reconnected(&|_| true);
        }
    }

    fn sleep(&self) {
        let mut files =
            [PollFd::new(&self.mailbox.pipe, PollFlags::IN), PollFd::new(&self.wake_pipe, PollFlags::IN)];
        let rest = if self.is_behind { SWEEP_PAUSE } else { FILE_CHECK_INTERVAL };
        let rest = Timespec { tv_sec: rest.as_secs().cast_signed(), tv_nsec: rest.subsec_nanos().into() };
        if let Err(error) = poll(&mut files, Some(&rest))
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "waiting for pushes failed");
            thread::sleep(Duration::from_millis(100));
        }
        let mut drained = [0; 64];
        while rustix::io::read(&self.wake_pipe, &mut drained).is_ok_and(|count| count == drained.len()) {}
    }

    fn receive_pushes(&self) {
        for push in self.mailbox.read(self.shared.client) {
            if let Some(inbox) = self.shared.inbox.upgrade() {
                inbox.deliver(push);
            }
        }
    }

    fn run_jobs(&mut self) {
        loop {
            let Some((until, job)) = self.queue.pop() else { return };
            self.run_job(job, until);
            // There may always be a next one.
            self.keep_small();
        }
    }

    fn run_job(&mut self, job: Job, until: Instant) {
        // A received grant does not wait for queued jobs, nor for the rest of a long one.
        self.receive_pushes();
        // If the receiver is gone, the client releases what the answers may have granted.
        match job {
            Job::Call(Call { resource, command }, sender) => {
                let began = Instant::now();
                let answer = self.run_one(&resource, &command, until);
                self.measure(1, began.elapsed());
                let _ = sender.send(answer);
            }
            Job::Batch(batch, sender) => {
                let _ = sender.send(self.run(&batch, until));
            }
            Job::AcquireAll(attempts, sender) => {
                let _ = sender.send(self.run_all(&attempts, until));
            }
        }
    }

    fn run_one(&mut self, resource: &Resource, command: &Command, until: Instant) -> CallResult {
        self.receive_pushes();
        let answered = self.transact(|shared, connection| {
            shared.transact_one(connection, || shared.clock.embedded(), until, (resource, command))
        });
        answered.or_else(|error| self.shared.answer_to(error, command))
    }

    fn run(&mut self, batch: &[Call], until: Instant) -> Vec<CallResult> {
        let mut answers = Vec::with_capacity(batch.len());
        loop {
            let rest = &batch[answers.len()..];
            let count = rest.len().min(self.chunk);
            let began = Instant::now();
            answers.extend(self.run_chunk(&rest[..count], until));
            self.measure(count, began.elapsed());
            if answers.len() == batch.len() {
                return answers;
            }
            if !are_of_holders(batch) {
                self.run_jobs_of_holders();
            }
            thread::sleep(TRANSACTION_PAUSE);
        }
    }

    /// How many commands the next transaction has, after one of so many that took this long.
    fn measure(&mut self, count: usize, took: Duration) {
        if took > TRANSACTION_TARGET {
            self.chunk = (count / 2).max(1);
        } else if took < TRANSACTION_TARGET / 4 && count == self.chunk {
            self.chunk = (count * 2).min(MAX_TRANSACTION_COMMANDS);
        }
    }

    /// Runs the renewals and releases that were submitted during a long job.
    fn run_jobs_of_holders(&mut self) {
        loop {
            let Some((until, job)) = self.queue.pop_of_holders() else { return };
            self.run_job(job, until);
        }
    }

    /// Runs all in one transaction. If it fails, runs each in its own, so that one command's error does not fail the others.
    /// Not if the COMMIT may have taken effect, because a repeat would then answer for the first run.
    fn run_chunk(&mut self, chunk: &[Call], until: Instant) -> Vec<CallResult> {
        self.receive_pushes();
        match self.transact(|shared, connection| shared.transact(connection, until, chunk)) {
            Ok(answers) => answers.into_iter().map(Ok).collect(),
            Err(TransactionError::Failed(error)) if error.failure.may_have_effect() => {
                vec![Err(error); chunk.len()]
            }
            Err(error) => match chunk {
                [Call { command, .. }] => vec![self.shared.answer_to(error, command)],
                _ => chunk
                    .iter()
                    .map(|Call { resource, command }| self.run_one(resource, command, until))
                    .collect(),
            },
        }
    }

    fn run_all(&mut self, attempts: &[(Arc<Resource>, Arc<Acquire>)], until: Instant) -> Vec<CallResult> {
        match self.transact(|shared, connection| shared.transact_all(connection, until, attempts)) {
            Ok(answers) => answers.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error.into_error()); attempts.len()],
        }
    }

    /// Runs a transaction over this thread's connection, and delivers its pushes.
    fn transact<T>(
        &mut self,
        run: impl FnOnce(&Shared, &FileConnection) -> Result<(T, PendingPushes), TransactionError>,
    ) -> Result<T, TransactionError> {
        let shared = self.shared.clone();
        let (done, pending) = run(&shared, self.connection()?)?;
        shared.send(pending);
        Ok(done)
    }

    fn connection(&mut self) -> Result<&mut FileConnection, TransactionError> {
        self.connection = self.connection.take_if(|connection| !connection.is_spoiled());
        if self.connection.is_none() {
            self.connection = Some(self.shared.connect()?);
        }
        self.connection
            .as_mut()
            .ok_or_else(|| TransactionError::Failed(not_sent("there is no connection to the file")))
    }

    // --- Keeping the file small ------------------------------------------------------------------

    /// Removes expired rows and the pipes of dead clients. The next sweep repeats what fails.
    fn maintain(&mut self) {
        self.maintained = Instant::now();
        if let Err(error) = self.shared.mailboxes.sweep() {
            tracing::warn!(%error, "pipes of dead clients could not be removed");
        }
        if checkpoint::is_large(&self.shared.path) {
            self.checkpoint();
        }
        self.sweep();
    }

    fn checkpoint(&mut self) {
        self.shared.commands.store(0, Ordering::Relaxed);
        let shared = self.shared.clone();
        // A removed log does not belong to the file that others use.
        if shared.files.are_in_place()
            && let Ok(connection) = self.connection()
        {
            checkpoint::truncate_log(&shared.path, connection);
        }
    }

    fn sweep(&mut self) {
        let until = Instant::now() + super::INLINE_TIMEOUT;
        let swept = self.transact(|shared, connection| shared.sweep_batch(connection, until));
        self.is_behind = swept.unwrap_or_else(|error| {
            let is_busy = matches!(error, TransactionError::Busy);
            tracing::debug!(error = error.into_error().message, "expired leases could not be removed");
            is_busy
        });
    }
}
