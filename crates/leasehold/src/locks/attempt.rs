//! One attempt in the store's queue, from its first command to a guard or an error.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Failure, GrantSecret, Kind, LeaseTerms, LocalTime, Loss, Outcome, Refusal,
    Resource, Token, WaitFor, WaitPolicy,
};
use leasehold_store::StoreError;
use leasehold_store::digest::{RequestedTerms, random_attempt, requested_attempt};

use super::lock::{AttemptIds, Lock, WaitMode, unit};
use crate::barrier_rounds::parties;
use crate::engine::{
    AttemptEnd, BeginError, End, EntryId, MinHold, ReleaseOutcome, Request, Response, Transmit,
    release_dropped, with_deadline,
};
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;

/// Max time an attempt that was not granted in time waits for the store to confirm its cancellation.
///
/// The confirmation is what makes `None` mean "not granted". The limit has to cover a round trip to a distant store, and it
/// bounds how late a caller learns that no confirmation comes.
pub(crate) const CANCEL_LIMIT: Duration = Duration::from_secs(2);

/// Why a lease has ended that was to be exchanged, at the limit of that.
const UNDONE: &str = "the lease was lost: the store exchanged it at the limit, and the new one was released; or it was revoked or \
     expired there";

impl Lock {
    /// One attempt in the store's queue, outside of local queues and admission.
    pub(crate) async fn attempt(
        &self,
        resource: &Arc<Resource>,
        weight: u32,
        replaces: Option<&Guard>,
        wait: WaitMode,
    ) -> Result<Option<Guard>, Error> {
        self.await_earlier_release(resource, weight).await;
        let (attempt, transmit) = self.begin(resource, weight, replaces, wait.deadline(self.handle.now()))?;
        let (outcome, last_error) = attempt.finish(transmit).await;
        if let Outcome::Granted { grant, .. } = outcome {
            let token = grant.tokens.first;
            tracing::debug!(%resource, %token, "lease granted");
            return Ok(Some(attempt.into_guard(token)));
        }
        match outcome {
            // The store did not answer at last: what the caller repeats may not be in the queue.
            Outcome::TimedOut if attempt.is_request && last_error.is_some() => {
                Err(self.failed(resource, outcome, last_error.as_ref()))
            }
            // The caller may repeat the request.
            Outcome::NotGranted | Outcome::TimedOut if attempt.is_request => Ok(None),
            Outcome::NotGranted | Outcome::TimedOut => {
                let needs_release = self.handle.session.needs_release(attempt.entry);
                let until = self.handle.now() + CANCEL_LIMIT;
                let released = await_release(&self.handle, attempt.entry, until).await;
                match (released, replaces) {
                    (Some(_), Some(held)) if needs_release => {
                        // A command that came late may have exchanged `held`, and the release has ended that. A renewal finds out.
                        let renewed = held.renew().await;
                        let is_gone = held.loss() == Some(Loss::Gone);
                        renewed.map_err(|error| {
                            if is_gone { self.handle.error(ErrorKind::Lost, resource, UNDONE) } else { error }
                        })?;
                        Ok(None)
                    }
                    (Some(released), _) if released != ReleaseOutcome::Unconfirmed => Ok(None),
                    // The store has refused the attempt; only an earlier response was lost.
                    (_, None) if outcome == Outcome::NotGranted => Ok(None),
                    (_, None) => {
                        // The attempt was not refused, but its release is.
                        let last_error =
                            last_error.or_else(|| self.handle.session.release_error(attempt.entry));
                        Err(self.failed(resource, outcome, last_error.as_ref()))
                    }
                    (_, Some(_)) => {
                        let what = "the store did not confirm whether the lease was exchanged";
                        Err(self.handle.unavailable(resource, what))
                    }
                }
            }
            outcome => Err(self.failed(resource, outcome, last_error.as_ref())),
        }
    }

    /// Maps a terminal outcome to the caller's error.
    pub(crate) fn failed(
        &self,
        resource: &Resource,
        outcome: Outcome,
        last_error: Option<&StoreError>,
    ) -> Error {
        match outcome {
            Outcome::QueueFull => {
                let what = format!("the wait queue is full ({} waiters)", self.max_waiters);
                self.handle.error(ErrorKind::QueueFull, resource, what)
            }
            Outcome::Refused(Refusal::NotHeld) => self.handle.lost(resource, Loss::Gone, None),
            Outcome::Refused(refusal) => {
                self.handle.error(ErrorKind::Invalid, resource, explain(refusal, resource.kind))
            }
            Outcome::Cancelled if self.handle.session.is_closed() => self.handle.closed(),
            Outcome::Cancelled if matches!(self.ids, AttemptIds::Requested(_)) => {
                self.request_ended(resource)
            }
            Outcome::Cancelled => {
                let what =
                    "it was granted and has been released by another process before this client heard of it";
                self.handle.unavailable(resource, what)
            }
            Outcome::TimedOut if self.handle.session.is_closed() => self.handle.closed(),
            Outcome::TimedOut => {
                let what = "timed out, and the store did not confirm that the lock was not granted";
                match last_error {
                    None => self.handle.unavailable(resource, what),
                    Some(error) => {
                        let message = format!("{what}: {}", error.message);
                        self.handle.store_error(resource, &error.clone().saying(message))
                    }
                }
            }
            Outcome::Failed | Outcome::NotGranted | Outcome::Granted { .. } => match last_error {
                None => self.handle.unavailable(resource, "the response came too late"),
                Some(error) => self.handle.store_error(resource, error),
            },
        }
    }

