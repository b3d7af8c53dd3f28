//! Polls the store for the dashboard and the metrics, as seldom as possible.
//!
//! A poll lists all locks. There is one every half second while a watcher is connected, and otherwise one every five seconds, for
//! the history. If a poll takes long, polls become rarer, so that they take at most half of the time while a watcher is connected,
//! and otherwise a tenth. Between two long polls only the names of the locks are read, so that a new lock is shown soon.

mod rows;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use leasehold::{Client, Kind, LockInfo};
use metrics::histogram;
use serde::Serialize;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::time::millis;
pub(crate) use rows::{Event, Key, Row};

/// The poll interval while a watcher is connected.
const WATCHED_INTERVAL: Duration = Duration::from_millis(500);
/// The poll interval without a watcher.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// A poll that takes longer is long.
const LONG_POLL: Duration = Duration::from_millis(100);
/// The interval at which the names are read between two long polls.
const NAMES_INTERVAL: Duration = Duration::from_millis(200);
/// How many new locks are looked up after the names were read.
const MAX_NEW: usize = 100;
/// Points of the history: ten minutes while a watcher is connected.
const MAX_POINTS: usize = 1200;
/// Events of all locks that the timelines show.
const MAX_EVENTS: usize = 20_000;
/// Events of one timeline.
const MAX_TIMELINE: usize = 200;
/// The lock whose state is read to measure the store's latency. It is never acquired.
const PROBE: &str = "leasehold:serve:probe";
/// The maximum age of an answer to `/healthz`, so that any number of requests costs the store ten commands a second at most.
const HEALTH_AGE: Duration = Duration::from_millis(100);

/// How long a store that lists its locks slowly has for the look-up of one.
const LOOK_UP_LIMIT: Duration = Duration::from_secs(1);

/// The result of a poll.
pub(crate) struct Snapshot {
    /// When the poll ended.
    polled_at: Instant,
    pub(crate) took: Duration,
    pub(crate) listed: Listed,
    pub(crate) locks: Vec<LockInfo>,
    pub(crate) rows: BTreeMap<Key, Arc<Row>>,
    /// Why the store did not answer. The rest is then that of the poll before.
    pub(crate) error: Option<String>,
}

/// The last poll that the store answered, on which `locks` and `rows` are based.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Listed {
    /// When it ended; the start of the server if there was none.
    pub(crate) at: Instant,
    pub(crate) took: Option<Duration>,
}

impl Snapshot {
    pub(crate) fn age(&self) -> Duration {
        self.polled_at.elapsed()
    }
}

/// One point of the history.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Point {
    at_ms: u64,
    held: usize,
    waiting: usize,
    /// New holders since the poll before, per second. A lease that begins and ends between two polls is not counted.
    grants_per_second: f64,
    /// The 99th percentile of the waits that last at this moment.
    p99_wait_ms: u64,
    /// Leases of this server's callers that were lost since the point before.
    lost: u64,
}

#[derive(Default)]
struct History {
    points: VecDeque<Point>,
    events: VecDeque<Event>,
    /// Losses at the last point.
    lost: u64,
    /// Grants since the last point.
    grants: usize,
}

/// The probes for `/healthz`.
#[derive(Default)]
struct Health {
    /// When the last one began. Its request may have ended before it.
    began: Option<Instant>,
    /// When the last one ended that was waited for, and its result.
    last: Option<(Instant, Result<(), leasehold::Error>)>,
}

/// Lists the locks of the store, for all callers.
pub(crate) struct Observer {
    client: Client,
    latest: watch::Sender<Arc<Snapshot>>,
    /// One poll at a time.
    polling: tokio::sync::Mutex<()>,
    history: Mutex<History>,
    watchers: AtomicUsize,
    /// Wakes the loop when the first watcher comes.
    watched: Notify,
    lost: AtomicU64,
    /// One probe for `/healthz` at a time.
    health: tokio::sync::Mutex<Health>,
}

