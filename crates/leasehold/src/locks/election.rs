//! One leader at a time, visible to every client.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use leasehold_core::{Acquisition, Kind, LocalTime};

use crate::engine::Sleep;
#[cfg(feature = "blocking")]
use crate::engine::with_deadline;
use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::inspect::{HolderInfo, LockInfo};
use crate::locks::lock::Lock;
use crate::options::settings;

/// How often an observer polls by default.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// One leader at a time. Created by [`Client::election`](crate::Client::election).
///
/// Candidates wait in a FIFO queue. The guard represents the leadership; releasing it resigns. The [`label`](Self::label)
/// publishes information about the leader, for example its address.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let election = client.election("scheduler").label("http://10.0.0.7:8080");
/// let mut observer = election.observe();
/// assert!(observer.next().await?.is_none()); // no leader yet
///
/// let leadership = election.campaign().await?;
/// let leader = observer.next().await?.unwrap(); // waits for a change
/// assert_eq!(leader.metadata.label.as_deref(), Some("http://10.0.0.7:8080"));
/// leadership.release().await?; // resigns
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Election(Lock);

settings!(Election, "election(\"scheduler\")");

impl Election {
    pub(crate) fn new(handle: Arc<Handle>, name: &str) -> Self {
        Self(Lock::new(handle, Kind::Election, name, 1))
    }

    /// Also takes the lock of another library on the same Redis server, so that programs with that library and programs with
    /// leasehold exclude each other. [The guide](https://github.com/leasehold/leasehold/blob/main/docs/bridges.md) has the libraries, and [`crate::bridge`] how it works.
    ///
    /// The foreign lock is taken after this one and released before it, and its loss is the loss of the guard
    /// ([`Loss::Bridge`](crate::Loss::Bridge)). [`Self::try_campaign`] returns `None` if another leasehold
    /// client waits for the foreign lock.
    ///
    /// A guard begins with at most 3 s of [`remaining`](Guard::remaining), and the first renewal makes it the whole ttl. Fencing tokens
    /// order only the programs that use leasehold. Tasks of one client do not hand a bridged lock off among themselves.
    /// [`auto_renew(false)`](Self::auto_renew) and [`min_hold`](Self::min_hold) are invalid with it. The store must be Redis, or,
    /// for a lock on which several servers vote, a quorum.
    ///
    /// ```no_run
    /// # leasehold::doc_test(async {
    /// use leasehold::bridge::Foreign;
    ///
    /// let client = leasehold::Client::connect("redis://127.0.0.1").await?;
    /// let scheduler = client.election("scheduler").bridge(Foreign::redis_py("scheduler"));
    /// let leadership = scheduler.campaign().await?;
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn bridge(mut self, foreign: crate::bridge::Foreign) -> Self {
        self.0.set_bridge(foreign);
        self
    }

    /// Waits for the leadership without a limit.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let leadership = client.election("scheduler").campaign().await?;
    /// leadership.run(async { /* lead until the lease is lost */ }).await?;
    /// leadership.release().await?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for an invalid name or option; `is_unavailable` if the store did not respond;
    /// `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the wait is cancelled and a granted lease is released.
    pub async fn campaign(&self) -> Result<Guard, Error> {
        self.0.lock(1).await
    }

    /// Acquires the leadership if there is no leader now; otherwise returns `None`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let election = client.election("scheduler");
    /// let leadership = election.try_campaign().await?;
    /// assert!(leadership.is_some() && election.try_campaign().await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::campaign`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::campaign`].
    pub async fn try_campaign(&self) -> Result<Option<Guard>, Error> {
        self.0.try_lock(1).await
    }

    /// Waits at most `limit` for the leadership; returns `None` at the limit: as [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let election = client.election("scheduler");
    /// assert!(election.campaign_timeout(Duration::from_secs(1)).await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::campaign`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::campaign`].
    pub async fn campaign_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        self.0.lock_timeout(1, limit).await
    }

    /// The current leader, or `None` if there is none.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let election = client.election("scheduler");
    /// assert!(election.leader().await?.is_none());
    /// let leadership = election.campaign().await?;
    /// assert_eq!(election.leader().await?.unwrap().token, leadership.token());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for the name; `is_unavailable`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn leader(&self) -> Result<Option<HolderInfo>, Error> {
        Ok(leader_in(self.inspect().await?))
    }

    /// Polls until the leader differs from `seen`, and returns it. The first poll is not before this time.
    async fn change(
        self,
        every: Duration,
        seen: Option<Option<Acquisition>>,
        not_before: LocalTime,
    ) -> Result<Option<HolderInfo>, Error> {
        let handle = &self.0.handle;
        Sleep::until(&handle.session, not_before).await;
        loop {
            if handle.session.is_closed() {
                return Err(handle.closed());
            }
            let is_new =
                |leader: &Option<HolderInfo>| seen != Some(leader.as_ref().map(|leader| leader.acquisition));
            if is_new(&leader_in(self.0.look_up().await?)) {
                let leader = self.leader().await?;
                if is_new(&leader) {
                    return Ok(leader);
                }
            }
            Sleep::until(&handle.session, handle.now() + every).await;
        }
    }

    /// Creates an observer of the leader. It polls once a second; [`Observer::every`] changes the interval.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let mut observer = client.election("scheduler").observe();
    /// assert!(observer.next().await?.is_none());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn observe(&self) -> Observer {
        Observer {
            election: self.clone(),
            every: POLL_INTERVAL,
            seen: None,
            not_before: LocalTime::default(),
            pending: None,
            is_over: false,
        }
    }
}

