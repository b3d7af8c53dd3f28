//! Which calls go out together, and in which order.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::AtomicBool;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Kind, Name, Release, Renew, Reply, Resource, StoreTime,
};
use leasehold_redis_protocol::ScriptVariant;
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
        let answer =
            |call: &&Call| Ok(Answer { at: StoreTime::from_micros(sequence(call)), reply: Reply::Released });
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

fn waiting(sequence: u64, replicas: u32, is_renewal: bool) -> Waiting {
    let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
    let acquisition = Acquisition { client: ClientId::new(1), sequence };
    let ttl = Duration::from_secs(9);
    let call = match is_renewal {
        true => Call::new(resource, Renew::to(acquisition, ttl)),
        false => Call::new(resource, Acquire::exclusive(acquisition, ttl)),
    };
    let terms = Terms { replicas, role: Role::of(ScriptVariant::Server) };
    Waiting { terms, calls: vec![call], since: Instant::now(), answers: oneshot::channel().0 }
}

fn numbers(waiting: &[Waiting]) -> Vec<u64> {
    let number = |waiting: &Waiting| match &waiting.calls[0].command {
        Command::Renew(renew) => renew.acquisition.sequence,
        Command::Acquire(acquire) => acquire.acquisition.sequence,
        other => panic!("{other:?}"),
    };
    waiting.iter().map(number).collect()
}

#[tokio::test]
async fn renewal_goes_before_all_attempts_that_wait() {
    let queue = ReplicaQueue::default();
    let count = 2 * MAX_CALLS as u64;
    let started = (0..count).filter(|number| queue.push(waiting(*number, 1, false))).count();
    assert_eq!(started, 1, "one task sends them");
    queue.push(waiting(count, 1, true));
    queue.push(waiting(count + 1, 2, false));
    let (terms, first) = queue.pop().unwrap();
    assert_eq!((terms.replicas, first.len()), (1, MAX_CALLS));
    assert_eq!(numbers(&first)[..3], [count, 0, 1]);
    queue.push(waiting(count + 2, 2, true));
    let sizes: Vec<_> =
        std::iter::from_fn(|| queue.pop()).map(|(terms, next)| (terms.replicas, next.len())).collect();
    assert_eq!(sizes, [(1, MAX_CALLS), (2, 2), (1, 1)]);
    assert!(queue.push(waiting(0, 1, false)), "the task has ended");
}

#[tokio::test]
async fn renewal_goes_in_each_round_of_its_terms() {
    let queue = ReplicaQueue::default();
    for number in 0..3 * MAX_CALLS as u64 {
        queue.push(waiting(number, 1, false));
    }
    for _ in 0..3 {
        queue.push(waiting(1_000, 1, true));
        let (_, next) = queue.pop().unwrap();
        assert!(next.len() == MAX_CALLS && numbers(&next).contains(&1_000));
    }
}

/// Neither those of other terms, nor a batch for which the renewals leave no room.
#[tokio::test]
async fn attempts_have_every_second_turn_however_many_renewals_wait() {
    for (replicas, size) in [(2, 1), (1, MAX_CALLS)] {
        let queue = ReplicaQueue::default();
        let mut batch = waiting(0, replicas, false);
        batch.calls = vec![batch.calls[0].clone(); size];
        queue.push(batch);
        for round in 0..2 {
            for number in 0..MAX_CALLS as u64 {
                queue.push(waiting(1 + number, 1, true));
            }
            let (terms, next) = queue.pop().unwrap();
            let has_attempt = next.iter().any(Waiting::has_attempt);
            assert_eq!((terms.replicas, has_attempt), if round == 0 { (1, false) } else { (replicas, true) });
        }
        let (_, next) = queue.pop().unwrap();
        assert_eq!(next.len(), MAX_CALLS, "the renewals have the next turn");
    }
}
