//! The connection to a store.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{ClientId, Kind};
use tokio::runtime;
use tokio::sync::oneshot;

use crate::diagnostics::Diagnosis;
use crate::engine::clock::Clock;
use crate::engine::driver;
use crate::engine::manual::ManualClock;
use crate::engine::{Session, Sleep};
use crate::error::{Error, ErrorKind};
use crate::handle::{ClientOptions, Handle, resource_of};
use crate::inspect::{HolderInfo, LockInfo};
use crate::locks::barrier::Barrier;
use crate::locks::election::Election;
use crate::locks::latch::Latch;
use crate::locks::mutex::Mutex;
use crate::locks::once_per::OncePer;
use crate::locks::reentrant::ReentrantMutex;
use crate::locks::rw::RwLock;
use crate::locks::semaphore::Semaphore;
use crate::store::{self, Inbox};
use crate::url::StoreUrl;

/// A connection to a store. Cloning is cheap, and all clones are one client.
///
/// A client owns one thread, which renews its leases, detects losses, and releases dropped guards. The thread ends after the
/// last clone, lock and guard are dropped. A process that forks without `exec` must not use a client of its parent.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let orders = client.mutex("orders:42");
/// let guard = orders.lock().await?;
/// println!("token {}, {:?} left", guard.token(), guard.remaining());
/// guard.release().await?;
/// client.close().await?;
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) handle: Arc<Handle>,
}