fn leader_in(info: LockInfo) -> Option<HolderInfo> {
    info.holders.into_iter().find(|holder| !holder.retained)
}

/// Reports changes of the leader, by [`next`](Self::next) or as a [`Stream`]. Created by [`Election::observe`].
///
/// An observer polls. If a leader is elected and resigns between two polls, it is not reported. The stream yields
/// the results of [`next`](Self::next), including errors, and ends after the error `is_closed`.
///
/// ```
/// # leasehold::doc_test(async {
/// use futures_util::{StreamExt as _, TryStreamExt as _};
///
/// # let client = leasehold::Client::connect("memory:").await?;
/// let election = client.election("scheduler").label("http://10.0.0.7:8080");
/// let leadership = election.campaign().await?;
/// let leaders = election.observe().map_ok(|leader| leader.and_then(|leader| leader.metadata.label));
/// let addresses: Vec<Option<String>> = leaders.take(1).try_collect().await?;
/// assert_eq!(addresses, [Some("http://10.0.0.7:8080".to_owned())]);
/// # leadership.release().await?;
/// # Ok(()) });
/// ```
pub struct Observer {
    election: Election,
    every: Duration,
    /// The last report: none yet, no leader, or a leader.
    seen: Option<Option<Acquisition>>,
    /// The time of the next poll after one that has failed.
    not_before: LocalTime,
    /// The poll in progress, kept between two calls of the stream's `poll_next`.
    pending: Option<PendingChange>,
    /// The stream has ended.
    is_over: bool,
}

/// It is never locked: the mutex only makes an observer `Sync`.
type PendingChange = Mutex<Pin<Box<dyn Future<Output = Result<Option<HolderInfo>, Error>> + Send>>>;

impl Observer {
    /// Sets the interval between two polls: 1 s by default, at least 10 ms.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let observer = client.election("scheduler").observe().every(Duration::from_millis(200));
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn every(mut self, every: Duration) -> Self {
        self.every = every.max(Duration::from_millis(10));
        self
    }

    /// The first call returns the current leader. Later calls wait until the leader differs from the last one returned.
    /// `None` means that there is no leader.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let election = client.election("scheduler").label("http://10.0.0.7:8080");
    /// let mut observer = election.observe();
    /// let leadership = election.campaign().await?;
    /// let leader = observer.next().await?.expect("a leader");
    /// assert_eq!(leader.metadata.label.as_deref(), Some("http://10.0.0.7:8080"));
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for the name; `is_closed`; `is_unavailable`, after which `next` can be called again.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads, and a change that was not returned is returned by the next call.
    pub async fn next(&mut self) -> Result<Option<HolderInfo>, Error> {
        // A poll that an earlier, dropped call began may be outdated.
        self.pending = None;
        poll_fn(|context| self.poll_change(context)).await
    }

    /// As `next`; `None` if the leader has not changed within `limit`.
    #[cfg(feature = "blocking")]
    pub(crate) async fn next_within(&mut self, limit: Duration) -> Option<Result<Option<HolderInfo>, Error>> {
        let handle = self.election.0.handle.clone();
        let until = handle.now() + limit;
        with_deadline(&handle.session, Some(until), self.next()).await
    }

    fn poll_change(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<HolderInfo>, Error>> {
        let Self { election, every, seen, not_before, .. } = self;
        let begin = || PendingChange::new(Box::pin(election.clone().change(*every, *seen, *not_before)));
        let pending = self.pending.get_or_insert_with(begin).get_mut();
        let change = ready!(pending.unwrap_or_else(PoisonError::into_inner).as_mut().poll(context));
        self.pending = None;
        match &change {
            Ok(leader) => self.seen = Some(leader.as_ref().map(|leader| leader.acquisition)),
            Err(_) => self.not_before = self.election.0.handle.now() + self.every,
        }
        Poll::Ready(change)
    }
}

impl Stream for Observer {
    type Item = Result<Option<HolderInfo>, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let change = ready!(self.poll_change(context));
        self.is_over = change.as_ref().is_err_and(Error::is_closed);
        Poll::Ready(Some(change))
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observer({:?} every {:?})", self.election, self.every)
    }
}
