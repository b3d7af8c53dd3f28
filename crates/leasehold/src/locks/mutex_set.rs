//! Several mutexes at once: all of them or none, and no deadlock.
//!
//! First all of them in one command (`together`), which is all there is to do when nobody else wants them. Otherwise one
//! after the other, in the order of their names.

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
use crate::locks::lock::{Lock, WaitMode};
use crate::locks::mutex::Mutex;

/// Several mutexes of one client that are taken together: all of them or none.
///
/// When all of them are free, they are taken by one command, in one step: nobody sees some of them taken. That is so on
/// every store but a Redis Cluster, where it is so for those whose names share a hash slot, which names seldom do. It is
/// not so for mutexes that want [`replicas`](Mutex::replicas). When one of them is taken, that command changes nothing.
///
/// Whoever waits for them, and whoever can't take them in one step, takes them in the order of their names, whatever
/// order they are given in, so that no two who want several can wait for each other for ever (E. G. Coffman et al.,
/// *System Deadlocks*, 1971, section 4). While it waits for a later one, the earlier ones are held: others that want
/// only those wait too. Each keeps its own settings and gets its own lease and token.
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
    /// As they were given.
    mutexes: Vec<Mutex>,
}

impl MutexSet {
    /// A set of these mutexes. What can't be one (none, one twice, of two clients) is reported when it is used.
    pub fn new(mutexes: impl IntoIterator<Item = Mutex>) -> Self {
        Self { mutexes: mutexes.into_iter().collect() }
    }

    /// Waits for all of them, for as long as it takes.
    ///
    /// # Errors
    ///
    /// `is_invalid` for an empty set, the same name twice, mutexes of two clients, and as [`Mutex::lock`]; `is_lost` when
    /// one was lost while it waited for the next, because it is not renewed or was taken by force; `is_unavailable`;
    /// `is_queue_full`; `is_closed`. None of them is held then.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the wait is cancelled and granted leases are released.
    pub async fn lock(&self) -> Result<SetGuard, Error> {
        let guard = self.take(WaitMode::Forever).await?;
        match (guard, self.mutexes.first()) {
            (Some(guard), _) => Ok(guard),
            (None, Some(mutex)) => Err(mutex.0.handle.closed()),
            (None, None) => Err(nothing_to_take()),
        }
    }

    /// Takes all of them if they can be had at once, and otherwise answers `None` and holds none. Where they can't be taken in
    /// one step, others may find one of them taken for a moment, until that is known.
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn try_lock(&self) -> Result<Option<SetGuard>, Error> {
        self.take(WaitMode::NoWait).await
    }

    /// Waits for all of them for at most this long, and then answers `None` and holds none.
    ///
    /// # Errors
    ///
    /// As [`Self::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::lock`].
    pub async fn lock_timeout(&self, limit: Duration) -> Result<Option<SetGuard>, Error> {
        self.take(WaitMode::AtMost(limit)).await
    }

    async fn take(&self, wait: WaitMode) -> Result<Option<SetGuard>, Error> {
        let order = self.in_order()?;
        let handle = &order.first().ok_or_else(nothing_to_take)?.0.handle;
        let deadline = wait.deadline(handle.now());
        let locks: Vec<&Lock> = order.iter().map(|mutex| &mutex.0).collect();
        match acquire_all(&locks, deadline).await? {
            BatchOutcome::Granted(guards) => Ok(Some(self.sorted(guards))),
            BatchOutcome::Contended if deadline.is_none_or(|deadline| deadline <= handle.now()) => Ok(None),
            BatchOutcome::Contended | BatchOutcome::Unsupported => self.take_in_order(order, deadline).await,
        }
    }

