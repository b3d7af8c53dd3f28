//! One attempt, then its lease, then what it owes: a life in three stages, and the end.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use leasehold_core::{
    AcquireMachine, Command, HandoffBudget, HandoffDecision, HandoffLimits, LeaseMachine, LeaseState,
    LeaseTerms, LocalTime, Loss, Outcome, Owner, Push, PushKind, Release, Reply, Resource, Token,
    drift_margin,
};

use super::session::Request;
use crate::store::CallResult;

/// How soon a release that failed is tried again; the pause doubles up to [`RELEASE_RETRY_MAX`].
const RELEASE_RETRY_MIN: Duration = Duration::from_millis(100);
const RELEASE_RETRY_MAX: Duration = Duration::from_secs(5);

/// How long a client that is closed goes on giving back what is no lease, or a lease that ends sooner.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// How something that was to be given back came to be so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseOutcome {
    /// The store has taken it back.
    Released,
    /// The store says that there was nothing left to take back.
    NotHeld,
    /// The store never answered. It has let go by itself by now.
    Unconfirmed,
}

/// Why a renewal did not succeed.
#[derive(Debug)]
pub(crate) enum RenewalError {
    Lost(Loss),
    Failed(String),
}

pub(super) struct Entry {
    pub(super) resource: Arc<Resource>,
    /// Who holds, where the caller named somebody.
    pub(super) owner: Option<Owner>,
    terms: LeaseTerms,
    pub(super) min_hold: Duration,
    stage: Stage,
    /// How the attempt ended, for whoever waits for it.
    pub(super) outcome: Option<Outcome>,
    /// The store's last error.
    pub(super) last_error: Option<String>,
    /// A future or a guard still stands for this entry.
    pub(super) is_referenced: bool,
    /// The session still counts it among those that the store may keep something for.
    pub(super) is_unsettled: bool,
    /// Whoever waits for this entry is to look at it.
    is_changed: bool,
    is_loss_logged: bool,
    /// The log has heard that renewals fail, or that it could not be given back, and not that this is over.
    is_failure_logged: bool,
    /// The attempt of a named owner was granted, which its other attempts do not know yet.
    owner_was_granted: bool,
    /// Another lease is to take the place of this one, which then ends without being lost.
    pub(super) is_replacing: bool,
    /// The line that it belongs to, and how that hands it on.
    pub(super) local_queue: Option<(u64, HandoffLimits)>,
    /// What the log is to hear of.
    pub(super) log_events: Vec<LogEvent>,
    /// As it stands in the session's timers.
    pub(super) timer: Option<LocalTime>,
    /// Whoever waits for this entry to change, by the key of its watch.
    pub(super) wakers: Vec<(u64, Waker)>,
}

/// What an operator would want to know.
#[derive(Debug)]
pub(super) enum LogEvent {
    Lost(Loss),
    /// The first time since it went well.
    RenewalFailed(String),
    /// For the first time after that.
    RenewalRecovered,
    /// The first time.
    ReleaseFailed(String),
    /// After that.
    ReleaseRecovered,
    ReleaseUnconfirmed,
}

enum Stage {
    Attempt(AcquireMachine),
    Lease {
        machine: LeaseMachine,
        tombstone: Duration,
        /// What the tombstone is once the `Acquire` that is under way is answered.
        tombstone_once_answered: Duration,
    },
    /// The store may still keep something: the release is repeated until it is answered, or until the
    /// store has let go by itself.
    Releasing {
        release: Release,
        retry_at: LocalTime,
        pause: Duration,
        /// How often it was sent.
        sent: u32,
        until: LocalTime,
        /// A lease that is not given back has ended by then, as far as this client knows.
        held_until: LocalTime,
    },
    /// The store keeps nothing.
    Ended(ReleaseOutcome),
}