    pub(crate) fn begin<'a>(
        &'a self,
        resource: &'a Arc<Resource>,
        weight: u32,
        replaces: Option<&Guard>,
        deadline: Option<LocalTime>,
    ) -> Result<(Attempt<'a>, Option<Transmit>), Error> {
        let session = &self.handle.session;
        let terms = self.terms(replaces, self.handle.now());
        let (acquisition, inbox) = match &self.ids {
            AttemptIds::Counted => (session.next_acquisition(), None),
            AttemptIds::Random => (self.random_attempt(resource)?, Some(session.id)),
            AttemptIds::Requested(request) => {
                (self.requested_attempt(resource, weight, request), Some(session.id))
            }
        };
        let is_request = matches!(self.ids, AttemptIds::Requested(_));
        let command = Acquire {
            acquisition,
            inbox,
            owner: self.owner.clone(),
            capacity: self.capacity,
            weight,
            ttl: terms.ttl.max(terms.min_lifetime),
            reserve: 0,
            wait: deadline.map(|_| self.wait_for()),
            replaces: replaces.map(|held| held.entry_id().sequence()),
            secret: GrantSecret::UNUSED,
            metadata: self.metadata.clone(),
        };
        let wait_policy = deadline.map(|deadline| self.wait_policy(deadline));
        // A writer that becomes a reader, or the reverse, keeps what `Guard::set_min_hold` has set. A party of a barrier does not.
        let continued = replaces
            .filter(|_| resource.kind == Kind::ReadWrite)
            .and_then(|held| session.min_hold(held.entry_id()));
        let min_hold = MinHold {
            length: continued.unwrap_or(self.min_hold),
            ends_at_close: self.min_hold_ends_at_close,
            is_continued: continued.is_some(),
        };
        let now = self.handle.now();
        let began = session.begin(resource.clone(), terms, min_hold, command, wait_policy, now);
        let (entry, transmit) = began.map_err(|refused| match refused {
            BeginError::Closed => self.handle.closed(),
            BeginError::InUse => self.handle.error(
                ErrorKind::Invalid,
                resource,
                "another task of this client makes this request",
            ),
            BeginError::Released => self.request_ended(resource),
            BeginError::Unsettled => {
                let what = "this client releases what it has had of this request, and the store has not confirmed that: repeat it at another client, \
                            or later";
                self.handle.unavailable(resource, what)
            }
        })?;
        Ok((Attempt { handle: &self.handle, resource, entry, is_request, is_taken: false }, transmit))
    }

    /// The id that this request has at each client of the store.
    fn requested_attempt(&self, resource: &Resource, weight: u32, request: &[u8]) -> Acquisition {
        let (capacity, owner, min_lifetime) = (self.capacity, self.owner.as_ref(), self.terms.min_lifetime);
        requested_attempt(resource, RequestedTerms { capacity, weight, owner, min_lifetime }, request)
    }

    /// This client may be releasing what it has had of a request, unless another client has continued it: only the answer tells whether the
    /// request goes on.
    async fn await_earlier_release(&self, resource: &Resource, weight: u32) {
        let AttemptIds::Requested(request) = &self.ids else { return };
        let attempt = self.requested_attempt(resource, weight, request);
        if let Some(releasing) = self.handle.session.conditional_release(attempt) {
            await_release(&self.handle, releasing, self.handle.now() + CANCEL_LIMIT).await;
        }
    }

    /// An id that cannot be guessed.
    fn random_attempt(&self, resource: &Resource) -> Result<Acquisition, Error> {
        let (mut client, mut number) = ([0; 16], [0; 8]);
        getrandom::fill(&mut client).and_then(|()| getrandom::fill(&mut number)).map_err(|error| {
            self.handle.unavailable(resource, &format!("the system gave no random numbers: {error}"))
        })?;
        Ok(random_attempt(u128::from_be_bytes(client), u64::from_be_bytes(number)))
    }

    /// The attempt of a request was released before.
    fn request_ended(&self, resource: &Resource) -> Error {
        let what = "this request has ended: its lease was released, or it was not repeated in time; use a new id for a new request";
        self.handle.error(ErrorKind::Lost, resource, what)
    }

    /// The entry that an attempt of this lock has in the store's queue.
    pub(crate) fn wait_for(&self) -> WaitFor {
        let entry_ttl = self.handle.capabilities.poll_intervals.entry_ttl;
        WaitFor { entry_ttl, max_queue: self.max_waiters }
    }

    /// How an attempt of this lock waits, until this time at the latest.
    pub(crate) fn wait_policy(&self, deadline: LocalTime) -> WaitPolicy {
        WaitPolicy {
            deadline,
            repoll_interval: self.handle.capabilities.poll_intervals.repoll_interval,
            // Of several clients that make an attempt, the one that the store answers has the grant.
            confirms_pushes: self.terms.replicas > 0 || !matches!(self.ids, AttemptIds::Counted),
            secret_key: self.handle.session.secret_key,
        }
    }

    /// The lease's terms. A ttl never exceeds the maximum hold, which an exchanged lease continues.
    fn terms(&self, replaces: Option<&Guard>, now: LocalTime) -> LeaseTerms {
        let mut terms = self.terms;
        if let (Some(held), Some(_)) = (replaces, terms.max_hold) {
            terms.max_hold = Some(self.handle.session.ends_at(held.entry_id()).since(now));
        }
        terms.ttl = terms.max_hold.map_or(terms.ttl, |hold| hold.min(terms.ttl));
        terms
    }
}

