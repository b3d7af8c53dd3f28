//! A held lease.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use leasehold_core::{LocalTime, Loss, Resource, Token};

use crate::engine::clock;
use crate::engine::{ReleaseOutcome, RenewalError, Request, Sleep};
use crate::error::{Error, ErrorKind};
use crate::handle::{Handle, missing_response};
use crate::locks::lock::MAX_TTL;
use crate::store::{BoxFuture, CallResult};

/// A held lease. It is renewed while the guard lives, and given back when the guard is released or dropped.
///
/// Dropping it works anywhere: outside a runtime, in a panic, on another thread. Where the store can be told at once
/// it is; otherwise the client's own thread does it. `release` is how to know that it has happened.
#[must_use = "the lock is given back when the guard is dropped"]
pub struct Guard {
    handle: Arc<Handle>,
    sequence: u64,
    resource: Arc<Resource>,
    token: Token,
    /// The line of its client's tasks that the lease belongs to, if it does.
    local_queue: Option<u64>,
    /// The lease was given back, and nothing is left to do.
    is_over: bool,
}

impl Guard {
    pub(crate) fn new(handle: Arc<Handle>, sequence: u64, resource: Arc<Resource>, token: Token) -> Self {
        Self { handle, sequence, resource, token, local_queue: None, is_over: false }
    }

    /// For a lease that its client's tasks hand on among themselves.
    pub(crate) fn from_local_queue(
        handle: Arc<Handle>,
        sequence: u64,
        resource: Arc<Resource>,
        token: Token,
        queue: u64,
    ) -> Self {
        Self { handle, sequence, resource, token, local_queue: Some(queue), is_over: false }
    }

    /// Whether another task of the client has the lease now, or gets it next. Then the store need not hear of it.
    fn try_hand_off(&mut self) -> bool {
        let queue = self.local_queue.take();
        let is_handed_off =
            queue.is_some_and(|queue| self.handle.session.hand_off(queue, self.sequence, clock::local()));
        self.is_over |= is_handed_off;
        is_handed_off
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Another lease has taken the place of this one.
    pub(crate) fn mark_replaced(mut self) {
        self.handle.session.mark_replaced(self.sequence, clock::local());
        self.is_over = true;
    }

    /// Keeps what was taken until this long after the grant, instead of what the lock's `min_hold` says: zero for work
    /// that is not to be done after all. A lease with a minimum is not handed on among the tasks of its client.
    ///
    /// # Errors
    ///
    /// `is_invalid` for more than 30 days, or than the `max_ttl` of servers that vote. Then nothing was changed.
    pub fn set_min_hold(&self, min_hold: Duration) -> Result<(), Error> {
        let longest = self.handle.store.max_ttl().map_or(MAX_TTL, |longest| longest.min(MAX_TTL));
        if min_hold > longest {
            let what = format!("it can be kept for at most {longest:?}, not {min_hold:?}");
            return Err(self.handle.error(ErrorKind::Invalid, &self.resource, what));
        }
        self.handle.session.set_min_hold(self.sequence, min_hold, clock::local());
        Ok(())
    }

    /// The lock's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.resource.name.as_str()
    }

    /// The fencing token: higher than that of every earlier grant of this lock. Give it to whatever the lock
    /// protects, and let that refuse a lower one than it has seen.
    #[must_use]
    pub fn token(&self) -> Token {
        self.token
    }

