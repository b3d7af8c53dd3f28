//! The connection to a store.

mod kinds;
mod open;

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{Kind, Token};
use leasehold_store::digest::client_name;
use leasehold_store::{Diagnose, Diagnosis, diagnose, inspect_all};
use tokio::runtime;

use crate::engine::with_deadline;
use crate::error::{Error, ErrorKind};
use crate::handle::{Handle, resource_of};
use crate::inspect::{HolderInfo, LockInfo};

/// A connection to a store. Cloning is cheap; all clones are the same client.
///
/// A thread of the library renews its leases, detects losses, and releases dropped guards. All clients of a process share min(4, cores) such
/// threads, and each thread ends after the last clone, lock and guard of its clients are dropped. In a process
/// that was forked without `exec` a client of the parent fails ([`Error::is_forked`]), and its guards do nothing when they are dropped: connect
/// again there. The child learns of the fork when it connects, or by [`forked`](crate::forked).
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
    /// Connects to the store at this address:
    ///
    /// - `memory:`; `memory:NAME` is shared by the clients of this process that use the same NAME.
    /// - `sqlite:PATH`: shared by the processes of this machine.
    /// - `redis://[user:password@]host[:port][/database]`, `rediss://…` (TLS), `redis+unix:///PATH`,
    ///   `redis-sentinel://host[:port],…/service`, `redis-cluster://host[:port],…`.
    /// - `redlock://host[:port],…`: a quorum of servers, as [`Redlock`](crate::Redlock).
    /// - `postgres://[user:password@]host[:port]/database`, or `postgresql://…`: tables of a PostgreSQL database.
    ///
    /// [The guide](crate::guide::operations#addresses) lists the parameters of each. [`Client::builder`] has more settings.
    ///
    /// If this is called in a tokio runtime (with its timers and sockets enabled), the calling tasks send their
    /// commands to Redis themselves. Otherwise the client's thread sends them.
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
    /// `is_invalid` or `is_unsupported` for an address that can't be used; `is_unavailable` if the store can't be
    /// opened. The message names the address and the fix.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped early, nothing remains open.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_from(url, runtime::Handle::try_current().ok()).await
    }

    /// The address of the store, as messages show it: without its password.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// let client = leasehold::Client::connect("memory:jobs").await?;
    /// assert_eq!(client.address(), "memory:jobs");
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn address(&self) -> &str {
        &self.handle.url
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
        self.handle.store.doctor().map_or_else(Vec::new, Diagnose::warnings)
    }

    /// Has the function of [`ClientBuilder::credentials`](crate::ClientBuilder::credentials) called again for each server, and logs in with what
    /// it returns on all open connections to Redis: for an operator who has replaced a password. Does not wait for it. Without such a
    /// function it does nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// let client = leasehold::Client::connect("memory:").await?;
    /// client.refresh_credentials();
    /// # Ok(()) });
    /// ```
    pub fn refresh_credentials(&self) {
        if let Some(provider) = &self.handle.options.provider {
            provider.refresh();
        }
    }

    /// Checks the store for settings that make locks unsafe, and returns the fix for each. The checks include versions,
    /// settings, clocks, access rights, and the cost of a lock. They take some tens of milliseconds per server.
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
    /// `is_unavailable`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// No setting is changed. The call acquires and releases a test lock, and removes its keys or its row; those of `sqlite:` and
    /// `memory:` are removed after an hour. If the future is dropped before that, they expire within an hour.
    pub async fn diagnose(&self) -> Result<Diagnosis, Error> {
        let handle = &self.handle;
        handle.check_open()?;
        diagnose(&*handle.store).await.map_err(|error| Error::from_store(&handle.url, &error))
    }

    /// Whether the store keeps nothing for this client, as far as the client knows.
    #[cfg(test)]
    pub(crate) fn is_settled(&self) -> bool {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        self.handle.session.poll_closed(&mut context).is_ready()
    }

    /// All locks of this store with a holder or a waiter, ordered by name. On Redis this takes one round trip per 1,000 keys
    /// and one per 200 locks of each node, then one for the whole list, and one per 1,000 clients among the holders and waiters. The result is not a snapshot: locks may change during the call.
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
    /// `is_unavailable`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn list(&self) -> Result<Vec<LockInfo>, Error> {
        let handle = &self.handle;
        handle.check_open()?;
        let listed = inspect_all(&*handle.store).await;
        let listed = listed.map_err(|error| Error::from_store(&handle.url, &error))?;
        let view = |(resource, answer)| handle.view(&resource, answer);
        let mut views = listed.into_iter().map(view).collect::<Result<Vec<_>, _>>()?;
        views.retain(|view| !view.holders.is_empty() || !view.waiters.is_empty() || view.foreign.is_some());
        Ok(views)
    }

    /// The kinds and names of the locks of this store, in any order. Locks that were in use a moment ago may be among them. On a
    /// server of Redis this takes one round trip per 1,000 keys and costs a small part of [`Self::list`], so it finds new locks in a
    /// store with many. In a cluster it costs as much.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// assert_eq!(client.list_names().await?, [(leasehold::Kind::Mutex, "orders:42".to_owned())]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn list_names(&self) -> Result<Vec<(Kind, String)>, Error> {
        let handle = &self.handle;
        handle.check_open()?;
        let listed = handle.store.list().await.map_err(|error| Error::from_store(&handle.url, &error))?;
        Ok(listed.into_iter().map(|resource| (resource.kind, resource.name.as_str().to_owned())).collect())
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
    /// `is_invalid` for the name; `is_unavailable`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn inspect(&self, kind: Kind, name: impl AsRef<str>) -> Result<LockInfo, Error> {
        self.handle.inspect(resource_of(kind, name.as_ref())?).await
    }

    /// Why the store refuses a waiting attempt, a renewal or a release of this client at present; `None` if it refuses none. They are
    /// retried: an attempt for 5 minutes, if the refusal may pass, such as that of a full disk or of a password that is being
    /// changed; a renewal and a release until the lease has ended. A program that waits can show it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// if let Some(refusal) = client.refusal() {
    ///     eprintln!("still waiting: {refusal:#}");
    /// }
    /// # assert!(client.refusal().is_none());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn refusal(&self) -> Option<Error> {
        let (resource, error) = self.handle.session.refusal()?;
        Some(self.handle.store_error(&resource, &error))
    }

    /// Releases a lock of any kind by force, as [`Mutex::force_release`](crate::Mutex::force_release). Returns the former holders.
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
    /// As [`Self::inspect`]; `is_invalid` if another program's value is in the lock's key.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock may or may not have been released.
    pub async fn force_release(&self, kind: Kind, name: impl AsRef<str>) -> Result<Vec<HolderInfo>, Error> {
        self.handle.force_release(resource_of(kind, name.as_ref())?).await
    }

    /// Releases the lease with this token by force, and no other: if the lock has a later holder by now, that holder keeps its
    /// lease. The token is that of [`HolderInfo`] and [`Guard::lease_token`](crate::Guard::lease_token); tasks of one client that hand
    /// a lease on among themselves share it. Acquisitions of one owner share it too, and all of them are released. Returns the
    /// former holder; `None` if no holder has this token. The former holder detects the loss at its next renewal, within a third of
    /// its ttl.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let stuck = client.mutex("orders:42").lock().await?.token();
    /// // … its holder was released in the meantime, and this is the next one.
    /// let guard = client.mutex("orders:42").lock().await?;
    /// assert!(client.force_release_token(leasehold::Kind::Mutex, "orders:42", stuck).await?.is_none());
    /// assert!(guard.is_held());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::inspect`]; `is_invalid` if the holder has released the lock, which stays taken for its `min_hold` or period.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease may or may not have been released.
    pub async fn force_release_token(
        &self,
        kind: Kind,
        name: impl AsRef<str>,
        token: Token,
    ) -> Result<Option<HolderInfo>, Error> {
        self.handle.force_release_token(resource_of(kind, name.as_ref())?, token).await
    }

    /// Releases every lease and cancels every wait of this client and its clones, and waits until the store has confirmed
    /// it. Guards lose their leases at once (`Loss::Closed`), and waiters get an error with `is_closed`.
    ///
    /// If the store does not answer, this waits until the longest lease has expired, and at least 2 s; over a quorum up to 2 s longer.
    /// [`ClientBuilder::close_timeout`](crate::ClientBuilder::close_timeout) can limit the wait.
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
    /// `is_unavailable` if the store did not confirm everything. The leases have expired by then; queue entries expire
    /// later. `is_timeout` if the builder's `close_timeout` has passed.
    ///
    /// # Cancel safety
    ///
    /// The client is closed at the first poll. Dropping the future only ends the wait.
    pub async fn close(self) -> Result<(), Error> {
        if let Some(limit) = self.handle.options.close_timeout {
            return self.close_timeout(limit).await;
        }
        self.handle.check_process()?;
        self.handle.session.close(self.handle.now());
        self.closed().await
    }

    /// As [`Self::close`], but waits at most `limit`. A `limit` of zero closes the client without waiting.
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
    /// `is_unavailable` as for [`Self::close`]; `is_timeout` when the limit has passed. Releases then continue in
    /// the background.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::close`].
    pub async fn close_timeout(self, limit: Duration) -> Result<(), Error> {
        self.handle.check_process()?;
        let session = &self.handle.session;
        session.close(session.now());
        let until = session.now() + limit;
        if let Some(closed) = with_deadline(session, Some(until), self.closed()).await {
            return closed;
        }
        // Everything was released, and only the driver has not ended yet.
        let released = poll_fn(|context| Poll::Ready(session.poll_closed(context))).await;
        if released == Poll::Ready(0) {
            return Ok(());
        }
        let what = "not everything was released within the limit; releases are retried in the background";
        Err(Error::new(ErrorKind::Timeout, format!("{}: {what}", self.handle.url)))
    }

    async fn closed(&self) -> Result<(), Error> {
        let session = &self.handle.session;
        poll_fn(|context| session.poll_driver_gone(context)).await;
        let unanswered = poll_fn(|context| session.poll_closed(context)).await;
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
        write!(f, "Client({} on {})", client_name(self.handle.session.id), self.handle.url)
    }
}
