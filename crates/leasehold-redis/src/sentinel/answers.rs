//! What the sentinels answer, and which of them are waited for.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use leasehold_store::StoreError;
use tokio::time::{Instant, timeout_at};

use super::not_sent;
use crate::url::Host;

/// How long those that do not answer are waited for once others have: as long as a connection and a question take if a round trip takes
/// 300 ms.
const GRACE: Duration = Duration::from_millis(900);

/// An attempt to connect that is given up sooner says nothing about those that have not answered by then.
const MIN_SILENCE: Duration = Duration::from_millis(250);

/// How long a silence is remembered.
const MEMORY: Duration = Duration::from_secs(10);

/// The sentinels that did not answer while others did, and since when, by their place in the list. Each attempt to connect has little
/// time, and must not spend it on the same host that is down.
#[derive(Default)]
pub(super) struct Silences(Mutex<HashMap<usize, Instant>>);

impl Silences {
    fn is_silent(&self, sentinel: usize) -> bool {
        self.locked().get(&sentinel).is_some_and(|since| since.elapsed() < MEMORY)
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<usize, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which sentinels are waited for.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Awaited {
    All,
    /// All that were not silent lately.
    NotSilent,
}

/// The sentinels that were asked, and have not answered. When it is dropped, they are remembered, if another one has answered: otherwise
/// it is the network, or this machine.
struct Asked<'a> {
    silences: &'a Silences,
    since: Instant,
    waiting: HashSet<usize>,
    has_answer: bool,
}

impl Asked<'_> {
    fn answered(&mut self, sentinel: usize) {
        self.has_answer = true;
        self.waiting.remove(&sentinel);
        self.silences.locked().remove(&sentinel);
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if self.has_answer && self.since.elapsed() >= MIN_SILENCE {
            let now = Instant::now();
            let mut silences = self.silences.locked();
            silences.extend(self.waiting.drain().map(|sentinel| (sentinel, now)));
        }
    }
}

/// The answers of all sentinels, or fewer once most of those that were asked name one host. A few that are near may be cut off from the
/// others, and name the master of before: the others are slow then, and are waited for until they have answered or failed, or for
/// [`GRACE`].
pub(super) async fn gather(
    answers: impl Iterator<Item = impl Future<Output = Result<Host, StoreError>>>,
    silences: &Silences,
    awaited: Awaited,
) -> Result<Vec<Host>, StoreError> {
    let numbered = answers.enumerate().map(async |(sentinel, answer)| (sentinel, answer.await));
    let mut answers: FuturesUnordered<_> = numbered.collect();
    let majority = answers.len() / 2 + 1;
    let since = Instant::now();
    let mut asked = Asked { silences, since, waiting: (0..answers.len()).collect(), has_answer: false };
    let (mut named, mut last_error) = (Vec::new(), not_sent("no sentinel has answered".to_owned()));
    loop {
        let is_awaited = |sentinel: &usize| awaited == Awaited::All || !silences.is_silent(*sentinel);
        let until = if named.is_empty() {
            None
        } else if asked.waiting.iter().any(is_awaited) {
            Some(since + GRACE)
        } else {
            Some(since)
        };
        let next = answers.next();
        let answer = match until {
            None => next.await,
            Some(until) => timeout_at(until, next).await.unwrap_or(None),
        };
        let Some((sentinel, answer)) = answer else { break };
        asked.answered(sentinel);
        match answer {
            Ok(host) => {
                named.push(host.clone());
                if named.iter().filter(|other| **other == host).count() >= majority {
                    break;
                }
            }
            Err(error) => last_error = error,
        }
    }
    if named.is_empty() { Err(last_error) } else { Ok(named) }
}

/// The host that is named more often than any other.
pub(super) fn most_named(named: &[Host]) -> Option<&Host> {
    let votes = |host: &Host| named.iter().filter(|other| *other == host).count();
    let first = named.iter().max_by_key(|host| votes(host))?;
    let is_alone = named.iter().all(|host| host == first || votes(host) < votes(first));
    is_alone.then_some(first)
}

