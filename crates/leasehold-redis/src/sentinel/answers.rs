//! What the sentinels answer, and which of them are waited for.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use leasehold_core::Failure;
use leasehold_store::StoreError;
use tokio::time::{Instant, timeout_at};

use crate::limits::SENTINEL_POLL_INTERVAL;
use crate::url::Host;

/// How long those that do not answer are waited for if the others name the master that is used already: to stay there risks nothing new.
const GRACE: Duration = Duration::from_millis(100);

/// As [`GRACE`], if they name another one, or this client is new. A few that are near may be cut off from the others, and name the master of
/// before: the others are slow then, or their first packet was lost, which is repeated after a second. Both count from the first answer: what
/// lets that one come late may have let all others come late.
const LONG_GRACE: Duration = Duration::from_secs(3);

/// How long a silence is remembered: a connected client asks again before that, and so knows at any time which sentinels hang.
const MEMORY: Duration =
    SENTINEL_POLL_INTERVAL.saturating_add(LONG_GRACE).saturating_add(Duration::from_secs(2));

/// What is known from earlier questions.
#[derive(Default)]
pub(super) struct Known(Mutex<Facts>);

#[derive(Default)]
struct Facts {
    /// The master of the last connection that was confirmed, until something speaks against it.
    master: Option<Host>,
    /// The sentinels that did not answer for [`LONG_GRACE`], while others did, and since when, by their place in the list. An attempt to
    /// connect asks twice, and has little time.
    silent: HashMap<usize, Instant>,
}

impl Known {
    pub(super) fn uses(&self, master: &Host) {
        self.locked().master = Some(master.clone());
    }

    /// The master in use may have been replaced: one that a few sentinels name is none that is used already, and waits for a majority. What
    /// kept the others silent may be over, so they are waited for again.
    pub(super) fn forget_master(&self) {
        *self.locked() = Facts::default();
    }

    fn is_silent(&self, sentinel: usize) -> bool {
        self.locked().silent.get(&sentinel).is_some_and(|since| since.elapsed() < MEMORY)
    }

    /// How long others are waited for, once these were named.
    fn grace(&self, named: &[Host]) -> Duration {
        let facts = self.locked();
        if named.iter().all(|host| Some(host) == facts.master.as_ref()) { GRACE } else { LONG_GRACE }
    }

