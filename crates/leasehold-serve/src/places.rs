//! The places of one listener: how many connections it has, and who may take a place from whom.
//!
//! Anyone can open a connection over TCP. Until it has shown a token it is a *stranger*: strangers have places of their own, few
//! seconds, and the newest takes the place of the oldest. Half of the places are for those that have sent no request yet, and half
//! for those that wait for an answer, so that silent ones cut off no answer. A connection is accepted only when those whose places
//! were taken are really gone: otherwise a flood would take the place of a connection that the server has not looked at yet.
//!
//! A connection that has shown a token keeps its place until it ends. Tokens that only read get at most half of these places.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::config::Limits;
use crate::problem::{Code, Problem};
use crate::tokens::{Access, Tokens};

/// How many connections at a time are told why they are closed. Further ones are closed without a word.
const MAX_CLOSING: usize = 64;

/// How many connections may be open whose place was taken, and which are not told.
const MAX_EVICTED: usize = 64;

/// The places of one listener.
pub(crate) struct Places {
    /// Connections that have shown a token, and those of the Unix socket.
    known: Arc<Semaphore>,
    /// Those of them that may only read.
    readers: Arc<Semaphore>,
    closing: Arc<Semaphore>,
    /// For strangers and those whose place was taken, until they are gone.
    room: Arc<Semaphore>,
    strangers: Mutex<Strangers>,
    limits: Limits,
}

#[derive(Default)]
struct Strangers {
    next: u64,
    /// Those that have sent no request, in the order in which they came. Cancelled when another one takes the place.
    silent: BTreeMap<u64, CancellationToken>,
    /// Those that wait for an answer.
    asking: BTreeMap<u64, CancellationToken>,
}

impl Places {
    pub(crate) fn new(limits: &Limits) -> Arc<Self> {
        let known = limits.connections.clamp(1, Semaphore::MAX_PERMITS);
        Arc::new(Self {
            known: Arc::new(Semaphore::new(known)),
            readers: Arc::new(Semaphore::new(known.div_ceil(2))),
            closing: Arc::new(Semaphore::new(MAX_CLOSING)),
            room: Arc::new(Semaphore::new(limits.strangers + 2 + MAX_CLOSING + MAX_EVICTED)),
            strangers: Mutex::default(),
            limits: limits.clone(),
        })
    }

    /// A place for a connection that needs no token.
    pub(crate) fn owner(&self) -> Option<OwnedSemaphorePermit> {
        self.known.clone().try_acquire_owned().ok()
    }

    /// Waits until a connection over TCP can be accepted.
    pub(crate) async fn room(&self) -> Option<OwnedSemaphorePermit> {
        self.room.clone().acquire_owned().await.ok()
    }

    /// A place for a new connection over TCP; that of the oldest stranger if all are taken.
    pub(crate) fn stranger(self: &Arc<Self>, room: Option<OwnedSemaphorePermit>) -> Peer {
        let evicted = CancellationToken::new();
        let mut strangers = self.strangers();
        let number = strangers.next;
        strangers.next += 1;
        strangers.silent.insert(number, evicted.clone());
        evict_beyond(self.half_of_strangers(), &mut strangers.silent);
        drop(strangers);
        let state = Mutex::new(State::Stranger { has_asked: false, _room: room });
        Peer { places: self.clone(), number, came: Instant::now(), evicted, state }
    }

    /// Closes the oldest connection without a token, because the process has no descriptor left.
    pub(crate) fn make_room(&self) {
        let mut strangers = self.strangers();
        let fewer = strangers.silent.len().saturating_sub(1);
        evict_beyond(fewer, &mut strangers.silent);
    }

    fn half_of_strangers(&self) -> usize {
        self.limits.strangers.div_ceil(2).max(1)
    }

