//! The queue of work for the worker's thread.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use leasehold_core::{Acquire, Command, Resource};
use leasehold_store::{Batch, Call, CallResult};
use tokio::sync::oneshot;

use super::BUSY_TIMEOUT;

/// Max number of queued jobs.
const MAX_JOBS: usize = 65_536;

pub(super) enum Job {
    Call(Call, oneshot::Sender<CallResult>),
    Batch(Batch, oneshot::Sender<Vec<CallResult>>),
    /// All attempts are granted, or none is.
    AcquireAll(Vec<(Arc<Resource>, Arc<Acquire>)>, oneshot::Sender<Vec<CallResult>>),
}

/// The thread's job queue.
pub(super) struct JobQueue {
    jobs: Mutex<Jobs>,
    is_ending: AtomicBool,
    /// A byte in it wakes the thread. Writing never blocks: when it is full, the thread is awake.
    wake_pipe: File,
}

/// Jobs in order of arrival, each with its deadline for getting the file.
#[derive(Default)]
struct Jobs {
    /// Renewals and releases, which do not wait behind acquires, of which there may be thousands.
    of_holders: VecDeque<(Instant, Job)>,
    others: VecDeque<(Instant, Job)>,
}

impl Jobs {
    fn len(&self) -> usize {
        self.of_holders.len() + self.others.len()
    }

    fn push(&mut self, until: Instant, job: Job) {
        let jobs = if job.is_of_holders() { &mut self.of_holders } else { &mut self.others };
        jobs.push_back((until, job));
    }

    fn pop(&mut self) -> Option<(Instant, Job)> {
        self.of_holders.pop_front().or_else(|| self.others.pop_front())
    }
}

impl Job {
    fn is_of_holders(&self) -> bool {
        match self {
            Self::Call(call, _) => is_of_holder(&call.command),
            Self::Batch(batch, _) => are_of_holders(batch),
            Self::AcquireAll(..) => false,
        }
    }
}

fn is_of_holder(command: &Command) -> bool {
    matches!(command, Command::Renew(_) | Command::Release(_))
}

pub(super) fn are_of_holders(batch: &[Call]) -> bool {
    batch.iter().all(|Call { command, .. }| is_of_holder(command))
}

impl JobQueue {
    pub(super) fn new(wake_pipe: File) -> Self {
        Self { jobs: Mutex::default(), is_ending: AtomicBool::new(false), wake_pipe }
    }

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a job. Returns false if the queue is full or ends.
    pub(super) fn push(&self, job: Job) -> bool {
        {
            let mut jobs = self.jobs();
            if jobs.len() >= MAX_JOBS || self.is_ending() {
                return false;
            }
            jobs.push(Instant::now() + BUSY_TIMEOUT, job);
        }
        self.wake();
        true
    }

    pub(super) fn pop(&self) -> Option<(Instant, Job)> {
        self.jobs().pop()
    }

    pub(super) fn pop_of_holders(&self) -> Option<(Instant, Job)> {
        self.jobs().of_holders.pop_front()
    }

    pub(super) fn wake(&self) {
        let _ = (&self.wake_pipe).write(&[1]);
    }

    /// Ends the thread after the jobs that are queued now.
    pub(super) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// The thread has ended: drops all jobs, and accepts no more.
    pub(super) fn close(&self) {
        let mut jobs = self.jobs();
        self.is_ending.store(true, Ordering::Release);
        *jobs = Jobs::default();
    }
}
