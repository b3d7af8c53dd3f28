//! Several mutexes at once: all or none, without deadlock.
//!
//! The first attempt is one command for all mutexes (`acquire_all`). If not all are free, they are acquired one after the
//! other, in the order of their names.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::{LocalTime, Loss, Resource, Token};

use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::acquire_all::{BatchOutcome, acquire_all};
use crate::locks::attempt::CANCEL_LIMIT;
use crate::locks::lock::{Lock, WaitMode};
use crate::locks::mutex::Mutex;
use crate::locks::observe::ObservedBatch;

/// Several mutexes of one client that are acquired together: all or none. Created by [`MutexSet::new`].
///
/// If all mutexes are free, one command acquires them in one step: no client sees only some of them held. If one of them is
/// held, that command changes nothing. This single step is not available for names in different hash slots of a Redis
/// Cluster, and for mutexes with [`replicas`](Mutex::replicas).
///
/// If the client must wait, or if the single step is not available, it acquires the mutexes one after the other. It uses the
/// order of their names, not their order in the set. Two clients therefore never wait for each other (E. G. Coffman et
/// al., *System Deadlocks*, 1971, section 4). While the client waits for a later mutex, it holds the earlier ones. Each
/// mutex keeps its own options and has its own lease and token.
///
/// ```
/// # leasehold::doc_test(async {
/// use leasehold::MutexSet;
///
/// let client = leasehold::Client::connect("memory:").await?;
/// let accounts = MutexSet::new(["account:9", "account:7"].map(|name| client.mutex(name)));
///
/// let guard = accounts.lock().await?;
/// let from = guard.token("account:9").unwrap();
/// let to = guard.token("account:7").unwrap();
/// # let _ = (from, to);
/// let moved = guard.run(async { 100 }).await?; // dropped when any of the leases is lost
/// # assert_eq!(moved, 100);
/// guard.release().await?;
/// # Ok(()) });
/// ```
#[derive(Clone, Debug)]
pub struct MutexSet {
    /// In the order in which they were passed.
    pub(super) mutexes: Vec<Mutex>,
}

impl MutexSet {
    /// Creates a set of these mutexes. Sends nothing. An invalid set (empty, one name twice, mutexes of two clients) causes
    /// an error when it is used.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let account = client.mutex("account:7");
    /// let set = leasehold::MutexSet::new([account.clone(), account]);
    /// assert!(set.lock().await.unwrap_err().is_invalid());
    /// # Ok(()) });
    /// ```
    pub fn new(mutexes: impl IntoIterator<Item = Mutex>) -> Self {
        Self { mutexes: mutexes.into_iter().collect() }
    }

    /// Waits for all mutexes without a limit.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use leasehold::MutexSet;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = MutexSet::new([client.mutex("a"), client.mutex("b")]).lock().await?;
    /// assert_eq!(guard.guards().len(), 2);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for an empty set, one name twice, mutexes of two clients, and as [`Mutex::lock`]. `is_lost` if one lease was
    /// lost while the client waited for the next mutex. `is_unavailable`; `is_queue_full`; `is_closed`. After an error no mutex
    /// of the set is held.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the wait is cancelled and granted leases are released.
    pub async fn lock(&self) -> Result<SetGuard, Error> {
        let guard = self.acquire(WaitMode::Forever).await?;
        match (guard, self.mutexes.first()) {
            (Some(guard), _) => Ok(guard),
            (None, Some(mutex)) => Err(mutex.0.handle.closed()),
            (None, None) => Err(empty_set()),
        }
    }

    /// Acquires all mutexes if they are free now. Otherwise returns `None` and holds none of them. If the single step is
    /// not available, another client may briefly find one of them held.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use leasehold::MutexSet;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let set = MutexSet::new([client.mutex("a"), client.mutex("b")]);
    /// let other = client.mutex("b").lock().await?;
    /// assert!(set.try_lock().await?.is_none());
    /// assert!(client.mutex("a").try_lock().await?.is_some()); // nothing is held in part
    /// # drop(other);
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
    pub async fn try_lock(&self) -> Result<Option<SetGuard>, Error> {
        self.acquire(WaitMode::NoWait).await
    }

    /// Waits at most `limit` for all mutexes. At the limit returns `None` and holds none of them. The call returns at most 5
    /// s after the limit.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use {leasehold::MutexSet, std::time::Duration};
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let set = MutexSet::new([client.mutex("a"), client.mutex("b")]);
    /// let other = client.mutex("b").lock().await?;
    /// assert!(set.lock_timeout(Duration::from_millis(5)).await?.is_none());
    /// # drop(other);
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
    pub async fn lock_timeout(&self, limit: Duration) -> Result<Option<SetGuard>, Error> {
        self.acquire(WaitMode::AtMost(limit)).await
    }

