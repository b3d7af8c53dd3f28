//! The client's side of one attempt to lock: ask, wait for the push, look again, give up.
//!
//! The rule that shapes it: a lost answer is *unknown*. Until the store has answered a `Release` with a
//! tombstone, an attempt whose answer was not seen may still come to hold the lease.

use alloc::sync::Arc;
use core::time::Duration;

use crate::command::{
    Acquire, Answer, Command, Grant, Head, Push, PushKind, Queued, Refusal, Release, Reply,
};
use crate::id::Acquisition;
use crate::time::{LocalTime, StoreTime, drift_margin};

/// How long a tombstone stands: longer than any delayed command can be under way.
const TOMBSTONE: Duration = Duration::from_secs(60);

/// Stores answer sooner, with an error if need be, where anybody runs what was to send the command.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// The pause before the first repetition after a failure; it doubles up to [`Patience::look_again`].
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// How often at least a waiter looks during the time that the store keeps its place without a sign of life.
const LOOKS_PER_PLACE: u32 = 3;

/// How a waiter waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Give up then; `NEVER` waits for as long as it takes.
    pub deadline: LocalTime,
    /// How long the head of the queue waits at most until it looks again when nothing is heard; the store may say that it
    /// should be sooner. The others look when the store says, which takes care that it is not asked too often, and a few
    /// times while it keeps their place.
    pub look_again: Duration,
    /// A pushed grant does not count before it was asked for: the answer says how safe it is.
    pub confirms_pushes: bool,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The lease is held.
    Granted {
        /// What was granted.
        grant: Grant,
        /// The local clock when the grant can be counted from.
        since: LocalTime,
        /// The local clock until which it may be trusted.
        trusted_until: LocalTime,
    },
    /// The store says that somebody else holds it.
    NotGranted,
    /// The time to wait was over before the store granted it. What the store has to say about that is its answer to the
    /// `Release` that is owed: before that comes, nobody knows whether the store was there at all.
    TimedOut,
    /// The queue is full.
    QueueFull,
    /// The attempt contradicts how the resource is used.
    Refused(Refusal),
    /// It was given back, by its caller or by a command that overtook it.
    Cancelled,
    /// The store could not be asked. Whether it was granted is unknown; giving it back is under way.
    Failed,
}

/// What is known about a command that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It never reached the store.
    NotSent,
    /// It never reached the store, because others were in the way: whoever waits may as well wait for them.
    Busy,
    /// Whether it took effect is unknown.
    Unknown,
    /// It took effect, but is not as safe as was asked for.
    NotDurable,
    /// It never reached the store, and no later one will: what the store kept is lost.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// An `Acquire` is to be sent at this time.
    Asking { at: LocalTime },
    /// An `Acquire` is under way, and counts as lost from then on.
    Asked { until: LocalTime },
    /// The attempt is in the queue.
    Waiting { look_again_at: LocalTime },
    /// The attempt has ended.
    Done(Outcome),
}

/// One attempt to lock.
#[derive(Clone, Debug)]
pub struct AcquireMachine {
    command: Arc<Acquire>,
    patience: Option<Patience>,
    phase: Phase,
    /// The local time before an answered `Acquire` was sent, and the store's time in the answer: what a push
    /// is measured from.
    anchor: Option<(LocalTime, StoreTime)>,
    /// Since then the way to the store is new, and may lead to another clock than the anchor's.
    adrift_since: Option<LocalTime>,
    /// Some `Acquire` may still be under way, or its answer was lost.
    may_arrive_late: bool,
    /// The store may hold a lease or a place for an attempt that ended without a grant.
    owes_release: bool,
    failures: u32,
    /// It has asked, with whatever result. However short its time is, an attempt asks once.
    has_asked: bool,
    /// It has stood in the queue.
    has_waited: bool,
    /// Something was told while an answer was under way, which may be older than that: ask once more.
    hinted: bool,
    /// A grant that was pushed before the answer came that it is measured from: each may take a way of its own.
    early: Option<Pushed>,
    /// So it was told that it is the next, and when.
    early_head: Option<(Head, StoreTime)>,
}

/// A pushed grant: what it gives, when the store decided that, and when it was heard here.
#[derive(Clone, Copy, Debug)]
struct Pushed {
    grant: Grant,
    at: StoreTime,
    heard_at: LocalTime,
}