    /// How much longer the lease may be trusted if no renewal succeeds any more, by this process's own clock, which
    /// also runs while the machine sleeps. Zero when it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.handle.session.remaining(self.sequence, clock::local()).unwrap_or(Duration::ZERO)
    }

    /// Whether the lease may be trusted now. A process that is stopped right after asking can be wrong a moment later:
    /// that is what the token is for.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Waits until the lease is lost. It ends by itself, with no word from the store, no later than
    /// [`Self::remaining`] says.
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    pub async fn lost(&self) -> Loss {
        let session = &self.handle.session;
        let mut watch = session.watch(self.sequence);
        poll_fn(|context| session.poll_lost(&mut watch, context)).await
    }

    /// Waits until no more than this is left: because renewals fail, or are off, or the lease is lost.
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    pub async fn wait_until_expiring(&self, left: Duration) {
        let mut lost = pin!(self.lost());
        loop {
            let remaining = self.remaining();
            if remaining <= left {
                return;
            }
            // A renewal only moves this later, so looking again then is soon enough.
            let mut sleep = self.sleep_until(clock::local() + (remaining - left));
            let ended = poll_fn(|context| match lost.as_mut().poll(context) {
                Poll::Ready(_) => Poll::Ready(true),
                Poll::Pending => Pin::new(&mut sleep).poll(context).map(|()| false),
            });
            if ended.await {
                return;
            }
        }
    }

    /// Renews the lease now, to its full ttl from here, and waits for the store's word. With automatic renewal off this
    /// is how to keep a lease; with it on, how to be sure of a full ttl before a long step, since a lease that was
    /// waited for begins with 3 s.
    ///
    /// # Errors
    ///
    /// `is_lost`; `is_unavailable` when the store could not be asked: it is tried again in the background, whether
    /// renewal is automatic or not.
    ///
    /// # Cancel safety
    ///
    /// Dropped early, the renewal may or may not have taken effect, and is tried again in the background.
    pub async fn renew(&self) -> Result<(), Error> {
        let (session, store) = (&self.handle.session, &self.handle.store);
        if let Some(request) = session.begin_renewal(self.sequence, clock::local()) {
            let answered = match store.try_call_inline(&self.resource, &request.command) {
                Some(answered) => answered,
                None => {
                    let abandon_on_drop = RenewalGuard(self);
                    let batch = vec![(self.resource.clone(), request.command.clone())];
                    let mut answers = store.call_replicated(batch, request.replicas).await;
                    std::mem::forget(abandon_on_drop);
                    answers.pop().unwrap_or_else(missing_response)
                }
            };
            session.handle_response(&request, clock::local(), &answered);
        }
        let mut watch = session.watch(self.sequence);
        match poll_fn(|context| session.poll_renewed(&mut watch, context)).await {
            Ok(()) => Ok(()),
            Err(RenewalError::Lost(loss)) => Err(self.lost_error(loss)),
            Err(RenewalError::Failed(message)) => Err(self.handle.unavailable(&self.resource, &message)),
        }
    }

    /// Runs `work` for as long as the lease is held, and drops it when the lease is lost.
    ///
    /// # Errors
    ///
    /// `is_lost`. The value of work that ended after its lease did is dropped too: nobody can say that what it did
    /// was protected.
    ///
    /// # Cancel safety
    ///
    /// That of `work`; the guard is only borrowed.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, Error> {
        let (mut lost, mut work) = (pin!(self.lost()), pin!(work));
        poll_fn(|context| {
            if let Poll::Ready(loss) = lost.as_mut().poll(context) {
                return Poll::Ready(Err(self.lost_error(loss)));
            }
            let Poll::Ready(value) = work.as_mut().poll(context) else { return Poll::Pending };
            Poll::Ready(self.loss().map_or(Ok(value), |loss| Err(self.lost_error(loss))))
        })
        .await
    }

    /// Gives the lease back, and waits for the store's word.
    ///
    /// # Errors
    ///
    /// `is_lost` when the lease had ended before; `is_unavailable` when the store could not be told: that is tried
    /// again in the background until the lease has run out.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, it is given back all the same, in the background.
    pub async fn release(self) -> Result<(), Error> {
        self.release_until(None).await
    }

    /// As [`Self::release`], and tries again until this much time has passed.
    ///
    /// # Errors
    ///
    /// `is_lost` as there, and `is_timeout` when the limit has passed; then it goes on in the background.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::release`].
    pub async fn release_timeout(self, limit: Duration) -> Result<(), Error> {
        self.release_until(Some(clock::local() + limit)).await
    }

    async fn release_until(mut self, deadline: Option<LocalTime>) -> Result<(), Error> {
        if self.try_hand_off() {
            return Ok(());
        }
        let (request, loss) = self.handle.session.begin_release(self.sequence, clock::local());
        let given = self.send_release(request, deadline).await?;
        self.is_over = true;
        match (loss, given) {
            (Some(loss), _) => Err(self.lost_error(loss)),
            (None, ReleaseOutcome::Released) => Ok(()),
            (None, ReleaseOutcome::NotHeld) => Err(self.lost_error(Loss::Gone)),
            (None, ReleaseOutcome::Unconfirmed) => {
                Err(self.handle.unavailable(&self.resource, "it was left to run out"))
            }
        }
    }

    /// Sends it, and waits for the end or for the deadline. Further sendings are the driver's.
    async fn send_release(
        &self,
        request: Option<Request>,
        deadline: Option<LocalTime>,
    ) -> Result<ReleaseOutcome, Error> {
        let (session, store) = (&self.handle.session, &self.handle.store);
        let mut call: Option<(Request, BoxFuture<Vec<CallResult>>)> = None;
        let mut error = None;
        if let Some(request) = request {
            match store.try_call_inline(&self.resource, &request.command) {
                Some(answered) => match session.handle_release_response(&request, &answered) {
                    Some(given) => return Ok(given),
                    None => error = answered.err(),
                },
                None => {
                    let sent = store.call(vec![(self.resource.clone(), request.command.clone())]);
                    call = Some((request, sent));
                }
            }
        }
        let mut watch = session.watch(self.sequence);
        let mut limit = deadline.map(|deadline| self.sleep_until(deadline));
        poll_fn(|context: &mut Context<'_>| {
            if let Some((request, sent)) = &mut call
                && let Poll::Ready(mut answers) = sent.as_mut().poll(context)
            {
                let answered = answers.pop().unwrap_or_else(missing_response);
                if let Some(given) = session.handle_release_response(request, &answered) {
                    return Poll::Ready(Ok(given));
                }
                error = answered.err();
                call = None;
            }
            if let Poll::Ready(given) = session.poll_released(&mut watch, context) {
                return Poll::Ready(Ok(given));
            }
            match (&mut limit, &error) {
                (None, Some(error)) => {
                    Poll::Ready(Err(self.handle.unavailable(&self.resource, &error.message)))
                }
                (Some(limit), _) => Pin::new(limit).poll(context).map(|()| {
                    let what = "it could not be given back within the time set, which is being tried on";
                    Err(self.handle.error(ErrorKind::Timeout, &self.resource, what))
                }),
                (None, None) => Poll::Pending,
            }
        })
        .await
    }

    pub(crate) fn loss(&self) -> Option<Loss> {
        self.handle.session.remaining(self.sequence, clock::local()).err()
    }

    pub(crate) fn lost_error(&self, loss: Loss) -> Error {
        self.handle.lost(&self.resource, loss)
    }

    pub(crate) fn sleep(&self, span: Duration) -> Sleep {
        self.sleep_until(clock::local() + span)
    }

    fn sleep_until(&self, until: LocalTime) -> Sleep {
        Sleep::until(&self.handle.session, until)
    }
}

/// A renewal under way by a future. Dropped, nobody listens for its answer.
struct RenewalGuard<'a>(&'a Guard);

impl Drop for RenewalGuard<'_> {
    fn drop(&mut self) {
        self.0.handle.session.abandon_renewal(self.0.sequence, clock::local());
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.is_over && !self.try_hand_off() {
            self.handle.abandon(&self.resource, self.sequence);
        }
    }
}

impl Handle {
    /// Nobody stands for this entry any more. It is given back at once where that can't mean to wait, and otherwise by
    /// the driver.
    pub(crate) fn abandon(&self, resource: &Resource, sequence: u64) {
        let Some(request) = self.session.release_dropped(sequence, clock::local()) else { return };
        match self.store.try_call_inline(resource, &request.command) {
            Some(answered) => drop(self.session.handle_release_response(&request, &answered)),
            None => self.session.defer_release(sequence, clock::local()),
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guard({} on {}, token {})", self.resource, self.handle.url, self.token)
    }
}
