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

use super::error::{CallError, lost};
use super::exec::MIN_EACH;
use super::limits::MAX_WAIT_FOR_COMPANY;
use crate::store::StoreError;

type Call = (Arc<Resource>, Command);
type Answered = Result<Answer, CallError>;

/// Runs commands on a server.
pub(super) trait Carrier: Send + Sync + 'static {
    fn run_one(&self, call: &Call) -> impl Future<Output = Answered> + Send;

    /// Returns one answer per command, in the same order.
    fn run_several(&self, calls: &[&Call]) -> impl Future<Output = Vec<Answered>> + Send;
}

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
    /// The number of the next place.
    next: u64,
    /// By place.
    waiting: Vec<(u64, Waiting)>,
}

struct Waiting {
    call: Call,
    since: Instant,
    answer: oneshot::Sender<Answered>,
}

impl Gatherings {
    /// Runs a command, with others if there are some. Dropping the future cancels the command if it was not sent.
    pub(super) async fn run(&self, carrier: &Arc<impl Carrier>, call: &Call) -> Answered {
        let (_in_flight, others) = InFlight::enter(&self.in_flight);
        if others > 0
            && let Some(gathering) = self.gathering(&call.1)
            && let Some(answered) = gather(gathering, carrier, call).await
        {
            return answered;
        }
        carrier.run_one(call).await
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
    number: u64,
}

impl<'a> Place<'a> {
    fn take(gathering: &'a Mutex<Gathering>, waiting: Waiting) -> Self {
        let mut gathered = locked(gathering);
        let number = gathered.next;
        gathered.next += 1;
        gathered.waiting.push((number, waiting));
        Self { gathering, number }
    }

    /// Takes out what is sent now: all that wait if they are enough, otherwise this command. `None` if it was taken out before.
    fn leave(self) -> Option<Vec<Waiting>> {
        let mut gathered = locked(self.gathering);
        let at = self.position(&gathered)?;
        if gathered.waiting.len() < MIN_EACH {
            return Some(vec![gathered.waiting.remove(at).1]);
        }
        Some(take(&mut gathered.waiting).into_iter().map(|(_, waiting)| waiting).collect())
    }

    fn position(&self, gathered: &Gathering) -> Option<usize> {
        gathered.waiting.binary_search_by_key(&self.number, |(number, _)| *number).ok()
    }
}

impl Drop for Place<'_> {
    /// So that no command is sent for a future that is gone.
    fn drop(&mut self) {
        let mut gathered = locked(self.gathering);
        if let Some(at) = self.position(&gathered) {
            gathered.waiting.remove(at);
        }
    }
}

/// Waits for company, and for the answer. `None` if there was no company: the command was not sent.
async fn gather(gathering: &Mutex<Gathering>, carrier: &Arc<impl Carrier>, call: &Call) -> Option<Answered> {
    let (sender, receiver) = oneshot::channel();
    let waiting = Waiting { call: call.clone(), since: Instant::now(), answer: sender };
    let place = Place::take(gathering, waiting);
    yield_now().await;
    if let Some(mut leaving) = place.leave() {
        if leaving.len() == 1 {
            refuse_late(&mut leaving, Instant::now());
            if !leaving.is_empty() {
                return None;
            }
        }
        while !leaving.is_empty() {
            let rest = leaving.split_off(leaving.len().min(MAX_EACH));
            tokio::spawn(send(carrier.clone(), replace(&mut leaving, rest)));
        }
    }
    // The sender is gone if the runtime has ended.
    Some(receiver.await.unwrap_or_else(|_| Err(CallError::ConnectionLost(lost(None)))))
}

/// Takes out the commands whose futures were not polled for long. Such an attempt may have been given up meanwhile, and even the
/// tombstone be gone that would refuse it.
fn refuse_late(leaving: &mut Vec<Waiting>, now: Instant) {
    for late in leaving.extract_if(.., |waiting| now.duration_since(waiting.since) > MAX_WAIT_FOR_COMPANY) {
        let what = "the future of this command was not polled for 10 s, so it was not sent: run it in a task of its own";
        let error = CallError::NotConnected(StoreError::new(Failure::NotSent, what));
        let _ = late.answer.send(Err(error));
    }
}

