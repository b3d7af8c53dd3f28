//! The keys of other libraries' locks on several servers that vote.
//!
//! A command goes to all servers at once. Its answer is what a majority of them answers. A server that does not answer in time does not
//! count: the command may still run there, as on a single server whose answer is lost.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Failure, quorum_of};
use leasehold_store::credentials::CredentialCache;
use leasehold_store::tasks::Tasks;
use leasehold_store::{
    BoxFuture, ForeignAnswer, ForeignAnswers, ForeignCall, ForeignError, ForeignKeys, ForeignOutcome,
    KeyWatch, MAX_DELAY, OpenError, StoreError, Watchers,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, timeout_at};

use super::foreign::{Sent, ServerKeys};
use crate::url::RedisUrl;

/// How long the other servers may take once a majority has agreed. They are waited for even so: a release that has not been sent when
/// the client ends would leave the key on its server.
const GRACE: Duration = Duration::from_millis(50);

/// The same once a majority has answered, but has not agreed: the answers of the others decide.
const UNDECIDED_GRACE: Duration = Duration::from_millis(500);

/// Commands to one server at the same time. More wait for their turn, as long as a command may be late.
const MAX_WAITING: usize = 32;

pub(super) struct Voters {
    servers: Vec<Arc<Server>>,
    watchers: Arc<Watchers>,
    tasks: Tasks,
}

struct Server {
    keys: ServerKeys,
    name: String,
    permits: Arc<tokio::sync::Semaphore>,
}

/// What a server has answered.
type Vote = Result<Sent, StoreError>;

impl Voters {
    pub(super) fn new(
        urls: &[String],
        tasks: Tasks,
        credentials: Option<&CredentialCache>,
    ) -> Result<Self, StoreError> {
        let watchers = Arc::<Watchers>::default();
        let refused = |error: OpenError| StoreError::new(Failure::NotSent, error.to_string());
        let open = |url: &String| {
            let url = RedisUrl::of_node(url).map_err(refused)?;
            let url = credentials.map_or(url.clone(), |cache| url.with_credentials(cache));
            let keys = ServerKeys::at(&url, tasks.clone(), watchers.clone()).map_err(refused)?;
            let permits = Arc::new(tokio::sync::Semaphore::new(MAX_WAITING));
            Ok(Arc::new(Server { keys, name: url.to_string(), permits }))
        };
        let servers = urls.iter().map(open).collect::<Result<_, StoreError>>()?;
        Ok(Self { servers, watchers, tasks })
    }
}

impl ForeignKeys for Voters {
    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn run(&self, calls: Vec<ForeignCall>) -> BoxFuture<Result<ForeignOutcome, StoreError>> {
        let (calls, (votes, ballots)) = (Arc::new(calls), unbounded_channel());
        let until = Instant::now() + MAX_DELAY;
        for server in &self.servers {
            let (server, calls, votes) = (server.clone(), calls.clone(), votes.clone());
            self.tasks.spawn(async move {
                let vote = server.ask(&calls, until).await;
                // The others may have decided.
                let _ = votes.send(vote);
            });
        }
        let servers = self.servers.len();
        let counting = async move { count(ballots, servers, &calls).await };
        self.tasks.answer(counting, || Err(StoreError::runtime_ended()))
    }

    fn is_tracking(&self) -> bool {
        self.servers.iter().all(|server| server.keys.is_tracking())
    }

    fn watch(&self, keys: &[String]) -> KeyWatch {
        KeyWatch::new(&self.watchers, keys)
    }
}

impl Server {
    async fn ask(&self, calls: &[ForeignCall], until: Instant) -> Vote {
        let named = |error: StoreError| error.of(&self.name);
        let Ok(Ok(_permit)) = timeout_at(until, self.permits.acquire()).await else {
            return Err(named(StoreError::new(Failure::NotSent, "it does not answer")));
        };
        self.keys.shared.send(calls, until).await.map_err(named)
    }
}

