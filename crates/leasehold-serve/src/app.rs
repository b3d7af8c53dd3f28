//! What all requests share. The server keeps no lease: the store has them, and their ids say all that is needed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::Client;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::caller::Caller;
use crate::config::{Limits, Notices};
use crate::metrics::Metrics;
use crate::observer::Observer;
use crate::problem::{Code, Problem};
use crate::requests::Requests;
use crate::shares::{Share, Shares, WaitPermit};
use crate::tokens::Tokens;

/// Metrics are added up as often as this.
const UPKEEP: Duration = Duration::from_secs(5);

/// The state of a server.
pub(crate) struct App {
    pub(crate) client: Client,
    pub(crate) requests: Requests,
    pub(crate) observer: Observer,
    pub(crate) metrics: Metrics,
    /// Those that are accepted now.
    pub(crate) tokens: watch::Sender<Tokens>,
    pub(crate) limits: Limits,
    pub(crate) notices: Notices,
    /// Places of requests that acquire.
    waits: Arc<Semaphore>,
    /// Those of each token.
    wait_shares: Shares,
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
            requests: Requests::default(),
            waits: Arc::new(Semaphore::new(limits.waits.min(Semaphore::MAX_PERMITS))),
            metrics: Metrics::new(),
            tokens: watch::Sender::new(tokens),
            limits,
            notices: Notices::default(),
            wait_shares: Shares::default(),
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

    /// A place for a request that acquires.
    pub(crate) fn reserve(&self, caller: &Caller) -> Result<WaitPermit, Problem> {
        let limit = self.limits.waits;
        let of_token = self.token_share(caller, &self.wait_shares, limit, "requests acquire or wait")?;
        let of_all = self.waits.clone().try_acquire_owned().map_err(|_| {
            Problem::new(Code::LimitReached, format!("{limit} requests acquire or wait, which is the limit"))
        })?;
        Ok(WaitPermit { _of_all: of_all, _of_token: of_token })
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

    /// Adds the samples of metrics up, until the server stops.
    pub(crate) async fn keep_up(&self) {
        while timeout(UPKEEP, self.stopping.cancelled()).await.is_err() {
            self.metrics.upkeep();
        }
    }
}