impl AcquireMachine {
    /// An attempt that waits as `patience` says, or only tries once without it.
    ///
    /// # Panics
    ///
    /// When the command waits and `patience` is absent, or the other way round.
    #[must_use]
    #[inline]
    pub fn new(command: Acquire, patience: Option<Patience>, now: LocalTime) -> Self {
        assert!(command.wait.is_some() == patience.is_some(), "an attempt waits, or does not");
        Self {
            command: Arc::new(command),
            patience,
            phase: Phase::Asking { at: now },
            anchor: None,
            adrift_since: None,
            may_arrive_late: false,
            owes_release: false,
            failures: 0,
            has_asked: false,
            has_waited: false,
            hinted: false,
            early: None,
            early_head: None,
        }
    }

    /// Which attempt this is.
    #[must_use]
    pub fn acquisition(&self) -> Acquisition {
        self.command.acquisition
    }

    /// How the attempt ended, once it has.
    #[must_use]
    pub const fn poll_outcome(&self) -> Option<Outcome> {
        match self.phase {
            Phase::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// When something is to be done next: asking again, or giving up.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<LocalTime> {
        let deadline = self.patience.map_or(LocalTime::NEVER, |patience| patience.deadline);
        let next = match self.phase {
            Phase::Asking { at } => at,
            Phase::Asked { until } => until,
            Phase::Waiting { look_again_at } => look_again_at,
            Phase::Done(_) => return None,
        };
        Some(next.min(deadline)).filter(|time| *time != LocalTime::NEVER)
    }

    /// The command to send now, if there is one. After the end that is the `Release` that the attempt owes;
    /// it is handed out once, and whoever sends it repeats it until it is answered or the lease has run out.
    pub fn poll_transmit(&mut self, now: LocalTime) -> Option<Command> {
        self.handle_timeout(now);
        match self.phase {
            Phase::Asking { at } if at <= now => {
                self.phase = Phase::Asked { until: now + ANSWER_LIMIT };
                self.may_arrive_late = true;
                self.has_asked = true;
                Some(Command::Acquire(self.command.clone()))
            }
            Phase::Done(_) if self.owes_release => {
                self.owes_release = false;
                let acquisition = self.command.acquisition;
                let tombstone = self.tombstone();
                Some(Command::Release(Release { acquisition, at_least: Duration::ZERO, tombstone }))
            }
            _ => None,
        }
    }

    /// Something was told about this attempt that its grant may be older than: the lease is to be confirmed.
    #[must_use]
    pub const fn was_hinted(&self) -> bool {
        self.hinted
    }

    /// The attempt has stood in the store's queue, so others may stand behind it.
    #[must_use]
    pub const fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Whether the store may know of the attempt. One that never was sent has left nothing anywhere.
    #[must_use]
    pub const fn may_be_known(&self) -> bool {
        self.may_arrive_late || self.anchor.is_some()
    }

    /// How long a tombstone the release of this attempt's lease must leave now: none once every `Acquire` has
    /// been answered.
    #[must_use]
    pub const fn tombstone(&self) -> Duration {
        if self.may_arrive_late { TOMBSTONE } else { Duration::ZERO }
    }

    /// The same, once the `Acquire` that is under way is answered: an earlier one may have been lost.
    #[must_use]
    pub const fn tombstone_once_answered(&self) -> Duration {
        if self.failures > 0 { TOMBSTONE } else { Duration::ZERO }
    }

    /// How long the store keeps a place in the queue that is not given back.
    #[must_use]
    pub fn place_lasts(&self) -> Duration {
        self.command.wait.map_or(Duration::ZERO, |wait| wait.entry_ttl)
    }

    /// Moves on when a deadline has passed.
    pub fn handle_timeout(&mut self, now: LocalTime) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        if self.has_asked && self.patience.is_some_and(|patience| now >= patience.deadline) {
            // Where nothing has reached the store, it has nothing to say either.
            self.give_up(if self.may_be_known() { Outcome::TimedOut } else { Outcome::Failed });
        } else if let Phase::Asked { until } = self.phase
            && now >= until
        {
            self.handle_failure(now, Failure::Unknown);
        } else if let Phase::Waiting { look_again_at } = self.phase
            && now >= look_again_at
        {
            self.phase = Phase::Asking { at: now };
        }
    }

