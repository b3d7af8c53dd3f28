//! Groups calls that can be sent together. It sends none itself.
//!
//! [`Coalescer`]: commands that tasks of one client send at the same time go out as one script call. For the server, an attempt or a release
//! then costs less than half of what it costs alone. A command that finds others in flight waits until the tasks that are ready have run
//! once: those that send a command of its kind meanwhile join it. A task of the runtime sends them, so that none depends on a future that is
//! not polled any more. A command without others in flight is sent at once.
//!
//! [`ReplicaQueue`]: while the server waits for replicas it runs nothing else of that connection. What comes meanwhile waits here, and goes
//! out together: renewals and releases first. In every second round one attempt does not wait for them: there may always be some.

use std::collections::VecDeque;
use std::mem::{replace, take};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_core::{Command, Failure};
use leasehold_redis_protocol::{BatchKind, MAX_EACH};
use leasehold_store::{Call, StoreError, tasks};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::pipeline::Role;
use crate::error::{Answered, CallError, lost};
use crate::limits::MAX_COALESCE_DELAY;

/// Max number of calls that go out with one WAIT: the server must run them within the time limit of a reply.
const MAX_CALLS: usize = 200;

/// Runs commands on a server.
pub(super) trait Transport: Send + Sync + 'static {
    fn run_one(&self, call: &Call) -> impl Future<Output = Answered> + Send;

    /// Returns one answer per command, in the same order.
    fn run_several(&self, calls: &[&Call]) -> impl Future<Output = Vec<Answered>> + Send;
}

/// Collects the commands of one server's connections that can be sent together.
#[derive(Default)]
pub(crate) struct Coalescer {
    /// Commands that were given to `run`, and have no answer yet.
    in_flight: AtomicUsize,
    attempts: PendingBatch,
    releases: PendingBatch,
}

/// Commands of one kind. While there are some, a task is about to send them.
type PendingBatch = Arc<Mutex<Vec<PendingCommand>>>;

struct PendingCommand {
    call: Call,
    since: Instant,
    answer: oneshot::Sender<Answered>,
}

impl Coalescer {
    /// Runs a command, with others if there are some. Dropping the future cancels the command if it was not sent.
    pub(super) async fn run(&self, transport: &Arc<impl Transport>, call: &Call) -> Answered {
        let (_in_flight, others) = InFlight::enter(&self.in_flight);
        match self.batch_for(&call.command) {
            Some(batch) if others > 0 => join_batch(batch, transport, call).await,
            _ => transport.run_one(call).await,
        }
    }

    fn batch_for(&self, command: &Command) -> Option<&PendingBatch> {
        match BatchKind::of(command)? {
            BatchKind::Attempts => Some(&self.attempts),
            BatchKind::Releases => Some(&self.releases),
            BatchKind::Renewals(_) => None,
        }
    }
}

/// Counts a command while it has no answer.
struct InFlight<'a>(&'a AtomicUsize);

