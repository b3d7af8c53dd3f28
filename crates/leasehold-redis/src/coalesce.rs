//! Commands that tasks of one client send at the same time go out as one script call: for the server, an attempt or a release costs
//! less than half of what it costs alone.
//!
//! A command that finds others in flight waits until the tasks that are ready have run once: those that send a command of its kind
//! meanwhile join it. A task of the runtime sends them, so that none depends on a future that is not polled any more. A command without
//! others in flight is sent at once.

use std::mem::{replace, take};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_core::{Answer, Command, Failure};
use leasehold_redis_protocol::{MAX_EACH, may_share_a_call};
use leasehold_store::{Call, StoreError, tasks};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::error::{CallError, lost};
use super::limits::MAX_COALESCE_DELAY;

type Answered = Result<Answer, CallError>;

/// Runs commands on a server.
pub(super) trait Transport: Send + Sync + 'static {
    fn run_one(&self, call: &Call) -> impl Future<Output = Answered> + Send;

    /// Returns one answer per command, in the same order.
    fn run_several(&self, calls: &[&Call]) -> impl Future<Output = Vec<Answered>> + Send;
}

/// Collects the commands of one server's connections that can be sent together.
#[derive(Default)]
pub(super) struct Coalescer {
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

/// Takes out the attempts that have waited for long, because the runtime or the process was paused. Such an attempt may have been
/// given up meanwhile, and even the tombstone be gone that would refuse it: it asks again if it was not. A release harms none.
fn refuse_late(commands: &mut Vec<PendingCommand>, now: Instant) {
    let is_late = |pending: &mut PendingCommand| {
        let is_attempt = matches!(pending.call.command, Command::Acquire(_));
        is_attempt && now.duration_since(pending.since) > MAX_COALESCE_DELAY
    };
    for late in commands.extract_if(.., is_late) {
        let what = "the program was paused before it could ask the store";
        let error = CallError::NotConnected(StoreError::new(Failure::Paused, what));
        let _ = late.answer.send(Err(error));
    }
}

fn locked(batch: &PendingBatch) -> MutexGuard<'_, Vec<PendingCommand>> {
    batch.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::{Pin, pin};
    use std::sync::atomic::AtomicBool;
    use std::task::Poll;
    use std::time::Duration;

    use leasehold_core::{Acquire, Acquisition, ClientId, Kind, Name, Release, Reply, Resource, StoreTime};
    use tokio::sync::Notify;
    use tokio::task::JoinHandle;

    use super::*;

    type Receiver = oneshot::Receiver<Answered>;

    fn pending(sequence: u64) -> (PendingCommand, Receiver) {
        let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
        let release = Release::now(Acquisition { client: ClientId::new(1), sequence });
        let (answer, receiver) = oneshot::channel();
        let call = Call::new(Arc::new(resource), Command::Release(release));
        (PendingCommand { call, since: Instant::now(), answer }, receiver)
    }

    fn attempt(sequence: u64) -> Call {
        let (pending, _) = pending(sequence);
        let acquire =
            Acquire::exclusive(Acquisition { client: ClientId::new(1), sequence }, Duration::from_secs(9));
        Call::new(pending.call.resource, acquire)
    }

    fn sequence(call: &Call) -> u64 {
        match &call.command {
            Command::Release(release) => release.acquisition.sequence,
            Command::Acquire(acquire) => acquire.acquisition.sequence,
            other => panic!("{other:?}"),
        }
    }

    /// Answers once it may.
    #[derive(Default)]
    struct Server {
        may_answer: Notify,
        is_open: AtomicBool,
        /// The sizes of the calls.
        calls: Mutex<Vec<usize>>,
    }

    impl Server {
        fn open(&self) {
            self.is_open.store(true, Ordering::SeqCst);
            self.may_answer.notify_waiters();
        }

