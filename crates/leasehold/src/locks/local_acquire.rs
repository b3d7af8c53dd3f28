//! Taking a lock as one of its client's tasks: in a line of its own kind, within which the lease is handed on.
//!
//! Which task is next, and with which token, the session decides; here one of them waits.

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use leasehold_core::{Failure, HandoffLimits, LocalTime, Outcome, Resource, WaitFor, WaitPolicy};

use crate::client::{Handle, unanswered};
use crate::engine::clock;
use crate::engine::{Errand, Left, NoPlace, Place, Sleep, Turned, Wish};
use crate::error::Error;
use crate::guard::Guard;
use crate::locks::acquire_all::within;
use crate::locks::lock::{CANCEL_LIMIT, Lock, Wait, withdrawn};
use crate::store::{BoxFuture, CallResult, StoreError};

impl Lock {
    /// How leases are handed on within the client, if they are: a hold with an end or a beginning of its own can't be
    /// handed on, and a lease that is not renewed would have little left for the next one.
    pub(crate) fn handed_on(&self) -> Option<HandoffLimits> {
        let is_plain = self.owner.is_none()
            && self.terms.renews
            && self.terms.max_hold.is_none()
            && self.terms.min_lifetime.is_zero()
            && self.at_least.is_zero();
        self.hand_off.filter(|_| is_plain)
    }

    pub(crate) fn wish(&self, resource: &Arc<Resource>, hand_off: HandoffLimits) -> Wish {
        let poll_intervals = self.handle.store.poll_intervals();
        Wish {
            resource: resource.clone(),
            terms: self.terms,
            wait: WaitFor { entry_ttl: poll_intervals.entry_ttl, max_queue: self.max_waiters },
            patience: WaitPolicy {
                deadline: LocalTime::NEVER,
                repoll_interval: poll_intervals.repoll_interval,
                confirms_pushes: self.terms.replicas > 0,
            },
            metadata: self.about.clone(),
            hand_off,
        }
    }

    /// Waits in the client's line. Nobody in it is overtaken.
    pub(crate) async fn acquire_in_line(
        &self,
        resource: &Arc<Resource>,
        wish: Wish,
        wait: Wait,
    ) -> Result<Option<Guard>, Error> {
        let handle = &self.handle;
        let deadline = wait.deadline().unwrap_or(LocalTime::NEVER);
        let entered = handle.session.enter(wish, clock::local());
        let (place, errand) = entered.map_err(|refused| match refused {
            NoPlace::Closed => handle.closed(),
            NoPlace::QueueFull => self.failed(resource, Outcome::QueueFull, None),
        })?;
        let mut waiting = Waiting { handle, resource, place, call: None, is_over: false };
        match waiting.turn(errand, deadline).await {
            Some(Turned::Granted(lease, token)) => {
                waiting.is_over = true;
                tracing::debug!(%resource, %token, "a lease was granted");
                Ok(Some(Guard::in_line(handle.clone(), lease, resource.clone(), token, place.line)))
            }
            Some(Turned::Ended((outcome, trouble))) => {
                waiting.is_over = true;
                Err(self.failed(resource, outcome, trouble.as_deref()))
            }
            None => self.give_up(resource, waiting).await,
        }
    }

    /// The time to wait is over. What that comes to is the store's word, for which it has [`CANCEL_LIMIT`].
    async fn give_up(
        &self,
        resource: &Arc<Resource>,
        mut waiting: Waiting<'_>,
    ) -> Result<Option<Guard>, Error> {
        let unknown = || Err(self.failed(resource, Outcome::TimedOut, None));
        let until = clock::local() + CANCEL_LIMIT;
        match waiting.leave() {
            Left::Held => Ok(None),
            // The attempt ends with this task, and that is confirmed.
            Left::Last { sequence, may_be_in_store } => {
                if withdrawn(&self.handle, sequence, until).await && may_be_in_store {
                    Ok(None)
                } else {
                    unknown()
                }
            }
            // It goes on, and what was last heard of it may be long ago: this task asks for itself. It overtakes nobody who
            // stands in the store's queue.
            Left::Asking => {
                let tried = self.attempt(resource, 1, None, Wait::No);
                within(&self.handle, Some(until), tried).await.unwrap_or_else(unknown)
            }
        }
    }
}

/// A task's place in a line. Dropped, it is left, with whatever has come of it.
struct Waiting<'a> {
    handle: &'a Arc<Handle>,
    resource: &'a Arc<Resource>,
    place: Place,
    /// What the first of the line sends in its name.
    call: Option<(Errand, BoxFuture<Vec<CallResult>>)>,
    is_over: bool,
}

impl Waiting<'_> {
    async fn turn(&mut self, errand: Option<Errand>, deadline: LocalTime) -> Option<Turned> {
        let (session, store) = (&self.handle.session, &self.handle.store);
        if let Some(errand) = errand {
            match store.try_call_inline(self.resource, &errand.command) {
                Some(answered) => drop(session.absorb(&errand, clock::local(), &answered)),
                None => {
                    let batch = vec![(self.resource.clone(), errand.command.clone())];
                    let sent = store.call_replicated(batch, errand.replicas);
                    self.call = Some((errand, sent));
                }
            }
        }
        let mut limit = (deadline != LocalTime::NEVER).then(|| Sleep::until(session, deadline));
        poll_fn(|context| {
            if let Some((errand, sent)) = &mut self.call
                && let Poll::Ready(mut answers) = sent.as_mut().poll(context)
            {
                let answered = answers.pop().unwrap_or_else(unanswered);
                session.absorb(errand, clock::local(), &answered);
                self.call = None;
            }
            if let Poll::Ready(turned) = session.poll_turn(self.place, context) {
                return Poll::Ready(Some(turned));
            }
            match &mut limit {
                Some(limit) => Pin::new(limit).poll(context).map(|()| None),
                None => Poll::Pending,
            }
        })
        .await
    }

    fn leave(&mut self) -> Left {
        self.is_over = true;
        let left = self.handle.session.leave(self.place, clock::local());
        match (&left, self.call.take()) {
            (Left::Last { sequence, .. }, _) => self.handle.let_go(self.resource, *sequence),
            (Left::Held | Left::Asking, Some((errand, _))) => {
                // Others wait for the answer, which nobody hears any more: the driver asks again.
                let message = "whoever asked did not wait for the answer".to_owned();
                let lost = Err(StoreError { failure: Failure::Unknown, message });
                self.handle.session.absorb(&errand, clock::local(), &lost);
            }
            (Left::Held | Left::Asking, None) => {}
        }
        left
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.leave();
        }
    }
}
