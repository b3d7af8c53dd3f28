//! State machine of one acquire attempt: send, wait for the push, re-check, time out.
//!
//! If an answer is lost, the outcome is *unknown*. Such an attempt may still get the lease until the store has answered
//! a `Release` with a tombstone.

mod outcome;
mod pushes;

use alloc::sync::Arc;
use core::time::Duration;

use super::hints::HintLimit;
use super::secrets::GrantSecrets;
use crate::command::{Acquire, Answer, Command, Grant, HeadHint, Queued, Release, Reply};
use crate::id::Acquisition;
use crate::time::{LocalTime, StoreTime, drift_margin};

pub use outcome::{Effect, Failure, Outcome, REFUSAL_LIMIT, WaitPolicy};

/// Lifetime of a tombstone: longer than any delayed command can stay in flight.
pub const TOMBSTONE_TTL: Duration = Duration::from_secs(60);

/// Max time to wait for an answer. Stores answer sooner, unless the task that sends the command is not polled.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// How many answers may be missing for that long before the next one counts as lost: the driver sends all but the first request, so a
/// task is the reason only once, and else a pause of the process, or a store that hangs.
const MAX_PAUSES: u32 = 2;

/// Min pause between re-checks that follow each other. Without it a halted manual clock would loop.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);

/// Backoff before the first retry; it doubles up to [`WaitPolicy::repoll_interval`].
const RETRY_BACKOFF: Duration = Duration::from_millis(50);

/// Longest backoff while the store refuses commands: it may accept them again at any time, and sends no push then.
const LONGEST_REFUSAL: Duration = Duration::from_secs(1);

/// Min number of re-checks of a waiter within the lifetime of its queue entry.
const REPOLLS_PER_ENTRY_TTL: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Send an `Acquire` at this time.
    SendAt { at: LocalTime },
    /// An `Acquire` is in flight; after `until` the attempt asks again.
    InFlight { until: LocalTime },
    /// The attempt is queued in the store.
    Queued { repoll_at: LocalTime },
    /// The attempt has ended.
    Done(Outcome),
}

/// State machine of one attempt to lock.
#[derive(Clone, Debug)]
pub struct AcquireMachine {
    command: Arc<Acquire>,
    policy: Option<WaitPolicy>,
    phase: Phase,
    /// Local send time of an answered `Acquire`, and the store's time in the answer. Push times are relative to it.
    anchor: Option<(LocalTime, StoreTime)>,
    /// Time of a reconnect since the anchor was set: the server, and its clock, may have changed.
    anchor_stale_since: Option<LocalTime>,
    /// When the client released what the store may have granted to the attempt by then.
    released_at: Option<LocalTime>,
    /// An `Acquire` may still be in flight, or its answer was lost.
    may_be_in_flight: bool,
    /// The store may have a lease or a queue entry for an attempt that ended without a grant.
    needs_release: bool,
    /// `Acquire`s without an answer.
    failures: u32,
    /// How many of `failures` the store or the network lost, not a caller that stopped polling.
    lost_answers: u32,
    /// How often there was no answer within [`ANSWER_TIMEOUT`].
    pauses: u32,
    /// How many sends in a row had no answer.
    retries: u32,
    /// When the store first refused a command of a queued attempt since its last answer.
    refused_since: Option<LocalTime>,
    /// At least one `Acquire` was sent. An attempt asks once even if its deadline has passed.
    has_sent: bool,
    /// It was queued in the store.
    has_waited: bool,
    /// A push arrived while an answer was in flight that may be older than the push: re-check then.
    recheck_at: Option<LocalTime>,
    /// Of an attempt that waits: what a pushed grant must prove.
    secrets: Option<GrantSecrets>,
    /// Limits the re-checks that pushes without a proof cause.
    hints: HintLimit,
    /// A grant that was pushed before the anchoring answer arrived; the two may use different connections.
    early_push: Option<PushedGrant>,
    /// The same for a `Next` push, with its store time.
    early_next: Option<(HeadHint, StoreTime)>,
}

/// A pushed grant, with its store time and its local receive time.
#[derive(Clone, Copy, Debug)]
struct PushedGrant {
    grant: Grant,
    at: StoreTime,
    received_at: LocalTime,
    /// Number of the secret that it proves.
    secret: u32,
}