pub(super) fn disagreement(named: &[Host]) -> String {
    let mut named: Vec<String> = named.iter().map(|host| format!("{}:{}", host.name, host.port)).collect();
    named.sort();
    named.dedup();
    format!("the sentinels do not agree which server is the master: they name {}", named.join(" and "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each sentinel answers after so many milliseconds, with the port of a master, or fails.
    async fn gathered(answers: &[(u64, Option<u16>)], silences: &Silences) -> (u64, Vec<u16>) {
        let began = Instant::now();
        let ask = |&(after, port): &(u64, Option<u16>)| async move {
            tokio::time::sleep(Duration::from_millis(after)).await;
            let port = port.ok_or_else(|| not_sent("it fails".to_owned()))?;
            Ok(Host { name: "h".to_owned(), port })
        };
        let named = gather(answers.iter().map(ask), silences, Awaited::NotSilent).await.unwrap_or_default();
        let after = u64::try_from(began.elapsed().as_millis()).unwrap();
        (after, named.iter().map(|host| host.port).collect())
    }

    #[tokio::test(start_paused = true)]
    async fn slow_majority_counts_more_than_a_near_sentinel() {
        for (answers, expected) in [
            (&[(1, Some(1)), (720, Some(2)), (750, Some(2))][..], (750, vec![1, 2, 2])),
            // Half of them is not enough.
            (&[(1, Some(1)), (2, Some(2)), (3, Some(2)), (700, None)][..], (700, vec![1, 2, 2])),
            (&[(1, Some(2)), (2, Some(2)), (9_000, None)][..], (2, vec![2, 2])),
            // The others are gone.
            (&[(1, Some(1)), (700, None), (750, None)][..], (750, vec![1])),
            (&[(1, Some(1)), (9_000, None), (9_000, None)][..], (900, vec![1])),
            // None has answered before.
            (&[(5_000, Some(1)), (5_100, None)][..], (5_000, vec![1])),
            (&[(1, None)][..], (1, vec![])),
            (&[(1, Some(3))][..], (1, vec![3])),
        ] {
            assert_eq!(gathered(answers, &Silences::default()).await, expected, "{answers:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_sentinel_is_waited_for_once_until_it_answers() {
        let silences = Silences::default();
        let hung = [(1, Some(1)), (99_000, None), (99_000, None)];
        assert_eq!(gathered(&hung, &silences).await.0, 900);
        assert_eq!(gathered(&hung, &silences).await.0, 1);
        tokio::time::sleep(MEMORY).await;
        // An attempt that is given up tells, too, unless that is at once.
        let given_up = async |after| {
            let limit = Duration::from_millis(after);
            tokio::time::timeout(limit, gathered(&hung, &silences)).await.unwrap_err();
        };
        given_up(200).await;
        assert_eq!(gathered(&hung, &silences).await.0, 900);
        tokio::time::sleep(MEMORY).await;
        given_up(400).await;
        assert_eq!(gathered(&hung, &silences).await.0, 1);
        // One of them answers again, while it is asked beside the other.
        let again = async |sentinel: u64, port| {
            tokio::time::sleep(Duration::from_millis(sentinel)).await;
            Ok(Host { name: "h".to_owned(), port })
        };
        let all = gather(
            [(1, 1), (500, 2), (600, 2)].map(|(at, port)| again(at, port)).into_iter(),
            &silences,
            Awaited::All,
        );
        assert_eq!(all.await.unwrap().len(), 3);
        assert_eq!(gathered(&hung, &silences).await.0, 900);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_of_all_is_no_sentinels() {
        let silences = Silences::default();
        let stalled = [(5_000, Some(1)), (5_000, Some(1))];
        tokio::time::timeout(Duration::from_secs(1), gathered(&stalled, &silences)).await.unwrap_err();
        assert_eq!(gathered(&[(1, Some(1)), (800, Some(2))], &silences).await.0, 800);
    }

    #[test]
    fn master_is_the_host_that_most_sentinels_name() {
        let hosts = |ports: &[u16]| -> Vec<Host> {
            ports.iter().map(|port| Host { name: "h".to_owned(), port: *port }).collect()
        };
        let found = |ports: &[u16]| most_named(&hosts(ports)).map(|host| host.port);
        assert_eq!(found(&[1]), Some(1));
        assert_eq!(found(&[1, 2, 2]), Some(2));
        assert_eq!(found(&[2, 1, 2, 1, 1]), Some(1));
        assert_eq!(found(&[1, 2]), None, "a tie names no master");
        assert_eq!(found(&[1, 1, 2, 2, 3]), None);
        assert_eq!(found(&[]), None);
        assert_eq!(
            disagreement(&hosts(&[2, 1, 2])),
            "the sentinels do not agree which server is the master: they name h:1 and h:2"
        );
    }
}