    pub(super) async fn acquire(&self, wait: WaitMode) -> Result<Option<SetGuard>, Error> {
        let order = self.in_order()?;
        if order.iter().any(|mutex| mutex.0.bridge.is_some()) {
            return Box::pin(self.acquire_bridged(wait)).await;
        }
        let handle = &order.first().ok_or_else(empty_set)?.0.handle;
        let deadline = wait.deadline(handle.now());
        let locks: Vec<&Lock> = order.iter().map(|mutex| &mutex.0).collect();
        let observed = ObservedBatch::begin(&locks);
        match acquire_all(&locks, deadline).await {
            Ok(BatchOutcome::Granted(guards)) => {
                observed.leave();
                Ok(Some(self.sorted(guards)))
            }
            Ok(BatchOutcome::Contended) if deadline.is_none_or(|deadline| deadline <= handle.now()) => {
                observed.not_granted(wait);
                Ok(None)
            }
            Ok(BatchOutcome::Contended | BatchOutcome::Unsupported) => {
                observed.leave();
                self.acquire_in_order(order, deadline).await
            }
            Err(error) => {
                observed.failed(&error);
                Err(error)
            }
        }
    }

    async fn acquire_in_order(
        &self,
        order: Vec<&Mutex>,
        deadline: Option<LocalTime>,
    ) -> Result<Option<SetGuard>, Error> {
        let mut held = SetGuard { guards: Vec::new() };
        for mutex in order {
            match held.acquire_next(mutex, deadline).await {
                Ok(Some(guard)) => held.guards.push(guard),
                not_granted => {
                    let ends = deadline.filter(|deadline| *deadline != LocalTime::NEVER);
                    let left = |ends: LocalTime| (ends + GIVE_BACK_UNTIL).since(mutex.0.handle.now());
                    held.give_back(ends.map_or(CANCEL_LIMIT, left).min(CANCEL_LIMIT)).await;
                    return not_granted.map(|_| None);
                }
            }
        }
        let held = self.sorted(held.guards);
        self.set_min_hold(&held)?;
        Ok(Some(held))
    }

    /// Once all are held. A part that is released unused is not retained.
    pub(super) fn set_min_hold(&self, held: &SetGuard) -> Result<(), Error> {
        held.guards
            .iter()
            .zip(&self.mutexes)
            .try_for_each(|(guard, mutex)| guard.set_min_hold(mutex.0.min_hold))
    }

    /// In the order in which the mutexes were given.
    fn sorted(&self, mut guards: Vec<Guard>) -> SetGuard {
        let position = |guard: &Guard| self.mutexes.iter().position(|mutex| mutex.0.is_of(guard));
        guards.sort_by_cached_key(position);
        SetGuard { guards }
    }

    /// The mutexes ordered by name, if the set is valid.
    fn in_order(&self) -> Result<Vec<&Mutex>, Error> {
        let mut order: Vec<(&Arc<Resource>, &Mutex)> = Vec::new();
        let mut names = BTreeSet::new();
        let mut client: Option<&Arc<Handle>> = None;
        for mutex in &self.mutexes {
            let (resource, handle) = (mutex.0.check(1)?, &mutex.0.handle);
            let invalid = |what| Err(handle.error(ErrorKind::Invalid, resource, what));
            if !names.insert(resource) {
                return invalid("it is in the set twice");
            }
            if !Arc::ptr_eq(client.get_or_insert(handle), handle) {
                return invalid("its client is not that of the other mutexes in the set");
            }
            order.push((resource, mutex));
        }
        if order.is_empty() {
            return Err(empty_set());
        }
        order.sort_by_key(|(resource, _)| *resource);
        Ok(order.into_iter().map(|(_, mutex)| mutex).collect())
    }
}

fn empty_set() -> Error {
    Error::new(ErrorKind::Invalid, "the set has no mutex")
}

/// How long after its limit an attempt waits for the release of a part.
const GIVE_BACK_UNTIL: Duration = Duration::from_millis(4_900);

/// The held leases of a [`MutexSet`], released when [`release`](Self::release) is called or the guard is dropped.
///
/// ```
/// # leasehold::doc_test(async {
/// use leasehold::MutexSet;
///
/// # let client = leasehold::Client::connect("memory:").await?;
/// let accounts = MutexSet::new([client.mutex("account:7"), client.mutex("account:9")]);
/// let guard = accounts.lock().await?;
/// assert!(guard.is_held() && guard.token("account:9").is_some());
/// guard.renew().await?;
/// guard.release().await?;
/// # Ok(()) });
/// ```
#[must_use = "the locks are released when the guard is dropped"]
#[derive(Debug)]
pub struct SetGuard {
    pub(super) guards: Vec<Guard>,
}

