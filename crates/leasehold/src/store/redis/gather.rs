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

use super::connections::Connections;
use super::error::{CallError, lost};
use super::exec::{self, CallOptions, MIN_EACH};
use super::limits::MAX_WAIT_FOR_COMPANY;
use super::single_call::options_of;
use crate::store::StoreError;

type Call = (Arc<Resource>, Command);
type Answered = Result<Answer, CallError>;

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
    answer: oneshot::Sender<Answered>,
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

    /// Takes out what is sent now: all that wait if they are enough, otherwise this command. `None` if it was taken out before.
    fn leave(self) -> Option<Vec<Waiting>> {
        let mut gathered = locked(self.gathering);
        if gathered.round != self.round {
            return None;
        }
        if gathered.waiting.iter().flatten().count() < MIN_EACH {
            return Some(gathered.waiting[self.at].take().into_iter().collect());
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

/// Waits for company, and for the answer. `None` if there was no company: the command was not sent.
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
        let is_alone = leaving.len() == 1;
        refuse_late(&mut leaving, Instant::now());
        if is_alone && !leaving.is_empty() {
            return None;
        }
        while !leaving.is_empty() {
            let rest = leaving.split_off(leaving.len().min(MAX_EACH));
            tokio::spawn(send(connections.clone(), replace(&mut leaving, rest)));
        }
    }
    // The sender is gone if the runtime has ended.
    Some(receiver.await.unwrap_or_else(|_| Err(CallError::ConnectionLost(lost(None)))))
}

/// Takes out the commands whose futures were not polled for long. Such an attempt may have been given up meanwhile, and even the
/// tombstone be gone that would refuse it.
fn refuse_late(leaving: &mut Vec<Waiting>, now: Instant) {
    for late in leaving.extract_if(.., |waiting| now.duration_since(waiting.since) > MAX_WAIT_FOR_COMPANY) {
        let what = "the future of this command was not polled for too long, so the command was not sent";
        let error = CallError::NotConnected(StoreError::new(Failure::NotSent, what));
        let _ = late.answer.send(Err(error));
    }
}

async fn send(connections: Arc<Connections>, waiting: Vec<Waiting>) {
    let (calls, senders): (Vec<Call>, Vec<_>) =
        waiting.into_iter().map(|waiting| (waiting.call, waiting.answer)).unzip();
    let calls: Vec<exec::Call<'_>> = calls.iter().collect();
    let answers = exec::run(connections.preferred_conn(), options_of(&connections), &calls).await;
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
    use std::time::Duration;

    use leasehold_core::{Acquisition, ClientId, Kind, Name, Release};

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
    fn place_that_was_left_is_not_another_rounds() {
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
