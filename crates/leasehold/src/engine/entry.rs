//! One attempt, then its lease, then what it owes: a life in three stages, and the end.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use leasehold_core::{
    AcquireMachine, Command, HandoffBudget, HandoffDecision, HandoffLimits, LeaseMachine, LeaseState,
    LeaseTerms, LocalTime, Loss, Outcome, Owner, Push, PushKind, Release, Reply, Resource, Token,
    drift_margin,
};

use super::session::Errand;
use crate::store::CallResult;

/// How soon a release that failed is tried again; the pause doubles up to [`OWED_SELDOM`].
const OWED_AGAIN: Duration = Duration::from_millis(100);
const OWED_SELDOM: Duration = Duration::from_secs(5);

/// How long a client that is closed goes on giving back what is no lease, or a lease that ends sooner.
const CLOSING: Duration = Duration::from_secs(2);

/// How something that was to be given back came to be so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    /// The store has taken it back.
    Back,
    /// The store says that there was nothing left to take back.
    NotHeld,
    /// The store never answered. It has let go by itself by now.
    Unanswered,
}

/// Why a renewal did not succeed.
#[derive(Debug)]
pub(crate) enum Renewal {
    Lost(Loss),
    Failed(String),
}

pub(super) struct Entry {
    pub(super) resource: Arc<Resource>,
    /// Who holds, where the caller named somebody.
    pub(super) owner: Option<Owner>,
    terms: LeaseTerms,
    pub(super) at_least: Duration,
    stage: Stage,
    /// How the attempt ended, for whoever waits for it.
    pub(super) outcome: Option<Outcome>,
    /// The store's last error.
    pub(super) trouble: Option<String>,
    /// A future or a guard still stands for this entry.
    pub(super) is_wanted: bool,
    /// The session still counts it among those that the store may keep something for.
    pub(super) is_counted: bool,
    /// Whoever waits for this entry is to look at it.
    is_changed: bool,
    is_loss_told: bool,
    /// The log has heard that renewals fail, or that it could not be given back, and not that this is over.
    is_failure_told: bool,
    /// The attempt of a named owner was granted, which its other attempts do not know yet.
    has_entered: bool,
    /// Another lease is to take the place of this one, which then ends without being lost.
    pub(super) is_replacing: bool,
    /// The line that it belongs to, and how that hands it on.
    pub(super) line: Option<(u64, HandoffLimits)>,
    /// What the log is to hear of.
    pub(super) news: Vec<News>,
    /// As it stands in the session's timers.
    pub(super) timer: Option<LocalTime>,
    /// Whoever waits for this entry to change, by the key of its watch.
    pub(super) wakers: Vec<(u64, Waker)>,
}

/// What an operator would want to know.
#[derive(Debug)]
pub(super) enum News {
    Lost(Loss),
    /// The first time since it went well.
    NotRenewed(String),
    /// For the first time after that.
    RenewedAgain,
    /// The first time.
    NotGivenBack(String),
    /// After that.
    GivenBack,
    LeftToRunOut,
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
    Owed {
        release: Release,
        again_at: LocalTime,
        pause: Duration,
        /// How often it was sent.
        sent: u32,
        until: LocalTime,
        /// A lease that is not given back has ended by then, as far as this client knows.
        held_until: LocalTime,
    },
    /// The store keeps nothing.
    Over(Given),
}

