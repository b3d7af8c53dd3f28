//! One attempt to acquire a lease, from its first command to a guard or an error.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{
    Acquire, Kind, LeaseTerms, LocalTime, Loss, Outcome, Refusal, Resource, Token, WaitFor, WaitPolicy,
};
use tracing::Instrument as _;

use super::lock::{Lock, WaitMode, unit};
use crate::engine::{AttemptEnd, Closed, ReleaseOutcome, Request, Sleep, clock};
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::{Handle, missing_response};

/// Max time an attempt that was not granted in time waits for the store to confirm its cancellation.
///
/// The confirmation is what makes `None` mean "not granted". The limit has to cover a round trip to a distant store, and it
/// bounds how late a caller learns that no confirmation comes.
pub(crate) const CANCEL_LIMIT: Duration = Duration::from_secs(2);

impl Lock {
    pub(crate) async fn acquire(
        &self,
        weight: u32,
        replaces: Option<&Guard>,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        let resource = self.check(weight)?;
        let span = tracing::debug_span!("acquire", %resource, store = %self.handle.url);
        if self.handle.store.needs_admission_queue() && resource.kind != Kind::Admission {
            return self.acquire_with_admission(weight, wait).instrument(span).await;
        }
        if let Some(hand_off) = self.handoff_limits().filter(|_| replaces.is_none()) {
            let key = self.acquire_key(resource, hand_off);
            if wait.deadline().is_some() {
                return self.acquire_queued(resource, key, wait).instrument(span).await;
            }
            if self.handle.session.holds_lease(&key) {
                return Ok(None);
            }
        }
        self.attempt(resource, weight, replaces, wait).instrument(span).await
    }

    /// One attempt, by itself.
    pub(crate) async fn attempt(
        &self,
        resource: &Arc<Resource>,
        weight: u32,
        replaces: Option<&Guard>,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        let (attempt, request) = self.begin(resource, weight, replaces, wait.deadline())?;
        let (outcome, last_error) = attempt.finish(request).await;
        if let Outcome::Granted { grant, .. } = outcome {
            let token = grant.tokens.first;
            tracing::debug!(%resource, %token, "a lease was granted");
            return Ok(Some(attempt.into_guard(token)));
        }
        match outcome {
            Outcome::NotGranted | Outcome::TimedOut => {
                let until = clock::local() + CANCEL_LIMIT;
                let is_cancelled = await_cancellation(&self.handle, attempt.sequence, until).await;
                match (is_cancelled, replaces) {
                    (true, _) => Ok(None),
                    // The store has said so, only an earlier answer of its own was lost.
                    (false, None) if outcome == Outcome::NotGranted => Ok(None),
                    (false, None) => Err(self.failed(resource, outcome, last_error.as_deref())),
                    (false, Some(_)) => {
                        let what = "whether the lease was exchanged is unknown";
                        Err(self.handle.unavailable(resource, what))
                    }
                }
            }
            outcome => Err(self.failed(resource, outcome, last_error.as_deref())),
        }
    }

    /// What whoever wanted the lock is told about an attempt that was neither granted nor given up.
    pub(crate) fn failed(&self, resource: &Resource, outcome: Outcome, last_error: Option<&str>) -> Error {
        match outcome {
            Outcome::QueueFull => {
                let what = format!("{} wait already", self.max_waiters);
                self.handle.error(ErrorKind::QueueFull, resource, what)
            }
            Outcome::Refused(Refusal::NotHeld) => self.handle.lost(resource, Loss::Gone),
            Outcome::Refused(refusal) => {
                self.handle.error(ErrorKind::Invalid, resource, explain(refusal, resource.kind))
            }
            Outcome::Cancelled => self.handle.closed(),
            Outcome::TimedOut if self.handle.session.is_closed() => self.handle.closed(),
            Outcome::TimedOut => {
                let what = "the time to wait is over, and the store does not say whether it was granted";
                let last_error = last_error.map(|last_error| format!(": {last_error}")).unwrap_or_default();
                self.handle.unavailable(resource, &format!("{what}{last_error}"))
            }
            Outcome::Failed | Outcome::NotGranted | Outcome::Granted { .. } => {
                let message = last_error.unwrap_or("the answer came too late to be of use");
                self.handle.unavailable(resource, message)
            }
        }
    }