impl Client {
    /// Connects to a store: `memory:`, `memory:NAME` (shared by the clients of this process that name it),
    /// `sqlite:PATH` (shared by the processes of this machine), or Redis: `redis://[user:password@]host[:port][/database]`,
    /// `rediss://…` (TLS), `redis+unix:///PATH`, `redis-sentinel://host[:port],…/service`, `redis-cluster://host[:port],…`; and
    /// `redlock://host[:port],…`, several servers that vote, as [`Redlock`](crate::Redlock).
    /// [The guide](crate::guide::operations#addresses) has the parameters of each. [`Client::builder`] has more settings.
    ///
    /// In a tokio runtime (with its timers and sockets enabled) the caller's commands go out from its own tasks.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// use leasehold::Client;
    ///
    /// let (one, other) = (Client::connect("memory:jobs").await?, Client::connect("memory:jobs").await?);
    /// let guard = one.mutex("import").lock().await?;
    /// assert!(other.mutex("import").try_lock().await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` and `is_unsupported` for an address that can't be used, `is_unavailable` when the store can't be
    /// opened: the message names its path and says what to do.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped early, nothing is left.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_from(url, runtime::Handle::try_current().ok()).await
    }

    pub(crate) async fn connect_to(url: StoreUrl, caller: Option<runtime::Handle>) -> Result<Self, Error> {
        let opened = url.clone();
        let open = move |id, inbox| async move { store::open(&opened, id, inbox, caller).await };
        Self::with_options(url.to_string(), ClientOptions::default(), open).await
    }

    /// Warnings about the store for an operator; empty if there are none. Nothing is sent: they are from the time of the connect.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// for warning in client.warnings() {
    ///     eprintln!("warning: {warning}");
    /// }
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.handle.store.warnings()
    }

    /// Checks the store for settings that make locks unsafe, and returns the fix for each: versions, settings, clocks, access
    /// rights, and the cost of a lock. It takes some tens of milliseconds per server.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// let client = leasehold::Client::connect("memory:").await?;
    /// assert!(!client.diagnose().await?.is_dangerous());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable`.
    ///
    /// # Cancel safety
    ///
    /// It changes no setting. On a Redis server it acquires and releases a lock of its own and deletes its keys. If the future
    /// is dropped before that, the keys expire within an hour.
    pub async fn diagnose(&self) -> Result<Diagnosis, Error> {
        let handle = &self.handle;
        handle.store.diagnose().await.map_err(|error| Error::from_store(&handle.url, &error))
    }

    /// Whether the store keeps nothing for this client, as far as it knows.
    #[cfg(test)]
    pub(crate) fn is_settled(&self) -> bool {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        self.handle.session.poll_closed(&mut context).is_ready()
    }

    /// A client of a clock that a test moves. It has no thread.
    pub(crate) fn with_manual_clock(
        clock: &Arc<ManualClock>,
        open: impl FnOnce(ClientId, Weak<dyn Inbox>) -> Arc<dyn store::Store>,
    ) -> Result<Self, Error> {
        let session = Arc::new(Session::new(random_id()?, Clock::Manual(clock.clone())));
        let inbox: Arc<dyn Inbox> = session.clone();
        let store = open(session.id, Arc::downgrade(&inbox));
        driver::start_manual(clock, session.clone(), store.clone());
        let handle = Handle::new(session, store, "memory:".to_owned(), ClientOptions::default());
        Ok(Self { handle: Arc::new(handle) })
    }

    /// A client of the simulation, which drives it.
    #[cfg(feature = "_simulation")]
    pub(crate) fn simulated(session: Arc<Session>, store: Arc<dyn store::Store>) -> Self {
        // The host and the process id would differ from run to run.
        let metadata = crate::metadata::HolderMetadata::default();
        let options = ClientOptions { metadata, ..ClientOptions::default() };
        Self { handle: Arc::new(Handle::new(session, store, "simulated:".to_owned(), options)) }
    }

    #[cfg(test)]
    pub(crate) async fn with_store<O, F>(url: String, open: O) -> Result<Self, Error>
    where
        O: FnOnce(ClientId, Weak<dyn Inbox>) -> F + Send + 'static,
        F: Future<Output = Result<Arc<dyn store::Store>, Error>>,
    {
        Self::with_options(url, ClientOptions::default(), open).await
    }

    pub(crate) async fn with_options<O, F>(
        url: String,
        options: ClientOptions,
        open: O,
    ) -> Result<Self, Error>
    where
        O: FnOnce(ClientId, Weak<dyn Inbox>) -> F + Send + 'static,
        F: Future<Output = Result<Arc<dyn store::Store>, Error>>,
    {
        let session = Arc::new(Session::new(random_id()?, Clock::System));
        let inbox: Arc<dyn Inbox> = session.clone();
        let (id, inbox) = (session.id, Arc::downgrade(&inbox));
        let (tell, told) = oneshot::channel();
        let (limit, shown) = (options.connect_timeout, url.clone());
        let open = move || async move {
            let Some(limit) = limit else { return open(id, inbox).await };
            let late = |_| {
                let what = format!("{shown}: not connected within {limit:?}");
                Err(Error::new(ErrorKind::Timeout, what))
            };
            tokio::time::timeout(limit, open(id, inbox)).await.unwrap_or_else(late)
        };
        let start = driver::start(session.clone(), open, move |ready| tell.send(ready).is_ok());
        start.map_err(Error::from)?;
        let store = told.await.map_err(|_| {
            Error::new(ErrorKind::Unavailable, format!("the client's thread for {url} ended unexpectedly"))
        })??;
        tracing::debug!(store = %url, client = %session.id, "connected");
        Ok(Self { handle: Arc::new(Handle::new(session, store, url, options)) })
    }

    /// A lock with one holder at a time. Nothing is sent. An invalid name (empty, longer than 512 bytes, or with control
    /// characters) is reported when the lock is used.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// # Ok(()) });
    /// ```
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex::new(self.handle.clone(), name.as_ref())
    }

    /// The mutex of that name for a named owner, which may hold it more than once, from several tasks or processes. As
    /// [`Self::mutex`], nothing is sent.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.reentrant_mutex("account:7", "request-93ab").lock().await?;
    /// # Ok(()) });
    /// ```
    pub fn reentrant_mutex(&self, name: impl AsRef<str>, owner: impl AsRef<str>) -> ReentrantMutex {
        ReentrantMutex::new(self.handle.clone(), name.as_ref(), owner.as_ref())
    }

    /// A semaphore with this many permits, at least 1. As [`Self::mutex`], nothing is sent.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.semaphore("uploads", 3).acquire(1).await?;
    /// # Ok(()) });
    /// ```
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore::new(self.handle.clone(), name.as_ref(), permits)
    }

    /// A lock with many readers or one writer. As [`Self::mutex`], nothing is sent.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.rw_lock("prices").read().await?;
    /// # Ok(()) });
    /// ```
    pub fn rw_lock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock::new(self.handle.clone(), name.as_ref())
    }

    /// An election with one leader at a time. As [`Self::mutex`], nothing is sent.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let leadership = client.election("scheduler").campaign().await?;
    /// # Ok(()) });
    /// ```
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(self.handle.clone(), name.as_ref())
    }

    /// A latch that opens after this many counts. As [`Self::mutex`], nothing is sent.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// assert_eq!(client.latch("imported", 3).count_down().await?, 2);
    /// # Ok(()) });
    /// ```
    pub fn latch(&self, name: impl AsRef<str>, count: u32) -> Latch {
        Latch::new(self.handle.clone(), name.as_ref(), count)
    }

    /// Work that one of many candidates starts in each period, under the mutex of that name. The period is 1 s to 33 days. As
    /// [`Self::mutex`], nothing is sent.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let day = Duration::from_secs(86_400);
    /// assert!(client.once_per("report", day).start().await?.is_some());
    /// # Ok(()) });
    /// ```
    pub fn once_per(&self, name: impl AsRef<str>, period: Duration) -> OncePer {
        OncePer::new(self.handle.clone(), name.as_ref(), period)
    }

    /// A barrier at which this many parties wait for each other, 1 to 65,534. As [`Self::mutex`], nothing is sent.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// client.barrier("loaded", 1).wait().await?;
    /// # Ok(()) });
    /// ```
    pub fn barrier(&self, name: impl AsRef<str>, parties: u32) -> Barrier {
        Barrier::new(self.handle.clone(), name.as_ref(), parties)
    }

    /// All locks of this store with a holder or a waiter, ordered by name. On Redis it costs one round trip per 1,000 keys of
    /// each node, and one more. What it shows is no snapshot: locks may change while it reads.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// for lock in client.list().await? {
    ///     println!("{} {}: {} holders, {} waiters", lock.kind, lock.name, lock.holders.len(), lock.waiters.len());
    /// }
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn list(&self) -> Result<Vec<LockInfo>, Error> {
        let handle = &self.handle;
        let mut views = match handle.store.inspect_all() {
            Some(answers) => {
                let answers = answers.await.map_err(|error| Error::from_store(&handle.url, &error))?;
                let view = |(resource, answer)| handle.view(&resource, answer);
                answers.into_iter().map(view).collect::<Result<Vec<_>, _>>()?
            }
            None => {
                let resources = handle.store.list().await;
                let resources = resources.map_err(|error| Error::from_store(&handle.url, &error))?;
                let mut views = Vec::with_capacity(resources.len());
                for resource in resources {
                    views.push(handle.inspect(resource).await?);
                }
                views
            }
        };
        views.retain(|view| !view.holders.is_empty() || !view.waiters.is_empty());
        Ok(views)
    }

    /// The holders and waiters of a lock of any kind.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// let info = client.inspect(leasehold::Kind::Mutex, "orders:42").await?;
    /// assert_eq!(info.holders[0].token, guard.token());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for the name; `is_unavailable`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn inspect(&self, kind: Kind, name: impl AsRef<str>) -> Result<LockInfo, Error> {
        self.handle.inspect(resource_of(kind, name.as_ref())?).await
    }

    /// Releases a lock of any kind by force, as [`Mutex::force_release`]. Returns the former holders.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// let former = client.force_release(leasehold::Kind::Mutex, "orders:42").await?;
    /// assert_eq!(former[0].token, guard.token());
    /// guard.lost().await; // the holder is notified
    /// assert!(!guard.is_held());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::inspect`].
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock may or may not have been released.
    pub async fn force_release(&self, kind: Kind, name: impl AsRef<str>) -> Result<Vec<HolderInfo>, Error> {
        self.handle.force_release(resource_of(kind, name.as_ref())?).await
    }

    /// Releases every lease and cancels every wait of this client and its clones, and waits until the store has confirmed it.
    /// Guards lose their leases (`Loss::Closed`) and waiters get an error with `is_closed`, both at once.
    ///
    /// If the store does not answer, this waits until the longest of the leases has expired, and at least 2 s; no longer than
    /// [`ClientBuilder::close_timeout`](crate::ClientBuilder::close_timeout), if that is set.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// client.close().await?;
    /// assert!(!guard.is_held());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable` if the store did not confirm everything. The leases have expired by then; places in wait queues expire
    /// by themselves. `is_timeout` with a time limit of the builder.
    ///
    /// # Cancel safety
    ///
    /// The client is closed at the first poll. Dropping the future only ends the wait.
    pub async fn close(self) -> Result<(), Error> {
        if let Some(limit) = self.handle.options.close_timeout {
            return self.close_timeout(limit).await;
        }
        self.handle.session.close(self.handle.now());
        self.closed().await
    }

    /// As [`Self::close`], but waits at most `limit`. With zero it closes the client and does not wait.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// client.close_timeout(Duration::from_secs(2)).await?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable` as there; `is_timeout` when the limit has passed. Releases then continue in the background.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::close`].
    pub async fn close_timeout(self, limit: Duration) -> Result<(), Error> {
        let session = &self.handle.session;
        session.close(session.now());
        let mut limit = pin!(Sleep::until(session, session.now() + limit));
        let mut closed = pin!(self.closed());
        poll_fn(|context| match closed.as_mut().poll(context) {
            Poll::Ready(closed) => Poll::Ready(closed),
            Poll::Pending => limit.as_mut().poll(context).map(|()| {
                let what =
                    "not everything was released within the limit; releases are retried in the background";
                Err(Error::new(ErrorKind::Timeout, format!("{}: {what}", self.handle.url)))
            }),
        })
        .await
    }

    async fn closed(&self) -> Result<(), Error> {
        let session = &self.handle.session;
        let unanswered = poll_fn(|context| session.poll_closed(context)).await;
        poll_fn(|context| session.poll_driver_gone(context)).await;
        match unanswered {
            0 => Ok(()),
            count => Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{}: {count} leases or waiters not released; they expire by themselves",
                    self.handle.url
                ),
            )),
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({} on {})", self.handle.session.id, self.handle.url)
    }
}

fn random_id() -> Result<ClientId, Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Unavailable, format!("the system gave no random numbers: {error}"))
    })?;
    Ok(ClientId::new(u128::from_be_bytes(bytes)))
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::new(ErrorKind::Unavailable, format!("the client's thread could not be started: {error}"))
            .with_source(error)
    }
}
