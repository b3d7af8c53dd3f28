//! The leases that callers hold through this server.
//!
//! A lease's id is 128 random bits; with it, a caller may renew and release the lease. The ids of ended leases are kept for a
//! while, so that a late request gets the reason.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use leasehold::{Guard, Kind, Token, WriteGuard};
use tokio::sync::{OwnedSemaphorePermit, RwLock, Semaphore};

use crate::problem::{Code, Problem};

/// How many ended leases, and how many ended sessions, are remembered.
const REMEMBERED: usize = 20_000;

/// A random id of a lease or a session.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(Arc<str>);

impl Id {
    pub(crate) fn random() -> Result<Self, Problem> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Problem::new(Code::StoreUnavailable, format!("no random numbers: {error}")))?;
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self(text.into()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Id {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The guard of a lease, by its type.
pub(crate) enum Held {
    Guard(Guard),
    Write(WriteGuard),
}

impl Held {
    async fn release(self) -> Result<(), leasehold::Error> {
        match self {
            Self::Guard(guard) => guard.release().await,
            Self::Write(guard) => guard.release().await,
        }
    }
}

impl Deref for Held {
    type Target = Guard;

    fn deref(&self) -> &Guard {
        match self {
            Self::Guard(guard) => guard,
            Self::Write(guard) => guard,
        }
    }
}

/// One lease.
pub(crate) struct Lease {
    pub(crate) id: Id,
    pub(crate) kind: Kind,
    pub(crate) name: String,
    pub(crate) token: Token,
    pub(crate) session: Option<Id>,
    /// Other leases of this owner have the same token. The time after which this one has ended, whatever they do.
    owner_ttl: Option<Duration>,
    /// Empty once a release has begun.
    held: RwLock<Option<Held>>,
    /// Its share of the limit.
    _permit: OwnedSemaphorePermit,
}

/// What tells a released lease from the other leases of its lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unconfirmed {
    pub(crate) token: Token,
    /// When it has ended although the store has a holder with this token, which is then another lease of the same owner.
    pub(crate) shared_until: Option<Instant>,
}

/// How a lease ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Released,
    /// The store did not confirm the release yet. The client repeats it.
    ReleaseUnconfirmed(Unconfirmed),
    /// Its session ended, for this reason.
    Session(String),
    /// It was lost, for this reason.
    Lost(String),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Released => f.write_str("it was released"),
            Self::ReleaseUnconfirmed(_) => f.write_str("its release is not confirmed yet"),
            Self::Session(why) => write!(f, "its session ended: {why}"),
            Self::Lost(why) => f.write_str(why),
        }
    }
}

/// The endings of the last leases or sessions.
pub(crate) struct Endings<T> {
    known: HashMap<Id, T>,
    order: VecDeque<Id>,
}

impl<T> Default for Endings<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), order: VecDeque::new() }
    }
}

