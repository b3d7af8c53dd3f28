//! A lock that is bridged to the lock of another library.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::weight::{READER, UPGRADABLE};
use leasehold_core::{Kind, LocalTime, Resource};
use leasehold_store::StoreError;

use super::attempt::CANCEL_LIMIT;
use super::lock::{AttemptIds, Lock, WaitMode};
use super::mutex::Mutex;
use super::mutex_set::{MutexSet, SetGuard};
use crate::bridge::{Foreign, NO_MIN_HOLD, OwnLease, is_no_lock};
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;

impl Lock {
    pub(crate) fn set_bridge(&mut self, foreign: Foreign) {
        self.bridge = Some(Arc::new(foreign));
        // Each turn takes the foreign lock and releases it: the other programs would wait for all turns of a local queue.
        self.hand_off = None;
    }

    /// Whether the options and the store allow a bridge, if there is one.
    pub(super) fn check_bridge(&self, resource: &Resource, weight: u32) -> Result<(), Error> {
        let Some(foreign) = &self.bridge else { return Ok(()) };
        let capabilities = &self.handle.capabilities;
        let is_quorum = capabilities.needs_admission_queue;
        let has_keys = capabilities.has_foreign_keys || is_quorum && !foreign.servers().is_empty();
        let is_read_write = resource.kind == Kind::ReadWrite;
        let what = if is_read_write && !foreign.is_read_write() {
            "a read-write lock can only be bridged to redisson-rw:NAME, Foreign::redisson_read_write_lock"
        } else if foreign.is_read_write() && !is_read_write {
            "only a read-write lock (rw_lock, -s or -x) can be bridged to Redisson's read-write lock"
        } else if is_read_write && weight == UPGRADABLE {
            "an upgradable reader can't be bridged, because Redisson's readers can't become writers"
        } else if !has_keys && is_quorum {
            "a lock on a quorum can only be bridged to a lock on several servers: see Foreign::redlock"
        } else if !has_keys {
            "a bridge needs a store on the Redis server that has the keys of the other library"
        } else if !self.terms.renews {
            "a bridged lock is always renewed, because the other library's lock is first taken for 3 s only"
        } else if !self.min_hold.is_zero() {
            NO_MIN_HOLD
        } else {
            return Ok(());
        };
        Err(self.handle.error(ErrorKind::Invalid, resource, what))
    }

    /// Acquires the own lease, and then the foreign lock.
    pub(super) async fn acquire_bridged(
        &self,
        resource: &Arc<Resource>,
        foreign: &Foreign,
        weight: u32,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        let began_at = self.handle.now();
        let deadline = wait.deadline(began_at);
        let own = if self.handle.capabilities.needs_admission_queue {
            self.acquire_with_admission(weight, wait).await?
        } else {
            self.attempt(resource, weight, None, wait).await?
        };
        let Some(guard) = own else { return Ok(None) };
        let is_reader = resource.kind == Kind::ReadWrite && weight == READER;
        let foreign = if is_reader { &foreign.as_reader() } else { foreign };
        take_leg(guard, foreign, self.terms.ttl, began_at, deadline).await
    }

    /// Whether a lease of this lock may be exchanged for one with another weight.
    pub(super) fn check_exchange(&self, resource: &Resource) -> Result<(), Error> {
        let what = match (&self.ids, &self.bridge) {
            (AttemptIds::Counted, None) => return Ok(()),
            (_, Some(_)) => "a bridged writer can't become a reader: release the lock, and acquire it again",
            _ => {
                "the lease of a request, or a detachable one, can't be exchanged: release the lock, and acquire it again"
            }
        };
        Err(self.handle.error(ErrorKind::Invalid, resource, what))
    }
}

impl MutexSet {
    /// Acquires all own leases, and then the foreign locks in the order of their keys. Two clients with leasehold never wait for
    /// each other's foreign locks, because one of them has all own leases; programs with the other library have no such order, as
    /// before.
    pub(super) async fn acquire_bridged(&self, wait: WaitMode) -> Result<Option<SetGuard>, Error> {
        let order = self.foreign_order()?;
        let Some(first) = self.mutexes.first() else { return Ok(None) };
        let began_at = first.0.handle.now();
        let deadline = wait.deadline(began_at);
        let own = Self { mutexes: self.mutexes.iter().map(Mutex::for_own_lease).collect() };
        let Some(mut held) = own.acquire(wait).await? else { return Ok(None) };
        for position in order.into_values() {
            let guard = held.guards.remove(position);
            match self.take_next(position, guard, &held, (began_at, deadline)).await {
                Ok(Some(guard)) => held.guards.insert(position, guard),
                not_taken => {
                    held.give_back(CANCEL_LIMIT).await;
                    return not_taken.map(|_| None);
                }
            }
        }
        match held.guards.iter().find_map(|guard| Some(guard.lost_error(guard.loss()?))) {
            Some(lost) => Err(first.0.handle.closed_or(lost)),
            None => self.set_min_hold(&held).map(|()| Some(held)),
        }
    }