impl SetGuard {
    /// The fencing token of the mutex with this name, or `None` if it is not in the set.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = leasehold::MutexSet::new([client.mutex("a")]).lock().await?;
    /// assert_eq!(guard.token("a"), Some(guard.guards()[0].token()));
    /// assert_eq!(guard.token("b"), None);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn token(&self, name: &str) -> Option<Token> {
        self.guards.iter().find(|guard| guard.name() == name).map(Guard::token)
    }

    /// One guard for each mutex, in the order of the arguments of [`MutexSet::new`].
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = leasehold::MutexSet::new([client.mutex("b"), client.mutex("a")]).lock().await?;
    /// assert_eq!(guard.guards()[0].name(), "b");
    /// # Ok(()) });
    /// ```
    pub fn guards(&self) -> &[Guard] {
        &self.guards
    }

    /// The guards by value, to release each mutex separately.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let set = leasehold::MutexSet::new([client.mutex("from"), client.mutex("to")]);
    /// let mut guards = set.lock().await?.into_guards();
    /// guards.remove(0).release().await?; // "from"
    /// assert!(guards[0].is_held()); // "to"
    /// # Ok(()) });
    /// ```
    #[must_use = "the locks are released when the guard is dropped"]
    pub fn into_guards(self) -> Vec<Guard> {
        self.guards
    }

    /// As [`Guard::remaining`], for the lease that ends first.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guards.iter().map(Guard::remaining).min().unwrap_or(Duration::ZERO)
    }

    /// As [`Guard::is_held`], for all leases.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// As [`Guard::lost`], for the lease that is lost first. Also returns the guard of that lease.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn lost(&self) -> (&Guard, Loss) {
        let mut losses: Vec<_> = self.guards.iter().map(|guard| (guard, Box::pin(guard.lost()))).collect();
        poll_fn(|context| {
            for (guard, lost) in &mut losses {
                if let Poll::Ready(loss) = lost.as_mut().poll(context) {
                    return Poll::Ready((*guard, loss));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Runs `work` while all leases are held. Drops `work` when one of them is lost.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use leasehold::{Kind, MutexSet};
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = MutexSet::new([client.mutex("a"), client.mutex("b")]).lock().await?;
    /// assert_eq!(guard.run(async { 42 }).await?, 42);
    ///
    /// client.force_release(Kind::Mutex, "b").await?;
    /// let work = std::future::pending::<()>();
    /// assert!(guard.run(work).await.unwrap_err().is_lost());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost`, as [`Guard::run`].
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as `work`. The guard is only borrowed.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, Error> {
        let (mut lost, mut work) = (pin!(self.lost()), pin!(work));
        poll_fn(|context| {
            if let Poll::Ready((guard, loss)) = lost.as_mut().poll(context) {
                return Poll::Ready(Err(guard.lost_error(loss)));
            }
            let Poll::Ready(value) = Pin::new(&mut work).poll(context) else { return Poll::Pending };
            let loss = self.guards.iter().find_map(|guard| Some(guard.lost_error(guard.loss()?)));
            Poll::Ready(loss.map_or(Ok(value), Err))
        })
        .await
    }

    /// As [`Guard::renew`], for all leases concurrently.
    ///
    /// # Errors
    ///
    /// As [`Guard::renew`]: the first error, in the order of the set.
    ///
    /// # Cancel safety
    ///
    /// As [`Guard::renew`].
    pub async fn renew(&self) -> Result<(), Error> {
        join_all(self.guards.iter().map(Guard::renew)).await.into_iter().collect()
    }

    /// As [`Guard::release`], for all leases concurrently.
    ///
    /// # Errors
    ///
    /// As [`Guard::release`]: the first error, in the order of the set. The other leases are released too.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the client releases the leases in the background.
    pub async fn release(self) -> Result<(), Error> {
        join_all(self.guards.into_iter().map(Guard::release)).await.into_iter().collect()
    }

    /// Releases a part of a set. The set's error or `None` already says that nothing is held, so a release that the store does not
    /// confirm within the limit is repeated in the background.
    pub(super) async fn give_back(self, limit: Duration) {
        join_all(self.guards.into_iter().map(|guard| guard.release_timeout(limit))).await;
    }

    /// Waits for the next mutex, and fails if a held lease is lost meanwhile.
    async fn acquire_next(&self, mutex: &Mutex, deadline: Option<LocalTime>) -> Result<Option<Guard>, Error> {
        let lock = mutex.0.without_min_hold();
        let next = lock.acquire(1, None, WaitMode::until(deadline, lock.handle.now()));
        if self.guards.is_empty() {
            return next.await;
        }
        self.run(next).await.map_err(|lost| lock.handle.closed_or(lost))?
    }
}
