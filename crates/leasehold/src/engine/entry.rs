//! One row of the table: an attempt, then its lease, then its release.

mod detach;
mod holder;
mod late;
mod lease;
mod requested;
mod state;
mod suspended;
#[cfg(test)]
mod tests;
mod trust_limit;

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use leasehold_core::{
    AcquireMachine, ClientId, Command, HandoffBudget, HandoffLimits, LeaseMachine, LeaseState, LeaseTerms,
    LocalTime, Loss, Outcome, Owner, Push, PushKind, Release, ReleaseIf, Reply, Resource, TOMBSTONE_TTL,
};
use leasehold_store::{CallResult, StoreError};

use self::lease::Lease;
pub(crate) use self::suspended::BeginError;
use self::suspended::Suspended;
use super::ids::{EntryId, QueueId, UncountedId, WakerId};
use super::log_event::LogEvent;
use super::releasing::{ReleaseOf, ReleaseOutcome, Releasing};

/// A command for the store, its entry, and when it was issued.
#[derive(Debug)]
pub(crate) struct Transmit {
    pub(crate) entry: EntryId,
    pub(crate) sent_at: LocalTime,
    pub(crate) command: Command,
    /// How many replicas must have the write before its response counts.
    pub(crate) replicas: u32,
}

/// How an attempt ended, and the store's last error if there was one.
pub(crate) type AttemptEnd = (Outcome, Option<StoreError>);

/// Why a renewal did not succeed.
#[derive(Debug)]
pub(crate) enum RenewalError {
    Lost(Loss),
    Failed(StoreError),
}

/// For how long from its grant the store retains a lease that is released sooner.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MinHold {
    pub(crate) length: Duration,
    /// A lease that the close of its client releases is not retained: its work is unfinished.
    pub(crate) ends_at_close: bool,
    /// The attempt continues the hold of the lease that it replaces, so the minimum hold counts even if its own lease is never used.
    pub(crate) is_continued: bool,
}

pub(super) struct Entry {
    pub(super) resource: Arc<Resource>,
    /// The named owner, if the lock is reentrant.
    pub(super) owner: Option<Owner>,
    terms: LeaseTerms,
    pub(super) min_hold: MinHold,
    stage: Stage,
    /// How the attempt ended.
    pub(super) outcome: Option<Outcome>,
    /// The store's last error.
    pub(super) last_error: Option<StoreError>,
    /// Why the lease's last renewal failed; none if it succeeded.
    pub(super) renewal_error: Option<StoreError>,
    /// The same of its companion.
    pub(super) companion_error: Option<StoreError>,
    /// The number of an attempt that this client has not counted.
    pub(super) uncounted: Option<UncountedId>,
    /// A caller has named the attempt, and may repeat it at another client.
    pub(super) requested_by: Option<ClientId>,
    /// A future or a guard refers to this entry.
    pub(super) is_referenced: bool,
    /// The session counts it among the entries that the store may keep something for.
    pub(super) is_unsettled: bool,
    /// The tasks that wait for this entry must be woken.
    is_changed: bool,
    logged: Logged,
    /// A named owner's attempt was granted, and the owner's other attempts have not been woken.
    owner_was_granted: bool,
    /// The local queue that owns the entry, and its hand-off limits.
    pub(super) local_queue: Option<(QueueId, HandoffLimits)>,
    /// Not logged yet.
    pub(super) log_events: Vec<LogEvent>,
    /// The time at which the entry stands in the table's timers.
    pub(super) timer: Option<LocalTime>,
    /// The tasks that wait for this entry, by the key of their watch.
    pub(super) wakers: Vec<(WakerId, Waker)>,
}

/// What was logged of the entry's failures: an outage is logged once per lease, not once per retry.
#[derive(Clone, Copy, PartialEq)]
enum Logged {
    Nothing,
    /// A failure to renew or to release, whose end is logged too.
    Failure,
    /// The loss of the lease, after which nothing is logged.
    Loss,
}

