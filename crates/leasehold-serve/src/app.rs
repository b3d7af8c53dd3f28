//! What all requests share, and the work that no request does: ending sessions and lost leases.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::{Client, Kind};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::caller::Caller;
use crate::config::{Limits, Notices};
use crate::leases::{Ending, Id, Lease, Leases, unconfirmed};
use crate::metrics::Metrics;
use crate::observer::Observer;
use crate::problem::{Code, Problem};
use crate::sessions::{LostLease, Session, Sessions};
use crate::shares::{LeasePermit, Share, Shares};
use crate::tokens::Tokens;

/// How often sessions are looked at. A session ends this much after its deadline at most.
const SWEEP: Duration = Duration::from_millis(100);

/// How often leases are looked at, because there may be many. In between, when one would end that a session renews.
const LOOK: Duration = Duration::from_millis(500);

/// The shortest time between two looks. It is shorter than the time by which a lease ends earlier here than in the store, unless its
/// ttl is below a second.
const SHORTEST_LOOK: Duration = Duration::from_millis(10);

/// How long a request waits for the store's confirmation of a release.
const RELEASE_WAIT: Duration = Duration::from_secs(2);

/// Metrics are added up every five seconds.
const UPKEEP_EVERY: u64 = 50;

/// The state of a server.
pub(crate) struct App {
    pub(crate) client: Client,
    pub(crate) leases: Leases,
    pub(crate) sessions: Sessions,
    pub(crate) observer: Observer,
    pub(crate) metrics: Metrics,
    /// Those that are accepted now.
    pub(crate) tokens: watch::Sender<Tokens>,
    pub(crate) limits: Limits,
    pub(crate) notices: Notices,
    /// Leases that the callers with each token hold or wait for.
    lease_shares: Shares,
    /// Connections of each token that receive events.
    watcher_shares: Shares,
    /// Nothing new is granted.
    pub(crate) draining: CancellationToken,
    /// Connections end.
    pub(crate) stopping: CancellationToken,
    /// Where it listens, for people: `unix:PATH`, `http://HOST:PORT` or `https://HOST:PORT`.
    pub(crate) listen: Vec<String>,
    pub(crate) started: Instant,
    watchers: AtomicUsize,
}

/// A connection that receives events.
pub(crate) struct Watcher {
    app: Arc<App>,
    _share: Option<Share>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.app.watchers.fetch_sub(1, Ordering::Relaxed);
        self.app.observer.unwatch();
    }
}

impl App {
    pub(crate) fn new(client: Client, tokens: Tokens, limits: Limits) -> Self {
        Self {
            observer: Observer::new(client.clone()),
            client,
            leases: Leases::new(limits.leases),
            sessions: Sessions::new(limits.sessions),
            metrics: Metrics::new(),
            tokens: watch::Sender::new(tokens),
            limits,
            notices: Notices::default(),
            lease_shares: Shares::default(),
            watcher_shares: Shares::default(),
            draining: CancellationToken::new(),
            stopping: CancellationToken::new(),
            listen: Vec::new(),
            started: Instant::now(),
            watchers: AtomicUsize::new(0),
        }
    }

    /// The same with the addresses of its listeners.
    pub(crate) fn listening_on(self, listen: Vec<String>) -> Self {
        Self { listen, ..self }
    }

    /// An error while the server stops.
    pub(crate) fn check_open(&self) -> Result<(), Problem> {
        if self.draining.is_cancelled() { Err(Self::stopping_problem()) } else { Ok(()) }
    }

    pub(crate) fn stopping_problem() -> Problem {
        Problem::new(Code::Stopping, "the server is stopping and grants no more locks")
    }