impl Entry {
    pub(super) fn new(
        resource: Arc<Resource>,
        owner: Option<Owner>,
        terms: LeaseTerms,
        min_hold: Duration,
        machine: AcquireMachine,
    ) -> Self {
        Self {
            resource,
            owner,
            terms,
            min_hold,
            stage: Stage::Attempt(machine),
            outcome: None,
            last_error: None,
            is_referenced: true,
            is_unsettled: true,
            is_changed: false,
            is_loss_logged: false,
            is_failure_logged: false,
            owner_was_granted: false,
            is_replacing: false,
            local_queue: None,
            log_events: Vec::new(),
            timer: None,
            wakers: Vec::new(),
        }
    }

    /// Hands out the waker that this replaces.
    pub(super) fn register(&mut self, key: u64, context: &mut Context<'_>) -> Option<Waker> {
        match self.wakers.iter_mut().find(|(known, _)| *known == key) {
            Some((_, waker)) if waker.will_wake(context.waker()) => None,
            Some((_, waker)) => Some(std::mem::replace(waker, context.waker().clone())),
            None => {
                self.wakers.push((key, context.waker().clone()));
                None
            }
        }
    }

    pub(super) fn unregister(&mut self, key: u64) -> Option<Waker> {
        let at = self.wakers.iter().position(|(known, _)| *known == key)?;
        Some(self.wakers.swap_remove(at).1)
    }

    // --- What goes out ---------------------------------------------------------------------------

    pub(super) fn poll_transmit(&mut self, sequence: u64, now: LocalTime) -> Option<Request> {
        self.end_attempt(now);
        let command = match &mut self.stage {
            Stage::Attempt(machine) => machine.poll_transmit(now)?,
            Stage::Lease { machine, .. } => machine.poll_transmit(now)?,
            Stage::Releasing { release, retry_at, sent, until, .. } if *retry_at <= now && now < *until => {
                *sent += 1;
                // Whoever has sent it, if nobody answers it is sent again.
                *retry_at = now + self.terms.ttl / 2;
                Command::Release(release.clone())
            }
            Stage::Releasing { .. } | Stage::Ended(_) => return None,
        };
        let replicas = match command {
            Command::Acquire(_) | Command::Renew(_) => self.terms.replicas,
            _ => 0,
        };
        Some(Request { sequence, sent_at: now, command, replicas })
    }

    pub(super) fn poll_timeout(&self) -> Option<LocalTime> {
        match &self.stage {
            Stage::Attempt(machine) => machine.poll_timeout(),
            Stage::Lease { machine, .. } => machine.poll_timeout(),
            Stage::Releasing { retry_at, until, .. } => Some(*retry_at.min(until)),
            Stage::Ended(_) => None,
        }
    }

    // --- What comes in ---------------------------------------------------------------------------

    pub(super) fn handle_response(&mut self, request: &Request, now: LocalTime, answered: &CallResult) {
        if let Err(error) = answered {
            self.last_error = Some(error.message.clone());
            self.is_changed = true;
        }
        match (&mut self.stage, &request.command, answered) {
            (Stage::Attempt(machine), Command::Acquire(_), Ok(answer)) => {
                machine.handle_answer(request.sent_at, now, answer);
            }
            (Stage::Attempt(machine), Command::Acquire(_), Err(error)) => {
                machine.handle_failure(now, error.failure);
            }
            (Stage::Lease { tombstone, tombstone_once_answered, .. }, Command::Acquire(_), Ok(_)) => {
                *tombstone = *tombstone_once_answered;
            }
            (Stage::Lease { machine, .. }, Command::Renew(_), Ok(answer)) => {
                machine.handle_reply(now, request.sent_at, &answer.reply);
                if matches!(machine.state(now), LeaseState::Held)
                    && std::mem::take(&mut self.is_failure_logged)
                {
                    self.log_events.push(LogEvent::RenewalRecovered);
                }
                self.last_error = None;
                self.is_changed = true;
            }
            (Stage::Lease { machine, .. }, Command::Renew(_), Err(error)) => {
                machine.handle_failure(now);
                self.log_failure(LogEvent::RenewalFailed(error.message.clone()));
            }
            (Stage::Releasing { sent, .. }, Command::Release(_), Ok(answer)) => {
                // An earlier one, whose answer was lost, may be why there is nothing left.
                let is_back = *sent > 1 || matches!(answer.reply, Reply::Released);
                self.end(if is_back { ReleaseOutcome::Released } else { ReleaseOutcome::NotHeld });
            }
            (Stage::Releasing { retry_at, pause, .. }, Command::Release(_), Err(error)) => {
                *retry_at = now + *pause;
                *pause = (*pause * 2).min(RELEASE_RETRY_MAX);
                self.log_failure(LogEvent::ReleaseFailed(error.message.clone()));
            }
            // An answer to something that is no longer of interest.
            _ => {}
        }
    }