impl Logged {
    /// The failures are over. Returns whether that is to be logged.
    fn end_failure(&mut self) -> bool {
        let was_failure = *self == Self::Failure;
        if was_failure {
            *self = Self::Nothing;
        }
        was_failure
    }
}

enum Stage {
    Attempt(AcquireMachine),
    Lease(Lease),
    /// No task makes the attempt at present. The caller may repeat it here or elsewhere until a while has passed.
    Suspended(Suspended),
    /// The store may still keep the lease or the waiter.
    Releasing(Releasing),
    /// The store keeps nothing for this entry. An attempt that was refused at once had no release.
    Ended {
        outcome: ReleaseOutcome,
        had_release: bool,
    },
}

impl Entry {
    pub(super) fn new(
        resource: Arc<Resource>,
        owner: Option<Owner>,
        terms: LeaseTerms,
        min_hold: MinHold,
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
            renewal_error: None,
            companion_error: None,
            uncounted: None,
            requested_by: None,
            is_referenced: true,
            is_unsettled: true,
            is_changed: false,
            logged: Logged::Nothing,
            owner_was_granted: false,
            local_queue: None,
            log_events: Vec::new(),
            timer: None,
            wakers: Vec::new(),
        }
    }

    /// Registers the task's waker and returns the one it replaces, which the caller must drop with the mutex free.
    pub(super) fn register(&mut self, key: WakerId, context: &mut Context<'_>) -> Option<Waker> {
        match self.wakers.iter_mut().find(|(known, _)| *known == key) {
            Some((_, waker)) if waker.will_wake(context.waker()) => None,
            Some((_, waker)) => Some(std::mem::replace(waker, context.waker().clone())),
            None => {
                self.wakers.push((key, context.waker().clone()));
                None
            }
        }
    }

    pub(super) fn unregister(&mut self, key: WakerId) -> Option<Waker> {
        let at = self.wakers.iter().position(|(known, _)| *known == key)?;
        Some(self.wakers.swap_remove(at).1)
    }

    // --- Requests --------------------------------------------------------------------------------

    pub(super) fn poll_transmit(&mut self, entry_id: EntryId, now: LocalTime) -> Option<Transmit> {
        self.end_attempt(now);
        let late = self.poll_late_release(now);
        let command = match &mut self.stage {
            Stage::Attempt(machine) => machine.poll_transmit(now)?,
            Stage::Lease(lease) => late.or_else(|| lease.machine.poll_transmit(now))?,
            Stage::Releasing(releasing) => releasing.poll_transmit(now, self.terms.ttl)?,
            Stage::Suspended(_) | Stage::Ended { .. } => return None,
        };
        let replicas = match &command {
            Command::Acquire(_) | Command::Renew(_) => self.terms.replicas,
            // What it retains keeps others out. If it ends the lease, a failover only delays the next holder.
            Command::Release(release) if !release.min_hold.is_zero() => self.terms.replicas,
            _ => 0,
        };
        Some(Transmit { entry: entry_id, sent_at: now, command, replicas })
    }

    pub(super) fn poll_timeout(&self) -> Option<LocalTime> {
        match &self.stage {
            Stage::Attempt(machine) => machine.poll_timeout(),
            Stage::Lease(lease) => {
                let times = [lease.machine.poll_timeout(), lease.trust_limit.expiry(), lease.late_release_at];
                times.into_iter().flatten().min()
            }
            Stage::Suspended(suspended) => Some(suspended.until),
            Stage::Releasing(releasing) => Some(releasing.poll_timeout()),
            Stage::Ended { .. } => None,
        }
    }

    // --- Responses and pushes --------------------------------------------------------------------

    pub(super) fn handle_response(&mut self, transmit: &Transmit, now: LocalTime, answered: &CallResult) {
        if let Err(error) = answered {
            self.last_error = Some(error.clone());
            self.is_changed = true;
        }
        match (&mut self.stage, &transmit.command, answered) {
            (Stage::Attempt(machine), Command::Acquire(_), Ok(answer)) => {
                machine.handle_answer(transmit.sent_at, now, answer);
                self.last_error = None;
                if self.logged.end_failure() {
                    self.log_events.push(LogEvent::AttemptRecovered);
                    self.is_changed = true;
                }
            }
            (Stage::Attempt(machine), Command::Acquire(_), Err(error)) => {
                machine.handle_failure(now, error.failure);
                if machine.is_refused() {
                    self.log_failure(LogEvent::AttemptRefused(error.message.clone()));
                }
            }
            (Stage::Lease(lease), Command::Acquire(_), Ok(answer)) => {
                // If the lease was exchanged for another before this command arrived, the attempt was queued again. Its
                // release must not be skipped then.
                if let Reply::Granted(grant) = answer.reply {
                    lease.tombstone = lease.tombstone_once_answered;
                    self.handle_regrant(now, grant);
                }
            }
            (Stage::Lease(lease), Command::Renew(_), Ok(answer)) => {
                if !matches!(answer.reply, Reply::Renewed { tokens: None, contended: false, .. }) {
                    lease.as_granted = None;
                }
                lease.machine.handle_reply(now, transmit.sent_at, &answer.reply);
                if matches!(lease.machine.state(now), LeaseState::Held) && self.logged.end_failure() {
                    self.log_events.push(LogEvent::RenewalRecovered);
                }
                if answer.reply == Reply::NotHeld {
                    self.handle_not_held(now);
                } else {
                    self.renewal_error = None;
                }
                self.last_error = None;
                self.is_changed = true;
            }
            (Stage::Lease(lease), Command::Renew(_), Err(error)) => {
                lease.machine.handle_failure(now);
                self.renewal_error = Some(error.clone());
                self.log_failure(LogEvent::RenewalFailed(error.message.clone()));
            }
            (Stage::Lease(lease), Command::Release(_), Err(_)) => {
                lease.repeat_late_release(now);
            }
            (Stage::Releasing(releasing), Command::Release(_), Ok(answer)) => {
                let lingers = releasing.lingers_after(&answer.reply, now);
                let outcome = releasing.outcome(&answer.reply, now);
                if !lingers {
                    self.end(outcome);
                }
            }
            (Stage::Releasing(releasing), Command::Release(_), Err(error)) => {
                releasing.handle_failure(error.failure, now);
                self.log_failure(LogEvent::ReleaseFailed(error.message.clone()));
            }
            // A late response: the entry has moved on.
            _ => {}
        }
    }

    fn log_failure(&mut self, event: LogEvent) {
        if self.logged == Logged::Nothing {
            self.logged = Logged::Failure;
            self.log_events.push(event);
        }
    }

    /// Anybody may have sent a push. It ends no lease: the store is asked, at most once a second.
    pub(super) fn handle_push(&mut self, now: LocalTime, push: &Push) {
        match (&mut self.stage, push.kind) {
            (Stage::Attempt(machine), _) => machine.handle_push(now, push),
            (Stage::Lease(lease), PushKind::Revoked) => lease.machine.handle_pushed_hint(now),
            (Stage::Lease(lease), PushKind::Contended) => {
                lease.as_granted = None;
                lease.machine.handle_contended(now);
            }
            (Stage::Lease(lease), PushKind::Granted(grant, proof)) => {
                if lease.secrets.is_some_and(|secrets| secrets.is_genuine(push.at, &grant, proof)) {
                    self.handle_regrant(now, grant);
                } else {
                    lease.machine.handle_pushed_hint(now);
                }
            }
            // The response was faster than the push, or the lease is being released.
            (Stage::Lease(_), PushKind::Next(_))
            | (Stage::Suspended(_) | Stage::Releasing(_) | Stage::Ended { .. }, _) => {}
        }
    }

    /// Pushes may have been missed: asks the store at once.
    pub(super) fn handle_reconnected(&mut self, now: LocalTime) {
        match &mut self.stage {
            Stage::Attempt(machine) => machine.handle_reconnected(now),
            Stage::Lease(lease) => lease.machine.handle_reconnected(now),
            Stage::Releasing(releasing) => releasing.retry_now(now),
            Stage::Suspended(_) | Stage::Ended { .. } => {}
        }
    }

    /// No task polls for the answer to the `Acquire` any more.
    pub(super) fn abandon_acquire(&mut self, now: LocalTime) {
        if let Stage::Attempt(machine) = &mut self.stage {
            machine.handle_abandoned(now);
        }
    }

    /// The lock may be free: the attempt asks the store.
    pub(super) fn recheck(&mut self, now: LocalTime) {
        if let Stage::Attempt(machine) = &mut self.stage {
            machine.handle_hint(now);
        }
    }

    /// The owner whose attempt was granted, returned once.
    pub(super) fn take_granted_owner(&mut self) -> Option<(Arc<Resource>, Owner)> {
        let owner = self.owner.as_ref().filter(|_| std::mem::take(&mut self.owner_was_granted))?;
        Some((self.resource.clone(), owner.clone()))
    }

    /// Cancels the attempt or releases the lease. A second call sends the release again.
    pub(super) fn abandon(&mut self, now: LocalTime) {
        self.end_attempt(now);
        match &mut self.stage {
            Stage::Attempt(machine) => {
                machine.handle_cancel();
                self.end_attempt(now);
            }
            Stage::Lease(lease) if lease.is_borrowed => self.end(ReleaseOutcome::Released),
            Stage::Lease(lease) => {
                let (acquisition, tombstone) = (lease.machine.acquisition(), lease.tombstone);
                let remaining = lease.machine.remaining(now);
                // From now on it is the release's error.
                self.last_error = None;
                let as_granted = lease.as_granted.take();
                let only_if = lease.machine.request_token().map(ReleaseIf::HasToken);
                let release = Release {
                    only_if,
                    min_hold: self.min_hold.length,
                    tombstone,
                    as_granted,
                    ..Release::now(acquisition)
                };
                self.begin_release(ReleaseOf::Lease, release, Duration::ZERO, remaining, now);
            }
            Stage::Releasing(releasing) => releasing.retry_now(now),
            Stage::Suspended(_) | Stage::Ended { .. } => {}
        }
    }

    /// Releases everything, because the client is closed.
    pub(super) fn close(&mut self, now: LocalTime) {
        if self.min_hold.ends_at_close {
            self.min_hold.length = Duration::ZERO;
        }
        if !self.close_request(now) {
            self.abandon(now);
        }
        if let Stage::Releasing(releasing) = &mut self.stage {
            releasing.close(now, self.terms.ttl);
        }
        self.is_changed = true;
    }

    /// Another lease has replaced this one. Nothing is left to release, but a delayed `Acquire` must not be granted again.
    pub(super) fn mark_replaced(&mut self, now: LocalTime) {
        match &self.stage {
            Stage::Lease(lease) if lease.tombstone.is_zero() => self.end(ReleaseOutcome::Released),
            _ => self.abandon(now),
        }
    }

    /// The release that was polled could not be sent: the driver sends it.
    pub(super) fn defer_release(&mut self, now: LocalTime) {
        if let Stage::Releasing(releasing) = &mut self.stage {
            releasing.defer(now);
        }
    }

    // --- Transitions -----------------------------------------------------------------------------

    /// Advances the entry to the given time. Returns whether waiting tasks must be woken.
    pub(super) fn advance(&mut self, now: LocalTime) -> bool {
        self.end_attempt(now);
        match &mut self.stage {
            Stage::Releasing(releasing) if releasing.has_expired(now) => {
                let outcome = releasing.last_outcome();
                self.end(outcome);
            }
            Stage::Suspended(suspended) if now >= suspended.until => {
                let Suspended { release, lasts, .. } = suspended.clone();
                self.begin_release(ReleaseOf::Attempt, release, lasts, Duration::ZERO, now);
            }
            Stage::Lease(lease) => {
                lease.expire_trust(now);
                lease.machine.handle_timeout(now);
                let own = match lease.machine.state(now) {
                    LeaseState::Lost(loss) => Some(loss),
                    LeaseState::Held | LeaseState::Uncertain => None,
                };
                if let Some(loss) = own.or(lease.trust_limit.loss(now))
                    && self.logged != Logged::Loss
                    && !lease.is_replacing
                {
                    self.logged = Logged::Loss;
                    self.is_changed = true;
                    let why = self.loss_reason(loss).map(|error| error.message.clone());
                    self.log_events.push(LogEvent::Lost(loss, why));
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
        self.logged.end_failure();
        if let Outcome::Granted { grant, since, trusted_until } = outcome {
            self.owner_was_granted = self.owner.is_some();
            let acquisition = machine.acquisition();
            let secrets = machine.secrets();
            let as_granted = grant.is_plain.then(|| (machine.command().clone(), grant.tokens.first));
            // A repeat of a request may come late, too.
            let least = if self.requested_by.is_some() { TOMBSTONE_TTL } else { Duration::ZERO };
            let (tombstone, tombstone_once_answered) =
                (machine.tombstone().max(least), machine.tombstone_once_answered().max(least));
            // A grant that the queue has shortened shows a wait too, but an attempt that does not wait has nothing to claim.
            let is_shortened = machine.command().wait.is_some() && grant.valid_for < self.terms.ttl;
            let may_have_waited = machine.may_have_waited() || is_shortened;
            let mut next = LeaseMachine::new(
                acquisition,
                self.terms,
                since,
                grant.valid_for,
                trusted_until,
                may_have_waited,
            );
            if self.requested_by.is_some() {
                next = next.of_request(grant.tokens.first);
            }
            if let Some((_, bound)) = self.local_queue {
                let mut budget = HandoffBudget::new(bound, grant.tokens);
                if may_have_waited {
                    // A lease granted after a wait is assumed to have waiters behind it until a renewal reports otherwise.
                    budget.handle_contended(now);
                }
                next = next.with_handoff_budget(budget);
            }
            if machine.recheck_pending() {
                next.handle_pushed_hint(now);
            }
            let has_waited = machine.has_waited();
            let is_repeat = self.requested_by.is_some() && grant.valid_for < machine.command().ttl;
            self.stage = Stage::Lease(Lease {
                tombstone,
                tombstone_once_answered,
                as_granted,
                secrets,
                has_waited,
                is_repeat,
                ..Lease::new(next)
            });
        } else if let Some(Command::Release(mut release)) = machine.poll_transmit(now) {
            if self.min_hold.is_continued {
                release.min_hold = self.min_hold.length;
            }
            let entry_ttl = machine.queue_entry_ttl();
            match self.requested_by {
                Some(inbox) => self.suspend_until_release(release, inbox, entry_ttl, now),
                None => self.begin_release(ReleaseOf::Attempt, release, entry_ttl, Duration::ZERO, now),
            }
        } else {
            self.end(ReleaseOutcome::Released);
        }
    }

    fn end(&mut self, outcome: ReleaseOutcome) {
        if self.logged.end_failure() {
            let is_over = outcome == ReleaseOutcome::Unconfirmed;
            self.log_events.push(if is_over {
                LogEvent::ReleaseUnconfirmed
            } else {
                LogEvent::ReleaseRecovered
            });
        }
        let had_release = matches!(self.stage, Stage::Releasing(_));
        self.stage = Stage::Ended { outcome, had_release };
        self.is_changed = true;
    }

    /// Begins to release a lease with this much time left, or a waiter whose place in the queue lasts this long.
    fn begin_release(
        &mut self,
        of: ReleaseOf,
        release: Release,
        entry_ttl: Duration,
        remaining: Duration,
        now: LocalTime,
    ) {
        let lease = self.terms.ttl.max(self.terms.min_lifetime);
        let lasts = lease.max(release.tombstone).max(entry_ttl);
        self.stage = Stage::Releasing(Releasing::new(of, release, lasts, remaining, now));
        self.logged.end_failure();
        self.is_changed = true;
    }
}
