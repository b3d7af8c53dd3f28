//! Commands that tasks of one client send at the same time go out as one script call: for the server, an attempt or a release costs
//! less than half of what it costs alone.
//!
//! A command that finds others in flight waits until the tasks that are ready have run once: those that send a command of its kind
//! meanwhile join it. The first of them that runs again sends the commands of all, in a task of its own, so that none depends on
//! a future that is not polled any more. A command without company is sent at once, as if there were no gathering.

use std::mem::{replace, take};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_core::{Answer, Command, Failure, Resource};
use leasehold_redis_protocol::{MAX_EACH, may_share_a_call};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::ANSWER_TIMEOUT;
use super::connections::Connections;
use super::error::{CallError, lost};
use super::exec::{self, CallOptions};
use super::single_call::options_of;
use crate::store::StoreError;

type Call = (Arc<Resource>, Command);
type Answered = Result<Answer, CallError>;

/// Fewer commands are sent one by one, which costs the server no more.
const MIN_EACH: usize = 4;

/// The commands of one server's connections that wait for company.
#[derive(Default)]
pub(super) struct Gatherings {
    /// Commands that were given to `run`, and have no answer yet.
    in_flight: AtomicUsize,
    attempts: Mutex<Gathering>,
    releases: Mutex<Gathering>,
}

/// Commands of one kind.
#[derive(Default)]
struct Gathering {
    /// Increases when the commands are taken out.
    round: u64,
    /// Empty places are those of futures that were dropped.
    waiting: Vec<Option<Waiting>>,
}

struct Waiting {
    call: Call,
    since: Instant,
    /// `None` if the command has to be sent by itself.
    answer: oneshot::Sender<Option<Answered>>,
}

impl Gatherings {
    /// Runs a command, with others if there are some. Dropping the future cancels the command if it was not sent.
    pub(super) async fn run(
        &self,
        connections: &Arc<Connections>,
        options: CallOptions<'_>,
        call: &Call,
    ) -> Answered {
        let (_in_flight, others) = InFlight::enter(&self.in_flight);
        if others > 0
            && let Some(gathering) = self.gathering(&call.1)
            && let Some(answered) = gather(gathering, connections, call).await
        {
            return answered;
        }
        exec::run_one(&mut connections.preferred_conn(), options, call).await
    }

    fn gathering(&self, command: &Command) -> Option<&Mutex<Gathering>> {
        match command {
            _ if !may_share_a_call(command) => None,
            Command::Release(_) => Some(&self.releases),
            _ => Some(&self.attempts),
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

/// A command's place among those that wait.
struct Place<'a> {
    gathering: &'a Mutex<Gathering>,
    round: u64,
    at: usize,
}

impl<'a> Place<'a> {
    fn take(gathering: &'a Mutex<Gathering>, waiting: Waiting) -> Self {
        let mut gathered = locked(gathering);
        gathered.waiting.push(Some(waiting));
        Self { gathering, round: gathered.round, at: gathered.waiting.len() - 1 }
    }

    /// What goes out now: all that wait, if they are enough; otherwise only this command leaves. `None` if it was taken out before.
    fn leave(self) -> Option<Vec<Waiting>> {
        let mut gathered = locked(self.gathering);
        if gathered.round != self.round {
            return None;
        }
        if gathered.waiting.iter().flatten().count() < MIN_EACH {
            gathered.waiting[self.at] = None;
            return Some(Vec::new());
        }
        gathered.round += 1;
        Some(take(&mut gathered.waiting).into_iter().flatten().collect())
    }
}

impl Drop for Place<'_> {
    /// So that no command is sent for a future that is gone.
    fn drop(&mut self) {
        let mut gathered = locked(self.gathering);
        if gathered.round != self.round {
            return;
        }
        gathered.waiting[self.at] = None;
        if gathered.waiting.iter().all(Option::is_none) {
            gathered.waiting.clear();
            gathered.round += 1;
        }
    }
}

/// Waits for company. Returns `None` if the command has to be sent by itself: nothing was sent, or it has had no effect.
async fn gather(
    gathering: &Mutex<Gathering>,
    connections: &Arc<Connections>,
    call: &Call,
) -> Option<Answered> {
    let (sender, receiver) = oneshot::channel();
    let waiting = Waiting { call: call.clone(), since: Instant::now(), answer: sender };
    let place = Place::take(gathering, waiting);
    yield_now().await;
    if let Some(mut leaving) = place.leave() {
        if leaving.is_empty() {
            return None;
        }
        // A future was not polled for long. Its attempt may have been given up meanwhile, and even the tombstone be gone.
        for late in leaving.extract_if(.., |waiting| waiting.since.elapsed() > ANSWER_TIMEOUT) {
            let what = "the future of this command was not polled in time, so it was not sent";
            let error = CallError::NotConnected(StoreError::new(Failure::NotSent, what));
            let _ = late.answer.send(Some(Err(error)));
        }
        while !leaving.is_empty() {
            let rest = leaving.split_off(leaving.len().min(MAX_EACH));
            tokio::spawn(send(connections.clone(), replace(&mut leaving, rest)));
        }
    }
    // The sender is gone if the runtime has ended.
    receiver.await.unwrap_or_else(|_| Some(Err(CallError::ConnectionLost(lost(None)))))
}

async fn send(connections: Arc<Connections>, waiting: Vec<Waiting>) {
    let (calls, senders): (Vec<Call>, Vec<_>) =
        waiting.into_iter().map(|waiting| (waiting.call, waiting.answer)).unzip();
    let calls: Vec<exec::Call<'_>> = calls.iter().collect();
    let answers = exec::run_each(connections.preferred_conn(), options_of(&connections), &calls).await;
    for (sender, answer) in senders.into_iter().zip(answers) {
        // The receiver is gone if the caller's future was dropped.
        let _ = sender.send(answer);
    }
}

fn locked(gathering: &Mutex<Gathering>) -> MutexGuard<'_, Gathering> {
    gathering.lock().unwrap_or_else(PoisonError::into_inner)
}
