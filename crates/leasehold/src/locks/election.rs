//! One leader at a time, whom everybody can know.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use leasehold_core::{Acquisition, Kind};

use crate::engine::Sleep;
use crate::engine::clock;
use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::inspect::HolderInfo;
use crate::locks::lock::Lock;
use crate::options::settings;

/// How often an observer looks unless it is told otherwise.
const LOOK: Duration = Duration::from_secs(1);

/// One leader at a time, and how to become it. Created by [`Client::election`](crate::Client::election).
///
/// Whoever campaigns queues; the guard is the leadership, and releasing it is to resign. The
/// [`label`](Self::label) tells everybody what there is to know about the leader, its address for instance.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let election = client.election("scheduler").label("http://10.0.0.7:8080");
/// let mut observer = election.observe();
/// assert!(observer.next().await?.is_none()); // nobody leads
///
/// let leadership = election.campaign().await?;
/// let leader = observer.next().await?.unwrap(); // waits for a change
/// assert_eq!(leader.metadata.label.as_deref(), Some("http://10.0.0.7:8080"));
/// leadership.release().await?; // resigns
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Election(Lock);

settings!(Election);

impl Election {
    pub(crate) fn new(handle: Arc<Handle>, name: &str) -> Self {
        Self(Lock::new(handle, Kind::Election, name, 1))
    }

    /// Waits to become the leader, for as long as it takes.
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

    /// Becomes the leader if there is none, and otherwise answers `None`.
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

    /// Waits to become the leader for at most this long, and then answers `None`.
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

    /// Who leads now.
    ///
    /// # Errors
    ///
    /// `is_invalid` for the name; `is_unavailable`.
    pub async fn leader(&self) -> Result<Option<HolderInfo>, Error> {
        Ok(self.inspect().await?.holders.into_iter().find(|holder| !holder.retained))
    }

    /// Who leads once that is not what was seen.
    async fn change(
        self,
        every: Duration,
        seen: Option<Option<Acquisition>>,
    ) -> Result<Option<HolderInfo>, Error> {
        let handle = &self.0.handle;
        loop {
            if handle.session.is_closed() {
                return Err(handle.closed());
            }
            let leader = self.leader().await?;
            if seen != Some(leader.as_ref().map(|leader| leader.acquisition)) {
                return Ok(leader);
            }
            Sleep::until(&handle.session, clock::local() + every).await;
        }
    }

    /// Tells each new leader. It looks once a second: see [`Observer::every`].
    #[must_use]
    pub fn observe(&self) -> Observer {
        Observer { election: self.clone(), every: LOOK, seen: None, looking: None, is_over: false }
    }
}

/// Tells each new leader, by [`next`](Self::next) or as a [`Stream`]. Created by [`Election::observe`].
///
/// Leaders that come and go between two looks are not told, only the one that there is then. As a stream it tells what
/// [`next`](Self::next) does, errors too, and ends when the client is closed, after that error.
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
    /// What was told last: nothing, that nobody leads, or a leader.
    seen: Option<Option<Acquisition>>,
    /// What a stream that is not ready goes on with when it is polled again.
    looking: Option<Looking>,
    /// The stream has ended.
    is_over: bool,
}

/// It is never locked: the mutex only makes an observer `Sync`.
type Looking = Mutex<Pin<Box<dyn Future<Output = Result<Option<HolderInfo>, Error>> + Send>>>;

impl Observer {
    /// How often it looks: once a second unless set. No less than 10 ms.
    #[must_use]
    pub fn every(mut self, every: Duration) -> Self {
        self.every = every.max(Duration::from_millis(10));
        self
    }

    /// Who leads: at once when asked for the first time, and then whenever that has changed. `None` is told when nobody
    /// does.
    ///
    /// # Errors
    ///
    /// `is_invalid` for the name; `is_unavailable`, after which it can be asked again; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// It only looks: a change that was not told is told the next time.
    pub async fn next(&mut self) -> Result<Option<HolderInfo>, Error> {
        // What an earlier call began to look at may be long ago.
        self.looking = None;
        poll_fn(|context| self.poll_change(context)).await
    }

    fn poll_change(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<HolderInfo>, Error>> {
        let Self { election, every, seen, .. } = self;
        let begin = || -> Looking { Box::pin(election.clone().change(*every, *seen)) };
        let looking = self.looking.get_or_insert_with(begin).get_mut();
        let looking = looking.unwrap_or_else(PoisonError::into_inner);
        let told = ready!(looking.as_mut().poll(context));
        self.looking = None;
        if let Ok(leader) = &told {
            self.seen = Some(leader.as_ref().map(|leader| leader.acquisition));
        }
        Poll::Ready(told)
    }
}

impl Stream for Observer {
    type Item = Result<Option<HolderInfo>, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let told = ready!(self.poll_change(context));
        self.is_over = told.as_ref().is_err_and(Error::is_closed);
        Poll::Ready(Some(told))
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observer({:?} every {:?})", self.election, self.every)
    }
}