    /// The answer to an `Acquire` that was sent at `sent_at`.
    pub fn handle_answer(&mut self, sent_at: LocalTime, now: LocalTime, answer: &Answer) {
        self.may_arrive_late = self.failures > 0;
        if matches!(self.phase, Phase::Done(_)) {
            // The end came first. Its `Release` was sent with a tombstone, in whichever order they arrive.
            return;
        }
        self.anchor = Some((sent_at, answer.at));
        // One that was asked for before may be the last word of the old server.
        if self.adrift_since.is_some_and(|since| sent_at >= since) {
            self.adrift_since = None;
        }
        match &answer.reply {
            Reply::Granted(grant) => {
                let until = sent_at + grant.lasts.saturating_sub(drift_margin(grant.lasts));
                // The answer is here, so nothing is under way any more.
                self.phase = Phase::Waiting { look_again_at: now };
                self.granted(now, *grant, sent_at, until);
            }
            Reply::Queued(queued) => {
                self.has_waited = true;
                let told = self.early_head.take().filter(|(_, at)| *at >= answer.at);
                let told = told.map_or(*queued, |(head, _)| head.into());
                let look_again_at = self.next_look(now, sent_at, answer.at, told);
                self.phase = Phase::Waiting { look_again_at };
                if let Some(pushed) = self.early.take() {
                    self.handle_pushed(now, pushed, (sent_at, answer.at));
                }
                if !matches!(self.phase, Phase::Done(_)) && core::mem::take(&mut self.hinted) {
                    self.handle_hint(now);
                }
            }
            Reply::Busy => self.end(Outcome::NotGranted),
            Reply::QueueFull => self.end(Outcome::QueueFull),
            Reply::Refused(refusal) => self.end(Outcome::Refused(*refusal)),
            Reply::Cancelled => self.end(Outcome::Cancelled),
            _ => self.give_up(Outcome::Failed),
        }
    }