async fn send(carrier: Arc<impl Carrier>, mut waiting: Vec<Waiting>) {
    // This task may have waited, too.
    waiting.retain(|waiting| !waiting.answer.is_closed());
    refuse_late(&mut waiting, Instant::now());
    if waiting.is_empty() {
        return;
    }
    let (calls, senders): (Vec<Call>, Vec<_>) =
        waiting.into_iter().map(|waiting| (waiting.call, waiting.answer)).unzip();
    let answers = carrier.run_several(&calls.iter().collect::<Vec<_>>()).await;
    for (sender, answer) in senders.into_iter().zip(answers) {
        // The receiver is gone if the caller's future was dropped.
        let _ = sender.send(answer);
    }
}

fn locked(gathering: &Mutex<Gathering>) -> MutexGuard<'_, Gathering> {
    gathering.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::{Pin, pin};
    use std::sync::atomic::AtomicBool;
    use std::task::Poll;
    use std::time::Duration;

    use leasehold_core::{Acquisition, ClientId, Kind, Name, Release, Reply, StoreTime};
    use tokio::sync::Notify;
    use tokio::task::JoinHandle;

    use super::*;

    type Receiver = oneshot::Receiver<Answered>;

    fn waiting(sequence: u64) -> (Waiting, Receiver) {
        let resource = Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() };
        let release = Release::now(Acquisition { client: ClientId::new(1), sequence });
        let (answer, receiver) = oneshot::channel();
        let call = (Arc::new(resource), Command::Release(release));
        (Waiting { call, since: Instant::now(), answer }, receiver)
    }

    fn join(gathering: &Mutex<Gathering>, count: u64) -> Vec<Place<'_>> {
        (0..count).map(|number| Place::take(gathering, waiting(number).0)).collect()
    }

    fn numbers(leaving: Option<Vec<Waiting>>) -> Option<Vec<u64>> {
        let number = |waiting: Waiting| match waiting.call.1 {
            Command::Release(release) => release.acquisition.sequence,
            other => panic!("{other:?}"),
        };
        leaving.map(|leaving| leaving.into_iter().map(number).collect())
    }

    fn leave_all(places: Vec<Place<'_>>) -> Vec<Option<Vec<u64>>> {
        places.into_iter().map(|place| numbers(place.leave())).collect()
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
            let answer = |call: &&Call| match &call.1 {
                Command::Release(release) => {
                    let at = StoreTime::from_micros(release.acquisition.sequence);
                    Ok(Answer { at, reply: Reply::Released })
                }
                other => panic!("{other:?}"),
            };
            calls.iter().map(answer).collect()
        }

        fn calls(&self) -> Vec<usize> {
            self.calls.lock().unwrap().clone()
        }
    }

    impl Carrier for Server {
        async fn run_one(&self, call: &Call) -> Answered {
            self.answer(&[call]).await.remove(0)
        }

        async fn run_several(&self, calls: &[&Call]) -> Vec<Answered> {
            self.answer(calls).await
        }
    }

    /// Begins so many commands.
    fn begin(
        gatherings: &Arc<Gatherings>,
        server: &Arc<Server>,
        numbers: std::ops::Range<u64>,
    ) -> Vec<JoinHandle<Answered>> {
        let run = |number| {
            let (gatherings, server, call) = (gatherings.clone(), server.clone(), waiting(number).0.call);
            tokio::spawn(async move { gatherings.run(&server, &call).await })
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
        let (gatherings, server) = (Arc::<Gatherings>::default(), Arc::<Server>::default());
        let tasks = begin(&gatherings, &server, 0..100);
        let_others_run().await;
        // One found no other in flight.
        assert_eq!(server.calls(), [1, MAX_EACH, MAX_EACH, MAX_EACH, 99 - 3 * MAX_EACH]);
        server.open();
        expect_answers(tasks, 0).await;
        // None is in flight now, so each goes alone.
        for number in 0..5 {
            expect_answers(begin(&gatherings, &server, number..number + 1), number).await;
        }
        assert_eq!(server.calls()[5..], [1; 5]);
    }

    #[tokio::test]
    async fn task_that_is_aborted_takes_no_answer_from_others() {
        let (gatherings, server) = (Arc::<Gatherings>::default(), Arc::<Server>::default());
        let mut tasks = begin(&gatherings, &server, 0..20);
        let_others_run().await;
        // This one has taken the others along.
        tasks.remove(1).abort();
        tasks.remove(0).abort();
        let_others_run().await;
        server.open();
        expect_answers(tasks, 2).await;
        // The aborted ones are not in flight any more.
        assert_eq!(gatherings.in_flight.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn command_is_not_sent_late() {
        let (gatherings, server) = (Arc::<Gatherings>::default(), Arc::<Server>::default());
        let in_flight = begin(&gatherings, &server, 0..1);
        let_others_run().await;
        let (early, late) = (waiting(1).0.call, waiting(2).0.call);
        for (call, is_sent) in [(early, true), (late, false)] {
            let mut run = pin!(gatherings.run(&server, &call));
            assert!(poll_once(run.as_mut()).await.is_pending());
            let more = Duration::from_millis(if is_sent { 0 } else { 1 });
            tokio::time::advance(MAX_WAIT_FOR_COMPANY + more).await;
            let calls = server.calls().len();
            match poll_once(run.as_mut()).await {
                Poll::Pending => assert!(is_sent),
                Poll::Ready(answered) => {
                    let error = StoreError::from(answered.err().unwrap());
                    assert_eq!((error.failure, is_sent), (Failure::NotSent, false));
                }
            }
            assert_eq!(server.calls().len() - calls, usize::from(is_sent));
        }
        server.open();
        expect_answers(in_flight, 0).await;
    }

    #[tokio::test(start_paused = true)]
    async fn late_commands_leave_the_others_their_answers() {
        let (gatherings, server) = (Arc::<Gatherings>::default(), Arc::<Server>::default());
        let in_flight = begin(&gatherings, &server, 0..1);
        let_others_run().await;
        let calls = [1, 2, 3, 4].map(|number| waiting(number).0.call);
        let [mut first, mut second, mut third, mut fourth] =
            calls.each_ref().map(|call| Box::pin(gatherings.run(&server, call)));
        for run in [&mut first, &mut second, &mut third] {
            assert!(poll_once(run.as_mut()).await.is_pending());
        }
        tokio::time::advance(MAX_WAIT_FOR_COMPANY + Duration::from_millis(1)).await;
        assert!(poll_once(fourth.as_mut()).await.is_pending());
        // It takes the others along.
        assert!(poll_once(first.as_mut()).await.is_pending());
        for late in [first, second, third] {
            let error = StoreError::from(late.await.err().unwrap());
            assert_eq!(error.failure, Failure::NotSent);
        }
        server.open();
        assert_eq!(fourth.await.ok().map(|answer| answer.at.as_micros()), Some(4));
        expect_answers(in_flight, 0).await;
        assert_eq!(server.calls(), [1, 1]);
    }

    /// A task that was aborted before its command was sent.
    #[tokio::test]
    async fn command_of_an_aborted_task_is_not_sent() {
        let (gatherings, server) = (Arc::<Gatherings>::default(), Arc::<Server>::default());
        let in_flight = begin(&gatherings, &server, 0..1);
        let_others_run().await;
        let calls = [1, 2, 3, 4].map(|number| waiting(number).0.call);
        let mut runs = calls.each_ref().map(|call| Box::pin(gatherings.run(&server, call)));
        for run in &mut runs {
            assert!(poll_once(run.as_mut()).await.is_pending());
        }
        let [mut first, dropped, _, _] = runs;
        assert!(poll_once(first.as_mut()).await.is_pending());
        drop(dropped);
        let_others_run().await;
        assert_eq!(server.calls(), [1, 3]);
        server.open();
        assert_eq!(first.await.ok().map(|answer| answer.at.as_micros()), Some(1));
        expect_answers(in_flight, 0).await;
    }

    #[test]
    fn runtime_that_ends_leaves_the_outcome_unknown() {
        let (gatherings, server) = (Arc::<Gatherings>::default(), Arc::<Server>::default());
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (ending, other) = (runtime(), runtime());
        let call = waiting(9).0.call;
        // It waits for company, and one of the other runtime takes it along.
        let mut run = Box::pin(gatherings.run(&server, &call));
        let in_flight = ending.block_on(async {
            let mut in_flight = begin(&gatherings, &server, 0..1);
            let_others_run().await;
            assert!(poll_once(run.as_mut()).await.is_pending());
            in_flight.extend(begin(&gatherings, &server, 1..5));
            let_others_run().await;
            in_flight
        });
        assert_eq!(server.calls(), [1, 5]);
        drop(in_flight);
        drop(ending);
        let answered = other.block_on(run);
        assert!(matches!(answered, Err(CallError::ConnectionLost(_))));
    }

    #[test]
    fn first_command_that_leaves_takes_the_others_along() {
        let gathering = Mutex::default();
        for _ in 0..2 {
            let left = leave_all(join(&gathering, 4));
            assert_eq!(left, [Some(vec![0, 1, 2, 3]), None, None, None]);
        }
    }

    #[test]
    fn few_commands_leave_one_by_one() {
        let gathering = Mutex::default();
        assert_eq!(leave_all(join(&gathering, 3)), [Some(vec![0]), Some(vec![1]), Some(vec![2])]);
        assert!(locked(&gathering).waiting.is_empty());
    }

    #[test]
    fn command_of_a_dropped_future_is_left_out() {
        let gathering = Mutex::default();
        let mut places = join(&gathering, 6);
        drop(places.remove(1));
        assert_eq!(leave_all(places)[0], Some(vec![0, 2, 3, 4, 5]));
        // It does not count as company either.
        let mut places = join(&gathering, 4);
        drop(places.pop());
        assert_eq!(leave_all(places), [Some(vec![0]), Some(vec![1]), Some(vec![2])]);
        drop(join(&gathering, 9));
        assert!(locked(&gathering).waiting.is_empty());
    }

    #[test]
    fn future_that_is_not_polled_keeps_no_places_of_others() {
        let gathering = Mutex::default();
        let _unpolled = Place::take(&gathering, waiting(0).0);
        for number in 1..1_000 {
            let place = Place::take(&gathering, waiting(number).0);
            assert_eq!(numbers(place.leave()), Some(vec![number]));
        }
        assert_eq!(locked(&gathering).waiting.len(), 1);
    }

    #[test]
    fn place_that_was_left_is_no_other_commands() {
        let gathering = Mutex::default();
        let mut early = join(&gathering, 4);
        let late = early.pop();
        assert_eq!(numbers(early.remove(0).leave()), Some(vec![0, 1, 2, 3]));
        let next = join(&gathering, 5);
        drop(early);
        assert_eq!(numbers(late.unwrap().leave()), None);
        assert_eq!(leave_all(next)[0], Some(vec![0, 1, 2, 3, 4]));
    }

    #[test]
    fn command_whose_future_was_not_polled_for_long_is_not_sent() {
        let ((first, mut of_first), (second, mut of_second)) = (waiting(1), waiting(2));
        let since = first.since;
        let second = Waiting { since: since + Duration::from_millis(1), ..second };
        let mut leaving = vec![first, second];
        refuse_late(&mut leaving, since + MAX_WAIT_FOR_COMPANY);
        assert_eq!(leaving.len(), 2);
        refuse_late(&mut leaving, since + MAX_WAIT_FOR_COMPANY + Duration::from_millis(1));
        assert_eq!(numbers(Some(leaving)), Some(vec![2]));
        let Ok(Err(error)) = of_first.try_recv() else { panic!("it has an answer") };
        assert_eq!(StoreError::from(error).failure, Failure::NotSent);
        assert!(of_second.try_recv().is_err());
    }
}
