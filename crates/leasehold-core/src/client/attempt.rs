//! The client's side of one attempt to lock: ask, wait for the push, look again, give up.
//!
//! The rule that shapes it: a lost answer is *unknown*. Until the store has answered a `Release` with a
//! tombstone, an attempt whose answer was not seen may still come to hold the lease.

use alloc::sync::Arc;
use core::time::Duration;

use crate::command::{
    Acquire, Answer, Command, Grant, HeadHint, Push, PushKind, Queued, Refusal, Release, Reply,
};
use crate::id::Acquisition;
use crate::time::{LocalTime, StoreTime, drift_margin};

/// How long a tombstone stands: longer than any delayed command can be under way.
const TOMBSTONE_TTL: Duration = Duration::from_secs(60);

/// Stores answer sooner, with an error if need be, where anybody runs what was to send the command.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// The pause before the first repetition after a failure; it doubles up to [`WaitPolicy::repoll_interval`].
const RETRY_BACKOFF: Duration = Duration::from_millis(50);

/// How often at least a waiter looks during the time that the store keeps its place without a sign of life.
const REPOLLS_PER_ENTRY_TTL: u32 = 3;

/// How a waiter waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitPolicy {
    /// Give up then; `NEVER` waits for as long as it takes.
    pub deadline: LocalTime,
    /// How long the head of the queue waits at most until it looks again when nothing is heard; the store may say that it
    /// should be sooner. The others look when the store says, which takes care that it is not asked too often, and a few
    /// times while it keeps their place.
    pub repoll_interval: Duration,
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
    SendAt { at: LocalTime },
    /// An `Acquire` is under way, and counts as lost from then on.
    InFlight { until: LocalTime },
    /// The attempt is in the queue.
    Queued { repoll_at: LocalTime },
    /// The attempt has ended.
    Done(Outcome),
}

/// One attempt to lock.
#[derive(Clone, Debug)]
pub struct AcquireMachine {
    command: Arc<Acquire>,
    policy: Option<WaitPolicy>,
    phase: Phase,
    /// The local time before an answered `Acquire` was sent, and the store's time in the answer: what a push
    /// is measured from.
    anchor: Option<(LocalTime, StoreTime)>,
    /// Since then the way to the store is new, and may lead to another clock than the anchor's.
    anchor_stale_since: Option<LocalTime>,
    /// Some `Acquire` may still be under way, or its answer was lost.
    may_be_in_flight: bool,
    /// The store may hold a lease or a place for an attempt that ended without a grant.
    needs_release: bool,
    failures: u32,
    /// It has asked, with whatever result. However short its time is, an attempt asks once.
    has_sent: bool,
    /// It has stood in the queue.
    has_waited: bool,
    /// Something was told while an answer was under way, which may be older than that: ask once more.
    recheck_pending: bool,
    /// A grant that was pushed before the answer came that it is measured from: each may take a way of its own.
    early_push: Option<PushedGrant>,
    /// So it was told that it is the next, and when.
    early_next: Option<(HeadHint, StoreTime)>,
}

/// A pushed grant: what it gives, when the store decided that, and when it was heard here.
#[derive(Clone, Copy, Debug)]
struct PushedGrant {
    grant: Grant,
    at: StoreTime,
    received_at: LocalTime,
}

