//! The places of one listener: how many connections it has, and who may take a place from whom.
//!
//! Anyone can open a connection over TCP. Until it has shown a token it is a *stranger*: strangers have places of their own, few
//! seconds, and the newest takes the place of the oldest. Half of the places are for those that have sent no request yet, and half
//! for those that wait for an answer, so that silent ones cut off no answer. Those that have their answer, and may still read it, are
//! among the second half, and leave it first: strangers that do not close would otherwise cut off answers. A connection is accepted
//! only when those whose places were taken are really gone: otherwise a flood would take the place of a connection that the server has
//! not looked at yet.
//!
//! A connection that has shown a token keeps its place until it ends. Tokens that only read get at most half of these places, and so
//! do the tokens of one name if there are others.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::config::Limits;
use crate::problem::{Code, Problem};
use crate::rights::{Profile, Rights};
use crate::shares::{Share, Shares};
use crate::tokens::Tokens;

/// The places of one listener.
pub(crate) struct Places {
    /// Connections that have shown a token, and those of the Unix socket.
    known: Arc<Semaphore>,
    /// Those of them that may only read.
    readers: Arc<Semaphore>,
    /// The places of each token.
    shares: Shares,
    /// Those that are told why they are closed. Further ones are closed without a word.
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
    /// Those that the server has closed, and that may still read their answer.
    leaving: BTreeMap<u64, CancellationToken>,
}

