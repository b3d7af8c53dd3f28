//! The client's side of one attempt to lock: ask, wait for the push, look again, give up.
//!
//! The rule that shapes it: a lost answer is *unknown*. Until the store has answered a `Release` with a
//! tombstone, an attempt whose answer was not seen may still come to hold the lease.

use alloc::sync::Arc;
use core::time::Duration;

use crate::command::{Acquire, Answer, Command, Grant, Head, Push, PushKind, Refusal, Release, Reply};
use crate::id::Acquisition;
use crate::time::{LocalTime, StoreTime, drift_margin};

/// How long a tombstone stands: longer than any delayed command can be under way.
const TOMBSTONE: Duration = Duration::from_secs(60);

/// Stores answer sooner, with an error if need be, where anybody runs what was to send the command.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// The pause before the first repetition after a failure; it doubles up to [`Patience::look_again`].
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// How a waiter waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Give up then; `NEVER` waits for as long as it takes.
    pub deadline: LocalTime,
    /// How often to look again when nothing is heard.
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
    /// Somebody else holds it, or its time to wait was over.
    NotGranted,
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
    /// The way to the store is new, and may lead to another clock than the anchor's.
    is_adrift: bool,
    /// Some `Acquire` may still be under way, or its answer was lost.
    may_arrive_late: bool,
    /// The store may hold a lease or a place for an attempt that ended without a grant.
    owes_release: bool,
    failures: u32,
    /// It has stood in the queue.
    has_waited: bool,
    /// Something was told while an answer was under way, which may be older than that: ask once more.
    hinted: bool,
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
            is_adrift: false,
            may_arrive_late: false,
            owes_release: false,
            failures: 0,
            has_waited: false,
            hinted: false,
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

    /// How long a tombstone the release of this attempt's lease must leave now: none once every `Acquire` has
    /// been answered.
    #[must_use]
    pub const fn tombstone(&self) -> Duration {
        if self.may_arrive_late { TOMBSTONE } else { Duration::ZERO }
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
        if self.patience.is_some_and(|patience| now >= patience.deadline) {
            self.give_up(Outcome::NotGranted);
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
        self.is_adrift = false;
        match &answer.reply {
            Reply::Granted(grant) => {
                let until = sent_at + grant.lasts.saturating_sub(drift_margin(grant.lasts));
                // The answer is here, so nothing is under way any more.
                self.phase = Phase::Waiting { look_again_at: now };
                self.granted(now, *grant, sent_at, until);
            }
            Reply::Queued(queued) => {
                self.has_waited = true;
                let look_again_at = self.next_look(now, sent_at, answer.at, queued.head);
                self.phase = Phase::Waiting { look_again_at };
                if core::mem::take(&mut self.hinted) {
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
        if failure == Failure::Unknown {
            self.failures += 1;
        } else {
            self.may_arrive_late = self.failures > 0;
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
        let Some((sent_at, answered_at)) = self.anchor.filter(|_| !self.is_adrift) else {
            // Nothing to measure it from, and the answer that is under way may be older.
            self.hinted = true;
            return;
        };
        match push.kind {
            // It was decided before the answer, and that answer did not know of it any more: nobody can say how old it is.
            PushKind::Granted(_) if push.at < answered_at => self.handle_hint(now),
            PushKind::Granted(_) if self.patience.is_some_and(|patience| patience.confirms_pushes) => {
                self.handle_hint(now);
            }
            PushKind::Granted(grant) => {
                // The store's clock moved this much since it answered, so the push was sent no earlier than
                // this by ours, whatever delayed it on its way.
                let elapsed = push.at.since(answered_at);
                let since = now.min(sent_at + elapsed);
                let margin = drift_margin(elapsed + grant.lasts);
                self.granted(now, grant, since, since + grant.lasts.saturating_sub(margin));
            }
            PushKind::Next(head) => {
                if let Phase::Waiting { .. } = self.phase {
                    let look_again_at = self.next_look(now, sent_at, answered_at, Some(head));
                    self.phase = Phase::Waiting { look_again_at };
                }
            }
            PushKind::Revoked => self.handle_hint(now),
            // It is told to whoever holds already; its grant is under way.
            PushKind::Wanted => self.handle_hint(now),
        }
    }

    /// The way to the store is new: what was told meanwhile was missed, and what is told now may be by another clock, until
    /// an answer anchors it.
    pub fn handle_reconnected(&mut self, now: LocalTime) {
        self.is_adrift = true;
        self.handle_hint(now);
    }

    /// Something may have changed: ask at once.
    pub fn handle_hint(&mut self, now: LocalTime) {
        match self.phase {
            Phase::Waiting { .. } => self.phase = Phase::Asking { at: now },
            Phase::Asked { .. } => self.hinted = true,
            Phase::Asking { .. } | Phase::Done(_) => {}
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
        // An attempt that never was sent has left nothing anywhere.
        self.owes_release = self.may_arrive_late || self.anchor.is_some();
        self.phase = Phase::Done(outcome);
    }

    fn next_look(
        &self,
        now: LocalTime,
        sent_at: LocalTime,
        answered_at: StoreTime,
        head: Option<Head>,
    ) -> LocalTime {
        let seldom = self.patience.map_or(LocalTime::NEVER, |patience| now + patience.look_again);
        match head {
            None => seldom,
            // The answer was made after `sent_at`, so by our clock this is not too early by more than the way
            // here; a little later than the expiry is when it can be seen.
            Some(head) => {
                let wait = head.look_again_at.since(answered_at);
                let due = sent_at + wait + drift_margin(wait);
                seldom.min(due.max(now + Duration::from_millis(1)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{Queued, WaitFor};
    use crate::id::ClientId;
    use crate::token::TokenRange;

    const TTL: Duration = Duration::from_secs(10);

    fn at(ms: u64) -> LocalTime {
        LocalTime::ZERO + Duration::from_millis(ms)
    }

    fn store(ms: u64) -> StoreTime {
        StoreTime::from_micros(1_000_000_000) + Duration::from_millis(ms)
    }

    fn attempt(patience: Option<Patience>) -> AcquireMachine {
        let wait = patience.map(|_| WaitFor { entry_ttl: TTL, max_queue: 9 });
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        let command = Acquire {
            acquisition,
            owner: None,
            capacity: 1,
            weight: 1,
            ttl: TTL,
            reserve: 0,
            wait,
            replaces: None,
            metadata: Arc::from(""),
        };
        AcquireMachine::new(command, patience, at(0))
    }

    fn patient() -> Option<Patience> {
        Some(Patience { deadline: at(60_000), look_again: Duration::from_secs(20), confirms_pushes: false })
    }

    fn grant(lasts: Duration) -> Grant {
        Grant { tokens: TokenRange::next(0, 0, StoreTime::ZERO), lasts }
    }

    fn answer(ms: u64, reply: Reply) -> Answer {
        Answer { at: store(ms), reply }
    }

    fn queued(head: Option<u64>) -> Reply {
        Reply::Queued(Queued { head: head.map(|ms| Head { look_again_at: store(ms) }) })
    }

    fn owed(attempt: &mut AcquireMachine) -> Option<Duration> {
        match attempt.poll_transmit(at(99_000)) {
            Some(Command::Release(release)) => Some(release.tombstone),
            other => {
                assert_eq!(other, None);
                None
            }
        }
    }

    fn asked(patience: Option<Patience>) -> AcquireMachine {
        let mut attempt = attempt(patience);
        assert!(matches!(attempt.poll_transmit(at(0)), Some(Command::Acquire(_))));
        assert_eq!(attempt.poll_transmit(at(0)), None, "one is under way");
        attempt
    }

    #[test]
    fn an_answered_grant_is_trusted_from_before_it_was_asked_for() {
        let mut attempt = asked(None);
        attempt.handle_answer(at(0), at(400), &answer(0, Reply::Granted(grant(TTL))));
        let Some(Outcome::Granted { trusted_until, .. }) = attempt.poll_outcome() else { panic!() };
        assert_eq!(trusted_until, at(10_000 - 102));
        assert_eq!(owed(&mut attempt), None);
    }

    #[test]
    fn a_push_over_a_new_connection_is_confirmed_before_it_counts() {
        let mut attempt = asked(patient());
        attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
        attempt.handle_reconnected(at(5));
        assert!(matches!(attempt.poll_transmit(at(5)), Some(Command::Acquire(_))));
        // By a server whose clock is far ahead of the one that queued it: nobody knows how old this is.
        let acquisition = attempt.acquisition();
        let kind = PushKind::Granted(grant(TTL));
        attempt.handle_push(at(6), &Push { acquisition, at: store(90_000), kind });
        assert_eq!(attempt.poll_outcome(), None);
        attempt.handle_answer(at(5), at(7), &answer(90_001, Reply::Granted(grant(TTL))));
        let Some(Outcome::Granted { since, .. }) = attempt.poll_outcome() else { panic!() };
        assert_eq!(since, at(5));
    }

    #[test]
    fn a_push_that_has_to_be_confirmed_only_makes_it_ask() {
        let mut attempt = asked(patient().map(|patience| Patience { confirms_pushes: true, ..patience }));
        attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
        let acquisition = attempt.acquisition();
        let kind = PushKind::Granted(grant(TTL));
        attempt.handle_push(at(6), &Push { acquisition, at: store(5), kind });
        assert_eq!(attempt.poll_outcome(), None);
        assert!(matches!(attempt.poll_transmit(at(6)), Some(Command::Acquire(_))));
        attempt.handle_failure(at(8), Failure::NotDurable);
        assert_eq!(attempt.poll_outcome(), Some(Outcome::Failed));
        assert_eq!(owed(&mut attempt), Some(Duration::ZERO), "it was granted, and all answers were seen");
    }

    #[test]
    fn a_grant_that_arrives_after_its_time_is_given_back() {
        let mut attempt = asked(None);
        attempt.handle_answer(at(0), at(9_900), &answer(0, Reply::Granted(grant(TTL))));
        assert_eq!(attempt.poll_outcome(), Some(Outcome::Failed));
        assert_eq!(owed(&mut attempt), Some(Duration::ZERO));
    }

    #[test]
    fn whoever_waits_asks_again_for_what_is_left_of_a_grant_that_arrives_late() {
        let mut attempt = asked(patient());
        attempt.handle_answer(at(0), at(12_000), &answer(11_990, Reply::Granted(grant(TTL))));
        assert_eq!(attempt.poll_outcome(), None);
        assert!(matches!(attempt.poll_transmit(at(12_000)), Some(Command::Acquire(_))));
        let left = Duration::from_millis(9_980);
        attempt.handle_answer(at(12_000), at(12_010), &answer(12_010, Reply::Granted(grant(left))));
        let Some(Outcome::Granted { trusted_until, .. }) = attempt.poll_outcome() else { panic!() };
        assert!(trusted_until > at(21_000) && trusted_until < at(21_990));
    }

    #[test]
    fn a_late_push_while_an_answer_is_under_way_sends_nothing_twice() {
        let window = Duration::from_secs(3);
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        let push = Push { acquisition, at: store(1_005), kind: PushKind::Granted(grant(window)) };
        let mut attempt = asked(patient());
        attempt.handle_answer(at(0), at(10), &answer(5, queued(None)));
        attempt.handle_hint(at(8_000));
        assert!(attempt.poll_transmit(at(8_000)).is_some());
        attempt.handle_push(at(8_100), &push);
        assert_eq!(attempt.poll_transmit(at(8_100)), None, "one is under way");
        assert_ne!(attempt.tombstone(), Duration::ZERO, "and may still arrive");
        attempt.handle_answer(at(8_000), at(8_200), &answer(8_005, queued(None)));
        assert!(attempt.poll_transmit(at(8_200)).is_some());
    }

    #[test]
    fn whoever_waits_also_waits_for_those_in_the_way_of_asking() {
        let mut attempt = asked(patient());
        attempt.handle_failure(at(5_000), Failure::Busy);
        let again = attempt.poll_timeout().unwrap();
        assert!(again > at(5_000) && again < at(6_000));
        assert!(matches!(attempt.poll_transmit(again), Some(Command::Acquire(_))));
        attempt.handle_failure(at(60_000), Failure::Busy);
        attempt.handle_timeout(at(60_000));
        assert_eq!(attempt.poll_outcome(), Some(Outcome::NotGranted));
        assert_eq!(owed(&mut attempt), None, "nothing of it has ever reached the store");
        let mut impatient = asked(None);
        impatient.handle_failure(at(5_000), Failure::Busy);
        assert_eq!(impatient.poll_outcome(), Some(Outcome::Failed));
    }

    #[test]
    fn a_delayed_push_can_t_stretch_a_lease() {
        let window = Duration::from_secs(3);
        let push = |ms| Push {
            acquisition: Acquisition { client: ClientId::new(1), sequence: 1 },
            at: store(ms),
            kind: PushKind::Granted(grant(window)),
        };
        let mut late = asked(patient());
        late.handle_answer(at(0), at(10), &answer(5, queued(None)));
        late.handle_push(at(2_000), &push(1_005));
        let Some(Outcome::Granted { trusted_until, .. }) = late.poll_outcome() else { panic!() };
        assert_eq!(trusted_until, at(1_000 + 3_000 - 40 - 2), "counted from when it was sent");

        let mut stale = asked(patient());
        stale.handle_answer(at(0), at(10), &answer(5, queued(None)));
        stale.handle_hint(at(5_000));
        assert!(stale.poll_transmit(at(5_000)).is_some());
        stale.handle_answer(at(5_000), at(5_010), &answer(5_005, queued(None)));
        stale.handle_push(at(5_100), &push(1_005));
        assert_eq!(stale.poll_outcome(), None, "decided before the last answer, which knew nothing of it");

        let mut too_late = asked(patient());
        too_late.handle_answer(at(0), at(10), &answer(5, queued(None)));
        too_late.handle_push(at(4_000), &push(1_005));
        assert_eq!(too_late.poll_outcome(), None, "it is not taken for a lease");
        assert!(
            matches!(too_late.poll_transmit(at(4_000)), Some(Command::Acquire(_))),
            "and is asked for anew"
        );
    }

    #[test]
    fn the_head_looks_again_at_the_holder_s_expiry_and_others_seldom() {
        let mut head = asked(patient());
        head.handle_answer(at(0), at(2), &answer(0, queued(Some(5_000))));
        assert_eq!(head.poll_timeout(), Some(at(5_052)));
        assert!(matches!(head.poll_transmit(at(5_052)), Some(Command::Acquire(_))));

        let mut other = asked(patient());
        other.handle_answer(at(0), at(2), &answer(0, queued(None)));
        assert_eq!(other.poll_timeout(), Some(at(20_002)));
        let next = PushKind::Next(Head { look_again_at: store(7_000) });
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        other.handle_push(at(100), &Push { acquisition, at: store(90), kind: next });
        assert_eq!(other.poll_timeout(), Some(at(7_072)));
    }

    #[test]
    fn a_waiter_gives_up_at_its_deadline_and_leaves_the_queue() {
        let mut attempt = asked(patient());
        attempt.handle_answer(at(0), at(2), &answer(0, queued(None)));
        attempt.handle_timeout(at(60_000));
        assert_eq!(attempt.poll_outcome(), Some(Outcome::NotGranted));
        assert_eq!(owed(&mut attempt), Some(Duration::ZERO), "all answers were seen");
        assert_eq!(owed(&mut attempt), None, "it is owed once");
    }

    #[test]
    fn whatever_is_unseen_is_given_back_with_a_tombstone() {
        let mut unanswered = asked(None);
        unanswered.handle_cancel();
        assert_eq!(owed(&mut unanswered), Some(TOMBSTONE));

        let mut unknown = asked(None);
        unknown.handle_failure(at(1), Failure::Unknown);
        assert_eq!(unknown.poll_outcome(), None);
        assert!(matches!(unknown.poll_transmit(at(1)), Some(Command::Acquire(_))), "once more");
        unknown.handle_failure(at(2), Failure::Unknown);
        assert_eq!(unknown.poll_outcome(), Some(Outcome::Failed));
        assert_eq!(owed(&mut unknown), Some(TOMBSTONE));

        let mut never_sent = asked(None);
        never_sent.handle_failure(at(1), Failure::NotSent);
        assert_eq!(never_sent.poll_outcome(), Some(Outcome::Failed));
        assert_eq!(owed(&mut never_sent), None, "nothing can be left");

        let mut untouched = attempt(None);
        untouched.handle_cancel();
        assert_eq!(owed(&mut untouched), None);
    }

    #[test]
    fn a_lease_pushed_during_a_re_check_needs_a_tombstone_until_that_is_answered() {
        let mut attempt = asked(patient());
        attempt.handle_answer(at(0), at(1), &answer(0, queued(None)));
        attempt.handle_hint(at(5));
        assert!(attempt.poll_transmit(at(5)).is_some());
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        attempt.handle_push(at(6), &Push { acquisition, at: store(6), kind: PushKind::Granted(grant(TTL)) });
        assert_eq!(attempt.tombstone(), TOMBSTONE);
        attempt.handle_answer(at(5), at(7), &answer(6, Reply::Granted(grant(TTL))));
        assert_eq!(attempt.tombstone(), Duration::ZERO);
    }

    #[test]
    fn a_push_that_overtakes_the_first_answer_is_not_lost() {
        let mut attempt = asked(patient());
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };
        attempt.handle_push(at(6), &Push { acquisition, at: store(6), kind: PushKind::Granted(grant(TTL)) });
        attempt.handle_answer(at(0), at(7), &answer(5, queued(None)));
        assert!(matches!(attempt.poll_transmit(at(7)), Some(Command::Acquire(_))), "it asks again at once");
    }

    #[test]
    fn a_grant_that_nobody_took_is_given_back() {
        let mut attempt = asked(None);
        attempt.handle_answer(at(0), at(1), &answer(0, Reply::Granted(grant(TTL))));
        attempt.handle_cancel();
        assert_eq!(owed(&mut attempt), Some(Duration::ZERO));
    }

    #[test]
    fn a_waiter_with_a_place_asks_again_after_failures_with_growing_pauses() {
        let mut attempt = asked(patient());
        attempt.handle_answer(at(0), at(0), &answer(0, queued(None)));
        let (mut now, mut pauses) = (at(20_000), 0);
        while now < at(60_000) {
            if attempt.poll_transmit(now).is_some() {
                attempt.handle_failure(now, Failure::Unknown);
                pauses += 1;
            }
            let next = attempt.poll_timeout().expect("it has not ended");
            assert!(next > now);
            now = next;
        }
        attempt.handle_timeout(now);
        assert_eq!(attempt.poll_outcome(), Some(Outcome::NotGranted));
        assert!((5..20).contains(&pauses), "{pauses}");
        assert_eq!(owed(&mut attempt), Some(TOMBSTONE));
    }

    #[test]
    fn busy_full_refused_and_cancelled_leave_nothing() {
        let replies = [
            (Reply::Busy, Outcome::NotGranted),
            (Reply::QueueFull, Outcome::QueueFull),
            (
                Reply::Refused(Refusal::Weight { capacity: 1 }),
                Outcome::Refused(Refusal::Weight { capacity: 1 }),
            ),
            (Reply::Cancelled, Outcome::Cancelled),
        ];
        for (reply, outcome) in replies {
            let mut attempt = asked(None);
            attempt.handle_answer(at(0), at(1), &answer(0, reply));
            assert_eq!(attempt.poll_outcome(), Some(outcome));
            assert_eq!(owed(&mut attempt), None);
        }
    }
}