    fn locked(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long sentinels are waited for.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Awaited {
    /// For [`LONG_GRACE`], whatever the others name.
    All,
    /// Less if the others name the master in use, or if they were silent before.
    Enough,
}

/// The answers of all sentinels, or fewer: once most of those that were asked name one host, or once the others have failed, or were
/// waited for long enough. The first answer is waited for until `limit`.
pub(super) async fn gather(
    answers: impl Iterator<Item = impl Future<Output = Result<Host, StoreError>>>,
    known: &Known,
    awaited: Awaited,
    limit: Duration,
) -> Result<Vec<Host>, StoreError> {
    let numbered = answers.enumerate().map(async |(sentinel, answer)| (sentinel, answer.await));
    let mut answers: FuturesUnordered<_> = numbered.collect();
    let all = answers.len();
    let mut waiting: HashSet<usize> = (0..all).collect();
    let give_up = Instant::now() + limit;
    let mut first_named = None;
    let (mut named, mut last_error) = (Vec::new(), not_sent("no sentinel has answered".to_owned()));
    loop {
        let is_done = || waiting.iter().all(|sentinel| known.is_silent(*sentinel));
        let until = first_named.map_or(give_up, |first_named| match awaited {
            Awaited::All => first_named + LONG_GRACE,
            Awaited::Enough if is_done() => first_named,
            Awaited::Enough => first_named + known.grace(&named),
        });
        let Ok(Some((sentinel, answer))) = timeout_at(until, answers.next()).await else { break };
        waiting.remove(&sentinel);
        known.locked().silent.remove(&sentinel);
        match answer {
            Ok(host) => {
                first_named.get_or_insert_with(Instant::now);
                named.push(host);
                if majority(&named, all).is_some() {
                    break;
                }
            }
            Err(error) => last_error = error,
        }
    }
    if first_named.is_some_and(|first_named: Instant| first_named.elapsed() >= LONG_GRACE) {
        let now = Instant::now();
        known.locked().silent.extend(waiting.into_iter().map(|sentinel| (sentinel, now)));
    }
    if named.is_empty() { Err(last_error) } else { Ok(named) }
}

/// The host that most of all sentinels name, of which there are so many.
pub(super) fn majority(named: &[Host], all: usize) -> Option<&Host> {
    named.iter().find(|host| named.iter().filter(|other| other == host).count() > all / 2)
}

/// The host that is named more often than any other.
pub(super) fn most_named(named: &[Host]) -> Option<&Host> {
    let votes = |host: &Host| named.iter().filter(|other| *other == host).count();
    let first = named.iter().max_by_key(|host| votes(host))?;
    let has_most = named.iter().all(|host| host == first || votes(host) < votes(first));
    has_most.then_some(first)
}

pub(super) fn disagreement(named: &[Host]) -> String {
    let mut named: Vec<String> = named.iter().map(|host| format!("{}:{}", host.name, host.port)).collect();
    named.sort();
    named.dedup();
    format!("the sentinels do not agree which server is the master: they name {}", named.join(" and "))
}

pub(super) fn not_sent(message: String) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    fn host(port: u16) -> Host {
        Host { name: "h".to_owned(), port }
    }

    /// Each sentinel answers after so many milliseconds, with the port of a master, or fails.
    async fn gathered(answers: &[(u64, Option<u16>)], known: &Known) -> (u64, Vec<u16>) {
        let began = Instant::now();
        let ask = |&(after, port): &(u64, Option<u16>)| async move {
            tokio::time::sleep(Duration::from_millis(after)).await;
            port.map(host).ok_or_else(|| not_sent("it fails".to_owned()))
        };
        let gathered = gather(answers.iter().map(ask), known, Awaited::Enough, LIMIT).await;
        let named = gathered.unwrap_or_default();
        let after = u64::try_from(began.elapsed().as_millis()).unwrap();
        (after, named.iter().map(|host| host.port).collect())
    }

    #[tokio::test(start_paused = true)]
    async fn slow_majority_counts_more_than_a_near_sentinel() {
        for (answers, expected) in [
            (&[(1, Some(1)), (2_800, Some(2)), (2_900, Some(2))][..], (2_900, vec![1, 2, 2])),
            // Half of them is not enough.
            (&[(1, Some(1)), (2, Some(2)), (3, Some(2)), (700, None)][..], (700, vec![1, 2, 2])),
            (&[(1, Some(2)), (2, Some(2)), (9_000, None)][..], (2, vec![2, 2])),
            // The others are gone.
            (&[(1, Some(1)), (700, None), (750, None)][..], (750, vec![1])),
            (&[(1, Some(1)), (9_000, None), (9_000, None)][..], (3_001, vec![1])),
            // None has answered before: the network came up late, for all of them.
            (&[(4_000, Some(1)), (4_150, Some(2)), (4_150, Some(2))][..], (4_150, vec![1, 2, 2])),
            (&[(4_000, Some(1)), (4_100, None)][..], (4_100, vec![1])),
            (&[(4_000, Some(1)), (9_000, None)][..], (7_000, vec![1])),
            (&[(5_100, Some(1)), (5_100, Some(1))][..], (5_000, vec![])),
            (&[(1, None)][..], (1, vec![])),
            (&[(1, Some(3))][..], (1, vec![3])),
        ] {
            assert_eq!(gathered(answers, &Known::default()).await, expected, "{answers:?}");
        }
    }

    /// What was late with all others, or not waited for, is not silent.
    #[tokio::test(start_paused = true)]
    async fn sentinel_that_is_late_is_waited_for_when_it_is_asked_again() {
        let known = Known::default();
        let late = [(4_000, Some(1)), (4_150, Some(2)), (4_150, Some(2))];
        assert_eq!(gathered(&late, &known).await.1, [1, 2, 2]);
        let again = [(1, Some(1)), (150, Some(2)), (150, Some(2))];
        assert_eq!(gathered(&again, &known).await.1, [1, 2, 2]);
        let known = Known::default();
        known.uses(&host(1));
        assert_eq!(gathered(&[(4_000, Some(1)), (9_000, None)], &known).await.0, 4_100);
        known.forget_master();
        assert_eq!(gathered(&again, &known).await.1, [1, 2, 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn master_in_use_needs_no_majority() {
        let known = Known::default();
        known.uses(&host(1));
        let hung = [(1, Some(1)), (9_000, None), (9_000, None)];
        assert_eq!(gathered(&hung, &known).await, (101, vec![1]));
        assert_eq!(gathered(&hung, &known).await, (101, vec![1]));
        let other = [(1, Some(2)), (2_000, Some(1)), (2_000, Some(1))];
        assert_eq!(gathered(&other, &known).await, (2_000, vec![2, 1, 1]));
        assert_eq!(gathered(&[(1, Some(1)), (90, Some(2)), (95, Some(2))], &known).await.1, [1, 2, 2]);
        // Who looks whether it was replaced waits for the others.
        let slow = [(1, 1), (900, 2), (950, 2)].map(async |(after, port)| {
            tokio::time::sleep(Duration::from_millis(after)).await;
            Ok(host(port))
        });
        assert_eq!(gather(slow.into_iter(), &known, Awaited::All, LIMIT).await.unwrap().len(), 3);
        known.forget_master();
        assert_eq!(gathered(&hung, &known).await, (3_001, vec![1]));
    }

    #[tokio::test(start_paused = true)]
    async fn silent_sentinel_is_waited_for_once_until_it_answers() {
        let known = Known::default();
        let hung = [(1, Some(1)), (99_000, None), (99_000, None)];
        // What is slower than an attempt that is given up may be alive.
        let attempt = tokio::time::timeout(Duration::from_secs(1), gathered(&hung, &known));
        attempt.await.unwrap_err();
        assert_eq!(gathered(&hung, &known).await.0, 3_001);
        assert_eq!(gathered(&hung, &known).await.0, 1);
        assert_eq!(gathered(&[(5, Some(1)), (1, Some(2)), (99_000, None)], &known).await.0, 5);
        assert_eq!(gathered(&hung, &known).await.0, 3_001, "one of them has answered again");
        tokio::time::sleep(MEMORY).await;
        assert_eq!(gathered(&hung, &known).await.0, 3_001);
    }

    /// What made them silent is over, and the near one is behind: it would lead to the server that restarts.
    #[tokio::test(start_paused = true)]
    async fn silent_sentinels_are_waited_for_again_once_the_master_in_use_is_in_doubt() {
        let known = Known::default();
        known.uses(&host(1));
        let hung = [(1, Some(1)), (99_000, None), (99_000, None)].map(async |(after, port): (u64, _)| {
            tokio::time::sleep(Duration::from_millis(after)).await;
            port.map(host).ok_or_else(|| not_sent("it fails".to_owned()))
        });
        assert_eq!(gather(hung.into_iter(), &known, Awaited::All, LIMIT).await.unwrap(), [host(1)]);
        known.forget_master();
        let again = [(1, Some(1)), (1_000, Some(2)), (1_010, Some(2))];
        assert_eq!(gathered(&again, &known).await, (1_010, vec![1, 2, 2]));
    }

    #[test]
    fn master_is_the_host_that_most_sentinels_name() {
        let hosts = |ports: &[u16]| -> Vec<Host> { ports.iter().copied().map(host).collect() };
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
