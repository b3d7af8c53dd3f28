//! A mutex whose holder is named, and may take it again.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Command, Holder, Kind, Owner, Push, PushKind, Release, Reply, Resource, Token};

use crate::engine::clock;
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;
use crate::inspect::HolderInfo;
use crate::locks::lock::{Lock, WaitMode};
use crate::options::settings;
use crate::store::Inbox as _;

/// A mutex for an owner whom the caller names. Made by [`Client::reentrant_mutex`](crate::Client::reentrant_mutex).
///
/// An owner that holds the lock may take it again, at once, from other tasks and other processes too: whoever names
/// the same owner. It is the lock that [`Client::mutex`](crate::Client::mutex) of that name is, which others find taken
/// until the owner has given back all of its acquisitions. Each of them has a guard and a lease of its own, with a ttl and a
/// longest hold; all share one token, since it is the same critical section.
///
/// The store keeps the *set* of an owner's acquisitions, not a count, so no repeated message can raise it.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let account = client.reentrant_mutex("account:7", "request-93ab");
///
/// let outer = account.lock().await?;
/// let inner = account.lock().await?; // at once
/// assert_eq!(inner.token(), outer.token());
/// assert_eq!(account.hold_count().await?, 2);
/// inner.release().await?;
/// assert!(client.mutex("account:7").try_lock().await?.is_none());
/// outer.release().await?;
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct ReentrantMutex(Lock);

settings!(ReentrantMutex);

impl ReentrantMutex {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, owner: &str) -> Self {
        let mut lock = Lock::new(handle, Kind::Mutex, name, 1);
        lock.owner = Some(Owner::new(owner));
        Self(lock)
    }

    /// Waits for the lock, for as long as it takes; not at all where the owner holds it.
    ///
    /// # Errors
    ///
    /// `is_lost` when this client still has a guard of the owner whose lease was lost: what that guard stands for is over,
    /// and must be left before the owner begins anew. `is_invalid` for a name, an owner or a setting that can't be;
    /// `is_unavailable` when the store could not be asked; `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point it gives back whatever it has or may have come to have, a place in the queue or a lease.
    pub async fn lock(&self) -> Result<Guard, Error> {
        let guard = self.enter(WaitMode::Forever).await?;
        guard.ok_or_else(|| self.0.handle.closed())
    }

    /// Takes the lock if it can be had at once, and otherwise answers `None`.
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

    /// Waits for the lock for at most this long, and then answers `None`.
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

    /// How often the owner holds the lock, in all tasks and processes.
    ///
    /// # Errors
    ///
    /// `is_invalid`; `is_unavailable`.
    pub async fn hold_count(&self) -> Result<usize, Error> {
        let resource = self.resource()?;
        Ok(self.holders(&resource).await?.0.len())
    }

    /// Gives back everything that the owner holds of the lock, whichever task or process took it: for an owner that has
    /// forgotten, after a crash, what it held. Guards that stood for it learn that they have lost, those of other
    /// processes when they renew next. Says how many acquisitions there were.
    ///
    /// # Errors
    ///
    /// `is_not_owner`, with who holds it, when the owner does not; nothing is changed then. `is_invalid`;
    /// `is_unavailable`.
    pub async fn release_all(&self) -> Result<usize, Error> {
        let handle = &self.0.handle;
        let resource = self.resource()?;
        let (theirs, others) = self.holders(&resource).await?;
        if theirs.is_empty() {
            let holder = others.first().map_or_else(|| "nobody".to_owned(), HolderInfo::describe);
            return Err(handle.error(
                ErrorKind::NotOwner,
                &resource,
                format!("{} does not hold it, it is held by {holder}", self.owner()),
            ));
        }
        for holder in &theirs {
            let acquisition = holder.acquisition;
            let release = Release { acquisition, min_hold: self.0.min_hold, tombstone: Duration::ZERO };
            let answer = handle.ask((*resource).clone(), Command::Release(release)).await?;
            if acquisition.client == handle.session.id {
                handle.session.deliver(Push { acquisition, at: answer.at, kind: PushKind::Revoked });
            }
        }
        Ok(theirs.len())
    }

    /// A lost lease of the owner ends the critical section for all of its guards here. What only the store knew shows in the
    /// token: re-entries share one.
    async fn enter(&self, wait: WaitMode) -> Result<Option<Guard>, Error> {
        let resource = self.resource()?;
        self.lost_before(&resource, None)?;
        let guard = self.0.acquire(1, None, wait).await?;
        if let Some(guard) = &guard {
            self.lost_before(&resource, Some(guard.token()))?;
        }
        Ok(guard)
    }

    fn lost_before(&self, resource: &Resource, granted: Option<Token>) -> Result<(), Error> {
        let handle = &self.0.handle;
        let owner = self.0.owner.as_ref();
        let loss =
            owner.and_then(|owner| handle.session.loss_of_owner(resource, owner, granted, clock::local()));
        loss.map_or(Ok(()), |loss| Err(handle.lost(resource, loss)))
    }

    /// What the owner holds, and what others do.
    async fn holders(&self, resource: &Resource) -> Result<(Vec<Holder>, Vec<HolderInfo>), Error> {
        let handle = &self.0.handle;
        let answer = handle.ask(resource.clone(), Command::Inspect).await?;
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
