//! A mutex whose holder is a named owner, which may acquire it again.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Command, Holder, Kind, Owner, Release, Reply, Resource, Token};

use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;
use crate::inspect::HolderInfo;
use crate::locks::lock::{Lock, WaitMode};
use crate::options::settings;

/// A mutex for a named owner. Created by [`Client::reentrant_mutex`](crate::Client::reentrant_mutex).
///
/// While the owner holds the lock, every further acquisition with the same owner name is granted at once, also in other
/// tasks and processes. The lock is the same as [`Client::mutex`](crate::Client::mutex) of that name. It is free for other
/// owners when the owner has released all of its acquisitions. Each acquisition has its own guard and lease, with its own
/// ttl and maximum hold. All acquisitions of the owner share one token, because they are one critical section.
///
/// The store keeps the owner's acquisitions as a *set* and not as a count. A repeated message therefore does
/// not add an acquisition.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let account = client.reentrant_mutex("account:7", "request-93ab");
///
/// let outer = account.lock().await?;
/// let inner = account.lock().await?; // granted at once
/// assert_eq!(inner.token(), outer.token());
/// assert_eq!(account.hold_count().await?, 2);
/// inner.release().await?;
/// assert!(client.mutex("account:7").try_lock().await?.is_none());
/// outer.release().await?;
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct ReentrantMutex(Lock);

settings!(ReentrantMutex, "reentrant_mutex(\"account:7\", \"request-93ab\")");

