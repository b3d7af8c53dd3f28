//! Looks at the store for the dashboard and the metrics, as seldom as possible.
//!
//! A look lists all locks. There is one every half second while a watcher is connected, and otherwise one every five seconds, for
//! the history. If a look takes long, looks become rarer, so that the store spends at most a tenth of its time on them.

mod rows;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use leasehold::{Client, Kind, LockInfo};
use metrics::histogram;
use serde::Serialize;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::time::millis;
pub(crate) use rows::{Event, Key, Row};

/// The pause between looks while a watcher is connected.
const WATCHED: Duration = Duration::from_millis(500);
/// The pause between looks without a watcher.
const UNWATCHED: Duration = Duration::from_secs(5);
/// Points of the history: ten minutes while a watcher is connected.
const MAX_POINTS: usize = 1200;
/// Events of all locks that the timelines show.
const MAX_EVENTS: usize = 20_000;
/// Events of one timeline.
const MAX_TIMELINE: usize = 200;
/// The lock whose state is read to measure the store's latency. It is never acquired.
const PROBE: &str = "leasehold:serve:probe";

/// What a look has seen.
pub(crate) struct Snapshot {
    /// When the look ended.
    seen: Instant,
    pub(crate) took: Duration,
    pub(crate) locks: Vec<LockInfo>,
    pub(crate) rows: BTreeMap<Key, Arc<Row>>,
    /// Why the store did not answer. The rest is then that of the last look.
    pub(crate) error: Option<String>,
}

impl Snapshot {
    pub(crate) fn age(&self) -> Duration {
        self.seen.elapsed()
    }
}

/// One point of the history.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Point {
    at_ms: u64,
    held: usize,
    waiting: usize,
    /// New holders that the look saw, per second. Grants that begin and end between two looks are not seen.
    grants_per_second: f64,
    /// The 99th percentile of the waits that last at this moment.
    p99_wait_ms: u64,
    /// Leases of this server's callers that were lost since the point before.
    lost: u64,
}

#[derive(Default)]
struct Past {
    points: VecDeque<Point>,
    events: VecDeque<Event>,
    /// Losses at the last point.
    lost: u64,
}

/// Lists the locks of the store, for all callers.
pub(crate) struct Observer {
    client: Client,
    latest: watch::Sender<Arc<Snapshot>>,
    /// One look at a time.
    looking: tokio::sync::Mutex<()>,
    past: Mutex<Past>,
    watchers: AtomicUsize,
    /// Wakes the loop when the first watcher comes.
    watched: Notify,
    lost: AtomicU64,
}

impl Observer {
    pub(crate) fn new(client: Client) -> Self {
        let nothing = Snapshot {
            seen: Instant::now(),
            took: Duration::ZERO,
            locks: Vec::new(),
            rows: BTreeMap::new(),
            error: Some("the store was not looked at yet".to_owned()),
        };
        Self {
            client,
            latest: watch::Sender::new(Arc::new(nothing)),
            looking: tokio::sync::Mutex::default(),
            past: Mutex::default(),
            watchers: AtomicUsize::new(0),
            watched: Notify::new(),
            lost: AtomicU64::new(0),
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
        self.past().points.iter().cloned().collect()
    }

    pub(crate) fn last_point(&self) -> Option<Point> {
        self.past().points.back().cloned()
    }

    /// The last events of a lock, the newest first.
    pub(crate) fn timeline(&self, kind: Kind, name: &str) -> Vec<Event> {
        let past = self.past();
        let of_lock = past.events.iter().rev().filter(|event| event.is_of(kind, name));
        of_lock.take(MAX_TIMELINE).cloned().collect()
    }

    /// Looks again and again until the server stops.
    pub(crate) async fn run(&self, stopping: &CancellationToken) {
        loop {
            let snapshot = tokio::select! {
                snapshot = self.look(Duration::ZERO) => snapshot,
                () = stopping.cancelled() => return,
            };
            let is_watched = self.watchers.load(Ordering::Relaxed) > 0;
            let pause = if is_watched { WATCHED } else { UNWATCHED }.max(snapshot.took * 9);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.watched.notified(), if !is_watched => {}
                () = stopping.cancelled() => return,
            }
        }
    }

    /// What the store holds, at most this old. Several callers share one look.
    pub(crate) async fn look(&self, max_age: Duration) -> Arc<Snapshot> {
        let begin = Instant::now();
        let _alone = self.looking.lock().await;
        let latest = self.latest.borrow().clone();
        // A look that began while this caller waited is as good as one of its own.
        if latest.seen >= begin + latest.took || (latest.error.is_none() && latest.age() < max_age) {
            return latest;
        }
        let started = Instant::now();
        let probe = self.client.inspect(Kind::Mutex, PROBE).await;
        if probe.is_ok() {
            histogram!("leasehold_store_latency_seconds").record(started.elapsed().as_secs_f64());
        }
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
        let (seen, took) = (Instant::now(), started.elapsed());
        let locks = match listed {
            Ok(locks) => locks,
            Err(error) => {
                let error = Some(format!("{error:#}"));
                return Snapshot {
                    seen,
                    took,
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
        // The first look has nothing to compare with.
        let is_first = before.error.is_some() && before.rows.is_empty();
        let events = if is_first { Vec::new() } else { rows::events(&before.rows, &rows, at_ms) };
        self.remember(&locks, events, at_ms, seen.saturating_duration_since(before.seen));
        Snapshot { seen, took, locks, rows, error: None }
    }

    fn remember(&self, locks: &[LockInfo], events: Vec<Event>, at_ms: u64, since: Duration) {
        let waits = locks.iter().flat_map(|lock| lock.waiters.iter().map(|waiter| waiter.waiting_for));
        let mut waits: Vec<Duration> = waits.collect();
        waits.sort_unstable();
        let p99 = waits.get(waits.len() * 99 / 100).copied().unwrap_or_default();
        let grants = events.iter().filter(|event| event.what == "acquired").count();
        let lost = self.lost.load(Ordering::Relaxed);
        let mut past = self.past();
        let point = Point {
            at_ms,
            held: locks.iter().filter(|lock| !lock.holders.is_empty()).count(),
            waiting: waits.len(),
            grants_per_second: grants as f64 / since.as_secs_f64().max(0.001),
            p99_wait_ms: millis(p99),
            lost: lost - past.lost,
        };
        past.lost = lost;
        past.points.push_back(point);
        past.events.extend(events);
        let (points, events) = (past.points.len(), past.events.len());
        past.points.drain(..points.saturating_sub(MAX_POINTS));
        past.events.drain(..events.saturating_sub(MAX_EVENTS));
    }

    fn past(&self) -> MutexGuard<'_, Past> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn now_ms() -> u64 {
    millis(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}