    /// An outage is one event for each lease, however often something is tried meanwhile. What was lost is no news any more.
    fn log_failure(&mut self, event: LogEvent) {
        if !self.is_loss_logged && !std::mem::replace(&mut self.is_failure_logged, true) {
            self.log_events.push(event);
        }
    }

    pub(super) fn handle_push(&mut self, now: LocalTime, push: &Push) {
        match &mut self.stage {
            Stage::Attempt(machine) => machine.handle_push(now, push),
            Stage::Lease { machine, .. } if push.kind == PushKind::Revoked => machine.handle_hint(now),
            Stage::Lease { machine, .. } if push.kind == PushKind::Contended => machine.handle_contended(now),
            // A grant that an answer has told already, or something that is being given back.
            Stage::Lease { .. } | Stage::Releasing { .. } | Stage::Ended(_) => {}
        }
    }

    /// Something may have been missed: ask at once.
    pub(super) fn handle_reconnected(&mut self, now: LocalTime) {
        match &mut self.stage {
            Stage::Attempt(machine) => machine.handle_reconnected(now),
            Stage::Lease { machine, .. } => machine.handle_reconnected(now),
            Stage::Releasing { .. } => self.retry_release(now),
            Stage::Ended(_) => {}
        }
    }

    /// What an attempt waits for may be there.
    pub(super) fn recheck(&mut self, now: LocalTime) {
        if let Stage::Attempt(machine) = &mut self.stage {
            machine.handle_hint(now);
        }
    }

    /// Which owner has come to hold which resource, once.
    pub(super) fn take_granted_owner(&mut self) -> Option<(Arc<Resource>, Owner)> {
        let owner = self.owner.as_ref().filter(|_| std::mem::take(&mut self.owner_was_granted))?;
        Some((self.resource.clone(), owner.clone()))
    }

    /// The caller wants no more of it, whatever it is. Told twice, it is sent twice.
    pub(super) fn abandon(&mut self, now: LocalTime) {
        self.end_attempt(now);
        match &mut self.stage {
            Stage::Attempt(machine) => {
                machine.handle_cancel();
                self.end_attempt(now);
            }
            Stage::Lease { machine, tombstone, .. } => {
                let (acquisition, tombstone) = (machine.acquisition(), *tombstone);
                let remaining = machine.remaining(now);
                let release = Release { acquisition, min_hold: self.min_hold, tombstone };
                self.begin_release(release, Duration::ZERO, remaining, now);
            }
            Stage::Releasing { .. } => self.retry_release(now),
            Stage::Ended(_) => {}
        }
    }

    /// The client is closed: everything is given back. That is not tried for longer than the lease could be held, and for
    /// [`CLOSE_GRACE`] where there is none, since a place in the queue harms nobody once its client is gone.
    pub(super) fn close(&mut self, now: LocalTime) {
        self.abandon(now);
        if let Stage::Releasing { until, held_until, .. } = &mut self.stage {
            *until = (*held_until).min(now + self.terms.ttl).max(now + CLOSE_GRACE).min(*until);
        }
        self.is_changed = true;
    }

    /// Another lease has taken the place of this one: there is nothing to give back, but a delayed `Acquire` must not take
    /// it anew.
    pub(super) fn mark_replaced(&mut self, now: LocalTime) {
        match &self.stage {
            Stage::Lease { tombstone, .. } if tombstone.is_zero() => self.end(ReleaseOutcome::Released),
            _ => self.abandon(now),
        }
    }