impl AcquireMachine {
    /// An attempt that waits as `policy` says, or only tries once without it.
    ///
    /// # Panics
    ///
    /// When the command waits and `policy` is absent, or the other way round.
    #[must_use]
    #[inline]
    pub fn new(command: Acquire, policy: Option<WaitPolicy>, now: LocalTime) -> Self {
        assert!(command.wait.is_some() == policy.is_some(), "an attempt waits, or does not");
        Self {
            command: Arc::new(command),
            policy,
            phase: Phase::SendAt { at: now },
            anchor: None,
            anchor_stale_since: None,
            may_be_in_flight: false,
            needs_release: false,
            failures: 0,
            has_sent: false,
            has_waited: false,
            recheck_pending: false,
            early_push: None,
            early_next: None,
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
        let deadline = self.policy.map_or(LocalTime::NEVER, |policy| policy.deadline);
        let next = match self.phase {
            Phase::SendAt { at } => at,
            Phase::InFlight { until } => until,
            Phase::Queued { repoll_at } => repoll_at,
            Phase::Done(_) => return None,
        };
        Some(next.min(deadline)).filter(|time| *time != LocalTime::NEVER)
    }

    /// The command to send now, if there is one. After the end that is the `Release` that the attempt owes;
    /// it is handed out once, and whoever sends it repeats it until it is answered or the lease has run out.
    pub fn poll_transmit(&mut self, now: LocalTime) -> Option<Command> {
        self.handle_timeout(now);
        match self.phase {
            Phase::SendAt { at } if at <= now => {
                self.phase = Phase::InFlight { until: now + ANSWER_TIMEOUT };
                self.may_be_in_flight = true;
                self.has_sent = true;
                Some(Command::Acquire(self.command.clone()))
            }
            Phase::Done(_) if self.needs_release => {
                self.needs_release = false;
                let acquisition = self.command.acquisition;
                let tombstone = self.tombstone();
                Some(Command::Release(Release { acquisition, min_hold: Duration::ZERO, tombstone }))
            }
            _ => None,
        }
    }

    /// Something was told about this attempt that its grant may be older than: the lease is to be confirmed.
    #[must_use]
    pub const fn recheck_pending(&self) -> bool {
        self.recheck_pending
    }

    /// The attempt has stood in the store's queue, so others may stand behind it.
    #[must_use]
    pub const fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Whether the store may know of the attempt. One that never was sent has left nothing anywhere.
    #[must_use]
    pub const fn may_be_in_store(&self) -> bool {
        self.may_be_in_flight || self.anchor.is_some()
    }

    /// How long a tombstone the release of this attempt's lease must leave now: none once every `Acquire` has
    /// been answered.
    #[must_use]
    pub const fn tombstone(&self) -> Duration {
        if self.may_be_in_flight { TOMBSTONE_TTL } else { Duration::ZERO }
    }

    /// The same, once the `Acquire` that is under way is answered: an earlier one may have been lost.
    #[must_use]
    pub const fn tombstone_once_answered(&self) -> Duration {
        if self.failures > 0 { TOMBSTONE_TTL } else { Duration::ZERO }
    }

    /// How long the store keeps a place in the queue that is not given back.
    #[must_use]
    pub fn queue_entry_ttl(&self) -> Duration {
        self.command.wait.map_or(Duration::ZERO, |wait| wait.entry_ttl)
    }

    /// Moves on when a deadline has passed.
    pub fn handle_timeout(&mut self, now: LocalTime) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        if self.has_sent && self.policy.is_some_and(|policy| now >= policy.deadline) {
            // Where nothing has reached the store, it has nothing to say either.
            self.finish_and_release(if self.may_be_in_store() { Outcome::TimedOut } else { Outcome::Failed });
        } else if let Phase::InFlight { until } = self.phase
            && now >= until
        {
            self.handle_failure(now, Failure::Unknown);
        } else if let Phase::Queued { repoll_at } = self.phase
            && now >= repoll_at
        {
            self.phase = Phase::SendAt { at: now };
        }
    }

    /// The answer to an `Acquire` that was sent at `sent_at`.
    pub fn handle_answer(&mut self, sent_at: LocalTime, now: LocalTime, answer: &Answer) {
        self.may_be_in_flight = self.failures > 0;
        if matches!(self.phase, Phase::Done(_)) {
            // The end came first. Its `Release` was sent with a tombstone, in whichever order they arrive.
            return;
        }
        self.anchor = Some((sent_at, answer.at));
        // One that was asked for before may be the last word of the old server.
        if self.anchor_stale_since.is_some_and(|since| sent_at >= since) {
            self.anchor_stale_since = None;
        }
        match &answer.reply {
            Reply::Granted(grant) => {
                let until = sent_at + grant.valid_for.saturating_sub(drift_margin(grant.valid_for));
                // The answer is here, so nothing is under way any more.
                self.phase = Phase::Queued { repoll_at: now };
                self.finish_granted(now, *grant, sent_at, until);
            }
            Reply::Queued(queued) => {
                self.has_waited = true;
                let told = self.early_next.take().filter(|(_, at)| *at >= answer.at);
                let told = told.map_or(*queued, |(head, _)| head.into());
                let repoll_at = self.next_repoll(now, sent_at, answer.at, told);
                self.phase = Phase::Queued { repoll_at };
                if let Some(pushed) = self.early_push.take() {
                    self.handle_pushed(now, pushed, (sent_at, answer.at));
                }
                if !matches!(self.phase, Phase::Done(_)) && core::mem::take(&mut self.recheck_pending) {
                    self.handle_hint(now);
                }
            }
            Reply::Busy => self.finish(Outcome::NotGranted),
            Reply::QueueFull => self.finish(Outcome::QueueFull),
            Reply::Refused(refusal) => self.finish(Outcome::Refused(*refusal)),
            Reply::Cancelled => self.finish(Outcome::Cancelled),
            _ => self.finish_and_release(Outcome::Failed),
        }
    }