        /// The answer tells which command it is for.
        async fn answer(&self, calls: &[&Call]) -> Vec<Answered> {
            self.calls.lock().unwrap().push(calls.len());
            let opened = self.may_answer.notified();
            if !self.is_open.load(Ordering::SeqCst) {
                opened.await;
            }
            let answer = |call: &&Call| {
                Ok(Answer { at: StoreTime::from_micros(sequence(call)), reply: Reply::Released })
            };
            calls.iter().map(answer).collect()
        }

        fn calls(&self) -> Vec<usize> {
            self.calls.lock().unwrap().clone()
        }
    }

    impl Transport for Server {
        async fn run_one(&self, call: &Call) -> Answered {
            self.answer(&[call]).await.remove(0)
        }

        async fn run_several(&self, calls: &[&Call]) -> Vec<Answered> {
            self.answer(calls).await
        }
    }

    /// Begins so many commands.
    fn begin(
        coalescer: &Arc<Coalescer>,
        server: &Arc<Server>,
        numbers: std::ops::Range<u64>,
    ) -> Vec<JoinHandle<Answered>> {
        let run = |number| {
            let (coalescer, server, call) = (coalescer.clone(), server.clone(), pending(number).0.call);
            tokio::spawn(async move { coalescer.run(&server, &call).await })
        };
        numbers.map(run).collect()
    }

    async fn expect_answers(tasks: Vec<JoinHandle<Answered>>, first: u64) {
        for (number, task) in (first..).zip(tasks) {
            assert_eq!(task.await.unwrap().ok().map(|answer| answer.at.as_micros()), Some(number));
        }
    }

