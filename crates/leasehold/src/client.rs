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
use crate::engine::clock;
use crate::engine::driver;
use crate::engine::{Session, Sleep};
use crate::error::{Error, ErrorKind};
use crate::handle::{Handle, resource_of};
use crate::inspect::{HolderInfo, LockInfo};
use crate::locks::barrier::Barrier;
use crate::locks::election::Election;
use crate::locks::latch::Latch;
use crate::locks::mutex::Mutex;
use crate::locks::once_per::OncePer;
use crate::locks::reentrant::ReentrantMutex;
use crate::locks::rw::RwLock;
use crate::locks::semaphore::Semaphore;
use crate::metadata::HolderMetadata;
use crate::store::{self, Inbox, Store};
use crate::url::StoreUrl;

/// One process's connection to a store. Cloning is cheap, and all clones are one client.
///
/// A client owns one thread, which renews its leases, notices losses, and gives back what was dropped. It ends by
/// itself after the last clone, lock and guard are gone. A process that forks without `exec` must not use a client
/// of its parent.
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
    /// `docs/operations.md` has the parameters of each.
    ///
    /// In a tokio runtime (with its timers and sockets enabled) the caller's commands go out from its own tasks.
    ///
    /// # Errors
    ///
    /// `is_invalid` and `is_unsupported` for an address that can't be used, `is_unavailable` when the store can't be
    /// opened: the message names its path and says what to do.
    ///
    /// # Cancel safety
    ///
    /// Nothing is left when it is dropped early.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_from(url, runtime::Handle::try_current().ok()).await
    }

    /// Connects with a client of the [`redis`](crate::redis) crate, for what an address can't say: certificates that are in no
    /// file, a name that resolves in a way of its own. It makes connections of its own; those of the caller are not used.
    ///
    /// # Errors
    ///
    /// `is_unavailable`: the message names the address.
    ///
    /// # Cancel safety
    ///
    /// Nothing is left when it is dropped early.
    pub async fn from_redis_client(redis: redis::Client) -> Result<Self, Error> {
        let caller = runtime::Handle::try_current().ok();
        let shown = format!("redis://{}", redis.get_connection_info().addr());
        let open = move |id, inbox| async move { store::open_own(&redis, id, inbox, caller).await };
        Self::with_store(shown, open).await
    }

    /// With a connection of the caller's own on its runtime, where it has one that nobody blocks.
    pub(crate) async fn connect_from(url: &str, caller: Option<runtime::Handle>) -> Result<Self, Error> {
        Self::connect_to(StoreUrl::parse(url)?, caller).await
    }

    pub(crate) async fn connect_to(url: StoreUrl, caller: Option<runtime::Handle>) -> Result<Self, Error> {
        let opened = url.clone();
        let open = move |id, inbox| async move { store::open(&opened, id, inbox, caller).await };
        Self::with_store(url.to_string(), open).await
    }

    /// What an operator should know about the store, in plain words: none where there is nothing to worry about.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.handle.store.warnings()
    }

    /// Looks at everything in the store that locks depend on, and says what is dangerous for them and what to do: versions,
    /// settings, clocks, rights, what a lock costs. It takes some tens of milliseconds for each server.
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
    /// It changes no setting. On a Redis server it takes and releases a lock of its own, whose few bytes are deleted in the
    /// end; dropped before that, they expire within an hour.
    pub async fn diagnose(&self) -> Result<Diagnosis, Error> {
        let handle = &self.handle;
        handle
            .store
            .diagnose()
            .await
            .map_err(|error| Error::new(ErrorKind::Unavailable, format!("{}: {}", handle.url, error.message)))
    }

    /// Whether the store keeps nothing for this client, as far as it knows.
    #[cfg(test)]
    pub(crate) fn is_settled(&self) -> bool {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        self.handle.session.poll_closed(&mut context).is_ready()
    }

    pub(crate) async fn with_store<O, F>(url: String, open: O) -> Result<Self, Error>
    where
        O: FnOnce(ClientId, Weak<dyn Inbox>) -> F + Send + 'static,
        F: Future<Output = Result<Arc<dyn Store>, Error>>,
    {
        let session = Arc::new(Session::new(random_id()?));
        let inbox: Arc<dyn Inbox> = session.clone();
        let (id, inbox) = (session.id, Arc::downgrade(&inbox));
        let (tell, told) = oneshot::channel();
        let start =
            driver::start(session.clone(), move || open(id, inbox), move |ready| tell.send(ready).is_ok());
        start.map_err(Error::from)?;
        let store = told.await.map_err(|_| {
            Error::new(ErrorKind::Unavailable, format!("the client's thread for {url} ended unexpectedly"))
        })??;
        tracing::debug!(store = %url, client = %session.id, "connected");
        let metadata = HolderMetadata::this_process();
        let encoded_metadata = metadata.encode();
        Ok(Self { handle: Arc::new(Handle { session, store, url, metadata, encoded_metadata }) })
    }

    /// A lock with one holder at a time. Nothing is sent; a name that can't be one (empty, more than 512 bytes,
    /// control characters) is reported when it is used.
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex::new(self.handle.clone(), name.as_ref())
    }

    /// The mutex of that name for somebody who may hold it more than once, from several tasks or processes. As
    /// [`Self::mutex`], nothing is sent.
    pub fn reentrant_mutex(&self, name: impl AsRef<str>, owner: impl AsRef<str>) -> ReentrantMutex {
        ReentrantMutex::new(self.handle.clone(), name.as_ref(), owner.as_ref())
    }

    /// This many permits that holders share. As [`Self::mutex`], nothing is sent.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore::new(self.handle.clone(), name.as_ref(), permits)
    }

    /// Many readers, or one writer. As [`Self::mutex`], nothing is sent.
    pub fn rw_lock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock::new(self.handle.clone(), name.as_ref())
    }

    /// One leader at a time. As [`Self::mutex`], nothing is sent.
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(self.handle.clone(), name.as_ref())
    }

    /// A number that is counted down to zero. As [`Self::mutex`], nothing is sent.
    pub fn latch(&self, name: impl AsRef<str>, count: u32) -> Latch {
        Latch::new(self.handle.clone(), name.as_ref(), count)
    }

    /// Work that one of many starts in each period, under the mutex of that name. As [`Self::mutex`], nothing is sent.
    pub fn once_per(&self, name: impl AsRef<str>, period: Duration) -> OncePer {
        OncePer::new(self.handle.clone(), name.as_ref(), period)
    }

    /// A place where this many parties wait for each other. As [`Self::mutex`], nothing is sent.
    pub fn barrier(&self, name: impl AsRef<str>, parties: u32) -> Barrier {
        Barrier::new(self.handle.clone(), name.as_ref(), parties)
    }

    /// What is held or waited for in this store, in the order of the names.
    ///
    /// # Errors
    ///
    /// `is_unavailable`.
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn list(&self) -> Result<Vec<LockInfo>, Error> {
        let handle = &self.handle;
        let resources = handle.store.list().await;
        let resources = resources.map_err(|error| {
            Error::new(ErrorKind::Unavailable, format!("{}: {}", handle.url, error.message))
        })?;
        let mut views = Vec::new();
        for resource in resources {
            let view = handle.inspect(resource).await?;
            if !view.holders.is_empty() || !view.waiters.is_empty() {
                views.push(view);
            }
        }
        Ok(views)
    }

    /// Who holds and who waits, for a lock of any kind.
    ///
    /// # Errors
    ///
    /// `is_invalid` for the name; `is_unavailable`.
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn inspect(&self, kind: Kind, name: impl AsRef<str>) -> Result<LockInfo, Error> {
        self.handle.inspect(resource_of(kind, name.as_ref())?).await
    }

    /// Takes a lock of any kind away from whoever holds it, as [`Mutex::force_release`] does.
    ///
    /// # Errors
    ///
    /// As [`Self::inspect`].
    pub async fn force_release(&self, kind: Kind, name: impl AsRef<str>) -> Result<Vec<HolderInfo>, Error> {
        self.handle.force_release(resource_of(kind, name.as_ref())?).await
    }

    /// Gives back everything that this client holds or waits for, also in its clones, and waits until the store has
    /// taken it back. What is held is lost for its guards (`Loss::Closed`); whoever waits gets an error with `is_closed`. Both
    /// happen at once.
    ///
    /// A store that does not answer is waited for as long as the longest of the leases lasts, and for 2 s at least.
    ///
    /// # Errors
    ///
    /// `is_unavailable` when the store could not be told. The leases that were held have run out by then; places in queues do
    /// so by themselves.
    ///
    /// # Cancel safety
    ///
    /// The client is closed at the first poll; dropping the future only ends the waiting.
    pub async fn close(self) -> Result<(), Error> {
        self.handle.session.close(clock::local());
        self.closed().await
    }

    /// As [`Self::close`], and waits for at most this long. With zero it only begins.
    ///
    /// # Errors
    ///
    /// `is_unavailable` as there, and `is_timeout` when the limit has passed; then it goes on in the background.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::close`].
    pub async fn close_timeout(self, limit: Duration) -> Result<(), Error> {
        let session = &self.handle.session;
        session.close(clock::local());
        let mut limit = pin!(Sleep::until(session, clock::local() + limit));
        let mut closed = pin!(self.closed());
        poll_fn(|context| match closed.as_mut().poll(context) {
            Poll::Ready(closed) => Poll::Ready(closed),
            Poll::Pending => limit.as_mut().poll(context).map(|()| {
                let what =
                    "what it holds could not be given back within the time set, which is being tried on";
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
                    "{}: {count} leases or places could not be given back and were left to run out",
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
