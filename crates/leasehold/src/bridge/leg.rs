//! The foreign leg of one lease: it is renewed, watched and released by the client's keeper.

use std::future::{pending, poll_fn};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use leasehold_core::{LocalTime, Token, drift_margin};
use leasehold_store::{ForeignAnswer, ForeignCall, ForeignError, ForeignKeys, MAX_DELAY, StoreError};
use tokio::sync::{Notify, watch};

use super::commands::{is_silent, is_yes};
use super::foreign::Foreign;
use super::holders::Holders;
use super::yielding::YieldTable;
use crate::engine::{EntryId, Session, with_deadline};

/// The ttl of a leg until its first renewal. A command to take it leaves no tombstone, so one that arrives late, after its attempt
/// has been given up, may take the foreign lock without a holder: for this long at most.
pub(super) const FIRST_TTL: Duration = Duration::from_secs(3);

/// Pause between two tries to release.
const RELEASE_PAUSE: Duration = Duration::from_millis(250);

/// Is called once the leg is released.
pub(crate) type OnReleased = Box<dyn FnOnce() + Send>;

/// How a leg ended.
#[derive(Clone, Debug)]
pub(crate) enum LegEnd {
    Released,
    /// Another program had it, or none.
    NotHeld,
    /// The server has not answered yet. The release is repeated until the leg has expired.
    Unconfirmed,
    /// The server refuses the release, which is repeated until the leg has expired.
    Refused(StoreError),
}

impl LegEnd {
    fn is_confirmed(&self) -> bool {
        !matches!(self, Self::Unconfirmed | Self::Refused(_))
    }
}

/// The lease of the own leg, and its token.
#[derive(Clone, Copy)]
pub(crate) struct OwnLease {
    pub(crate) entry: EntryId,
    pub(crate) token: Token,
}

pub(crate) struct Leg {
    pub(super) session: Arc<Session>,
    pub(super) keys: Arc<dyn ForeignKeys>,
    pub(super) foreign: Foreign,
    pub(super) yields: Arc<YieldTable>,
    /// What the key shows as its holder.
    pub(super) holders: Holders,
    pub(super) own: OwnLease,
    pub(super) ttl: Duration,
    state: Mutex<State>,
    /// Wakes the keeper.
    changed: Notify,
    end: watch::Sender<Option<LegEnd>>,
}

#[derive(Default)]
struct State {
    /// When the leg was taken; none before.
    taken_at: Option<LocalTime>,
    /// The token of the other library, if its lock has tokens.
    token: Option<Token>,
    renew_at: Option<LocalTime>,
    /// When the server has certainly let the leg expire.
    expires_at: LocalTime,
    /// Until when the client may rely on the leg, by the last confirmation.
    trusted_until: LocalTime,
    /// When the command to take the leg was sent that is in flight.
    taking_since: Option<LocalTime>,
    /// Until when a command without an answer may still take the foreign lock.
    orphan_until: LocalTime,
    is_ending: bool,
    /// Whether the leg was trusted when its release began.
    was_trusted: bool,
    /// Whether the server has answered a release.
    is_given_back: bool,
    on_released: Option<OnReleased>,
}