fn twice() -> StoreError {
    StoreError::new(Failure::Unknown, "two addresses of the bridge lead to the same server, which votes once")
}

/// Counts votes until all servers have answered, or no more can be waited for.
async fn count(
    mut ballots: UnboundedReceiver<Vote>,
    servers: usize,
    calls: &[ForeignCall],
) -> Result<ForeignOutcome, StoreError> {
    let quorum = quorum_of(servers);
    let (mut votes, mut failures): (Vec<ForeignAnswers>, Vec<StoreError>) = Default::default();
    let mut counted = HashSet::new();
    let mut answered_at: Option<Instant> = None;
    loop {
        let next = match answered_at {
            None => ballots.recv().await,
            Some(answered_at) => {
                let awaited = servers - votes.len() - failures.len();
                let grace = if is_decided(&votes, calls, servers, awaited) { GRACE } else { UNDECIDED_GRACE };
                timeout_at(answered_at + grace, ballots.recv()).await.unwrap_or(None)
            }
        };
        match next {
            None => break,
            // Two addresses may lead to one server, which votes once.
            Some(Ok(Sent { run_id: Some(run_id), .. })) if !counted.insert(run_id.clone()) => {
                failures.push(twice());
            }
            Some(Ok(Sent { answers, .. })) => votes.push(answers),
            Some(Err(error)) => failures.push(error),
        }
        if votes.len() >= quorum {
            answered_at.get_or_insert_with(Instant::now);
        }
        if failures.len() > servers - quorum {
            break;
        }
    }
    if votes.len() < quorum {
        let why = failures.first().map_or("", |error| &error.message);
        let what = format!(
            "{} of the {servers} servers of the lock do not answer, and {quorum} are needed: {why}",
            failures.len()
        );
        return Err(StoreError::new(Failure::Unknown, what));
    }
    let undecided = || Err(ForeignError::Undecided);
    let is_complete = votes.len() == servers && votes.iter().flatten().all(Result::is_ok);
    let all = 0..calls.len();
    let answers = all.map(|call| majority(&votes, call, servers, 0).unwrap_or_else(undecided)).collect();
    Ok(ForeignOutcome { answers, is_complete })
}

/// Whether the votes decide what the scripts have done. Other commands only read, and their answers may differ.
fn is_decided(votes: &[ForeignAnswers], calls: &[ForeignCall], servers: usize, awaited: usize) -> bool {
    let mut scripts = calls.iter().enumerate().filter(|(_, call)| matches!(call, ForeignCall::Script { .. }));
    scripts.all(|(call, _)| majority(votes, call, servers, awaited).is_some())
}

/// The answer to one call that a majority of the servers has given. So many answers are still awaited.
fn majority(
    votes: &[ForeignAnswers],
    call: usize,
    servers: usize,
    awaited: usize,
) -> Option<Result<ForeignAnswer, ForeignError>> {
    let quorum = quorum_of(servers);
    let given: Vec<_> = votes.iter().filter_map(|vote| vote.get(call)).collect();
    let values = || given.iter().filter_map(|answer| answer.as_ref().ok());
    if let Some(value) = values().find(|value| values().filter(|other| other == value).count() >= quorum) {
        return Some(Ok(value.clone()));
    }
    let mut errors = given.iter().filter_map(|answer| answer.as_ref().err());
    if errors.clone().count() >= quorum {
        return errors.next().map(|error| Err(error.clone()));
    }
    let agreeing = values().map(|value| values().filter(|other| *other == value).count()).max().unwrap_or(0);
    // Without the error there could be a majority, and further answers can't make one: it is the reason.
    if let Some(error) = errors.clone().next()
        && agreeing + errors.clone().count() >= quorum
        && agreeing + awaited < quorum
    {
        return Some(Err(error.clone()));
    }
    // What a majority has at least, of numbers: how many enough servers agree to, or the time after which enough of them are free.
    let mut numbers: Vec<i64> = values()
        .filter_map(|value| if let ForeignAnswer::Int(number) = value { Some(*number) } else { None })
        .collect();
    if numbers.len() == servers {
        numbers.sort_unstable();
        return Some(Ok(ForeignAnswer::Int(numbers[servers - quorum])));
    }
    // All have answered, and no value has a majority.
    (values().count() == servers).then_some(Ok(ForeignAnswer::Nil))
}