    /// A place for a connection that receives events. A token that only reads gets half of them at most.
    pub(crate) fn watch(self: &Arc<Self>, caller: &Caller) -> Result<Watcher, Problem> {
        let all = self.limits.watchers;
        let share = self.token_share(caller, &self.watcher_shares, all, "connections receive events")?;
        let limit = if caller.only_reads() { all.div_ceil(2) } else { all };
        let counted = self
            .watchers
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < limit).then_some(count + 1));
        counted.map_err(|_| {
            Problem::new(
                Code::LimitReached,
                format!("{limit} connections receive events, which is the limit"),
            )
        })?;
        self.observer.watch();
        Ok(Watcher { app: self.clone(), _share: share })
    }

    /// A place for a lease, before the lock is requested.
    pub(crate) fn reserve(&self, caller: &Caller) -> Result<LeasePermit, Problem> {
        let (shares, limit) = (&self.lease_shares, self.limits.leases);
        let of_token = self.token_share(caller, shares, limit, "leases are held or waited for")?;
        Ok(LeasePermit { _of_all: self.leases.reserve()?, _of_token: of_token })
    }

    /// The part of a limit that the callers with one token can use.
    pub(crate) fn limit_of_one_token(&self, limit: usize) -> usize {
        if self.tokens.borrow().has_several_names() { self.limits.token_share(limit) } else { limit }
    }

    /// A place in the share of the caller's token. None on the Unix socket, whose callers are those of one user.
    fn token_share(
        &self,
        caller: &Caller,
        shares: &Shares,
        limit: usize,
        what: &str,
    ) -> Result<Option<Share>, Problem> {
        if !caller.has_token() {
            return Ok(None);
        }
        let limit = self.limit_of_one_token(limit);
        shares.take(caller.name(), limit).map(Some).ok_or_else(|| {
            let what = format!("{limit} {what} with the token {:?}, which is its share", caller.name());
            Problem::new(Code::LimitReached, what)
        })
    }

    /// Releases the lease of a request that is no longer wanted, because its session has ended.
    pub(crate) fn drop_lease(self: &Arc<Self>, lease: &Arc<Lease>, why: &str) {
        self.begin_release(lease, Ending::Session(why.to_owned()));
    }

    /// Begins to release a lease, unless its release has begun.
    ///
    /// One task owns the release of a lease, so its outcome is kept although the request may be dropped. The lease stays in the
    /// table and in its session until the store has confirmed the release, or until the lease has expired.
    fn begin_release(self: &Arc<Self>, lease: &Arc<Lease>, ending: Ending) {
        if !lease.begin_release() {
            return;
        }
        // A server that ends does not wait for it: its other leases are released too.
        let (app, lease) = (Arc::downgrade(self), lease.clone());
        tokio::spawn(async move {
            let ending = lease.release(ending).await;
            let Some(app) = app.upgrade() else { return };
            if let Some(session) = app.session_of(&lease) {
                session.remove_lease(&lease.id);
            }
            app.leases.end(&lease, ending);
        });
    }

    /// Releases a lease: how it ended, or an error if the store has not confirmed that in time. Then the release goes on.
    pub(crate) async fn release(
        self: &Arc<Self>,
        lease: &Arc<Lease>,
        ending: Ending,
    ) -> Result<Ending, Problem> {
        self.begin_release(lease, ending);
        let lock = (lease.kind, lease.name.as_str());
        match timeout(RELEASE_WAIT, lease.ended()).await {
            Err(_) => Err(unconfirmed(lock, "its release is not confirmed yet")),
            Ok(refused @ Ending::Refused(_)) => Err(unconfirmed(lock, refused)),
            Ok(ending) => Ok(ending),
        }
    }

    fn session_of(&self, lease: &Lease) -> Option<Arc<Session>> {
        lease.session.as_ref().and_then(|id: &Id| self.sessions.get(id).ok())
    }

    /// Ends overdue sessions and lost leases, until the server stops.
    pub(crate) async fn sweep(self: &Arc<Self>) {
        let mut ticks = tokio::time::interval(SWEEP);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut look_at = Instant::now();
        let mut round = 0_u64;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = sleep_until(look_at) => {
                    look_at = Instant::now() + self.end_lost();
                    continue;
                }
                () = self.stopping.cancelled() => return,
            }
            self.end_overdue();
            if round.is_multiple_of(UPKEEP_EVERY) {
                self.metrics.upkeep();
            }
            round += 1;
        }
    }

    fn end_overdue(self: &Arc<Self>) {
        let now = Instant::now();
        for session in self.sessions.overdue(now) {
            let why = format!("there was no heartbeat for {:?}", session.heartbeat);
            // A heartbeat may have come in between.
            let Some(ids) = self.sessions.end_overdue(&session, now, &why) else { continue };
            self.metrics.session_ended("heartbeat");
            for lease in ids.iter().filter_map(|id| self.leases.by_id(id)) {
                // It is released in the background.
                self.begin_release(&lease, Ending::Session(why.clone()));
                self.metrics.lease_lost(lease.kind, "heartbeat");
                self.observer.count_loss();
            }
        }
    }

    /// Returns when to look again.
    fn end_lost(&self) -> Duration {
        let mut next = LOOK;
        for lease in self.leases.live() {
            self.end_if_lost(&lease);
            // A lease that is being released has no time left.
            if let Some(remaining) = Some(lease.remaining()).filter(|remaining| !remaining.is_zero())
                && lease.session.is_some()
            {
                next = next.min(remaining);
            }
        }
        next.max(SHORTEST_LOOK)
    }

    /// Looks for losses that no sweep has found yet.
    pub(crate) fn end_lost_of(&self, session: &Session) {
        for lease in session.leases().iter().filter_map(|id| self.leases.by_id(id)) {
            self.end_if_lost(&lease);
        }
    }

    /// The same for the leases of a lock.
    pub(crate) fn end_lost_at(&self, kind: Kind, name: &str) {
        for lease in self.leases.live().iter().filter(|lease| lease.kind == kind && lease.name == name) {
            self.end_if_lost(lease);
        }
    }

    fn end_if_lost(&self, lease: &Lease) {
        let Some(reason) = self.leases.end_if_lost(lease) else { return };
        self.metrics.lease_lost(lease.kind, "store");
        self.observer.count_loss();
        if let Some(session) = self.session_of(lease) {
            session.lose(LostLease {
                lease: lease.id.as_str().to_owned(),
                kind: lease.kind.to_string(),
                name: lease.name.clone(),
                token: lease.token.get(),
                reason,
            });
        }
    }
}
