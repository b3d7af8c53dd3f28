//! The leases that callers hold through this server.
//!
//! A lease's id is 128 random bits; with it, a caller may renew and release the lease. The ids of ended leases are kept for a
//! while, so that a late request gets the reason.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use leasehold::{Guard, Kind, Loss, MAX_TTL, Token, WriteGuard};
use tokio::sync::{OwnedSemaphorePermit, RwLock, Semaphore, watch};

use crate::problem::{Code, Problem};
use crate::shares::LeasePermit;

/// How many ended leases, and how many ended sessions, are remembered: so many in any case, and those of the last half minute up to
/// the limit.
const REMEMBERED: usize = 20_000;
const REMEMBERED_FOR: Duration = Duration::from_secs(30);
const MAX_REMEMBERED: usize = 500_000;

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
    /// Repeats the release until the store has confirmed it, or until the lease has expired.
    async fn release(self) -> Result<(), leasehold::Error> {
        // Longer than any lease.
        let limit = 2 * MAX_TTL;
        match self {
            Self::Guard(guard) => guard.release_timeout(limit).await,
            Self::Write(guard) => guard.release_timeout(limit).await,
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
    /// Empty once a release has begun.
    held: RwLock<Option<Held>>,
    /// One task has begun to release it.
    is_releasing: AtomicBool,
    /// How it ended, for those who wait for the end of its release.
    ending: watch::Sender<Option<Ending>>,
    /// Its share of the limit.
    _permit: LeasePermit,
}

/// How a lease ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The store has confirmed its release, or it has expired during the release.
    Released,
    /// Its session ended, for this reason.
    Session(String),
    /// It was lost, for this reason.
    Lost(String),
    /// The store refused its release, for this reason. The client retries it until the ttl is over; the outcome of the retries is not recorded.
    Refused(String),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Released => f.write_str("it was released"),
            Self::Session(why) => write!(f, "its session ended: {why}"),
            Self::Lost(why) => f.write_str(why),
            Self::Refused(why) => {
                write!(f, "the release was refused: {why}; it is retried until the lease's ttl is over")
            }
        }
    }
}

/// The problem of a release that the store has not confirmed, for this reason.
pub(crate) fn unconfirmed((kind, name): (Kind, &str), why: impl fmt::Display) -> Problem {
    Problem::new(Code::StoreUnavailable, format!("{kind} {name:?}: {why}"))
}

/// The endings of the last leases or sessions.
pub(crate) struct Endings<T> {
    known: HashMap<Id, T>,
    order: VecDeque<(Instant, Id)>,
}

impl<T> Default for Endings<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), order: VecDeque::new() }
    }
}

impl<T> Endings<T> {
    pub(crate) fn insert(&mut self, id: &Id, ending: T) {
        self.insert_at(Instant::now(), id, ending);
    }

    fn insert_at(&mut self, now: Instant, id: &Id, ending: T) {
        if self.known.insert(id.clone(), ending).is_none() {
            self.order.push_back((now, id.clone()));
        }
        // Two at a time, so that they become fewer again after a rush.
        for _ in 0..2 {
            let Some((at, oldest)) = self.order.front() else { return };
            let limit =
                if now.saturating_duration_since(*at) < REMEMBERED_FOR { MAX_REMEMBERED } else { REMEMBERED };
            if self.order.len() <= limit {
                return;
            }
            self.known.remove(oldest);
            self.order.pop_front();
        }
    }

    pub(crate) fn get(&self, id: &Id) -> Option<&T> {
        self.known.get(id)
    }
}