    /// An `Acquire` that failed. An attempt that waits tries again, if it has a place in the queue or others are only in
    /// its way. Any attempt asks once more when an answer was lost, since a connection may have been cut while it was idle.
    pub fn handle_failure(&mut self, now: LocalTime, failure: Failure) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        // The next answer may be another server's.
        self.forget_early();
        if failure == Failure::Unknown {
            self.failures += 1;
        } else {
            self.may_arrive_late = self.failures > 0;
        }
        if failure == Failure::Gone {
            self.end(Outcome::Failed);
            return;
        }
        if failure == Failure::NotDurable {
            // The store has granted it, and is to take it back at once: nobody else gets it meanwhile.
            self.owes_release = true;
            self.phase = Phase::Done(Outcome::Failed);
            return;
        }
        match self.patience {
            Some(patience) if self.anchor.is_some() || failure == Failure::Busy => {
                let pause = RETRY_AFTER.saturating_mul(1 << self.failures.min(10));
                self.phase = Phase::Asking { at: now + pause.min(patience.look_again) };
            }
            _ if failure == Failure::Unknown && self.failures == 1 => self.phase = Phase::Asking { at: now },
            _ if self.may_arrive_late => self.give_up(Outcome::Failed),
            _ => self.end(Outcome::Failed),
        }
    }

    /// What the store told unasked. A push to an attempt that has ended changes nothing: what it owes has been
    /// sent, or its lease is known.
    pub fn handle_push(&mut self, now: LocalTime, push: &Push) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        let Some((sent_at, answered_at)) = self.anchor.filter(|_| self.adrift_since.is_none()) else {
            match push.kind {
                PushKind::Granted(grant) if self.adrift_since.is_none() => {
                    // The newest counts, should the store have given up on one before; of that the first word.
                    if self.early.is_none_or(|early| early.at < push.at) {
                        self.early = Some(Pushed { grant, at: push.at, heard_at: now });
                    }
                }
                PushKind::Next(head) if self.adrift_since.is_none() => {
                    self.early_head = Some((head, push.at));
                }
                // Nothing to measure it from, and the answer that is under way may be older.
                _ => self.hinted = true,
            }
            return;
        };
        match push.kind {
            PushKind::Granted(grant) => {
                let pushed = Pushed { grant, at: push.at, heard_at: now };
                self.handle_pushed(now, pushed, (sent_at, answered_at));
            }
            PushKind::Next(head) => match self.phase {
                Phase::Waiting { .. } => {
                    let look_again_at = self.next_look(now, sent_at, answered_at, head.into());
                    self.phase = Phase::Waiting { look_again_at };
                }
                // The answer that is under way may not know of it.
                Phase::Asked { .. } => self.early_head = Some((head, push.at)),
                Phase::Asking { .. } | Phase::Done(_) => {}
            },
            PushKind::Revoked => self.handle_hint(now),
            // It is told to whoever holds already; its grant is under way.
            PushKind::Wanted => self.handle_hint(now),
        }
    }

    /// A pushed grant is measured from an answer: when that was asked for here, and made there.
    fn handle_pushed(
        &mut self,
        now: LocalTime,
        Pushed { grant, at, heard_at }: Pushed,
        (sent_at, answered_at): (LocalTime, StoreTime),
    ) {
        // It was decided before the answer, and that answer did not know of it any more: nobody can say how old it is.
        let is_older = at < answered_at;
        if is_older || self.patience.is_some_and(|patience| patience.confirms_pushes) {
            self.handle_hint(now);
            return;
        }
        // The store's clock moved this much since it answered, so the push was sent no earlier than this by ours, whatever
        // delayed it on its way.
        let elapsed = at.since(answered_at);
        let since = heard_at.min(sent_at + elapsed);
        let margin = drift_margin(elapsed + grant.lasts);
        let trusted_until = since + grant.lasts.saturating_sub(margin);
        // The question that it is measured from may have been on its way for seconds, where many were asked at once. What is
        // left of the trust may then be too short for the renewal, though the lease is new: an answer says more.
        if trusted_until < now + grant.lasts / 2 {
            self.handle_hint(now);
        } else {
            self.granted(now, grant, since, trusted_until);
        }
    }

    /// The way to the store is new: what was told meanwhile was missed, and what is told now may be by another clock, until
    /// an answer anchors it.
    pub fn handle_reconnected(&mut self, now: LocalTime) {
        self.adrift_since = Some(now);
        self.forget_early();
        // What failed on the old way need not wait out its pause.
        if let Phase::Asking { at } = &mut self.phase {
            *at = now.min(*at);
        }
        self.handle_hint(now);
    }

    fn forget_early(&mut self) {
        (self.early, self.early_head) = (None, None);
    }

    /// Something may have changed: ask at once.
    pub fn handle_hint(&mut self, now: LocalTime) {
        match self.phase {
            Phase::Waiting { .. } => self.phase = Phase::Asking { at: now },
            Phase::Asked { .. } => self.hinted = true,
            // Also during the pause after a failure.
            Phase::Asking { at } => self.phase = Phase::Asking { at: at.min(now) },
            Phase::Done(_) => {}
        }
    }

    /// The caller has lost interest. A grant that was not taken is given back too.
    pub fn handle_cancel(&mut self) {
        match self.phase {
            Phase::Done(Outcome::Granted { .. }) => self.give_up(Outcome::Cancelled),
            Phase::Done(_) => {}
            _ => self.give_up(Outcome::Cancelled),
        }
    }

    fn granted(&mut self, now: LocalTime, grant: Grant, since: LocalTime, trusted_until: LocalTime) {
        if now < trusted_until {
            self.end(Outcome::Granted { grant, since, trusted_until });
        } else if matches!(self.phase, Phase::Asked { .. }) {
            // Its answer tells what is left of the lease, or is as late, and then it asks once more.
            self.hinted = true;
        } else if self.patience.is_some() {
            // It took longer to arrive than it is good for. What is left of the lease is told whoever asks again.
            self.phase = Phase::Asking { at: now };
        } else {
            self.give_up(Outcome::Failed);
        }
    }

    /// Ends with the store keeping nothing that is not known, except after unseen answers.
    fn end(&mut self, outcome: Outcome) {
        let is_granted = matches!(outcome, Outcome::Granted { .. });
        self.owes_release = self.may_arrive_late && !is_granted;
        self.phase = Phase::Done(outcome);
    }

    /// Ends with the store possibly keeping a lease or a place.
    fn give_up(&mut self, outcome: Outcome) {
        self.owes_release = self.may_be_known();
        self.phase = Phase::Done(outcome);
    }

    fn next_look(
        &self,
        now: LocalTime,
        sent_at: LocalTime,
        answered_at: StoreTime,
        Queued { is_head, look_again_at }: Queued,
    ) -> LocalTime {
        let longest = self.patience.map_or(Duration::MAX, |patience| {
            let others = self.place_lasts() / LOOKS_PER_PLACE;
            if is_head { patience.look_again } else { others.max(patience.look_again) }
        });
        let seldom = now + longest;
        // The answer was made after `sent_at`, so by our clock this is not too early by more than the way
        // here; a little later than the expiry is when it can be seen.
        let wait = look_again_at.since(answered_at);
        let due = sent_at + wait + drift_margin(wait);
        seldom.min(due.max(now + Duration::from_millis(1)))
    }
}

#[cfg(test)]
mod tests;