impl AcquireMachine {
    /// Creates an attempt. Without `policy` it does not wait.
    ///
    /// # Panics
    ///
    /// If the command waits and `policy` is absent, or the reverse.
    #[must_use]
    #[inline]
    pub fn new(command: Acquire, policy: Option<WaitPolicy>, now: LocalTime) -> Self {
        assert!(command.wait.is_some() == policy.is_some(), "an attempt waits, or does not");
        let secrets = policy.map(|policy| GrantSecrets::new(policy.secret_key, command.acquisition));
        Self {
            command: Arc::new(command),
            policy,
            phase: Phase::SendAt { at: now },
            anchor: None,
            anchor_stale_since: None,
            released_at: None,
            may_be_in_flight: false,
            needs_release: false,
            failures: 0,
            lost_answers: 0,
            pauses: 0,
            retries: 0,
            refused_since: None,
            has_sent: false,
            has_waited: false,
            recheck_at: None,
            secrets,
            hints: HintLimit::default(),
            early_push: None,
            early_next: None,
        }
    }

    /// The attempt's id.
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

    /// Time of the next action: a re-check, a retry or the timeout.
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

    /// The command to send now, if any. A finished attempt returns its pending `Release` once; the caller must repeat it
    /// until it is answered or the lease has expired.
    pub fn poll_transmit(&mut self, now: LocalTime) -> Option<Command> {
        self.handle_timeout(now);
        match self.phase {
            Phase::SendAt { at } if at <= now => {
                self.phase = Phase::InFlight { until: now + ANSWER_TIMEOUT };
                self.may_be_in_flight = true;
                self.has_sent = true;
                self.hints.handle_sent(now);
                if let Some(secrets) = &mut self.secrets {
                    Arc::make_mut(&mut self.command).secret = secrets.draw();
                }
                Some(Command::Acquire(self.command.clone()))
            }
            Phase::Done(_) if self.needs_release => {
                self.needs_release = false;
                let acquisition = self.command.acquisition;
                let tombstone = self.tombstone();
                Some(Command::Release(Release { tombstone, ..Release::now(acquisition) }))
            }
            _ => None,
        }
    }

    /// A push that may be newer than the grant arrived: the lease must be confirmed.
    #[must_use]
    pub const fn recheck_pending(&self) -> bool {
        self.recheck_at.is_some()
    }

    /// The secrets that the attempt has sent, to recognise a grant that is pushed to its lease. None if it does not wait.
    #[must_use]
    pub const fn secrets(&self) -> Option<GrantSecrets> {
        self.secrets
    }

    /// The attempt was queued in the store, so other attempts may be queued behind it.
    #[must_use]
    pub const fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// It was queued, or an answer that was lost may have said so.
    #[must_use]
    pub const fn may_have_waited(&self) -> bool {
        self.has_waited || (self.policy.is_some() && self.failures > 0)
    }

    /// The command that it sends.
    #[must_use]
    pub const fn command(&self) -> &Arc<Acquire> {
        &self.command
    }

    /// Whether the store may know the attempt. An attempt that was never sent needs no release.
    #[must_use]
    pub const fn may_be_in_store(&self) -> bool {
        self.may_be_in_flight || self.anchor.is_some()
    }

    /// Tombstone lifetime for a release now: zero once every `Acquire` has been answered.
    #[must_use]
    pub const fn tombstone(&self) -> Duration {
        if self.may_be_in_flight { TOMBSTONE_TTL } else { Duration::ZERO }
    }

    /// Tombstone lifetime once the `Acquire` in flight is answered: an earlier one may have been lost.
    #[must_use]
    pub const fn tombstone_once_answered(&self) -> Duration {
        if self.failures > 0 { TOMBSTONE_TTL } else { Duration::ZERO }
    }

    /// Lifetime of a queue entry that is not released.
    #[must_use]
    pub fn queue_entry_ttl(&self) -> Duration {
        self.command.wait.map_or(Duration::ZERO, |wait| wait.entry_ttl)
    }