    async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
        poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await
    }

    async fn let_others_run() {
        for _ in 0..9 {
            yield_now().await;
        }
    }

    #[tokio::test]
    async fn each_task_has_its_answer_from_the_call_of_several() {
        let (coalescer, server) = (Arc::<Coalescer>::default(), Arc::<Server>::default());
        let tasks = begin(&coalescer, &server, 0..100);
        let_others_run().await;
        // One found no other in flight.
        assert_eq!(server.calls(), [1, MAX_EACH, MAX_EACH, MAX_EACH, 99 - 3 * MAX_EACH]);
        server.open();
        expect_answers(tasks, 0).await;
        // None is in flight now, so each goes alone.
        for number in 0..5 {
            expect_answers(begin(&coalescer, &server, number..number + 1), number).await;
        }
        assert_eq!(server.calls()[5..], [1; 5]);
    }

    #[tokio::test]
    async fn task_that_is_aborted_takes_no_answer_from_others() {
        let (coalescer, server) = (Arc::<Coalescer>::default(), Arc::<Server>::default());
        let mut tasks = begin(&coalescer, &server, 0..20);
        let_others_run().await;
        // This one has taken the others along.
        tasks.remove(1).abort();
        tasks.remove(0).abort();
        let_others_run().await;
        server.open();
        expect_answers(tasks, 2).await;
        // The aborted ones are not in flight any more.
        assert_eq!(coalescer.in_flight.load(Ordering::Relaxed), 0);
    }

    /// Its task is not polled any more, and none of the others.
    #[tokio::test]
    async fn command_of_a_future_that_was_polled_once_is_sent() {
        let (coalescer, server) = (Arc::<Coalescer>::default(), Arc::<Server>::default());
        let calls = [1, 2].map(|number| pending(number).0.call);
        let [mut first, mut second] = calls.each_ref().map(|call| Box::pin(coalescer.run(&server, call)));
        assert!(poll_once(first.as_mut()).await.is_pending());
        assert!(poll_once(second.as_mut()).await.is_pending());
        assert_eq!(server.calls(), [1]);
        let_others_run().await;
        assert_eq!(server.calls(), [1, 1]);
        server.open();
        assert_eq!(second.await.ok().map(|answer| answer.at.as_micros()), Some(2));
    }

    /// The runtime stands still before the batch is sent.
    #[tokio::test(start_paused = true)]
    async fn attempt_is_not_sent_late_and_tells_of_the_pause() {
        let (coalescer, server) = (Arc::<Coalescer>::default(), Arc::<Server>::default());
        let in_flight = begin(&coalescer, &server, 0..1);
        let_others_run().await;
        let (early, late, release) = (attempt(1), attempt(2), pending(3).0.call);
        for (call, more, is_sent) in [(early, 0, true), (late, 1, false), (release, 1, true)] {
            let before = server.calls().len();
            let mut run = pin!(coalescer.run(&server, &call));
            assert!(poll_once(run.as_mut()).await.is_pending());
            tokio::time::advance(MAX_COALESCE_DELAY + Duration::from_millis(more)).await;
            let_others_run().await;
            assert_eq!(server.calls().len() - before, usize::from(is_sent), "{call:?}");
            match poll_once(run.as_mut()).await {
                Poll::Pending => assert!(is_sent),
                Poll::Ready(answered) => {
                    let error = StoreError::from(answered.err().unwrap());
                    assert_eq!((error.failure, is_sent), (Failure::Paused, false));
                }
            }
        }
        server.open();
        expect_answers(in_flight, 0).await;
    }

    /// A task that was aborted before its command was sent.
    #[tokio::test]
    async fn command_of_an_aborted_task_is_not_sent() {
        let (coalescer, server) = (Arc::<Coalescer>::default(), Arc::<Server>::default());
        let in_flight = begin(&coalescer, &server, 0..1);
        let_others_run().await;
        let calls = [1, 2, 3, 4].map(|number| pending(number).0.call);
        let mut runs = calls.each_ref().map(|call| Box::pin(coalescer.run(&server, call)));
        for run in &mut runs {
            assert!(poll_once(run.as_mut()).await.is_pending());
        }
        let [first, dropped, _third, _fourth] = runs;
        drop(dropped);
        let_others_run().await;
        assert_eq!(server.calls(), [1, 3]);
        server.open();
        assert_eq!(first.await.ok().map(|answer| answer.at.as_micros()), Some(1));
        expect_answers(in_flight, 0).await;
    }

    #[test]
    fn runtime_that_ends_leaves_the_outcome_unknown() {
        let (coalescer, server) = (Arc::<Coalescer>::default(), Arc::<Server>::default());
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (ending, other) = (runtime(), runtime());
        let [sent, unsent] = [8, 9].map(|number| pending(number).0.call);
        let [mut sent, mut unsent] = [&sent, &unsent].map(|call| Box::pin(coalescer.run(&server, call)));
        let in_flight = ending.block_on(async {
            let in_flight = begin(&coalescer, &server, 0..1);
            let_others_run().await;
            assert!(poll_once(sent.as_mut()).await.is_pending());
            let_others_run().await;
            assert!(poll_once(unsent.as_mut()).await.is_pending());
            in_flight
        });
        assert_eq!(server.calls(), [1, 1]);
        drop(in_flight);
        drop(ending);
        for run in [sent, unsent] {
            let answered = other.block_on(run);
            assert!(matches!(answered, Err(CallError::ConnectionLost(_))));
        }
        // They are sent by the other one now.
        server.open();
        other.block_on(async { expect_answers(begin(&coalescer, &server, 1..9), 1).await });
    }

    #[test]
    fn attempt_that_has_waited_for_long_is_refused() {
        let ((first, mut of_first), (second, mut of_second)) = (pending(1), pending(2));
        let since = first.since;
        let first = PendingCommand { call: attempt(1), ..first };
        let second = PendingCommand { call: attempt(2), since: since + Duration::from_millis(1), ..second };
        let mut commands = vec![first, second];
        refuse_late(&mut commands, since + MAX_COALESCE_DELAY);
        assert_eq!(commands.len(), 2);
        refuse_late(&mut commands, since + MAX_COALESCE_DELAY + Duration::from_millis(1));
        assert_eq!(commands.iter().map(|pending| sequence(&pending.call)).collect::<Vec<_>>(), [2]);
        let Ok(Err(error)) = of_first.try_recv() else { panic!("it has an answer") };
        assert_eq!(StoreError::from(error).failure, Failure::Paused);
        assert!(of_second.try_recv().is_err());
    }
}