    /// An `Acquire` that failed. An attempt that waits tries again, if it has a place in the queue or others are only in
    /// its way. Any attempt asks once more when an answer was lost, since a connection may have been cut while it was idle.
    pub fn handle_failure(&mut self, now: LocalTime, failure: Failure) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        // The next answer may be another server's.
        self.discard_early_pushes();
        if failure == Failure::Unknown {
            self.failures += 1;
        } else {
            self.may_be_in_flight = self.failures > 0;
        }
        if failure == Failure::Gone {
            self.finish(Outcome::Failed);
            return;
        }
        if failure == Failure::NotDurable {
            // The store has granted it, and is to take it back at once: nobody else gets it meanwhile.
            self.needs_release = true;
            self.phase = Phase::Done(Outcome::Failed);
            return;
        }
        match self.policy {
            Some(policy) if self.anchor.is_some() || failure == Failure::Busy => {
                let pause = RETRY_BACKOFF.saturating_mul(1 << self.failures.min(10));
                self.phase = Phase::SendAt { at: now + pause.min(policy.repoll_interval) };
            }
            _ if failure == Failure::Unknown && self.failures == 1 => self.phase = Phase::SendAt { at: now },
            _ if self.may_be_in_flight => self.finish_and_release(Outcome::Failed),
            _ => self.finish(Outcome::Failed),
        }
    }

    /// What the store told unasked. A push to an attempt that has ended changes nothing: what it owes has been
    /// sent, or its lease is known.
    pub fn handle_push(&mut self, now: LocalTime, push: &Push) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        let Some((sent_at, answered_at)) = self.anchor.filter(|_| self.anchor_stale_since.is_none()) else {
            match push.kind {
                PushKind::Granted(grant) if self.anchor_stale_since.is_none() => {
                    // The newest counts, should the store have given up on one before; of that the first word.
                    if self.early_push.is_none_or(|early_push| early_push.at < push.at) {
                        self.early_push = Some(PushedGrant { grant, at: push.at, received_at: now });
                    }
                }
                PushKind::Next(head) if self.anchor_stale_since.is_none() => {
                    self.early_next = Some((head, push.at));
                }
                // Nothing to measure it from, and the answer that is under way may be older.
                _ => self.recheck_pending = true,
            }
            return;
        };
        match push.kind {
            PushKind::Granted(grant) => {
                let pushed = PushedGrant { grant, at: push.at, received_at: now };
                self.handle_pushed(now, pushed, (sent_at, answered_at));
            }
            PushKind::Next(head) => match self.phase {
                Phase::Queued { .. } => {
                    let repoll_at = self.next_repoll(now, sent_at, answered_at, head.into());
                    self.phase = Phase::Queued { repoll_at };
                }
                // The answer that is under way may not know of it.
                Phase::InFlight { .. } => self.early_next = Some((head, push.at)),
                Phase::SendAt { .. } | Phase::Done(_) => {}
            },
            PushKind::Revoked => self.handle_hint(now),
            // It is told to whoever holds already; its grant is under way.
            PushKind::Contended => self.handle_hint(now),
        }
    }

    /// A pushed grant is measured from an answer: when that was asked for here, and made there.
    fn handle_pushed(
        &mut self,
        now: LocalTime,
        PushedGrant { grant, at, received_at }: PushedGrant,
        (sent_at, answered_at): (LocalTime, StoreTime),
    ) {
        // It was decided before the answer, and that answer did not know of it any more: nobody can say how old it is.
        let is_older = at < answered_at;
        if is_older || self.policy.is_some_and(|policy| policy.confirms_pushes) {
            self.handle_hint(now);
            return;
        }
        // The store's clock moved this much since it answered, so the push was sent no earlier than this by ours, whatever
        // delayed it on its way.
        let elapsed = at.since(answered_at);
        let since = received_at.min(sent_at + elapsed);
        let margin = drift_margin(elapsed + grant.valid_for);
        let trusted_until = since + grant.valid_for.saturating_sub(margin);
        // The question that it is measured from may have been on its way for seconds, where many were asked at once. What is
        // left of the trust may then be too short for the renewal, though the lease is new: an answer says more.
        if trusted_until < now + grant.valid_for / 2 {
            self.handle_hint(now);
        } else {
            self.finish_granted(now, grant, since, trusted_until);
        }
    }

    /// The way to the store is new: what was told meanwhile was missed, and what is told now may be by another clock, until
    /// an answer anchors it.
    pub fn handle_reconnected(&mut self, now: LocalTime) {
        self.anchor_stale_since = Some(now);
        self.discard_early_pushes();
        // What failed on the old way need not wait out its pause.
        if let Phase::SendAt { at } = &mut self.phase {
            *at = now.min(*at);
        }
        self.handle_hint(now);
    }

    fn discard_early_pushes(&mut self) {
        (self.early_push, self.early_next) = (None, None);
    }

    /// Something may have changed: ask at once.
    pub fn handle_hint(&mut self, now: LocalTime) {
        match self.phase {
            Phase::Queued { .. } => self.phase = Phase::SendAt { at: now },
            Phase::InFlight { .. } => self.recheck_pending = true,
            // Also during the pause after a failure.
            Phase::SendAt { at } => self.phase = Phase::SendAt { at: at.min(now) },
            Phase::Done(_) => {}
        }
    }

    /// The caller has lost interest. A grant that was not taken is given back too.
    pub fn handle_cancel(&mut self) {
        match self.phase {
            Phase::Done(Outcome::Granted { .. }) => self.finish_and_release(Outcome::Cancelled),
            Phase::Done(_) => {}
            _ => self.finish_and_release(Outcome::Cancelled),
        }
    }

    fn finish_granted(&mut self, now: LocalTime, grant: Grant, since: LocalTime, trusted_until: LocalTime) {
        if now < trusted_until {
            self.finish(Outcome::Granted { grant, since, trusted_until });
        } else if matches!(self.phase, Phase::InFlight { .. }) {
            // Its answer tells what is left of the lease, or is as late, and then it asks once more.
            self.recheck_pending = true;
        } else if self.policy.is_some() {
            // It took longer to arrive than it is good for. What is left of the lease is told whoever asks again.
            self.phase = Phase::SendAt { at: now };
        } else {
            self.finish_and_release(Outcome::Failed);
        }
    }

    /// Ends with the store keeping nothing that is not known, except after unseen answers.
    fn finish(&mut self, outcome: Outcome) {
        let is_granted = matches!(outcome, Outcome::Granted { .. });
        self.needs_release = self.may_be_in_flight && !is_granted;
        self.phase = Phase::Done(outcome);
    }

    /// Ends with the store possibly keeping a lease or a place.
    fn finish_and_release(&mut self, outcome: Outcome) {
        self.needs_release = self.may_be_in_store();
        self.phase = Phase::Done(outcome);
    }

    fn next_repoll(
        &self,
        now: LocalTime,
        sent_at: LocalTime,
        answered_at: StoreTime,
        Queued { is_head, repoll_at }: Queued,
    ) -> LocalTime {
        let longest = self.policy.map_or(Duration::MAX, |policy| {
            let others = self.queue_entry_ttl() / REPOLLS_PER_ENTRY_TTL;
            if is_head { policy.repoll_interval } else { others.max(policy.repoll_interval) }
        });
        let seldom = now + longest;
        // The answer was made after `sent_at`, so by our clock this is not too early by more than the way
        // here; a little later than the expiry is when it can be seen.
        let wait = repoll_at.since(answered_at);
        let due = sent_at + wait + drift_margin(wait);
        seldom.min(due.max(now + Duration::from_millis(1)))
    }
}

#[cfg(test)]
mod tests;