impl<T> Endings<T> {
    pub(crate) fn insert(&mut self, id: &Id, ending: T) {
        if self.known.insert(id.clone(), ending).is_none() {
            self.order.push_back(id.clone());
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    pub(crate) fn get(&self, id: &Id) -> Option<&T> {
        self.known.get(id)
    }
}

#[derive(Default)]
struct Table {
    live: HashMap<Id, Arc<Lease>>,
    ended: Endings<(Kind, String, Ending)>,
}

/// The leases of all callers.
pub(crate) struct Leases {
    table: Mutex<Table>,
    permits: Arc<Semaphore>,
    limit: usize,
}

impl Leases {
    pub(crate) fn new(limit: usize) -> Self {
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self { table: Mutex::default(), permits: Arc::new(Semaphore::new(limit)), limit }
    }

    /// A share of the limit, before the lock is requested.
    pub(crate) fn reserve(&self) -> Result<OwnedSemaphorePermit, Problem> {
        self.permits.clone().try_acquire_owned().map_err(|_| {
            let what = format!("{} leases are held or waited for, which is the limit", self.limit);
            Problem::new(Code::LimitReached, what)
        })
    }

    pub(crate) fn insert(
        &self,
        lock: (Kind, &str),
        session: Option<Id>,
        held: Held,
        owner_ttl: Option<Duration>,
        permit: OwnedSemaphorePermit,
    ) -> Result<Arc<Lease>, Problem> {
        let id = Id::random()?;
        let lease = Arc::new(Lease {
            id: id.clone(),
            kind: lock.0,
            name: lock.1.to_owned(),
            token: held.token(),
            session,
            owner_ttl,
            held: RwLock::new(Some(held)),
            _permit: permit,
        });
        self.table().live.insert(id, lease.clone());
        Ok(lease)
    }

    /// The lease of that lock with this id.
    pub(crate) fn get(&self, lock: (Kind, &str), id: &Id) -> Result<Arc<Lease>, Problem> {
        let table = self.table();
        let of_lock = |kind: Kind, name: &str| (kind, name) == lock;
        match (table.live.get(id), table.ended.get(id)) {
            (Some(lease), _) if of_lock(lease.kind, &lease.name) => Ok(lease.clone()),
            (None, Some((kind, name, ending))) if of_lock(*kind, name) => {
                Err(Problem::new(Code::LeaseEnded, format!("{kind} {name:?}: {ending}")))
            }
            _ => Err(Problem::new(
                Code::UnknownLease,
                format!("{} {:?} has no lease with this id", lock.0, lock.1),
            )),
        }
    }

    pub(crate) fn by_id(&self, id: &Id) -> Option<Arc<Lease>> {
        self.table().live.get(id).cloned()
    }

    /// How the lease of that lock with this id ended.
    pub(crate) fn ending(&self, lock: (Kind, &str), id: &Id) -> Option<Ending> {
        let table = self.table();
        let ended = table.ended.get(id).filter(|(kind, name, _)| (*kind, name.as_str()) == lock);
        ended.map(|(_, _, ending)| ending.clone())
    }

    /// The store has shown that a release was carried out.
    pub(crate) fn confirm_release(&self, lock: (Kind, &str), id: &Id) {
        self.table().ended.insert(id, (lock.0, lock.1.to_owned(), Ending::Released));
    }

    /// Renews the lease for its whole ttl, and returns the remaining time.
    pub(crate) async fn renew(&self, lease: &Lease) -> Result<Duration, Problem> {
        let held = lease.held.read().await;
        let guard = held.as_ref().ok_or_else(|| self.ended_problem(lease))?;
        // A loss is found by the next sweep or heartbeat, which reports it to the session too.
        guard.renew().await?;
        Ok(guard.remaining())
    }

    /// Releases the lease, and waits until the store has confirmed it.
    pub(crate) async fn release(&self, lease: &Lease) -> Result<(), Problem> {
        let shared_until = lease.owner_ttl.map(|ttl| Instant::now() + ttl);
        let unconfirmed = Ending::ReleaseUnconfirmed(Unconfirmed { token: lease.token, shared_until });
        self.end(lease, unconfirmed.clone());
        let Some(held) = lease.held.write().await.take() else {
            return Err(self.ended_problem(lease));
        };
        let released = held.release().await;
        let ending = match &released {
            Ok(()) => Ending::Released,
            Err(error) if error.is_lost() => Ending::Lost(error.to_string()),
            Err(_) => unconfirmed,
        };
        self.end(lease, ending);
        released.map_err(Problem::from)
    }

    /// Forgets the lease. If it is still held, it is released in the background.
    pub(crate) fn end(&self, lease: &Lease, ending: Ending) {
        let mut table = self.table();
        let removed = table.live.remove(&lease.id);
        table.ended.insert(&lease.id, (lease.kind, lease.name.clone(), ending));
        drop(table);
        drop(removed);
    }

    /// Ends the lease if it is lost: the reason, for one caller only.
    pub(crate) fn end_if_lost(&self, lease: &Lease) -> Option<String> {
        let why = lease.loss()?;
        let mut table = self.table();
        let removed = table.live.remove(&lease.id)?;
        table.ended.insert(&lease.id, (lease.kind, lease.name.clone(), Ending::Lost(why.clone())));
        drop(table);
        drop(removed);
        Some(why)
    }

    /// The leases that have not ended.
    pub(crate) fn live(&self) -> Vec<Arc<Lease>> {
        self.table().live.values().cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.table().live.len()
    }

    /// Leaves the leases to the store, where they expire: their callers may still be working.
    pub(crate) fn abandon(&self) {
        let live = std::mem::take(&mut self.table().live);
        std::mem::forget(live);
    }

    fn ended_problem(&self, lease: &Lease) -> Problem {
        match self.get((lease.kind, &lease.name), &lease.id) {
            Err(problem) => problem,
            Ok(_) => {
                Problem::new(Code::LeaseEnded, format!("{} {:?}: it was released", lease.kind, lease.name))
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// The remaining time; zero if the lease has ended.
    pub(crate) fn remaining(&self) -> Duration {
        let held = self.held.try_read().ok();
        held.and_then(|held| held.as_ref().map(|guard| guard.remaining())).unwrap_or_default()
    }

    /// The loss, if it is lost. A lease that is being released is not lost.
    fn loss(&self) -> Option<String> {
        let held = self.held.try_read().ok()?;
        let guard = held.as_ref()?;
        if guard.is_held() {
            return None;
        }
        let loss = guard.lost().now_or_never();
        Some(loss.map_or_else(|| "it is not held any more".to_owned(), |loss| loss.to_string()))
    }
}