impl ReentrantMutex {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, owner: &str) -> Self {
        let mut lock = Lock::new(handle, Kind::Mutex, name, 1);
        lock.owner = Some(Owner::new(owner));
        Self(lock)
    }

    /// Waits for the lock without a limit. If the owner holds the lock, the call is granted at once.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let account = client.reentrant_mutex("account:7", "request-93ab");
    /// let outer = account.lock().await?;
    /// let inner = account.lock().await?; // the same owner
    /// assert_eq!(outer.token(), inner.token());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost` if this client still has a guard of the owner whose lease was lost. Drop that guard before the owner
    /// acquires the lock again. `is_invalid` for an invalid name, owner or option; `is_unavailable` if the store did not
    /// respond; `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the wait is cancelled and a granted lease is released.
    pub async fn lock(&self) -> Result<Guard, Error> {
        let guard = self.enter(WaitMode::Forever).await?;
        guard.ok_or_else(|| self.0.handle.closed())
    }

    /// Acquires the lock if it is free or held by the owner; otherwise returns `None`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.reentrant_mutex("account:7", "request-93ab").lock().await?;
    /// let other = client.reentrant_mutex("account:7", "request-40cd");
    /// assert!(other.try_lock().await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn try_lock(&self) -> Result<Option<Guard>, Error> {
        self.enter(WaitMode::NoWait).await
    }

    /// Waits at most `limit` for the lock; returns `None` at the limit: as [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.reentrant_mutex("account:7", "request-93ab").lock().await?;
    /// let other = client.reentrant_mutex("account:7", "request-40cd");
    /// assert!(other.lock_timeout(Duration::from_millis(5)).await?.is_none());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn lock_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        self.enter(WaitMode::AtMost(limit)).await
    }

    /// The number of the owner's acquisitions, in all tasks and processes.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let account = client.reentrant_mutex("account:7", "request-93ab");
    /// let guards = (account.lock().await?, account.lock().await?);
    /// assert_eq!(account.hold_count().await?, 2);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for an invalid name or owner; `is_unavailable`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn hold_count(&self) -> Result<usize, Error> {
        let resource = self.resource()?;
        Ok(self.holders(&resource).await?.0.len())
    }

    /// Releases all of the owner's acquisitions, of every task and process. Use it for an owner that restarts after a crash.
    /// Guards of this client lose their lease at once, and guards of other processes at their next renewal. Returns the
    /// number of released acquisitions.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let account = client.reentrant_mutex("account:7", "request-93ab");
    /// let guard = account.lock().await?;
    /// assert_eq!(account.release_all().await?, 1);
    /// assert!(guard.release().await.unwrap_err().is_lost());
    /// assert!(account.release_all().await.unwrap_err().is_not_owner());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_not_owner`, with the holder's name, if the owner does not hold the lock; nothing is changed in that case.
    /// `is_invalid` for an invalid name or owner; `is_unavailable`, after which some acquisitions may have been released.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, some of the acquisitions may have been released. Calling it again is safe.
    pub async fn release_all(&self) -> Result<usize, Error> {
        let handle = &self.0.handle;
        let resource = self.resource()?;
        let (theirs, others) = self.holders(&resource).await?;
        if theirs.is_empty() {
            let holder = others.first().map_or_else(|| "no owner".to_owned(), HolderInfo::describe);
            return Err(handle.error(
                ErrorKind::NotOwner,
                &resource,
                format!("{} does not hold it; it is held by {holder}", self.owner()),
            ));
        }
        for holder in &theirs {
            let acquisition = holder.acquisition;
            let tombstone =
                self.0.owner.as_ref().map_or(Duration::ZERO, |owner| {
                    handle.session.tombstone_of(&resource, owner, acquisition)
                });
            let release = Release { min_hold: self.0.min_hold, tombstone, ..Release::now(acquisition) };
            match handle.ask((*resource).clone(), Command::Release(release)).await?.reply {
                Reply::Released | Reply::NotHeld | Reply::Dequeued => {
                    if let Some(owner) = &self.0.owner {
                        handle.session.lose(&resource, owner, acquisition, handle.now());
                    }
                }
                reply => return Err(handle.unexpected(&resource, &reply)),
            }
        }
        Ok(theirs.len())
    }

    /// A lost lease of the owner ends the critical section for all of its guards in this client. If only the store knew of the
    /// loss, the new grant has another token, and the guards with a lower one learn of it now.
    async fn enter(&self, wait: WaitMode) -> Result<Option<Guard>, Error> {
        let resource = self.resource()?;
        self.lost_before(&resource, None)?;
        let guard = self.0.acquire(1, None, wait).await?;
        if let Some(guard) = &guard {
            // Nothing ran under the new grant.
            let forget = |_: &Error| drop(guard.set_min_hold(Duration::ZERO));
            self.lost_before(&resource, Some(guard.token())).inspect_err(forget)?;
        }
        Ok(guard)
    }

    fn lost_before(&self, resource: &Resource, granted: Option<Token>) -> Result<(), Error> {
        let Lock { handle, owner, .. } = &self.0;
        let Some(owner) = owner else { return Ok(()) };
        let Some(loss) = handle.session.loss_of_owner(resource, owner, granted, handle.now()) else {
            return Ok(());
        };
        if let Some(granted) = granted {
            handle.session.lose_before(resource, owner, granted, handle.now());
        }
        Err(handle.lost(resource, loss, None))
    }

    /// The owner's leases, and those of others.
    async fn holders(&self, resource: &Resource) -> Result<(Vec<Holder>, Vec<HolderInfo>), Error> {
        let handle = &self.0.handle;
        let answer = handle.ask(resource.clone(), Command::Inspect).await?;
        let answer = handle.add_clients(answer).await;
        let Reply::View(view) = answer.reply else { return Err(handle.unexpected(resource, &answer.reply)) };
        let live = view.holders.into_iter().filter(|holder| !holder.retained);
        let (theirs, others): (Vec<_>, Vec<_>) = live.partition(|holder| holder.owner == self.0.owner);
        let show = |holder| HolderInfo::new(resource.kind, holder, answer.at, handle.session.id);
        Ok((theirs, others.iter().map(show).collect()))
    }

    fn resource(&self) -> Result<Arc<Resource>, Error> {
        self.0.check(1).cloned()
    }

    fn owner(&self) -> String {
        self.0.owner.as_ref().map_or_else(String::new, |owner| format!("owner {:?}", owner.as_str()))
    }
}
