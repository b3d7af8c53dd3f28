//! Acquires several locks of one client in one command: all of them are granted, or none.
//!
//! Each attempt has its own table entry. If the command fails, each attempt is therefore retried or released like a single
//! attempt. These attempts never wait in a queue.

use std::sync::Arc;

use futures_util::future::join_all;
use leasehold_core::{Command, Failure, LocalTime, Outcome};
use leasehold_store::{BoxFuture, CallResult, StoreError};

use crate::engine::{AttemptEnd, Transmit, with_deadline};
use crate::error::Error;
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::attempt::{Attempt, CANCEL_LIMIT};
use crate::locks::lock::{AttemptIds, Lock};

/// The result of a batch.
pub(crate) enum BatchOutcome {
    /// One guard per lock, in the order of the locks.
    Granted(Vec<Guard>),
    /// The store has refused at least one lock, and none is held.
    Contended,
    /// The store or an option does not allow a batch, or the store was busy: the locks must be acquired one by one.
    Unsupported,
}

impl Lock {
    /// Whether this lock's attempt can be part of a batch.
    fn can_join_batch(&self) -> bool {
        // Commands that wait for replicas need a connection of their own.
        self.terms.replicas == 0 && self.owner.is_none() && self.ids == AttemptIds::Counted
    }

    /// Whether a task of this client has the lease. A batch must not overtake the local queue.
    fn is_held_locally(&self) -> Result<bool, Error> {
        let resource = self.checked_resource()?;
        let hand_off = self.handoff_limits();
        Ok(hand_off.is_some_and(|hand_off| {
            self.handle.session.holds_lease(&self.acquire_key(resource, hand_off), self.handle.now())
        }))
    }
}

/// Tries to acquire these locks of one client in one command.
pub(crate) async fn acquire_all(locks: &[&Lock], deadline: Option<LocalTime>) -> Result<BatchOutcome, Error> {
    if !locks.iter().all(|lock| lock.can_join_batch()) {
        return Ok(BatchOutcome::Unsupported);
    }
    for lock in locks {
        if lock.is_held_locally()? {
            return Ok(BatchOutcome::Contended);
        }
    }
    let Some(first) = locks.first() else { return Ok(BatchOutcome::Unsupported) };
    let batch = BatchAcquire::begin(&first.handle, locks)?;
    let Some(answered) = batch.send() else { return Ok(BatchOutcome::Unsupported) };
    let ended = async {
        let answers = answered.await;
        let is_busy = answers.iter().any(is_busy);
        (batch.handle_response(&answers).await, is_busy)
    };
    match with_deadline(&batch.handle.session, deadline, ended).await {
        Some((ended, is_busy)) => batch.conclude(ended, is_busy && deadline.is_some()).await,
        None => {
            let Some((lock, attempt, _)) = batch.attempts.first() else {
                return Ok(BatchOutcome::Unsupported);
            };
            let (lock, resource) = (*lock, attempt.resource);
            match batch.withdraw().await {
                Ok(()) => Ok(BatchOutcome::Contended),
                Err(why) => Err(lock.failed(resource, Outcome::TimedOut, why.as_ref())),
            }
        }
    }
}

/// Whether the store was busy with other clients, so that waiting helps.
fn is_busy(answered: &CallResult) -> bool {
    matches!(answered, Err(error) if error.failure == Failure::Busy)
}

/// The attempts of one batch. Dropping it cancels them and releases the leases that were granted.
struct BatchAcquire<'a> {
    handle: &'a Arc<Handle>,
    attempts: Vec<(&'a Lock, Attempt<'a>, Transmit)>,
    started: LocalTime,
}

impl<'a> BatchAcquire<'a> {
    fn begin(handle: &'a Arc<Handle>, locks: &[&'a Lock]) -> Result<Self, Error> {
        let mut attempts = Vec::with_capacity(locks.len());
        for lock in locks {
            let (attempt, transmit) = lock.begin(lock.checked_resource()?, 1, None, None)?;
            // A new attempt always has a command to send.
            attempts.extend(transmit.map(|transmit| (*lock, attempt, transmit)));
        }
        Ok(Self { handle, attempts, started: handle.now() })
    }

    /// None if the store does not support a batch of these locks.
    fn send(&self) -> Option<BoxFuture<Vec<CallResult>>> {
        let acquire_of = |(_, attempt, transmit): &(&Lock, Attempt<'_>, Transmit)| match &transmit.command {
            Command::Acquire(acquire) => Some((attempt.resource.clone(), acquire.clone())),
            _ => None,
        };
        let attempts: Vec<_> = self.attempts.iter().filter_map(acquire_of).collect();
        let sent = self.handle.store.acquire_all(&attempts);
        if sent.is_none() {
            let message = "the store does not support this batch".to_owned();
            let not_sent = Err(StoreError::new(Failure::NotSent, message));
            for (_, _, transmit) in &self.attempts {
                self.handle.session.handle_response(transmit, self.handle.now(), &not_sent);
            }
        }
        sent
    }

    /// Returns how each attempt ended. An attempt whose response was lost is retried on its own.
    async fn handle_response(&self, answers: &[CallResult]) -> Vec<AttemptEnd> {
        let now = self.handle.now();
        for ((_, _, transmit), answered) in self.attempts.iter().zip(answers) {
            self.handle.session.handle_response(transmit, now, answered);
        }
        join_all(self.attempts.iter().map(|(_, attempt, _)| attempt.finish(None))).await
    }

    async fn conclude(self, ended: Vec<AttemptEnd>, may_wait: bool) -> Result<BatchOutcome, Error> {
        let granted = |(outcome, _): &AttemptEnd| match outcome {
            Outcome::Granted { grant, .. } => Some(grant.tokens.first),
            _ => None,
        };
        let tokens: Option<Vec<_>> = ended.iter().map(granted).collect();
        if let Some(tokens) = tokens {
            let started = self.started;
            let guards = self.attempts.into_iter().zip(tokens).map(|((lock, attempt, _), token)| {
                tracing::debug!(resource = %attempt.resource, %token, "lease granted");
                let mut guard = attempt.into_guard(token);
                lock.granted_at_once(&mut guard, started);
                guard
            });
            return Ok(BatchOutcome::Granted(guards.collect()));
        }
        for ((lock, attempt, _), (outcome, last_error)) in self.attempts.iter().zip(ended) {
            if !may_wait && !matches!(outcome, Outcome::Granted { .. } | Outcome::NotGranted) {
                return Err(lock.failed(attempt.resource, outcome, last_error.as_ref()));
            }
        }
        let _ = self.withdraw().await;
        Ok(if may_wait { BatchOutcome::Unsupported } else { BatchOutcome::Contended })
    }

    /// Cancels all attempts, and waits up to [`CANCEL_LIMIT`] for the store's confirmation. An error is the store's last word.
    async fn withdraw(self) -> Result<(), Option<StoreError>> {
        let Self { handle, attempts, .. } = self;
        let until = handle.now() + CANCEL_LIMIT;
        let cancelled = attempts.into_iter().map(|(_, attempt, _)| attempt.cancel(until));
        join_all(cancelled).await.into_iter().collect()
    }
}