impl Observer {
    pub(crate) fn new(client: Client) -> Self {
        let nothing = Snapshot {
            polled_at: Instant::now(),
            took: Duration::ZERO,
            listed: Listed { at: Instant::now(), took: None },
            locks: Vec::new(),
            rows: BTreeMap::new(),
            error: Some("the store was not polled yet".to_owned()),
        };
        Self {
            client,
            latest: watch::Sender::new(Arc::new(nothing)),
            polling: tokio::sync::Mutex::default(),
            history: Mutex::default(),
            watchers: AtomicUsize::new(0),
            watched: Notify::new(),
            lost: AtomicU64::new(0),
            health: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn watch(&self) {
        self.watchers.fetch_add(1, Ordering::Relaxed);
        self.watched.notify_one();
    }

    pub(crate) fn unwatch(&self) {
        self.watchers.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn count_loss(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.latest.subscribe()
    }

    pub(crate) fn history(&self) -> Vec<Point> {
        self.locked_history().points.iter().cloned().collect()
    }

    pub(crate) fn last_point(&self) -> Option<Point> {
        self.locked_history().points.back().cloned()
    }

    /// The last events of a lock, the newest first.
    pub(crate) fn timeline(&self, kind: Kind, name: &str) -> Vec<Event> {
        let history = self.locked_history();
        let of_lock = history.events.iter().rev().filter(|event| event.is_of(kind, name));
        of_lock.take(MAX_TIMELINE).cloned().collect()
    }

    /// Polls until the server stops.
    pub(crate) async fn run(&self, stopping: &CancellationToken) {
        loop {
            let snapshot = tokio::select! {
                snapshot = self.snapshot(Duration::ZERO) => snapshot,
                () = stopping.cancelled() => return,
            };
            let is_watched = self.watchers.load(Ordering::Relaxed) > 0;
            tokio::select! {
                () = self.pause(snapshot.took, is_watched) => {}
                () = self.watched.notified(), if !is_watched => {}
                () = stopping.cancelled() => return,
            }
        }
    }

    /// Waits for the time of the next poll. Meanwhile it reads the names, if polls are long and the names are far cheaper.
    async fn pause(&self, took: Duration, is_watched: bool) {
        let end = tokio::time::Instant::now() + pause(took, is_watched);
        let mut is_cheap = is_watched && took > LONG_POLL;
        while is_cheap && tokio::time::Instant::now() + NAMES_INTERVAL < end {
            tokio::time::sleep(NAMES_INTERVAL).await;
            let began = Instant::now();
            self.poll_names().await;
            is_cheap = began.elapsed() * 4 < took;
        }
        tokio::time::sleep_until(end).await;
    }

    /// Adds the locks that are new since the last poll, and removes those that are gone. The states of the others remain those of the
    /// last poll, and so does the age of the snapshot.
    async fn poll_names(&self) {
        // Names that are older than the last poll would remove the locks that it has found.
        let _exclusive = self.polling.lock().await;
        let Ok(names) = self.client.list_names().await else { return };
        let names: BTreeSet<Key> = names.into_iter().collect();
        let latest = self.latest.borrow().clone();
        let new = names.iter().filter(|key| !latest.rows.contains_key(*key)).take(MAX_NEW);
        let found = join_all(new.map(|(kind, name)| self.client.inspect(*kind, name))).await;
        let is_in_use =
            |lock: &LockInfo| !lock.holders.is_empty() || !lock.waiters.is_empty() || lock.foreign.is_some();
        let found: Vec<LockInfo> = found.into_iter().flatten().filter(is_in_use).collect();
        if latest.error.is_some() || (found.is_empty() && latest.rows.keys().all(|key| names.contains(key))) {
            return;
        }
        let at_ms = now_ms();
        let mut rows = latest.rows.clone();
        rows.retain(|key, _| names.contains(key));
        rows.extend(found.iter().map(|lock| ((lock.kind, lock.name.clone()), Row::new(lock, None, at_ms))));
        self.remember_events(rows::events(&latest.rows, &rows, at_ms));
        let is_left = |lock: &&LockInfo| names.contains(&(lock.kind, lock.name.clone()));
        let locks = latest.locks.iter().filter(is_left).cloned().chain(found).collect();
        let (polled_at, took, listed) = (latest.polled_at, latest.took, latest.listed);
        self.latest.send_replace(Arc::new(Snapshot { polled_at, took, listed, locks, rows, error: None }));
    }

    /// Whether the store answers: a look-up of one lock, whose cost does not depend on the number of locks.
    async fn probe(&self) -> Result<(), leasehold::Error> {
        let began = Instant::now();
        self.client.inspect(Kind::Mutex, PROBE).await?;
        histogram!("leasehold_store_latency_seconds").record(began.elapsed().as_secs_f64());
        Ok(())
    }

    /// Whether the store answers, at most [`HEALTH_AGE`] ago. Requests at the same time share one probe.
    pub(crate) async fn health(&self) -> Result<(), leasehold::Error> {
        let mut health = self.health.lock().await;
        if let Some((at, result)) = &health.last
            && at.elapsed() < HEALTH_AGE
        {
            return result.clone();
        }
        if let Some(began) = health.began {
            tokio::time::sleep(HEALTH_AGE.saturating_sub(began.elapsed())).await;
        }
        health.began = Some(Instant::now());
        let result = self.probe().await;
        health.last = Some((Instant::now(), result.clone()));
        result
    }

    /// A snapshot with this maximum age, if there is one within the limit; otherwise the last one, with an error unless lists usually take
    /// longer and the store answers a look-up.
    pub(crate) async fn snapshot_within(&self, limit: Duration, max_age: Duration) -> Arc<Snapshot> {
        if let Ok(snapshot) = timeout(limit, self.snapshot(max_age)).await {
            return snapshot;
        }
        let latest = self.latest.borrow().clone();
        // A store that lists its locks slowly answers a look-up.
        let is_slow = latest.took >= limit;
        if latest.error.is_some()
            || (is_slow && matches!(timeout(LOOK_UP_LIMIT, self.health()).await, Ok(Ok(()))))
        {
            return latest;
        }
        let error = Some(format!("the store did not list its locks within {limit:?}"));
        let (locks, rows) = (latest.locks.clone(), latest.rows.clone());
        let (polled_at, took, listed) = (latest.polled_at, latest.took, latest.listed);
        Arc::new(Snapshot { polled_at, took, listed, locks, rows, error })
    }

    /// A snapshot with this maximum age. Several callers share one poll.
    pub(crate) async fn snapshot(&self, max_age: Duration) -> Arc<Snapshot> {
        let begin = Instant::now();
        let _exclusive = self.polling.lock().await;
        let latest = self.latest.borrow().clone();
        // A poll that began while this caller waited is as good as one of its own.
        if latest.polled_at >= begin + latest.took || (latest.error.is_none() && latest.age() < max_age) {
            return latest;
        }
        let started = Instant::now();
        // An error is that of the list, too.
        let _ = self.probe().await;
        let listed = self.client.list().await;
        let snapshot = Arc::new(self.compare(&latest, listed, started));
        self.latest.send_replace(snapshot.clone());
        snapshot
    }

    fn compare(
        &self,
        before: &Snapshot,
        listed: Result<Vec<LockInfo>, leasehold::Error>,
        started: Instant,
    ) -> Snapshot {
        let (polled_at, took) = (Instant::now(), started.elapsed());
        let locks = match listed {
            Ok(locks) => locks,
            Err(error) => {
                let error = Some(format!("{error:#}"));
                return Snapshot {
                    polled_at,
                    took,
                    listed: before.listed,
                    locks: before.locks.clone(),
                    rows: before.rows.clone(),
                    error,
                };
            }
        };
        let at_ms = now_ms();
        let mut rows = BTreeMap::new();
        for lock in &locks {
            let key = (lock.kind, lock.name.clone());
            let row = Row::new(lock, before.rows.get(&key), at_ms);
            rows.insert(key, row);
        }
        // The first poll has nothing to compare with.
        let is_first = before.error.is_some() && before.rows.is_empty();
        let events = if is_first { Vec::new() } else { rows::events(&before.rows, &rows, at_ms) };
        self.remember(&locks, events, at_ms, polled_at.saturating_duration_since(before.polled_at));
        let listed = Listed { at: polled_at, took: Some(took) };
        Snapshot { polled_at, took, listed, locks, rows, error: None }
    }

    fn remember(&self, locks: &[LockInfo], events: Vec<Event>, at_ms: u64, since: Duration) {
        let waits = locks.iter().flat_map(|lock| lock.waiters.iter().map(|waiter| waiter.waiting_for));
        let mut waits: Vec<Duration> = waits.collect();
        waits.sort_unstable();
        let p99 = waits.get(waits.len() * 99 / 100).copied().unwrap_or_default();
        self.remember_events(events);
        let lost = self.lost.load(Ordering::Relaxed);
        let mut history = self.locked_history();
        let point = Point {
            at_ms,
            held: locks.iter().filter(|lock| !lock.holders.is_empty()).count(),
            waiting: waits.len(),
            grants_per_second: history.grants as f64 / since.as_secs_f64().max(0.001),
            p99_wait_ms: millis(p99),
            lost: lost - history.lost,
        };
        (history.lost, history.grants) = (lost, 0);
        history.points.push_back(point);
        let points = history.points.len();
        history.points.drain(..points.saturating_sub(MAX_POINTS));
    }

    fn remember_events(&self, events: Vec<Event>) {
        let mut history = self.locked_history();
        history.grants += events.iter().filter(|event| event.what == "acquired").count();
        history.events.extend(events);
        let events = history.events.len();
        history.events.drain(..events.saturating_sub(MAX_EVENTS));
    }

    fn locked_history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pause after a poll that took this long.
fn pause(took: Duration, is_watched: bool) -> Duration {
    if is_watched { WATCHED_INTERVAL.saturating_sub(took).max(took) } else { IDLE_INTERVAL.max(took * 9) }
}

fn now_ms() -> u64 {
    millis(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_is_shown_within_a_second_while_a_poll_takes_a_third_of_one() {
        for took in [0, 10, 100, 250, 333] {
            let took = Duration::from_millis(took);
            // The worst case: the lock changes just after the poll has read its page.
            let latest = took + pause(took, true) + took;
            assert!(latest <= Duration::from_secs(1), "{took:?}: {latest:?}");
        }
    }

    #[tokio::test]
    async fn poll_that_takes_long_does_not_delay_the_last_snapshot() {
        let store = leasehold::testing::TestStore::new();
        let observer = Observer::new(store.client().unwrap());
        let last = observer.snapshot(Duration::ZERO).await;
        let after = |took| Snapshot {
            polled_at: last.polled_at,
            took,
            listed: last.listed,
            locks: Vec::new(),
            rows: BTreeMap::new(),
            error: None,
        };
        let _poll = observer.polling.lock().await;
        observer.latest.send_replace(Arc::new(after(Duration::ZERO)));
        let found = observer.snapshot_within(Duration::from_millis(20), Duration::ZERO).await;
        assert!(found.error.is_some(), "the store may hang");
        assert_eq!(found.polled_at, last.polled_at);
        // One that lists its locks slowly does not hang.
        observer.latest.send_replace(Arc::new(after(Duration::from_millis(30))));
        let found = async || observer.snapshot_within(Duration::from_millis(20), Duration::ZERO).await;
        assert!(found().await.error.is_none());
        store.set_reachable(false);
        observer.health.lock().await.last = None;
        assert!(found().await.error.is_some(), "it hangs again");
    }

    #[tokio::test]
    async fn list_is_as_old_as_the_last_answer_of_the_store() {
        let store = leasehold::testing::TestStore::new();
        let observer = Observer::new(store.client().unwrap());
        let nothing = observer.subscribe().borrow().listed;
        assert!(nothing.took.is_none());
        store.set_reachable(false);
        let failed = observer.snapshot(Duration::ZERO).await;
        assert!(failed.error.is_some() && failed.polled_at > nothing.at);
        assert_eq!((failed.listed.at, failed.listed.took), (nothing.at, None), "that was no list");
        store.set_reachable(true);
        let listed = observer.snapshot(Duration::ZERO).await;
        assert_eq!((listed.listed.at, listed.listed.took), (listed.polled_at, Some(listed.took)));
        store.set_reachable(false);
        let failed = observer.snapshot(Duration::ZERO).await;
        assert!(failed.error.is_some() && failed.polled_at > listed.polled_at);
        assert_eq!((failed.listed.at, failed.listed.took), (listed.polled_at, listed.listed.took));
    }

    #[tokio::test]
    async fn probes_whose_requests_end_before_them_are_as_rare_as_others() {
        let store = leasehold::testing::TestStore::new();
        let observer = Observer::new(store.client().unwrap());
        let began = Instant::now();
        for number in 0..3 {
            // The request ends while its probe is at the store.
            observer.health.lock().await.last = None;
            observer.health().await.unwrap();
            assert!(began.elapsed() >= HEALTH_AGE * number, "{:?}", began.elapsed());
        }
    }

    #[tokio::test]
    async fn leases_of_one_owner_in_one_client_are_counted() {
        let store = leasehold::testing::TestStore::new();
        let (observer, client) = (Observer::new(store.client().unwrap()), store.client().unwrap());
        let mutex = client.reentrant_mutex("orders", "job-7");
        observer.snapshot(Duration::ZERO).await;
        let what =
            || observer.timeline(Kind::Mutex, "orders").iter().map(|event| event.what).collect::<Vec<_>>();
        let first = mutex.lock().await.unwrap();
        observer.snapshot(Duration::ZERO).await;
        let _second = mutex.lock().await.unwrap();
        observer.snapshot(Duration::ZERO).await;
        assert_eq!(what(), ["acquired", "acquired"]);
        first.release().await.unwrap();
        observer.snapshot(Duration::ZERO).await;
        assert_eq!(what().iter().filter(|what| **what == "ended").count(), 1);
    }

    #[tokio::test]
    async fn names_between_two_polls_add_and_remove_locks() {
        let store = leasehold::testing::TestStore::new();
        let (observer, other) = (Observer::new(store.client().unwrap()), store.client().unwrap());
        let first = other.mutex("first").lock().await.unwrap();
        let _kept = other.mutex("kept").lock().await.unwrap();
        let polled = observer.snapshot(Duration::ZERO).await;
        first.release().await.unwrap();
        let guard = other.semaphore("second", 2).acquire(1).await.unwrap();
        observer.poll_names().await;
        let latest = observer.subscribe().borrow().clone();
        let names = |rows: &BTreeMap<Key, Arc<Row>>| rows.keys().map(|key| key.1.clone()).collect::<Vec<_>>();
        assert_eq!(
            (names(&polled.rows), names(&latest.rows)),
            (vec!["first".into(), "kept".into()], vec!["kept".into(), "second".into()])
        );
        let mut locks: Vec<&str> = latest.locks.iter().map(|lock| lock.name.as_str()).collect();
        locks.sort_unstable();
        assert_eq!(locks, ["kept", "second"]);
        assert_eq!(latest.polled_at, polled.polled_at, "the states of the others are not newer");
        let event = observer.timeline(Kind::Semaphore, "second").remove(0);
        assert_eq!(serde_json::to_value(&event).unwrap()["token"], guard.token().get());
        assert_eq!(observer.timeline(Kind::Mutex, "first").len(), 1);
        assert_eq!(observer.history().len(), 1);
        // The next poll counts the grant.
        observer.snapshot(Duration::ZERO).await;
        assert!(observer.last_point().unwrap().grants_per_second > 0.0);
        assert_eq!(observer.timeline(Kind::Semaphore, "second").len(), 1, "an event is not repeated");
    }

    #[tokio::test]
    async fn names_that_wait_for_a_poll_remove_no_lock_that_it_finds() {
        let store = leasehold::testing::TestStore::new();
        let (observer, other) = (Observer::new(store.client().unwrap()), store.client().unwrap());
        let _kept = other.mutex("kept").lock().await.unwrap();
        let before = observer.snapshot(Duration::ZERO).await;
        let poll = observer.polling.lock().await;
        let mut names = std::pin::pin!(observer.poll_names());
        assert!(timeout(Duration::from_millis(20), &mut names).await.is_err(), "it waits for the poll");
        let _new = other.mutex("new").lock().await.unwrap();
        let found = observer.compare(&before, observer.client.list().await, Instant::now());
        observer.latest.send_replace(Arc::new(found));
        drop(poll);
        names.await;
        assert_eq!(observer.subscribe().borrow().rows.len(), 2);
    }

    #[test]
    fn polls_leave_half_of_the_time_to_others_or_nine_tenths_without_a_watcher() {
        for took in [1, 100, 1000, 60_000] {
            let took = Duration::from_millis(took);
            assert!(pause(took, true) >= took && pause(took, false) >= took * 9, "{took:?}");
        }
        assert_eq!(pause(Duration::ZERO, true), WATCHED_INTERVAL);
        assert_eq!(pause(Duration::ZERO, false), IDLE_INTERVAL);
    }
}