#[derive(Default)]
struct Table {
    /// The leases that are held, and those whose release the store has not confirmed.
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
        permit: LeasePermit,
    ) -> Result<Arc<Lease>, Problem> {
        let id = Id::random()?;
        let lease = Arc::new(Lease {
            id: id.clone(),
            kind: lock.0,
            name: lock.1.to_owned(),
            token: held.token(),
            session,
            held: RwLock::new(Some(held)),
            is_releasing: AtomicBool::new(false),
            ending: watch::Sender::new(None),
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

    /// Renews the lease for its whole ttl, and returns the remaining time.
    pub(crate) async fn renew(&self, lease: &Lease) -> Result<Duration, Problem> {
        let held = lease.held.read().await;
        let guard = held.as_ref().ok_or_else(|| self.ended_problem(lease))?;
        // A loss is found by the next sweep or heartbeat, which reports it to the session too.
        guard.renew().await?;
        Ok(guard.remaining())
    }

    /// Forgets the lease, unless it has ended before. If it is still held, it is released in the background.
    pub(crate) fn end(&self, lease: &Lease, ending: Ending) -> bool {
        let mut table = self.table();
        let Some(removed) = table.live.remove(&lease.id) else { return false };
        table.ended.insert(&lease.id, (lease.kind, lease.name.clone(), ending.clone()));
        lease.ending.send_replace(Some(ending));
        drop(table);
        drop(removed);
        true
    }

    /// Ends the lease if it is lost: the reason, for one caller only.
    pub(crate) fn end_if_lost(&self, lease: &Lease) -> Option<String> {
        let why = lease.loss()?;
        self.end(lease, Ending::Lost(why.clone())).then_some(why)
    }

    /// The leases of a session that have not ended.
    pub(crate) fn of_session(&self, session: &Id) -> Vec<Arc<Lease>> {
        let table = self.table();
        table.live.values().filter(|lease| lease.session.as_ref() == Some(session)).cloned().collect()
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
            Ok(_) => Problem::new(
                Code::LeaseEnded,
                format!("{} {:?}: it is being released", lease.kind, lease.name),
            ),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// Whether the caller has to release it. True for one caller only.
    pub(crate) fn begin_release(&self) -> bool {
        !self.is_releasing.swap(true, Ordering::Relaxed)
    }

    /// Releases it after [`Self::begin_release`]. Ready once the store no longer has it.
    ///
    /// `ending` is how it ends if it was not lost.
    pub(crate) async fn release(&self, ending: Ending) -> Ending {
        let held = self.held.write().await.take();
        let Some(held) = held else { return ending };
        match held.release().await {
            Err(error) if error.is_lost() => Ending::Lost(error.to_string()),
            Err(error) if error.is_refused() => Ending::Refused(format!("{error:#}")),
            // After any other error the lease has expired.
            Ok(()) | Err(_) => ending,
        }
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(&self) -> Ending {
        let mut ending = self.ending.subscribe();
        let ended = ending.wait_for(Option::is_some).await.ok().and_then(|ending| ending.clone());
        // The sender is in this lease, so there always is an ending.
        ended.unwrap_or_else(|| Ending::Lost("it has ended".to_owned()))
    }

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
        let Some(loss) = guard.lost().now_or_never() else {
            return Some("it is not held any more".to_owned());
        };
        let why = guard.renewal_error().filter(|_| loss == Loss::Expired);
        Some(why.map_or_else(|| loss.to_string(), |error| format!("{loss}: {error:#}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_remembered_for_a_time_and_up_to_a_limit() {
        let mut endings = Endings::default();
        let begin = Instant::now();
        let id = |number: usize| Id::from(number.to_string().as_str());
        for number in 0..=MAX_REMEMBERED {
            endings.insert_at(begin, &id(number), number);
        }
        assert!(endings.get(&id(0)).is_none() && endings.get(&id(1)) == Some(&1));
        let later = begin + REMEMBERED_FOR;
        for number in 0..MAX_REMEMBERED {
            endings.insert_at(later, &id(MAX_REMEMBERED + 1 + number), number);
        }
        // They are old by now, and each new one took the place of two.
        assert!(endings.get(&id(MAX_REMEMBERED)).is_none());
        let mut few = Endings::default();
        for number in 0..REMEMBERED {
            few.insert_at(begin, &id(number), number);
        }
        few.insert_at(later, &id(REMEMBERED), REMEMBERED);
        assert!(
            few.get(&id(0)).is_none() && few.get(&id(1)) == Some(&1),
            "so many are remembered in any case"
        );
    }
}