#[cfg(test)]
mod tests {
    use leasehold_store::ForeignScript;

    use super::*;

    fn refusal() -> Result<ForeignAnswer, ForeignError> {
        Err(ForeignError::Failed(StoreError::new(Failure::Unknown, "refused")))
    }

    fn votes(answers: &[Option<i64>]) -> Vec<ForeignAnswers> {
        answers.iter().flatten().map(|answer| vec![Ok(ForeignAnswer::Int(*answer))]).collect()
    }

    fn decided(answers: &[Option<i64>]) -> Option<i64> {
        match majority(&votes(answers), 0, answers.len(), 0)? {
            Ok(ForeignAnswer::Int(number)) => Some(number),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn more_than_half_of_the_servers_decide() {
        let (yes, no, missing) = (Some(1), Some(0), None);
        assert_eq!(decided(&[yes]), yes);
        assert_eq!(decided(&[yes, yes, missing]), yes);
        assert_eq!(decided(&[no, missing, no]), no);
        assert_eq!(decided(&[yes, no, missing]), None);
        assert_eq!(decided(&[yes, missing, missing]), None);
        // Half of four is no majority.
        assert_eq!(decided(&[yes, yes, no, no]), no);
        assert_eq!(decided(&[yes, yes, yes, no]), yes);
        assert_eq!(decided(&[yes, yes, missing, missing]), None);
        // The time after which two of three are free.
        assert_eq!(decided(&[Some(-2), Some(40), Some(5_000)]), Some(40));
    }

    #[test]
    fn error_that_prevents_a_majority_is_the_answer() {
        let (yes, no) = (|| vec![Ok(ForeignAnswer::Int(1))], || vec![Ok(ForeignAnswer::Int(0))]);
        let refused = || vec![refusal()];
        assert!(matches!(majority(&[yes(), refused(), no()], 0, 3, 0), Some(Err(_))));
        assert!(matches!(majority(&[no(), refused(), no()], 0, 3, 0), Some(Ok(ForeignAnswer::Int(0)))));
        assert!(matches!(majority(&[yes(), refused(), yes()], 0, 3, 0), Some(Ok(ForeignAnswer::Int(1)))));
        // The third one decides, unless it is silent.
        assert!(majority(&[yes(), refused()], 0, 3, 1).is_none());
        assert!(matches!(majority(&[yes(), refused()], 0, 3, 0), Some(Err(_))));
        assert!(matches!(majority(&[refused(), refused()], 0, 3, 0), Some(Err(_))));
    }

    #[test]
    fn value_without_a_majority_is_nobodys() {
        let value = |text: &str| vec![Ok(ForeignAnswer::Bytes(text.into()))];
        let votes = vec![value("a"), value("b"), vec![Ok(ForeignAnswer::Nil)]];
        assert!(matches!(majority(&votes, 0, 3, 0), Some(Ok(ForeignAnswer::Nil))));
        assert!(majority(&votes[..2], 0, 3, 0).is_none());
    }

    fn script() -> [ForeignCall; 1] {
        static SCRIPT: ForeignScript = ForeignScript::new("return 1");
        [ForeignCall::Script { script: &SCRIPT, keys: Vec::new(), arguments: Vec::new() }]
    }

    fn sent(answer: Result<ForeignAnswer, ForeignError>, run_id: Option<&str>) -> Sent {
        Sent { answers: vec![answer], run_id: run_id.map(str::to_owned) }
    }

    /// The other program has the key on two of three servers, of which only one is asked.
    #[tokio::test]
    async fn server_votes_once() {
        let yes = |run_id| Ok(sent(Ok(ForeignAnswer::Int(1)), run_id));
        for (third, is_yes) in [(Some("a"), false), (Some("c"), true), (None, true)] {
            let (sender, ballots) = unbounded_channel();
            sender.send(yes(Some("a"))).unwrap();
            sender.send(Ok(sent(Ok(ForeignAnswer::Int(0)), Some("b")))).unwrap();
            sender.send(yes(third)).unwrap();
            let outcome = count(ballots, 3, &script()).await.unwrap();
            assert_eq!(matches!(outcome.answers[..], [Ok(ForeignAnswer::Int(1))]), is_yes, "{third:?}");
        }
    }

    #[tokio::test]
    async fn servers_that_disagree_are_decided_by_a_later_answer() {
        let vote = |answer: i64| Ok(sent(Ok(ForeignAnswer::Int(answer)), None));
        for late in [Some(1), Some(0), None] {
            let (sender, ballots) = unbounded_channel();
            sender.send(vote(1)).unwrap();
            sender.send(vote(0)).unwrap();
            let [calls, reads] = [script(), [ForeignCall::Track]];
            let began = Instant::now();
            let mut counting = std::pin::pin!(count(ballots, 3, &calls));
            if tokio::time::timeout(2 * GRACE, &mut counting).await.is_ok() {
                assert!(began.elapsed() >= UNDECIDED_GRACE, "the third one is waited for");
                continue;
            }
            if let Some(answer) = late {
                sender.send(vote(answer)).unwrap();
            }
            // More votes may come, but are not waited for.
            let answer = counting.await.unwrap().answers.remove(0);
            drop(sender);
            match late {
                Some(late) => assert_eq!(answer.unwrap(), ForeignAnswer::Int(late)),
                None => assert!(matches!(answer, Err(ForeignError::Undecided))),
            }
            assert!(
                is_decided(&[vec![Ok(ForeignAnswer::Int(1))]], &reads, 3, 2),
                "only scripts are waited for"
            );
        }
    }

    #[tokio::test]
    async fn commands_are_complete_once_every_server_has_run_them() {
        let yes = || Ok(sent(Ok(ForeignAnswer::Int(1)), None));
        let refused = || Ok(sent(refusal(), None));
        let silent = || Err(StoreError::new(Failure::Unknown, "it does not answer"));
        for (last, is_complete) in [(yes(), true), (refused(), false), (silent(), false)] {
            let (sender, ballots) = unbounded_channel();
            for vote in [yes(), yes(), last] {
                sender.send(vote).unwrap();
            }
            let outcome = count(ballots, 3, &script()).await.unwrap();
            assert_eq!(outcome.is_complete, is_complete);
            assert!(matches!(outcome.answers[..], [Ok(ForeignAnswer::Int(1))]));
        }
        // A server whose answer is late is not waited for.
        let (sender, ballots) = unbounded_channel();
        sender.send(yes()).unwrap();
        sender.send(yes()).unwrap();
        assert!(!count(ballots, 3, &script()).await.unwrap().is_complete);
    }

    #[tokio::test]
    async fn majority_that_does_not_answer_is_an_error_that_names_the_first() {
        let (sender, ballots) = unbounded_channel();
        sender.send(Ok(sent(Ok(ForeignAnswer::Int(1)), None))).unwrap();
        for name in ["b", "c"] {
            sender.send(Err(StoreError::new(Failure::NotSent, format!("{name}: refused")))).unwrap();
        }
        let error = count(ballots, 3, &script()).await.map(|outcome| outcome.answers).unwrap_err();
        assert_eq!(
            error.message,
            "2 of the 3 servers of the lock do not answer, and 2 are needed: b: refused"
        );
        assert_eq!(error.failure, Failure::Unknown);
    }
}