    pub(crate) fn begin<'a>(
        &'a self,
        resource: &'a Arc<Resource>,
        weight: u32,
        replaces: Option<&Guard>,
        deadline: Option<LocalTime>,
    ) -> Result<(Attempt<'a>, Option<Request>), Error> {
        let session = &self.handle.session;
        let intervals = self.handle.store.poll_intervals();
        let terms = self.terms(replaces, clock::local());
        let acquisition = session.next_acquisition();
        let command = Acquire {
            acquisition,
            owner: self.owner.clone(),
            capacity: self.capacity,
            weight,
            ttl: terms.ttl.max(terms.min_lifetime),
            reserve: 0,
            wait: deadline.map(|_| WaitFor { entry_ttl: intervals.entry_ttl, max_queue: self.max_waiters }),
            replaces: replaces.map(Guard::sequence),
            metadata: self.metadata.clone(),
        };
        let confirms_pushes = terms.replicas > 0;
        let patience = deadline.map(|deadline| WaitPolicy {
            deadline,
            repoll_interval: intervals.repoll_interval,
            confirms_pushes,
        });
        let began = session.begin(resource.clone(), terms, self.min_hold, command, patience, clock::local());
        let request = began.map_err(|Closed| self.handle.closed())?;
        Ok((
            Attempt { handle: &self.handle, resource, sequence: acquisition.sequence, is_taken: false },
            request,
        ))
    }

    /// A lease is never asked for longer than the hold may last, which goes on when another lease takes its place.
    fn terms(&self, replaces: Option<&Guard>, now: LocalTime) -> LeaseTerms {
        let mut terms = self.terms;
        if let (Some(held), Some(_)) = (replaces, terms.max_hold) {
            terms.max_hold = Some(self.handle.session.ends_at(held.sequence()).since(now));
        }
        terms.ttl = terms.max_hold.map_or(terms.ttl, |hold| hold.min(terms.ttl));
        terms
    }
}

fn explain(refusal: Refusal, kind: Kind) -> String {
    let unit = unit(kind);
    match refusal {
        Refusal::Capacity { in_use } => {
            let in_use = if kind == Kind::Barrier { super::barrier::parties(in_use) } else { in_use };
            format!("it is in use with {in_use} {unit}: everybody must name the same number")
        }
        Refusal::Weight { capacity } => format!("more than its {capacity} {unit}, or none, can't be had"),
        other => format!("the store refused: {other:?}"),
    }
}

/// Waits until the store has taken back what the attempt may have there, so that its caller, who may try again at once,
/// does not meet it. The driver sends it. Says whether the store has confirmed it by then, and ends with the client.
pub(crate) async fn await_cancellation(handle: &Handle, attempt: u64, until: LocalTime) -> bool {
    let session = &handle.session;
    let mut limit = pin!(Sleep::until(session, until));
    let mut watch = session.watch(attempt);
    poll_fn(|context| match session.poll_released(&mut watch, context) {
        Poll::Ready(given) => Poll::Ready(given != ReleaseOutcome::Unconfirmed),
        Poll::Pending if session.is_closed() => Poll::Ready(false),
        Poll::Pending => limit.as_mut().poll(context).map(|()| false),
    })
    .await
}

/// An attempt under way. Dropped, it gives back whatever it has or may come to have.
pub(crate) struct Attempt<'a> {
    handle: &'a Arc<Handle>,
    pub(crate) resource: &'a Arc<Resource>,
    pub(crate) sequence: u64,
    is_taken: bool,
}

impl Attempt<'_> {
    /// Sends the first command, and waits for the end. Further commands are the driver's.
    pub(crate) async fn finish(&self, request: Option<Request>) -> AttemptEnd {
        let (session, store) = (&self.handle.session, &self.handle.store);
        let mut call = None;
        if let Some(request) = request {
            match store.try_call_inline(self.resource, &request.command) {
                Some(answered) => {
                    let outcome = session.handle_response(&request, clock::local(), &answered);
                    if let Some(granted @ Outcome::Granted { .. }) = outcome {
                        return (granted, None);
                    }
                }
                None => {
                    let batch = vec![(self.resource.clone(), request.command.clone())];
                    let sent = store.call_replicated(batch, request.replicas);
                    call = Some((request, sent));
                }
            }
        }
        let mut watch = session.watch(self.sequence);
        poll_fn(|context| {
            if let Some((request, sent)) = &mut call
                && let Poll::Ready(mut answers) = sent.as_mut().poll(context)
            {
                let answered = answers.pop().unwrap_or_else(missing_response);
                session.handle_response(request, clock::local(), &answered);
                call = None;
            }
            // The deadline may come before the answer.
            session.poll_ended(&mut watch, context)
        })
        .await
    }

    /// A guard stands for the lease from now on.
    pub(crate) fn into_guard(mut self, token: Token) -> Guard {
        self.is_taken = true;
        Guard::new(self.handle.clone(), self.sequence, self.resource.clone(), token)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.is_taken {
            // What nobody came to have was never used, and need not be kept.
            self.handle.session.set_min_hold(self.sequence, Duration::ZERO, clock::local());
            self.handle.abandon(self.resource, self.sequence);
        }
    }
}
