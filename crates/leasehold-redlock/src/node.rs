//! One quorum node.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::{
    Acquisition, Command, Failure, Kind, LocalTime, Name, NodeReply, Release, Reply, Resource, StoreTime,
    Token,
};
use leasehold_store::clock::Clock;
use leasehold_store::{Batch, Call, CallResult, Diagnose, QuorumNode, SharedBatch, StoreError};

use super::MIN_NODE_TIMEOUT;
use super::attempts::NodeRequests;
use super::runtime::Runtime;

/// A node with this many unanswered requests, and no answer for this long, counts as stalled and is sent nothing.
const MAX_UNANSWERED: usize = 256;
const STALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Max number of unanswered releases kept per node, newest first. The leases also expire by themselves.
const MAX_PENDING_RELEASES: usize = 10_000;

/// Max number of releases in one batch.
const BATCH: usize = 128;

/// The clock offset before the first answer.
const NO_CLOCK: i64 = i64::MIN;

/// The longest pause before a node is connected to again because it is the same server as another one.
const MAX_RECONNECT_PAUSE: Duration = Duration::from_secs(300);

/// One quorum node, with its latency, clock offset and pending releases.
pub(super) struct Node {
    pub(super) store: Arc<dyn QuorumNode>,
    /// Its address without secrets.
    pub(super) name: String,
    clock: Clock,
    runtime: Runtime,
    unanswered: AtomicUsize,
    /// Time of its last answer or, if that is later, of the first request after it, by the local clock in microseconds. Zero if it
    /// has answered everything. A request that failed was not answered.
    silent_since: AtomicU64,
    /// Smoothed round trip in microseconds; zero before the first.
    round_trip: AtomicU64,
    /// Smoothed deviation of the round trips from that, in microseconds.
    deviation: AtomicU64,
    /// Its clock at the last answer minus the local clock, in microseconds. The half round trip of the reply makes up for that
    /// of the next command.
    ahead: AtomicI64,
    /// While it is the same server as another node: when it is connected to again, and the pause before that.
    reconnect: Mutex<Option<(LocalTime, Duration)>>,
    /// A test sets the clock ahead by this many microseconds.
    #[cfg(test)]
    pub(super) skew: AtomicI64,
    /// Unanswered releases, each until its lease has expired.
    pending_releases: Mutex<BTreeMap<Acquisition, PendingRelease>>,
}

/// A release that a node has not answered.
#[derive(Clone)]
pub(super) struct PendingRelease {
    pub(super) resource: Arc<Resource>,
    pub(super) release: Release,
    /// When what is to be released has expired.
    pub(super) until: LocalTime,
    /// What was sent to the nodes before, and which of them this one is; none for an admission queue.
    pub(super) requests: Option<(Arc<[NodeRequests]>, usize)>,
}

impl PendingRelease {
    /// Records the node's answer, and returns what it means.
    pub(super) fn handle_answer(&self, reply: &Reply) -> NodeReply {
        match &self.requests {
            Some((requests, node)) => requests[*node].handle_release(reply),
            None => NodeReply::NotHeld,
        }
    }
}