fn explain(refusal: Refusal, kind: Kind) -> String {
    let unit = unit(kind);
    match refusal {
        Refusal::Capacity { in_use } => {
            let in_use = if kind == Kind::Barrier { parties(in_use) } else { in_use };
            format!("it is in use with {in_use} {unit}: all clients must pass the same number")
        }
        Refusal::Weight { capacity } => format!("a request must be for 1 to {capacity} {unit}"),
        other => format!("the store refused: {other:?}"),
    }
}

/// Waits for the end of the attempt's cancellation, so that the caller's next attempt does not compete with it. The driver sends
/// the cancellation. Returns `None` at `until`, or when the client is closed.
async fn await_release(handle: &Handle, attempt: EntryId, until: LocalTime) -> Option<ReleaseOutcome> {
    let session = &handle.session;
    let mut watch = session.watch(attempt);
    let is_permanent = |error: StoreError| matches!(error.failure, Failure::Permanent(_));
    let ended = poll_fn(|context| match session.poll_released(&mut watch, context) {
        Poll::Ready(released) => Poll::Ready(Some(released)),
        Poll::Pending if session.is_closed() => Poll::Ready(None),
        // What the store refuses for good it refuses until the deadline, too.
        Poll::Pending if session.release_error(attempt).is_some_and(is_permanent) => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    });
    with_deadline(session, Some(until), ended).await.flatten()
}

/// An attempt in progress. Dropping it cancels the attempt and releases a lease that was granted.
pub(crate) struct Attempt<'a> {
    handle: &'a Arc<Handle>,
    pub(crate) resource: &'a Arc<Resource>,
    pub(crate) entry: EntryId,
    /// The caller may repeat it.
    is_request: bool,
    is_taken: bool,
}

impl<'a> Attempt<'a> {
    /// The attempt, or the lease, of a local queue that no other task needs.
    pub(crate) fn of_queue(handle: &'a Arc<Handle>, resource: &'a Arc<Resource>, entry: EntryId) -> Self {
        Self { handle, resource, entry, is_request: false, is_taken: false }
    }

    /// Cancels it. An error is the store's last word, if it has not confirmed that until `until`. Until then this refers to it: what ends
    /// without a confirmation would not be known otherwise.
    pub(crate) async fn cancel(self, until: LocalTime) -> Result<(), Option<StoreError>> {
        let (session, now) = (&self.handle.session, self.handle.now());
        session.end_unused_min_hold(self.entry, now);
        session.cancel(self.entry, now);
        match await_release(self.handle, self.entry, until).await {
            Some(released) if released != ReleaseOutcome::Unconfirmed => Ok(()),
            _ => Err(session.release_error(self.entry)),
        }
    }

    /// Sends the first command, and waits for the outcome. The driver sends the following commands.
    pub(crate) async fn finish(&self, transmit: Option<Transmit>) -> AttemptEnd {
        let mut request = Request::send(&self.handle.session, &*self.handle.store, self.resource, transmit);
        let mut watch = self.handle.session.watch(self.entry);
        poll_fn(|context| {
            if let Some(Response { end: Some(End::Attempt(granted @ Outcome::Granted { .. })), .. }) =
                request.poll_response(context)
            {
                return Poll::Ready((granted, None));
            }
            // The deadline may come before the response.
            self.handle.session.poll_ended(&mut watch, context)
        })
        .await
    }

    /// Turns a granted attempt into a guard.
    pub(crate) fn into_guard(mut self, token: Token) -> Guard {
        self.is_taken = true;
        Guard::new(self.handle.clone(), self.entry, self.resource.clone(), token, None)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if self.is_taken {
            return;
        }
        self.handle.session.end_unused_min_hold(self.entry, self.handle.now());
        if self.is_request {
            self.handle.session.suspend(self.entry, self.handle.now());
        } else {
            release_dropped(&self.handle.session, &*self.handle.store, self.resource, self.entry);
        }
    }
}