    /// Takes the foreign lock of one mutex, and fails if the lease of another one is lost meanwhile.
    async fn take_next(
        &self,
        position: usize,
        guard: Guard,
        others: &SetGuard,
        (began_at, deadline): (LocalTime, Option<LocalTime>),
    ) -> Result<Option<Guard>, Error> {
        let lock = &self.mutexes[position].0;
        let Some(foreign) = &lock.bridge else { return Ok(Some(guard)) };
        let taking = take_leg(guard, foreign, lock.terms.ttl, began_at, deadline);
        if others.guards.is_empty() {
            return taking.await;
        }
        others.run(taking).await.map_err(|lost| lock.handle.closed_or(lost))?
    }

    /// The positions of the bridged mutexes by their foreign keys. One key twice would wait for itself.
    fn foreign_order(&self) -> Result<BTreeMap<&str, usize>, Error> {
        let mut order = BTreeMap::new();
        for (position, mutex) in self.mutexes.iter().enumerate() {
            let Some(foreign) = &mutex.0.bridge else { continue };
            if order.insert(foreign.key(), position).is_some() {
                let what = format!("another mutex in the set is also bridged to the key {:?}", foreign.key());
                return Err(mutex.0.handle.error(ErrorKind::Invalid, mutex.0.checked_resource()?, what));
            }
        }
        Ok(order)
    }
}

impl Mutex {
    /// The same mutex without its bridge and its minimum hold, for a lease that gets them later.
    fn for_own_lease(&self) -> Self {
        let mut mutex = Self(self.0.without_min_hold());
        mutex.0.bridge = None;
        // `local_handoff` after `bridge` has set it again. A lease that is handed off would keep its leg.
        mutex.0.hand_off = None;
        mutex
    }
}

/// Takes the foreign leg for this guard, and waits for it until the deadline; without one, or once it has passed, it does not wait.
/// Returns `None`, with both legs released, if the leg is busy. The own leg was acquired since `began_at`.
async fn take_leg(
    mut guard: Guard,
    foreign: &Foreign,
    ttl: Duration,
    began_at: LocalTime,
    deadline: Option<LocalTime>,
) -> Result<Option<Guard>, Error> {
    let (handle, resource) = (guard.handle().clone(), guard.resource().clone());
    let failed = |guard: &Guard, error: &StoreError| leg_error(&handle, guard, foreign, error);
    let own = OwnLease { entry: guard.entry_id(), token: guard.token() };
    let bridges = handle.bridges(foreign);
    let begun = bridges.and_then(|bridges| bridges.begin(foreign, own, ttl));
    let leg = begun.map_err(|error| failed(&guard, &error))?;
    guard.set_leg(leg.clone());
    let error = match guard.run(leg.take(began_at, deadline)).await {
        Ok(Ok(true)) => return Ok(Some(guard)),
        Ok(Ok(false)) => None,
        Ok(Err(error)) => Some(failed(&guard, &error)),
        Err(lost) => Some(handle.closed_or(lost)),
    };
    let released = guard.release_timeout(CANCEL_LIMIT).await;
    match (error, released) {
        (Some(error), _) => Err(error),
        (None, Err(error)) if error.is_timeout() => {
            let what = "the lock of the other library was not taken, and the store did not confirm the release of its own";
            Err(handle.unavailable(&resource, what))
        }
        (None, Err(error)) if !error.is_lost() => Err(error),
        (None, _) => Ok(None),
    }
}

fn leg_error(handle: &Handle, guard: &Guard, foreign: &Foreign, error: &StoreError) -> Error {
    let subject = format!("{} on {}, bridged to {foreign}", guard.resource(), handle.url);
    if is_no_lock(error) {
        return Error::new(ErrorKind::Invalid, format!("{subject}: {}", error.message));
    }
    Error::from_store(subject, error)
}