/// Counts an unanswered request; dropped with the answer or the request.
struct Unanswered(Arc<Node>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.0.unanswered.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Node {
    pub(super) fn new(store: Arc<dyn QuorumNode>, name: String, clock: Clock, runtime: Runtime) -> Self {
        Self {
            store,
            name,
            clock,
            runtime,
            unanswered: AtomicUsize::new(0),
            silent_since: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
            deviation: AtomicU64::new(0),
            ahead: AtomicI64::new(NO_CLOCK),
            reconnect: Mutex::default(),
            #[cfg(test)]
            skew: AtomicI64::new(0),
            pending_releases: Mutex::default(),
        }
    }

    fn pending_releases(&self) -> MutexGuard<'_, BTreeMap<Acquisition, PendingRelease>> {
        self.pending_releases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> LocalTime {
        self.clock.local()
    }

    /// Runs a command, with no token below `floor`.
    pub(super) async fn call(self: Arc<Self>, call: Call, floor: Option<Token>) -> CallResult {
        let (_unanswered, sent_at) = self.count_request()?;
        let answered = self.store.vote(call, floor).await;
        if let Ok(answer) = &answered {
            let received_at = self.note_answer();
            // The usual answer to a release does not tell the time.
            if answer.at != StoreTime::ZERO {
                self.record_answer(sent_at, received_at, answer.at);
            }
        }
        answered
    }

    /// Runs commands in this order.
    pub(super) async fn call_batch(self: Arc<Self>, batch: SharedBatch) -> Vec<CallResult> {
        let _unanswered = match self.count_request() {
            Ok((unanswered, _)) => unanswered,
            Err(error) => return vec![Err(error); batch.len()],
        };
        let answers = self.store.vote_batch(batch).await;
        // A batch may take two round trips, so it measures none.
        if let Some(Ok(_)) = answers.last() {
            self.note_answer();
        }
        answers
    }

    /// Counts a request that is sent now; an error if the node is stalled.
    fn count_request(self: &Arc<Self>) -> Result<(Unanswered, LocalTime), StoreError> {
        let waiting = self.unanswered.fetch_add(1, Ordering::Relaxed);
        let unanswered = Unanswered(self.clone());
        let now = self.now();
        // If it has answered everything until now.
        let _ = self.silent_since.compare_exchange(0, now.as_micros(), Ordering::Relaxed, Ordering::Relaxed);
        if waiting >= MAX_UNANSWERED && self.silent_for(now) > STALL_TIMEOUT {
            return Err(too_slow(waiting));
        }
        Ok((unanswered, now))
    }

    fn note_answer(&self) -> LocalTime {
        let now = self.now();
        let is_last = self.unanswered.load(Ordering::Relaxed) <= 1;
        self.silent_since.store(if is_last { 0 } else { now.as_micros() }, Ordering::Relaxed);
        now
    }

    /// For how long it has not answered, while something is or was to be answered.
    pub(super) fn silent_for(&self, now: LocalTime) -> Duration {
        match self.silent_since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => now.since(LocalTime::from_micros(since)),
        }
    }

    /// Inspects an unused lock to learn the node's clock, so that the first acquire has a floor, and its round trip.
    pub(super) async fn learn_clock(self: Arc<Self>) {
        let Ok(name) = Name::new("clock") else { return };
        let runtime = self.runtime.clone();
        let call =
            self.call(Call::new(Arc::new(Resource { kind: Kind::Admission, name }), Command::Inspect), None);
        // Without an answer the first acquire has no floor.
        let _ = runtime.timeout(MIN_NODE_TIMEOUT, call).await;
    }

    /// An error if the node is too slow to be asked for its vote: each unanswered acquire would leave a tombstone when it is
    /// released.
    pub(super) fn lags(&self, usual: Duration) -> Option<StoreError> {
        let waiting = self.unanswered.load(Ordering::Relaxed);
        (waiting >= MAX_UNANSWERED && self.is_slow(usual)).then(|| too_slow(waiting))
    }

    fn record_answer(&self, sent_at: LocalTime, now: LocalTime, at: StoreTime) {
        let took = now.since(sent_at).as_micros();
        let took = u64::try_from(took).unwrap_or(u64::MAX).min(10_000_000);
        let before = self.round_trip.load(Ordering::Relaxed);
        // Smoothed as in RFC 6298.
        let (average, off) = match before {
            0 => (took, took / 2),
            _ => (before - before / 8 + took / 8, took.abs_diff(before)),
        };
        let deviation = self.deviation.load(Ordering::Relaxed);
        self.round_trip.store(average.max(1), Ordering::Relaxed);
        self.deviation
            .store(if before == 0 { off } else { deviation - deviation / 4 + off / 4 }, Ordering::Relaxed);
        let ahead = at.as_micros().cast_signed() - now.as_micros().cast_signed();
        #[cfg(test)]
        let ahead = ahead + self.skew.load(Ordering::Relaxed);
        self.ahead.store(ahead, Ordering::Relaxed);
    }

    /// Smoothed round trip; zero before the first.
    pub(super) fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip.load(Ordering::Relaxed))
    }

    /// A round trip that is long for this node, but not unusual.
    pub(super) fn long_round_trip(&self) -> Duration {
        self.round_trip() + Duration::from_micros(self.deviation.load(Ordering::Relaxed))
    }

    /// Whether its round trips are so much longer than the usual one of a majority that it should be asked for no more than a vote.
    pub(super) fn is_slow(&self, usual: Duration) -> bool {
        self.round_trip() > 4 * usual + Duration::from_millis(10)
    }

    /// The node's clock when a command that is sent at `now` arrives, if known. It may be later, but hardly earlier.
    pub(super) fn clock(&self, now: LocalTime) -> Option<StoreTime> {
        let ahead = self.ahead.load(Ordering::Relaxed);
        let micros = now.as_micros().cast_signed().checked_add(ahead).filter(|_| ahead != NO_CLOCK)?;
        Some(StoreTime::from_micros(u64::try_from(micros).ok()?))
    }

    /// As before its first answer.
    #[cfg(test)]
    pub(super) fn forget_clock(&self) {
        self.ahead.store(NO_CLOCK, Ordering::Relaxed);
    }

    /// Records an unconfirmed release, to be retried until `until`, when the lease has expired anyway.
    pub(super) fn add_pending_release(&self, pending: PendingRelease) {
        let mut pending_releases = self.pending_releases();
        pending_releases.insert(pending.release.acquisition, pending);
        while pending_releases.len() > MAX_PENDING_RELEASES {
            pending_releases.pop_first();
        }
    }

    pub(super) fn has_pending_releases(&self) -> bool {
        !self.pending_releases().is_empty()
    }

    /// The attempts whose releases are pending.
    pub(super) fn unreleased(&self) -> Vec<Acquisition> {
        let now = self.now();
        let pending_releases = self.pending_releases();
        pending_releases.iter().filter(|(_, pending)| pending.until > now).map(|(id, _)| *id).collect()
    }

    /// Resends pending releases.
    pub(super) async fn retry_pending_releases(self: Arc<Self>) {
        let (attempts, due): (Vec<Acquisition>, Batch) = {
            let mut pending_releases = self.pending_releases();
            let now = self.now();
            pending_releases.retain(|_, pending| pending.until > now);
            let call = |pending: &PendingRelease| {
                Call::new(pending.resource.clone(), Command::Release(pending.release.clone()))
            };
            pending_releases.iter().take(BATCH).map(|(attempt, pending)| (*attempt, call(pending))).unzip()
        };
        if due.is_empty() {
            return;
        }
        let answers = self.clone().call_batch(due.into()).await;
        let mut pending_releases = self.pending_releases();
        for (attempt, answer) in attempts.into_iter().zip(answers) {
            if let Ok(answer) = answer
                && let Some(released) = pending_releases.remove(&attempt)
            {
                released.handle_answer(&answer.reply);
            }
        }
    }

    /// It is the same server as another node. Its open connections may have led there for a moment only, as a balancer's mistake makes them, so
    /// it is connected to again: after this pause, and then after longer ones, because a node that is connected to gives no vote meanwhile.
    pub(super) fn is_duplicate(&self, first_pause: Duration) {
        let now = self.now();
        let mut reconnect = self.reconnect.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, pause) = *reconnect.get_or_insert((now + first_pause, first_pause));
        if now >= at {
            let pause = (pause * 2).min(MAX_RECONNECT_PAUSE);
            *reconnect = Some((now + pause, pause));
            drop(reconnect);
            self.store.reconnect();
        }
    }

    pub(super) fn is_no_duplicate(&self) {
        *self.reconnect.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let warnings = self.store.doctor().map_or_else(Vec::new, Diagnose::warnings);
        warnings.into_iter().map(|warning| format!("{}: {warning}", self.name)).collect()
    }
}

fn too_slow(waiting: usize) -> StoreError {
    StoreError::new(Failure::NotSent, format!("too slow: {waiting} answers are due"))
}