    async fn take_in_order(
        &self,
        order: Vec<&Mutex>,
        deadline: Option<LocalTime>,
    ) -> Result<Option<SetGuard>, Error> {
        let mut taken = SetGuard { guards: Vec::new() };
        for mutex in order {
            match taken.and_next(mutex, deadline).await {
                Ok(Some(guard)) => taken.guards.push(guard),
                not_taken => {
                    // The word that it failed is also the word that nothing is held, as far as the store can be asked.
                    let _ = taken.release().await;
                    return not_taken.map(|_| None);
                }
            }
        }
        let taken = self.sorted(taken.guards);
        for (guard, mutex) in taken.guards.iter().zip(&self.mutexes) {
            guard.set_min_hold(mutex.0.min_hold)?;
        }
        Ok(Some(taken))
    }

    /// In the order in which the mutexes were given.
    fn sorted(&self, mut guards: Vec<Guard>) -> SetGuard {
        let place = |guard: &Guard| self.mutexes.iter().position(|mutex| mutex.0.is_of(guard));
        guards.sort_by_cached_key(place);
        SetGuard { guards }
    }

    /// The mutexes by name, once it is known that they make a set.
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
                return invalid("it belongs to another client than the others of the set");
            }
            order.push((resource, mutex));
        }
        if order.is_empty() {
            return Err(nothing_to_take());
        }
        order.sort_by_key(|(resource, _)| *resource);
        Ok(order.into_iter().map(|(_, mutex)| mutex).collect())
    }
}

fn nothing_to_take() -> Error {
    Error::new(ErrorKind::Invalid, "a set of no mutexes can't be taken")
}

/// The held leases of a [`MutexSet`]. They are given back when it is released or dropped.
#[must_use = "the locks are released when the guard is dropped"]
#[derive(Debug)]
pub struct SetGuard {
    guards: Vec<Guard>,
}

impl SetGuard {
    /// The fencing token of the mutex of this name, if it is in the set.
    #[must_use]
    pub fn token(&self, name: &str) -> Option<Token> {
        self.guards.iter().find(|guard| guard.name() == name).map(Guard::token)
    }

    /// One guard for each mutex, in the order in which they were given.
    pub fn guards(&self) -> &[Guard] {
        &self.guards
    }

    /// The same, each to be given back on its own.
    #[must_use = "the locks are released when the guard is dropped"]
    pub fn into_guards(self) -> Vec<Guard> {
        self.guards
    }

    /// How much longer all of the leases may be trusted: as [`Guard::remaining`], of the one that ends first.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guards.iter().map(Guard::remaining).min().unwrap_or(Duration::ZERO)
    }

    /// Whether all of the leases may be trusted now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Waits until one of the leases is lost, and says which.
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

    /// Runs `work` for as long as all of the leases are held, and drops it when one is lost.
    ///
    /// # Errors
    ///
    /// `is_lost`, as [`Guard::run`].
    ///
    /// # Cancel safety
    ///
    /// That of `work`; the guard is only borrowed.
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

    /// Renews all of the leases now, at the same time, as [`Guard::renew`].
    ///
    /// # Errors
    ///
    /// As there; the first one that there was.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn renew(&self) -> Result<(), Error> {
        join_all(self.guards.iter().map(Guard::renew)).await.into_iter().collect()
    }

    /// Gives all of the leases back at the same time, and waits for the store's word.
    ///
    /// # Errors
    ///
    /// As [`Guard::release`]; the first one that there was. The others are given back all the same.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, they are given back all the same, in the background.
    pub async fn release(self) -> Result<(), Error> {
        join_all(self.guards.into_iter().map(Guard::release)).await.into_iter().collect()
    }

    /// Waits for the next one, unless one of those that are held is lost meanwhile.
    async fn and_next(&self, mutex: &Mutex, deadline: Option<LocalTime>) -> Result<Option<Guard>, Error> {
        // What is given back because the others can't be had was never used, and need not be kept.
        let mut lock = mutex.0.clone();
        lock.min_hold = Duration::ZERO;
        if !mutex.0.min_hold.is_zero() {
            // It is to be kept in the end, so it is not one that the client's tasks hand on.
            lock.hand_off = None;
        }
        let next = lock.acquire(1, None, WaitMode::until(deadline, lock.handle.now()));
        if self.guards.is_empty() { next.await } else { self.run(next).await? }
    }
}