impl Places {
    pub(crate) fn new(limits: &Limits) -> Arc<Self> {
        let known = limits.connections.clamp(1, Semaphore::MAX_PERMITS);
        Arc::new(Self {
            known: Arc::new(Semaphore::new(known)),
            readers: Arc::new(Semaphore::new(known.div_ceil(2))),
            shares: Shares::default(),
            closing: Arc::new(Semaphore::new(limits.closing)),
            room: Arc::new(Semaphore::new(limits.room_for_strangers())),
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
    pub(crate) fn stranger(
        self: &Arc<Self>,
        address: SocketAddr,
        room: Option<OwnedSemaphorePermit>,
    ) -> Peer {
        let evicted = CancellationToken::new();
        let mut strangers = self.strangers();
        let number = strangers.next;
        strangers.next += 1;
        strangers.silent.insert(number, evicted.clone());
        strangers.evict_beyond(self.half_of_strangers());
        drop(strangers);
        let state = Mutex::new(State::Stranger { has_asked: false, evicted, _room: room });
        Peer { places: self.clone(), address, number, came: Instant::now(), state }
    }

    /// Closes the oldest connection without a token, because the process has no descriptor left.
    pub(crate) fn make_room(&self) {
        let mut strangers = self.strangers();
        let _ = evict_first(&mut strangers.leaving) || evict_first(&mut strangers.silent);
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
    fn remove(&mut self, number: u64) {
        self.silent.remove(&number);
        self.asking.remove(&number);
        self.leaving.remove(&number);
    }

    /// Takes the places of the oldest of each half, until so many are left.
    fn evict_beyond(&mut self, half: usize) {
        while self.silent.len() > half && evict_first(&mut self.silent) {}
        while self.asking.len() + self.leaving.len() > half
            && (evict_first(&mut self.leaving) || evict_first(&mut self.asking))
        {}
    }
}

/// Takes the place of the oldest. Returns whether there was one.
fn evict_first(strangers: &mut BTreeMap<u64, CancellationToken>) -> bool {
    strangers.pop_first().inspect(|(_, evicted)| evicted.cancel()).is_some()
}

/// The client of one connection over TCP.
pub(crate) struct Peer {
    places: Arc<Places>,
    pub(crate) address: SocketAddr,
    /// Its number among the strangers.
    number: u64,
    came: Instant,
    state: Mutex<State>,
}

enum State {
    Stranger {
        /// Whether the head of a request has arrived.
        has_asked: bool,
        evicted: CancellationToken,
        _room: Option<OwnedSemaphorePermit>,
    },
    Known {
        /// The last token, with what it allowed: it may be withdrawn while the connection is open.
        shown: (Arc<Profile>, Box<[u8]>),
        _place: OwnedSemaphorePermit,
        /// Its place among those of the token's name.
        share: Share,
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
        let State::Stranger { has_asked, evicted, .. } = &mut *self.state() else { return };
        *has_asked = true;
        let mut strangers = self.places.strangers();
        // If its place was just taken, its request has arrived in time after all.
        if strangers.silent.remove(&self.number).is_none() {
            *evicted = CancellationToken::new();
        }
        strangers.asking.insert(self.number, evicted.clone());
        strangers.evict_beyond(self.places.half_of_strangers());
    }

    /// The server has closed the connection, and keeps it only so that its client can read the answer.
    pub(crate) fn leaves(&self) {
        let State::Stranger { evicted, .. } = &*self.state() else { return };
        let mut strangers = self.places.strangers();
        strangers.remove(self.number);
        // One whose place was taken has no other one.
        if !evicted.is_cancelled() {
            strangers.leaving.insert(self.number, evicted.clone());
            strangers.evict_beyond(self.places.half_of_strangers());
        }
    }

    /// The request shows a valid token, of whose name so many connections may be open.
    ///
    /// # Errors
    ///
    /// If so many connections have shown a token, or a token of this name, that there is no place for this one.
    pub(crate) fn shows(&self, profile: &Arc<Profile>, token: &[u8], limit: usize) -> Result<(), Problem> {
        let mut state = self.state();
        let only_reads = profile.rights == Rights::READ;
        match &mut *state {
            State::Known { shown, share, reader, .. } => {
                if !share.is_of(&profile.name) {
                    *share = self.share(profile, limit)?;
                }
                if *shown.1 != *token {
                    shown.1 = token.into();
                }
                shown.0 = profile.clone();
                if !only_reads {
                    *reader = None;
                }
            }
            State::Stranger { .. } => {
                let full =
                    || Problem::new(Code::TooManyConnections, "too many connections with a token are open");
                let place = self.places.owner().ok_or_else(full)?;
                let readers = || self.places.readers.clone().try_acquire_owned();
                let reader = only_reads.then(readers).transpose().map_err(|_| full())?;
                let share = self.share(profile, limit)?;
                // From now on `evicted` does not end, also if its place was just taken.
                self.places.strangers().remove(self.number);
                *state =
                    State::Known { shown: (profile.clone(), token.into()), _place: place, share, reader };
            }
        }
        Ok(())
    }

    fn share(&self, profile: &Profile, limit: usize) -> Result<Share, Problem> {
        let name = &profile.name;
        self.places.shares.take(name, limit).ok_or_else(|| {
            let what = format!("{limit} connections with the token {name:?} are open, which is its share");
            Problem::new(Code::LimitReached, what)
        })
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
        while let Some(evicted) = self.eviction() {
            evicted.cancelled().await;
            // Its request may have arrived at the same time.
            if self.eviction().is_some_and(|evicted| evicted.is_cancelled()) {
                return;
            }
        }
        std::future::pending::<()>().await;
    }

    fn eviction(&self) -> Option<CancellationToken> {
        match &*self.state() {
            State::Stranger { evicted, .. } => Some(evicted.clone()),
            State::Known { .. } => None,
        }
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
            State::Known { shown: (before, token), .. } => {
                tokens.find(token).is_some_and(|now| now.covers(before))
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const TOKEN: &[u8] = b"0123456789abcdef";

    fn address() -> SocketAddr {
        "127.0.0.1:4242".parse().unwrap()
    }

    fn profile(name: &str, rights: Rights) -> Arc<Profile> {
        Arc::new(Profile::new(name, rights, &[]))
    }

    fn places() -> Arc<Places> {
        Places::new(&Limits { strangers: 4, connections: 4, ..Limits::default() })
    }

    fn is_evicted(peer: &Peer) -> bool {
        peer.evicted().now_or_never().is_some()
    }

    #[tokio::test]
    async fn newest_stranger_takes_the_place_of_the_oldest_that_is_as_far() {
        let places = places();
        let come = || places.stranger(address(), None);
        let (first, second) = (come(), come());
        assert!(!is_evicted(&first));
        first.asks();
        let (third, fourth) = (come(), come());
        assert!(is_evicted(&second) && !is_evicted(&third) && !is_evicted(&fourth));
        assert!(!is_evicted(&first), "silent ones do not cut off an answer");
        third.asks();
        fourth.asks();
        assert!(is_evicted(&first) && !is_evicted(&third));
    }

    #[tokio::test]
    async fn strangers_that_have_their_answer_make_room_before_those_that_wait_for_one() {
        let places = places();
        let come = || places.stranger(address(), None);
        let (waits, answered, no_http) = (come(), come(), come());
        waits.asks();
        answered.asks();
        answered.leaves();
        assert!(!is_evicted(&answered), "it has a moment to read its answer");
        // One that sent no request leaves its place among the silent ones.
        no_http.leaves();
        assert!(is_evicted(&answered) && !is_evicted(&waits) && !is_evicted(&no_http));
        let (first, second) = (come(), come());
        assert!(!is_evicted(&first) && !is_evicted(&second) && !is_evicted(&no_http));
        first.asks();
        assert!(is_evicted(&no_http) && !is_evicted(&waits));
        second.asks();
        assert!(is_evicted(&waits));
        // Its answer was sent in the same moment.
        waits.leaves();
        assert!(is_evicted(&waits) && places.strangers().leaving.is_empty());
        // A process without descriptors closes those that have their answer first.
        first.leaves();
        let silent = come();
        places.make_room();
        assert!(is_evicted(&first) && !is_evicted(&silent));
        places.make_room();
        assert!(is_evicted(&silent));
    }

    #[tokio::test]
    async fn request_that_arrives_with_the_eviction_is_answered() {
        let places = places();
        let come = || places.stranger(address(), None);
        let (asking, known) = (come(), come());
        let _more = [come(), come()];
        assert!(is_evicted(&asking) && is_evicted(&known));
        asking.asks();
        known.asks();
        known.shows(&profile("a", Rights::READ), TOKEN, 1).unwrap();
        assert!(!is_evicted(&asking) && !is_evicted(&known));
        assert!(asking.is_stranger() && !known.is_stranger());
    }

    #[tokio::test]
    async fn connection_is_accepted_when_those_without_a_place_are_gone() {
        let places = places();
        // Without the budget of a task, which lets a future wait after some hundred polls.
        let room = || tokio::task::unconstrained(places.room()).now_or_never();
        let mut open = Vec::new();
        while let Some(room) = room() {
            open.push(places.stranger(address(), room));
        }
        let evicted = open.iter().filter(|peer| is_evicted(peer)).count();
        assert!((1..=2 * places.limits.closing + 4).contains(&evicted), "{evicted}");
        assert!(room().is_none());
        open.retain(|peer| !is_evicted(peer));
        assert!(room().is_some());
        // One that has shown a token needs no room.
        let peer = open.pop().unwrap();
        let before = places.room.available_permits();
        peer.shows(&profile("a", Rights::WRITE), TOKEN, 1).unwrap();
        assert_eq!(places.room.available_permits(), before + 1);
    }

    #[tokio::test]
    async fn connections_of_one_token_have_a_limit_that_follows_the_last_token() {
        let places = places();
        let come = || places.stranger(address(), None);
        let (ci, ops) = (profile("ci", Rights::WRITE), profile("ops", Rights::WRITE));
        let (first, second, third) = (come(), come(), come());
        first.shows(&ci, TOKEN, 2).unwrap();
        first.shows(&ci, TOKEN, 2).unwrap();
        second.shows(&ci, TOKEN, 2).unwrap();
        assert_eq!(third.shows(&ci, TOKEN, 2).unwrap_err().code, Code::LimitReached);
        assert!(third.is_stranger());
        // A connection that shows a token of another name counts for that one.
        first.shows(&ops, TOKEN, 2).unwrap();
        third.shows(&ci, TOKEN, 2).unwrap();
        assert_eq!(first.shows(&ci, TOKEN, 2).unwrap_err().code, Code::LimitReached);
        drop(second);
        first.shows(&ci, TOKEN, 2).unwrap();
    }
}