    /// A release whose sender may be gone.
    pub(super) fn retry_release(&mut self, now: LocalTime) {
        if let Stage::Releasing { retry_at, .. } = &mut self.stage {
            *retry_at = now.min(*retry_at);
        }
    }

    // --- From stage to stage ---------------------------------------------------------------------

    /// What follows from the time and from what was heard. Says whether anything changed.
    pub(super) fn advance(&mut self, now: LocalTime) -> bool {
        self.end_attempt(now);
        match &mut self.stage {
            Stage::Releasing { until, .. } if now >= *until => self.end(ReleaseOutcome::Unconfirmed),
            Stage::Lease { machine, .. } => {
                machine.handle_timeout(now);
                if let LeaseState::Lost(loss) = machine.state(now)
                    && !self.is_loss_logged
                    && !self.is_replacing
                {
                    self.is_loss_logged = true;
                    self.is_changed = true;
                    self.log_events.push(LogEvent::Lost(loss));
                }
            }
            _ => {}
        }
        std::mem::take(&mut self.is_changed)
    }

    fn end_attempt(&mut self, now: LocalTime) {
        let Stage::Attempt(machine) = &mut self.stage else { return };
        machine.handle_timeout(now);
        let Some(outcome) = machine.poll_outcome() else { return };
        self.outcome = Some(outcome);
        self.is_changed = true;
        if let Outcome::Granted { grant, since, trusted_until } = outcome {
            self.owner_was_granted = self.owner.is_some();
            let acquisition = machine.acquisition();
            let (tombstone, tombstone_once_answered) =
                (machine.tombstone(), machine.tombstone_once_answered());
            let mut lease = LeaseMachine::new(acquisition, self.terms, since, grant.valid_for, trusted_until);
            if let Some((_, bound)) = self.local_queue {
                let mut turn = HandoffBudget::new(bound, grant.tokens);
                if machine.has_waited() {
                    // Others may wait as well, until the store says that they don't.
                    turn.handle_contended(now);
                }
                lease = lease.with_handoff_budget(turn);
            }
            if machine.recheck_pending() {
                lease.handle_hint(now);
            }
            self.stage = Stage::Lease { machine: lease, tombstone, tombstone_once_answered };
        } else if let Some(Command::Release(release)) = machine.poll_transmit(now) {
            let place = machine.queue_entry_ttl();
            self.begin_release(release, place, Duration::ZERO, now);
        } else {
            self.end(ReleaseOutcome::Released);
        }
    }

    fn end(&mut self, given: ReleaseOutcome) {
        if std::mem::take(&mut self.is_failure_logged) {
            let is_over = given == ReleaseOutcome::Unconfirmed;
            self.log_events.push(if is_over {
                LogEvent::ReleaseUnconfirmed
            } else {
                LogEvent::ReleaseRecovered
            });
        }
        self.stage = Stage::Ended(given);
        self.is_changed = true;
    }

    /// Gives back a lease of which so much remains, or a place in the queue that lasts so long.
    fn begin_release(&mut self, release: Release, place: Duration, remaining: Duration, now: LocalTime) {
        // By then the lease, or the place in the queue, has ended without us.
        let lasts = self.terms.ttl.max(release.tombstone).max(place);
        let until = now + lasts + drift_margin(lasts);
        let held_until = now + remaining;
        self.stage =
            Stage::Releasing { release, retry_at: now, pause: RELEASE_RETRY_MIN, sent: 0, until, held_until };
        self.is_failure_logged = false;
        self.is_changed = true;
    }

    // --- Looking ---------------------------------------------------------------------------------

    /// Whether the store may know of it, so that it has something to say about its end.
    pub(super) fn may_be_in_store(&self) -> bool {
        match &self.stage {
            Stage::Attempt(machine) => machine.may_be_in_store(),
            Stage::Lease { .. } | Stage::Releasing { .. } => true,
            Stage::Ended(_) => false,
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Ended(_))
    }