impl Entry {
    pub(super) fn new(
        resource: Arc<Resource>,
        owner: Option<Owner>,
        terms: LeaseTerms,
        at_least: Duration,
        machine: AcquireMachine,
    ) -> Self {
        Self {
            resource,
            owner,
            terms,
            at_least,
            stage: Stage::Attempt(machine),
            outcome: None,
            trouble: None,
            is_wanted: true,
            is_counted: true,
            is_changed: false,
            is_loss_told: false,
            is_failure_told: false,
            has_entered: false,
            is_replacing: false,
            line: None,
            news: Vec::new(),
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

    pub(super) fn poll_transmit(&mut self, sequence: u64, now: LocalTime) -> Option<Errand> {
        self.end_attempt(now);
        let command = match &mut self.stage {
            Stage::Attempt(machine) => machine.poll_transmit(now)?,
            Stage::Lease { machine, .. } => machine.poll_transmit(now)?,
            Stage::Owed { release, again_at, sent, until, .. } if *again_at <= now && now < *until => {
                *sent += 1;
                // Whoever has sent it, if nobody answers it is sent again.
                *again_at = now + self.terms.ttl / 2;
                Command::Release(release.clone())
            }
            Stage::Owed { .. } | Stage::Over(_) => return None,
        };
        let replicas = match command {
            Command::Acquire(_) | Command::Renew(_) => self.terms.replicas,
            _ => 0,
        };
        Some(Errand { sequence, sent_at: now, command, replicas })
    }

    pub(super) fn poll_timeout(&self) -> Option<LocalTime> {
        match &self.stage {
            Stage::Attempt(machine) => machine.poll_timeout(),
            Stage::Lease { machine, .. } => machine.poll_timeout(),
            Stage::Owed { again_at, until, .. } => Some(*again_at.min(until)),
            Stage::Over(_) => None,
        }
    }

    // --- What comes in ---------------------------------------------------------------------------

    pub(super) fn handle_answered(&mut self, errand: &Errand, now: LocalTime, answered: &CallResult) {
        if let Err(error) = answered {
            self.trouble = Some(error.message.clone());
            self.is_changed = true;
        }
        match (&mut self.stage, &errand.command, answered) {
            (Stage::Attempt(machine), Command::Acquire(_), Ok(answer)) => {
                machine.handle_answer(errand.sent_at, now, answer);
            }
            (Stage::Attempt(machine), Command::Acquire(_), Err(error)) => {
                machine.handle_failure(now, error.failure);
            }
            (Stage::Lease { tombstone, tombstone_once_answered, .. }, Command::Acquire(_), Ok(_)) => {
                *tombstone = *tombstone_once_answered;
            }
            (Stage::Lease { machine, .. }, Command::Renew(_), Ok(answer)) => {
                machine.handle_reply(now, errand.sent_at, &answer.reply);
                if matches!(machine.state(now), LeaseState::Held) && std::mem::take(&mut self.is_failure_told)
                {
                    self.news.push(News::RenewedAgain);
                }
                self.trouble = None;
                self.is_changed = true;
            }
            (Stage::Lease { machine, .. }, Command::Renew(_), Err(error)) => {
                machine.handle_failure(now);
                self.tell_failure(News::NotRenewed(error.message.clone()));
            }
            (Stage::Owed { sent, .. }, Command::Release(_), Ok(answer)) => {
                // An earlier one, whose answer was lost, may be why there is nothing left.
                let is_back = *sent > 1 || matches!(answer.reply, Reply::Released);
                self.end(if is_back { Given::Back } else { Given::NotHeld });
            }
            (Stage::Owed { again_at, pause, .. }, Command::Release(_), Err(error)) => {
                *again_at = now + *pause;
                *pause = (*pause * 2).min(OWED_SELDOM);
                self.tell_failure(News::NotGivenBack(error.message.clone()));
            }
            // An answer to something that is no longer of interest.
            _ => {}
        }
    }

    /// An outage is one event for each lease, however often something is tried meanwhile. What was lost is no news any more.
    fn tell_failure(&mut self, news: News) {
        if !self.is_loss_told && !std::mem::replace(&mut self.is_failure_told, true) {
            self.news.push(news);
        }
    }

    pub(super) fn handle_push(&mut self, now: LocalTime, push: &Push) {
        match &mut self.stage {
            Stage::Attempt(machine) => machine.handle_push(now, push),
            Stage::Lease { machine, .. } if push.kind == PushKind::Revoked => machine.handle_hint(now),
            Stage::Lease { machine, .. } if push.kind == PushKind::Contended => machine.handle_contended(now),
            // A grant that an answer has told already, or something that is being given back.
            Stage::Lease { .. } | Stage::Owed { .. } | Stage::Over(_) => {}
        }
    }

    /// Something may have been missed: ask at once.
    pub(super) fn handle_reconnected(&mut self, now: LocalTime) {
        match &mut self.stage {
            Stage::Attempt(machine) => machine.handle_reconnected(now),
            Stage::Lease { machine, .. } => machine.handle_reconnected(now),
            Stage::Owed { .. } => self.send_again(now),
            Stage::Over(_) => {}
        }
    }

    /// What an attempt waits for may be there.
    pub(super) fn ask_again(&mut self, now: LocalTime) {
        if let Stage::Attempt(machine) = &mut self.stage {
            machine.handle_hint(now);
        }
    }

    /// Which owner has come to hold which resource, once.
    pub(super) fn take_entered(&mut self) -> Option<(Arc<Resource>, Owner)> {
        let owner = self.owner.as_ref().filter(|_| std::mem::take(&mut self.has_entered))?;
        Some((self.resource.clone(), owner.clone()))
    }

    /// The caller wants no more of it, whatever it is. Told twice, it is sent twice.
    pub(super) fn let_go(&mut self, now: LocalTime) {
        self.end_attempt(now);
        match &mut self.stage {
            Stage::Attempt(machine) => {
                machine.handle_cancel();
                self.end_attempt(now);
            }
            Stage::Lease { machine, tombstone, .. } => {
                let (acquisition, tombstone) = (machine.acquisition(), *tombstone);
                let remaining = machine.remaining(now);
                let release = Release { acquisition, min_hold: self.at_least, tombstone };
                self.owe(release, Duration::ZERO, remaining, now);
            }
            Stage::Owed { .. } => self.send_again(now),
            Stage::Over(_) => {}
        }
    }

    /// The client is closed: everything is given back. That is not tried for longer than the lease could be held, and for
    /// [`CLOSING`] where there is none, since a place in the queue harms nobody once its client is gone.
    pub(super) fn close(&mut self, now: LocalTime) {
        self.let_go(now);
        if let Stage::Owed { until, held_until, .. } = &mut self.stage {
            *until = (*held_until).min(now + self.terms.ttl).max(now + CLOSING).min(*until);
        }
        self.is_changed = true;
    }

    /// Another lease has taken the place of this one: there is nothing to give back, but a delayed `Acquire` must not take
    /// it anew.
    pub(super) fn replaced(&mut self, now: LocalTime) {
        match &self.stage {
            Stage::Lease { tombstone, .. } if tombstone.is_zero() => self.end(Given::Back),
            _ => self.let_go(now),
        }
    }

    /// A release whose sender may be gone.
    pub(super) fn send_again(&mut self, now: LocalTime) {
        if let Stage::Owed { again_at, .. } = &mut self.stage {
            *again_at = now.min(*again_at);
        }
    }

    // --- From stage to stage ---------------------------------------------------------------------

    /// What follows from the time and from what was heard. Says whether anything changed.
    pub(super) fn move_on(&mut self, now: LocalTime) -> bool {
        self.end_attempt(now);
        match &mut self.stage {
            Stage::Owed { until, .. } if now >= *until => self.end(Given::Unanswered),
            Stage::Lease { machine, .. } => {
                machine.handle_timeout(now);
                if let LeaseState::Lost(loss) = machine.state(now)
                    && !self.is_loss_told
                    && !self.is_replacing
                {
                    self.is_loss_told = true;
                    self.is_changed = true;
                    self.news.push(News::Lost(loss));
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
            self.has_entered = self.owner.is_some();
            let acquisition = machine.acquisition();
            let (tombstone, tombstone_once_answered) =
                (machine.tombstone(), machine.tombstone_once_answered());
            let mut lease = LeaseMachine::new(acquisition, self.terms, since, grant.valid_for, trusted_until);
            if let Some((_, bound)) = self.line {
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
            self.owe(release, place, Duration::ZERO, now);
        } else {
            self.end(Given::Back);
        }
    }

    fn end(&mut self, given: Given) {
        if std::mem::take(&mut self.is_failure_told) {
            let is_over = given == Given::Unanswered;
            self.news.push(if is_over { News::LeftToRunOut } else { News::GivenBack });
        }
        self.stage = Stage::Over(given);
        self.is_changed = true;
    }

    /// Gives back a lease of which so much remains, or a place in the queue that lasts so long.
    fn owe(&mut self, release: Release, place: Duration, remaining: Duration, now: LocalTime) {
        // By then the lease, or the place in the queue, has ended without us.
        let lasts = self.terms.ttl.max(release.tombstone).max(place);
        let until = now + lasts + drift_margin(lasts);
        let held_until = now + remaining;
        self.stage = Stage::Owed { release, again_at: now, pause: OWED_AGAIN, sent: 0, until, held_until };
        self.is_failure_told = false;
        self.is_changed = true;
    }

    // --- Looking ---------------------------------------------------------------------------------

    /// Whether the store may know of it, so that it has something to say about its end.
    pub(super) fn may_be_in_store(&self) -> bool {
        match &self.stage {
            Stage::Attempt(machine) => machine.may_be_in_store(),
            Stage::Lease { .. } | Stage::Owed { .. } => true,
            Stage::Over(_) => false,
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Over(_))
    }

    pub(super) fn outcome(&mut self, now: LocalTime) -> Option<Outcome> {
        self.end_attempt(now);
        self.outcome
    }

    pub(super) fn given(&self) -> Option<Given> {
        match self.stage {
            Stage::Over(given) => Some(given),
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

    pub(super) fn end_by(&mut self, ends_at: LocalTime) {
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
    pub(super) fn renewed(&self, now: LocalTime) -> Option<Result<(), Renewal>> {
        if let Err(loss) = self.remaining(now) {
            return Some(Err(Renewal::Lost(loss)));
        }
        let Stage::Lease { machine, .. } = &self.stage else { return None };
        match (machine.is_renewing(), machine.state(now), &self.trouble) {
            (true, ..) => None,
            (false, LeaseState::Uncertain, Some(trouble)) => Some(Err(Renewal::Failed(trouble.clone()))),
            (false, ..) => Some(Ok(())),
        }
    }

    /// What becomes of the lease now that a task is done with it and another one waits.
    pub(super) fn hand_on(&mut self, now: LocalTime) -> HandoffDecision {
        match &mut self.stage {
            // One that is to be kept goes back to the store, which keeps it.
            Stage::Lease { machine, .. } if self.at_least.is_zero() => machine.hand_off(now),
            _ => HandoffDecision::Release,
        }
    }

    pub(super) fn renew_now(&mut self, now: LocalTime) {
        if let Stage::Lease { machine, .. } = &mut self.stage {
            machine.handle_hint(now);
        }
    }
}