impl<'a> InFlight<'a> {
    /// Also returns how many others there are.
    fn enter(count: &'a AtomicUsize) -> (Self, usize) {
        let others = count.fetch_add(1, Ordering::Relaxed);
        (Self(count), others)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Adds the command to the batch, and waits for its answer.
async fn join_batch(batch: &PendingBatch, transport: &Arc<impl Transport>, call: &Call) -> Answered {
    let (sender, receiver) = oneshot::channel();
    let command = PendingCommand { call: call.clone(), since: Instant::now(), answer: sender };
    let is_first = {
        let mut commands = locked(batch);
        commands.push(command);
        commands.len() == 1
    };
    if is_first {
        tasks::spawn(send_batch(UnsentBatch(Some(batch.clone())), transport.clone()));
    }
    // The sender is gone if the runtime has ended.
    receiver.await.unwrap_or_else(|_| Err(CallError::ConnectionLost(lost(None))))
}

/// Yields once so that the tasks that are ready can add their commands, and sends the batch.
async fn send_batch(batch: UnsentBatch, transport: Arc<impl Transport>) {
    yield_now().await;
    let mut first = batch.take();
    let mut rest = first.split_off(first.len().min(MAX_EACH));
    while !rest.is_empty() {
        let later = rest.split_off(rest.len().min(MAX_EACH));
        tasks::spawn(send_commands(transport.clone(), replace(&mut rest, later)));
    }
    send_commands(transport, first).await;
}

/// The batch that a task is about to send. If the task is dropped before, with its runtime, its commands have no answer, and none waits
/// for it.
struct UnsentBatch(Option<PendingBatch>);

impl UnsentBatch {
    fn take(mut self) -> Vec<PendingCommand> {
        self.0.take().map(|batch| take(&mut *locked(&batch))).unwrap_or_default()
    }
}

impl Drop for UnsentBatch {
    fn drop(&mut self) {
        if let Some(batch) = &self.0 {
            let unsent = take(&mut *locked(batch));
            drop(unsent);
        }
    }
}

async fn send_commands(transport: Arc<impl Transport>, mut commands: Vec<PendingCommand>) {
    // The receiver is gone if the caller's future was dropped.
    commands.retain(|command| !command.answer.is_closed());
    refuse_late(&mut commands, Instant::now());
    if commands.is_empty() {
        return;
    }
    let (calls, senders): (Vec<Call>, Vec<_>) =
        commands.into_iter().map(|command| (command.call, command.answer)).unzip();
    let answers = transport.run_several(&calls.iter().collect::<Vec<_>>()).await;
    for (sender, answer) in senders.into_iter().zip(answers) {
        let _ = sender.send(answer);
    }
}

/// Takes out the attempts that have waited for long.
fn refuse_late(commands: &mut Vec<PendingCommand>, now: Instant) {
    let late = commands.extract_if(.., |pending| is_late(&pending.call, pending.since, now));
    late.for_each(|late| drop(late.answer.send(Err(paused()))));
}

/// Whether this attempt has waited for long, because the runtime or the process was paused. It may have been given up meanwhile, and even
/// the tombstone be gone that would refuse it: it asks again if it was not. A release harms none.
fn is_late(call: &Call, since: Instant, now: Instant) -> bool {
    matches!(call.command, Command::Acquire(_)) && now.duration_since(since) > MAX_COALESCE_DELAY
}

fn paused() -> CallError {
    let what = "the program was paused before it could ask the store";
    CallError::NotConnected(StoreError::new(Failure::Paused, what))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// --- Replicas -------------------------------------------------------------------------------------

/// Calls that wait for those before them to be acknowledged by replicas.
#[derive(Default)]
pub(crate) struct ReplicaQueue(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    /// Renewals and releases, which go before attempts: there may be thousands of these, and a lease would expire behind them.
    of_holders: VecDeque<Waiting>,
    attempts: VecDeque<Waiting>,
    /// The last calls that went out were chosen by the terms of a renewal or release. There may always be one, and attempts of other
    /// terms must not wait for ever.
    holders_were_first: bool,
    /// A task sends them.
    is_sending: bool,
}

/// Calls of one sender.
pub(super) struct Waiting {
    pub(super) terms: Terms,
    pub(super) calls: Vec<Call>,
    pub(super) since: Instant,
    pub(super) answers: oneshot::Sender<Vec<Answered>>,
}

impl Waiting {
    fn has_attempt(&self) -> bool {
        self.calls.iter().any(|call| matches!(call.command, Command::Acquire(_)))
    }

    /// Leaves those that still wait for an answer, and are not late.
    pub(super) fn retain_due(all: &mut Vec<Self>) {
        // The receiver is gone if the caller's future was dropped.
        all.retain(|waiting| !waiting.answers.is_closed());
        let now = Instant::now();
        let is_late = |waiting: &mut Self| waiting.calls.iter().any(|call| is_late(call, waiting.since, now));
        for late in all.extract_if(.., is_late) {
            let _ = late.answers.send(vec![Err(paused()); late.calls.len()]);
        }
    }
}

/// What calls have in common that may share a WAIT.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Terms {
    pub(super) replicas: u32,
    pub(super) role: Role,
}

impl ReplicaQueue {
    /// Returns whether a task must be started that sends what waits.
    pub(super) fn push(&self, waiting: Waiting) -> bool {
        let mut queue = locked(&self.0);
        let is_attempt = waiting.has_attempt();
        if is_attempt { &mut queue.attempts } else { &mut queue.of_holders }.push_back(waiting);
        !replace(&mut queue.is_sending, true)
    }

    /// The next calls to be sent together; `None` if none waits, and the task that sends them ends.
    pub(super) fn pop(&self) -> Option<(Terms, Vec<Waiting>)> {
        let mut queue = locked(&self.0);
        let Queue { of_holders, attempts, holders_were_first, is_sending } = &mut *queue;
        let attempts_are_first = of_holders.is_empty() || *holders_were_first && !attempts.is_empty();
        let first = if attempts_are_first { &mut *attempts } else { &mut *of_holders }.pop_front();
        let Some(first) = first else {
            *is_sending = false;
            return None;
        };
        *holders_were_first = !attempts_are_first;
        let terms = first.terms;
        let mut room = MAX_CALLS.saturating_sub(first.calls.len());
        let mut next = vec![first];
        for waiting in [of_holders, attempts] {
            for one in take(waiting) {
                if one.terms == terms && one.calls.len() <= room {
                    room -= one.calls.len();
                    next.push(one);
                } else {
                    waiting.push_back(one);
                }
            }
        }
        Some((terms, next))
    }

    /// The task that sends what waits is dropped.
    pub(super) fn forget_unsent(&self) {
        let unsent = take(&mut *locked(&self.0));
        drop(unsent);
    }
}

#[cfg(test)]
mod tests;