    /// A place for a connection that is told why it is closed.
    pub(crate) fn closing(&self) -> Option<OwnedSemaphorePermit> {
        self.closing.clone().try_acquire_owned().ok()
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Strangers {
    /// Whether it was one of them.
    fn remove(&mut self, number: u64) -> bool {
        self.silent.remove(&number).or_else(|| self.asking.remove(&number)).is_some()
    }
}

/// Takes the places of the oldest, until so many are left.
fn evict_beyond(limit: usize, strangers: &mut BTreeMap<u64, CancellationToken>) {
    while strangers.len() > limit
        && let Some((_, evicted)) = strangers.pop_first()
    {
        evicted.cancel();
    }
}

/// The client of one connection over TCP.
pub(crate) struct Peer {
    places: Arc<Places>,
    /// Its number among the strangers.
    number: u64,
    came: Instant,
    evicted: CancellationToken,
    state: Mutex<State>,
}

enum State {
    Stranger {
        /// Whether the head of a request has arrived.
        has_asked: bool,
        _room: Option<OwnedSemaphorePermit>,
    },
    Known {
        /// The last token, with what it allowed: it may be withdrawn while the connection is open.
        shown: (Access, Box<[u8]>),
        _place: OwnedSemaphorePermit,
        /// Its place among those that only read.
        reader: Option<OwnedSemaphorePermit>,
    },
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.places.strangers().remove(self.number);
    }
}

impl Peer {
    /// The head of a request has arrived.
    pub(crate) fn asks(&self) {
        let State::Stranger { has_asked, .. } = &mut *self.state() else { return };
        *has_asked = true;
        let mut strangers = self.places.strangers();
        if let Some(evicted) = strangers.silent.remove(&self.number) {
            strangers.asking.insert(self.number, evicted);
            evict_beyond(self.places.half_of_strangers(), &mut strangers.asking);
        }
    }

    /// The request shows a valid token.
    ///
    /// # Errors
    ///
    /// If so many connections have shown a token that there is no place for this one.
    pub(crate) fn shows(&self, access: Access, token: &[u8]) -> Result<(), Problem> {
        let mut state = self.state();
        match &mut *state {
            State::Known { shown, reader, .. } => {
                *shown = (access, token.into());
                if access == Access::Write {
                    *reader = None;
                }
            }
            State::Stranger { .. } => *state = self.admit(access, token)?,
        }
        Ok(())
    }

    fn admit(&self, access: Access, token: &[u8]) -> Result<State, Problem> {
        let full = || Problem::new(Code::TooManyConnections, "too many connections with a token are open");
        let place = self.places.owner().ok_or_else(full)?;
        let reader = match access {
            Access::Write => None,
            _ => Some(self.places.readers.clone().try_acquire_owned().map_err(|_| full())?),
        };
        // Under the lock of the strangers: it was evicted before, or can't be evicted any more.
        if !self.places.strangers().remove(self.number) {
            return Err(Problem::new(
                Code::TooManyConnections,
                "too many connections without a token are open",
            ));
        }
        Ok(State::Known { shown: (access, token.into()), _place: place, reader })
    }

    pub(crate) fn is_stranger(&self) -> bool {
        matches!(*self.state(), State::Stranger { .. })
    }

    /// Whether no head of a request has arrived, so that no answer is under way.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(*self.state(), State::Stranger { has_asked: false, .. })
    }

    /// A place for telling it why it is closed.
    pub(crate) fn closing(&self) -> Option<OwnedSemaphorePermit> {
        self.places.closing()
    }

    /// Waits until another stranger takes its place.
    pub(crate) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Waits until it should have sent a request, or should have received the answer to one without a token.
    pub(crate) async fn overdue(&self) {
        let limits = &self.places.limits;
        sleep_until(self.came + limits.stranger_timeout).await;
        if self.is_silent() {
            return;
        }
        sleep_until(self.came + limits.stranger_timeout + limits.send_timeout).await;
        if !self.is_stranger() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether the token that it has shown allows as much as before.
    pub(crate) fn is_allowed(&self, tokens: &Tokens) -> bool {
        match &*self.state() {
            State::Stranger { .. } => true,
            State::Known { shown: (access, token), .. } => tokens.access_of(token) >= Some(*access),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