    pub(super) fn outcome(&mut self, now: LocalTime) -> Option<Outcome> {
        self.end_attempt(now);
        self.outcome
    }

    pub(super) fn release_outcome(&self) -> Option<ReleaseOutcome> {
        match self.stage {
            Stage::Ended(given) => Some(given),
            _ => None,
        }
    }

    /// How much longer the lease may be trusted, or why not.
    pub(super) fn remaining(&self, now: LocalTime) -> Result<Duration, Loss> {
        let Stage::Lease { machine, .. } = &self.stage else { return Err(Loss::Closed) };
        match machine.state(now) {
            LeaseState::Lost(loss) => Err(loss),
            LeaseState::Held | LeaseState::Uncertain => Ok(machine.remaining(now)),
        }
    }

    pub(super) fn ends_at(&self) -> LocalTime {
        match &self.stage {
            Stage::Lease { machine, .. } => machine.hold_ends_at(),
            _ => LocalTime::NEVER,
        }
    }

    pub(super) fn limit_hold(&mut self, ends_at: LocalTime) {
        if let Stage::Lease { machine, .. } = &mut self.stage {
            machine.end_by(ends_at);
        }
    }

    /// Why a lease that a guard stands for is lost: also if its owner was granted another token since.
    pub(super) fn loss(&self, now: LocalTime, granted: Option<Token>) -> Option<Loss> {
        let Stage::Lease { machine, .. } = &self.stage else { return None };
        let Some(Outcome::Granted { grant, .. }) = self.outcome else { return None };
        match machine.state(now) {
            LeaseState::Lost(loss) => Some(loss),
            _ => granted.filter(|token| *token != grant.tokens.first).map(|_| Loss::Gone),
        }
    }

    /// The ttl of a lease that is held, and lost unless it is renewed.
    pub(super) fn ttl_at_stake(&self, now: LocalTime) -> Option<Duration> {
        let Stage::Lease { machine, .. } = &self.stage else { return None };
        let is_held = matches!(machine.state(now), LeaseState::Held | LeaseState::Uncertain);
        (is_held && self.terms.renews).then_some(self.terms.ttl)
    }

    /// Whether a renewal is due within this part of the ttl.
    pub(super) fn renews_within(&self, now: LocalTime, part: u32) -> bool {
        let Stage::Lease { machine, .. } = &self.stage else { return false };
        machine.poll_renewal().is_some_and(|time| time <= now + self.terms.ttl / part)
    }

    /// A renewal whose sender is gone counts as failed, so that the driver tries again.
    pub(super) fn abandon_renewal(&mut self, now: LocalTime) {
        if let Stage::Lease { machine, .. } = &mut self.stage
            && machine.is_renewing()
        {
            machine.handle_failure(now);
        }
    }

    /// How the last renewal went, once none is under way.
    pub(super) fn renewal_result(&self, now: LocalTime) -> Option<Result<(), RenewalError>> {
        if let Err(loss) = self.remaining(now) {
            return Some(Err(RenewalError::Lost(loss)));
        }
        let Stage::Lease { machine, .. } = &self.stage else { return None };
        match (machine.is_renewing(), machine.state(now), &self.last_error) {
            (true, ..) => None,
            (false, LeaseState::Uncertain, Some(last_error)) => {
                Some(Err(RenewalError::Failed(last_error.clone())))
            }
            (false, ..) => Some(Ok(())),
        }
    }

    /// What becomes of the lease now that a task is done with it and another one waits.
    pub(super) fn hand_off(&mut self, now: LocalTime) -> HandoffDecision {
        match &mut self.stage {
            // One that is to be kept goes back to the store, which keeps it.
            Stage::Lease { machine, .. } if self.min_hold.is_zero() => machine.hand_off(now),
            _ => HandoffDecision::Release,
        }
    }

    pub(super) fn renew_now(&mut self, now: LocalTime) {
        if let Stage::Lease { machine, .. } = &mut self.stage {
            machine.handle_hint(now);
        }
    }
}