impl Leg {
    pub(super) fn new(
        session: Arc<Session>,
        keys: Arc<dyn ForeignKeys>,
        yields: Arc<YieldTable>,
        holders: Holders,
        own: OwnLease,
        ttl: Duration,
    ) -> Self {
        let (end, _) = watch::channel(None);
        let (state, changed) = (Mutex::default(), Notify::new());
        let foreign = holders.foreign().clone();
        Self { session, keys, foreign, yields, holders, own, ttl, state, changed, end }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command that may take the leg, or renew it, is about to be sent.
    fn note_sent(&self, sent_at: LocalTime, ttl: Duration) {
        let mut state = self.state();
        state.expires_at = state.expires_at.max(sent_at + ttl + MAX_DELAY);
    }

    /// A command that may take the leg for this holder has no answer.
    pub(super) fn note_unanswered(&self, holder: &str, sent_at: LocalTime) {
        let until = sent_at + FIRST_TTL + MAX_DELAY;
        self.holders.give_up(holder, sent_at, until);
        self.note_late(sent_at);
    }

    /// What commands sent until then have taken is released. The releases may come late, too.
    pub(super) fn note_released(&self, sent_at: LocalTime) {
        self.holders.give_up_all(sent_at, sent_at + FIRST_TTL + MAX_DELAY);
    }

    /// A command that was sent then may still take the foreign lock, or its release may still come.
    pub(super) fn note_late(&self, sent_at: LocalTime) {
        let mut state = self.state();
        state.orphan_until = state.orphan_until.max(sent_at + FIRST_TTL + MAX_DELAY);
    }

    /// A command to take the leg is about to be sent. Returns its ttl.
    pub(super) fn begin_take(&self, sent_at: LocalTime) -> Duration {
        let ttl = self.ttl.min(FIRST_TTL);
        self.note_sent(sent_at, ttl);
        self.state().taking_since = Some(sent_at);
        ttl
    }

    /// That command was answered, or its attempt was dropped.
    pub(super) fn end_take(&self) {
        self.state().taking_since = None;
    }

    /// The token of a lock with tokens: that of the other library, and at least the own one.
    pub(crate) fn token(&self) -> Option<Token> {
        self.state().token.map(|token| token.max(self.own.token))
    }

    /// The server has confirmed the leg for `ttl` from `sent_at`, with this answer.
    pub(super) fn confirm(&self, sent_at: LocalTime, ttl: Duration, answer: &ForeignAnswer) {
        let trusted_until = sent_at + ttl.saturating_sub(drift_margin(ttl));
        let is_ending = {
            let mut state = self.state();
            state.taken_at.get_or_insert(sent_at);
            state.token = state.token.or(self.foreign.token(answer));
            state.renew_at = Some(sent_at + ttl / 3);
            state.trusted_until = trusted_until;
            state.is_ending
        };
        if !is_ending {
            self.session.limit_trust(self.own.entry, trusted_until, self.session.now());
        }
        self.changed.notify_one();
    }

    /// Renews the leg. Returns false if it is lost. An error leaves it as it was, and is the reason if it is lost by its expiry.
    pub(crate) async fn renew(&self) -> Result<bool, StoreError> {
        let renewed = self.try_to_renew().await;
        if let Err(error) = &renewed {
            self.session.fail_companion(self.own.entry, error);
        }
        renewed
    }

    async fn try_to_renew(&self) -> Result<bool, StoreError> {
        let sent_at = self.session.now();
        self.note_sent(sent_at, self.ttl);
        let holder = self.holders.current();
        let mut calls = vec![self.foreign.renew(&holder, millis(self.ttl))];
        if self.foreign.is_exclusive() {
            // A change of the key is reported from now on: an operator may delete it by hand. What came before is in the answer.
            calls.extend([ForeignCall::Track, self.foreign.holds(&holder)]);
        }
        let mut answers = self.keys.run(calls).await?.answers.into_iter();
        let renewed = answers.next().unwrap_or(Ok(ForeignAnswer::Nil));
        let is_gone = matches!(answers.nth(1), Some(Ok(held)) if !self.foreign.is_holder(&holder, &held));
        match renewed {
            Ok(_) if is_gone => self.lost("its key was deleted, has expired, or has another holder"),
            Ok(answer) if is_yes(&answer) => {
                if self.foreign.is_shortened(&answer) {
                    self.warn_of_watchdog();
                }
                self.confirm(sent_at, self.ttl, &answer);
                Ok(true)
            }
            Ok(_) => self.lost("its key was deleted, has expired, or has another holder"),
            Err(ForeignError::OtherType(_)) => self.lost("its key has another type now"),
            Err(error) => Err(error.into()),
        }
    }

    fn lost(&self, why: &str) -> Result<bool, StoreError> {
        let is_held = self.session.remaining(self.own.entry, self.session.now()).is_ok();
        if is_held {
            tracing::warn!(foreign = %self.foreign, why, "the lock of the other library was lost");
        }
        self.state().trusted_until = LocalTime::default();
        self.session.lose_companion(self.own.entry, self.session.now());
        Ok(false)
    }

    /// Ends the leg, and waits until the server has released it, or has failed to once.
    pub(crate) async fn release(&self) -> LegEnd {
        let mut end = self.end.subscribe();
        let now = self.session.now();
        {
            let mut state = self.state();
            state.is_ending = true;
            state.was_trusted = now < state.trusted_until;
        }
        // From now on its expiry is no loss: an answer may take longer.
        self.session.lift_trust_limit(self.own.entry, now);
        self.changed.notify_one();
        let ended = end.wait_for(Option::is_some).await;
        ended.ok().and_then(|end| end.clone()).unwrap_or(LegEnd::Unconfirmed)
    }

    /// Releases the leg in the background, then calls `on_released`.
    pub(crate) fn abandon(&self, on_released: OnReleased) {
        if self.end.borrow().is_some() {
            return on_released();
        }
        {
            let mut state = self.state();
            state.is_ending = true;
            state.on_released = Some(on_released);
        }
        self.changed.notify_one();
        // It may have ended in between.
        if self.end.borrow().is_some() {
            self.call_on_released();
        }
    }

    fn call_on_released(&self) {
        let on_released = self.state().on_released.take();
        if let Some(on_released) = on_released {
            on_released();
        }
    }

    fn publish(&self, end: LegEnd) {
        self.end.send_replace(Some(end));
        self.call_on_released();
    }

    // --- The keeper's part -----------------------------------------------------------------------

    /// Renews the leg until it is lost, and releases it.
    pub(super) async fn keep(self: Arc<Self>) {
        // Also if the client's thread ends before.
        let _ended = EndGuard(&self);
        self.hold().await;
        self.give_back().await;
    }

    /// Ends when the leg is to be released, or is lost.
    async fn hold(&self) {
        let key = self.keys.watch(&self.foreign.keys());
        let mut own = self.session.watch(self.own.entry);
        loop {
            let renew_at = {
                let state = self.state();
                if state.is_ending {
                    return;
                }
                state.renew_at
            };
            let event = async {
                tokio::select! {
                    biased;
                    _ = poll_fn(|context| self.session.poll_lost(&mut own, context)) => Event::Lost,
                    () = self.changed.notified() => Event::Command,
                    // Each reader changes the key of all readers: only its renewals look at it.
                    () = key.changed(), if renew_at.is_some() && self.foreign.is_exclusive() => Event::Look,
                }
            };
            match with_deadline(&self.session, renew_at, event).await {
                Some(Event::Lost) => {
                    // Its attempt ends with the next poll, which may never come.
                    let taking_since = self.state().taking_since;
                    if let Some(sent_at) = taking_since {
                        self.note_unanswered(&self.holders.current(), sent_at);
                    }
                    return;
                }
                Some(Event::Command) => {}
                Some(Event::Look) | None => {
                    if self.renew().await.is_err() {
                        self.state().renew_at = Some(self.session.now() + retry_pause(self.ttl));
                    }
                }
            }
        }
    }

    /// Releases the leg. Repeats that until the server has answered, and as long as a command without an answer may still take it.
    async fn give_back(&self) {
        let taken_at = self.state().taken_at;
        if let Some(taken_at) = taken_at {
            self.yields.record_hold(&self.foreign, self.session.now().since(taken_at));
        }
        let (mut is_confirmed, mut is_repeated) = (false, false);
        loop {
            let answers = self.keys.run(self.releases()).await;
            let answer = answers.map(|outcome| outcome.answers.into_iter().next());
            let is_answered = matches!(answer, Ok(Some(Ok(_))));
            let end = match answer {
                Ok(Some(Ok(answer))) if is_silent(&answer) => {
                    self.warn_of_silence();
                    LegEnd::Released
                }
                Ok(Some(Ok(answer))) if is_yes(&answer) => LegEnd::Released,
                Ok(Some(Ok(_))) if taken_at.is_none() => LegEnd::Released,
                // It was never taken, whatever the key is now.
                Ok(Some(Err(ForeignError::OtherType(_)))) if taken_at.is_none() => LegEnd::Released,
                Ok(Some(Ok(_))) if is_repeated => self.end_by_unanswered(),
                Ok(Some(Ok(_))) => LegEnd::NotHeld,
                Ok(Some(Err(ForeignError::OtherType(_)))) => LegEnd::NotHeld,
                Ok(Some(Err(error))) => self.unconfirmed(error.into()),
                Err(error) => self.unconfirmed(error),
                Ok(None) => LegEnd::Unconfirmed,
            };
            if !end.is_confirmed() && !std::mem::replace(&mut is_repeated, true) {
                // The connection may have been cut while it was idle.
                continue;
            }
            if !is_confirmed {
                // Whether this release or an earlier one has ended it, it is not held any more.
                is_confirmed = is_answered || end.is_confirmed();
                self.publish(end);
                self.state().is_given_back = is_confirmed;
            }
            let (orphan_until, expires_at) = {
                let state = self.state();
                (state.orphan_until, state.expires_at)
            };
            let until = if is_confirmed { orphan_until } else { expires_at.max(orphan_until) };
            let now = self.session.now();
            if now >= until {
                return;
            }
            with_deadline(&self.session, Some(now + RELEASE_PAUSE), pending::<()>()).await;
        }
    }

    /// Releases the lock, and what commands without an answer may have taken.
    pub(super) fn releases(&self) -> Vec<ForeignCall> {
        let mut holders = vec![self.holders.current()];
        holders.extend(self.holders.given_up());
        holders.iter().map(|holder| self.foreign.release(holder)).collect()
    }

    /// The end by a release that has failed.
    fn unconfirmed(&self, error: StoreError) -> LegEnd {
        if !error.failure.is_refusal() {
            return LegEnd::Unconfirmed;
        }
        self.session.refuse_companion(self.own.entry, &error);
        LegEnd::Refused(error)
    }

    fn warn_of_silence(&self) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let why = "the user has no right to the channel or the list that wakes them";
            tracing::warn!(foreign = %self.foreign, why, "the waiters of the other library are not woken");
        });
    }

    fn warn_of_watchdog(&self) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let why = "a watchdog in Java sets the lock's time to less than this ttl: set a ttl of at most its lockWatchdogTimeout";
            tracing::warn!(foreign = %self.foreign, ttl = ?self.ttl, why, "a reader's lock may expire too soon");
        });
    }

    /// The holder does not have the lock any more, after a release without an answer. That release has ended a leg which was trusted.
    fn end_by_unanswered(&self) -> LegEnd {
        if self.state().was_trusted { LegEnd::Released } else { LegEnd::Unconfirmed }
    }
}

enum Event {
    Lost,
    Command,
    Look,
}

/// Ends a leg whose future is over or was dropped.
struct EndGuard<'a>(&'a Leg);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        if self.0.end.borrow().is_none() {
            self.0.publish(LegEnd::Unconfirmed);
        }
        self.0.call_on_released();
        let state = self.0.state();
        let is_confirmed = state.is_given_back || state.taken_at.is_none();
        drop(state);
        self.0.session.end_companion(is_confirmed);
    }
}

/// The pause before a failed renewal is repeated.
fn retry_pause(ttl: Duration) -> Duration {
    (ttl / 12).min(Duration::from_secs(1))
}

pub(super) fn millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)
}