    /// Handles deadlines that have passed.
    pub fn handle_timeout(&mut self, now: LocalTime) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        if self.has_sent && self.policy.is_some_and(|policy| now >= policy.deadline) {
            // If nothing reached the store, no answer to a release can confirm the timeout.
            self.finish_and_release(if self.may_be_in_store() { Outcome::TimedOut } else { Outcome::Failed });
        } else if let Phase::InFlight { until } = self.phase
            && now >= until
        {
            self.pauses += 1;
            let failure = if self.pauses > MAX_PAUSES { Failure::Unknown } else { Failure::Paused };
            self.handle_failure(now, failure);
        } else if let Phase::Queued { repoll_at } = self.phase
            && now >= repoll_at
        {
            self.phase = Phase::SendAt { at: now };
        }
    }

    /// The answer to an `Acquire` that was sent at `sent_at`.
    pub fn handle_answer(&mut self, sent_at: LocalTime, now: LocalTime, answer: &Answer) {
        self.may_be_in_flight = self.failures > 0;
        self.retries = 0;
        if let Some(secrets) = &mut self.secrets {
            secrets.handle_answered();
        }
        self.refused_since = None;
        if matches!(self.phase, Phase::Done(_)) {
            // The attempt had ended. Its `Release` carried a tombstone, so the order of arrival does not matter.
            return;
        }
        self.anchor = Some((sent_at, answer.at));
        // An answer requested before the reconnect may come from the old server.
        if self.anchor_stale_since.is_some_and(|since| sent_at >= since) {
            self.anchor_stale_since = None;
        }
        match &answer.reply {
            // The grant is from before its release.
            Reply::Granted(_) if self.released_at.is_some_and(|at| sent_at <= at) => {
                self.phase = Phase::SendAt { at: now };
            }
            Reply::Granted(grant) => {
                let until = sent_at + grant.valid_for.saturating_sub(drift_margin(grant.valid_for));
                // The answer has arrived: nothing is in flight.
                self.phase = Phase::Queued { repoll_at: now };
                self.finish_granted(now, *grant, sent_at, until);
            }
            // Another client has queued it.
            Reply::Queued(_) if self.policy.is_none() => self.finish_and_release(Outcome::NotGranted),
            Reply::Queued(queued) => {
                self.has_waited = true;
                let repoll_at = self.next_repoll(now, sent_at, answer.at, *queued);
                self.phase = Phase::Queued { repoll_at };
                if let Some((head, at)) = self.early_next.take()
                    && at >= answer.at
                {
                    self.handle_next(now, head, (sent_at, answer.at));
                }
                if let Some(pushed) = self.early_push.take() {
                    self.handle_pushed(now, pushed, (sent_at, answer.at));
                }
                if !matches!(self.phase, Phase::Done(_))
                    && let Some(at) = self.recheck_at.take()
                {
                    self.recheck_by(at.max(now));
                }
            }
            Reply::Busy => self.finish(Outcome::NotGranted),
            Reply::QueueFull => self.finish(Outcome::QueueFull),
            Reply::Refused(refusal) => self.finish(Outcome::Refused(*refusal)),
            Reply::Cancelled => self.finish(Outcome::Cancelled),
            _ => self.finish_and_release(Outcome::Failed),
        }
    }

    /// Handles a failed `Acquire`. A queued attempt, or a waiting one that met a busy store, retries: without a limit of its own
    /// if the store did not answer, for [`REFUSAL_LIMIT`] if it refuses. Any attempt retries once after a lost answer, because
    /// an idle connection may have been cut, and asks again after each pause.
    pub fn handle_failure(&mut self, now: LocalTime, failure: Failure) {
        if matches!(self.phase, Phase::Done(_)) {
            return;
        }
        if failure == Failure::Paused {
            self.handle_abandoned(now);
            return;
        }
        // The next answer may come from another server.
        self.discard_early_pushes();
        // A grant that is not durable is an answer.
        if failure.may_have_effect() && failure != Failure::NotDurable {
            self.failures += 1;
        } else {
            self.may_be_in_flight = self.failures > 0;
        }
        match failure {
            // Handled above.
            Failure::Paused => {}
            Failure::Gone => self.finish(Outcome::Failed),
            // The store granted it: release at once, so that other clients do not wait for the expiry.
            Failure::NotDurable => {
                self.needs_release = true;
                self.phase = Phase::Done(Outcome::Failed);
            }
            Failure::Permanent(_) => self.finish_and_release(Outcome::Failed),
            Failure::Transient(_) if self.is_refused_too_long(now) => {
                self.finish_and_release(Outcome::Failed);
            }
            Failure::Transient(_) | Failure::NotSent => {
                self.retry_or_fail(now, self.anchor.is_some(), LONGEST_REFUSAL);
            }
            Failure::Busy => self.retry_or_fail(now, true, LONGEST_REFUSAL),
            Failure::Unknown => {
                self.lost_answers += 1;
                if self.lost_answers == 1 && (self.policy.is_none() || self.anchor.is_none()) {
                    self.phase = Phase::SendAt { at: now };
                } else {
                    self.retry_or_fail(now, self.anchor.is_some(), Duration::MAX);
                }
            }
        }
    }

    /// Retries after a backoff if the attempt waits and `may_wait`; otherwise it has failed.
    fn retry_or_fail(&mut self, now: LocalTime, may_wait: bool, longest: Duration) {
        match self.policy {
            Some(policy) if may_wait => {
                let pause = RETRY_BACKOFF.saturating_mul(1 << self.retries.min(10)).min(longest);
                self.retries += 1;
                self.phase = Phase::SendAt { at: now + pause.min(policy.repoll_interval) };
            }
            _ => self.finish(Outcome::Failed),
        }
    }

    /// Counts a refusal that may pass. Returns whether refusals have lasted for [`REFUSAL_LIMIT`].
    fn is_refused_too_long(&mut self, now: LocalTime) -> bool {
        let since = *self.refused_since.get_or_insert(now);
        now.since(since) >= REFUSAL_LIMIT
    }

    /// Whether the store refuses the attempt at present, which retries.
    #[must_use]
    pub const fn is_refused(&self) -> bool {
        self.refused_since.is_some() && !matches!(self.phase, Phase::Done(_))
    }

    /// No task polls for the answer to the `Acquire` in flight, or none has for long. It may take effect: asks again.
    pub fn handle_abandoned(&mut self, now: LocalTime) {
        if let Phase::InFlight { .. } = self.phase {
            self.discard_early_pushes();
            self.failures += 1;
            self.phase = Phase::SendAt { at: now };
        }
    }

    /// Handles a reconnect. Pushes may have been missed. The times in new pushes may be from another clock, so they count
    /// only after an answer has set the anchor again.
    pub fn handle_reconnected(&mut self, now: LocalTime) {
        self.anchor_stale_since = Some(now);
        self.discard_early_pushes();
        // The backoff was for the old connection.
        if let Phase::SendAt { at } = &mut self.phase {
            *at = now.min(*at);
        }
        self.handle_hint(now);
    }

    /// The client has released what the store may have granted to the attempt: asks again. Earlier answers and pushes grant nothing.
    pub fn handle_released(&mut self, now: LocalTime) {
        self.released_at = Some(now);
        self.handle_reconnected(now);
    }

    fn discard_early_pushes(&mut self) {
        (self.early_push, self.early_next) = (None, None);
    }

    /// Requests a re-check at once.
    pub fn handle_hint(&mut self, now: LocalTime) {
        self.recheck_by(now);
    }

    /// Re-checks at this time at the latest. With an `Acquire` in flight, it is another one that follows.
    fn recheck_by(&mut self, at: LocalTime) {
        match &mut self.phase {
            Phase::Queued { repoll_at } => *repoll_at = at.min(*repoll_at),
            Phase::InFlight { .. } => {
                self.recheck_at = Some(self.recheck_at.map_or(at, |before| before.min(at)));
            }
            // Also skips a retry backoff.
            Phase::SendAt { at: send_at } => *send_at = at.min(*send_at),
            Phase::Done(_) => {}
        }
    }

    /// Cancels the attempt. An unclaimed grant is released too.
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
            // The answer in flight shows the remaining lifetime, or triggers a re-check.
            self.recheck_at = Some(now);
        } else if self.policy.is_some() {
            // The grant arrived after its trust period. A re-check returns the remaining lifetime. If that is shorter than the
            // margin, no answer can be soon enough, and re-checks follow each other until the lease has expired.
            let pause = if trusted_until > since { Duration::ZERO } else { SHORTEST_PAUSE };
            self.phase = Phase::SendAt { at: now + pause };
        } else {
            self.finish_and_release(Outcome::Failed);
        }
    }

    /// Ends the attempt. A release is needed only if an `Acquire` is unanswered.
    fn finish(&mut self, outcome: Outcome) {
        let is_granted = matches!(outcome, Outcome::Granted { .. });
        self.needs_release = self.may_be_in_flight && !is_granted;
        self.phase = Phase::Done(outcome);
    }

    /// Ends the attempt with a release, because the store may have a lease or a queue entry.
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
        // The store answered after `sent_at`, so this is early by at most one network delay. The margin makes the expiry
        // visible.
        let wait = repoll_at.since(answered_at);
        let due = sent_at + wait + drift_margin(wait);
        seldom.min(due.max(now + SHORTEST_PAUSE))
    }
}

#[cfg(test)]
mod tests;
