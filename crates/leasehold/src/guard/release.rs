//! The end of a hold: the lease is handed to the next task of this client, or released in the store.

use std::future::poll_fn;
use std::mem::forget;
use std::task::Poll;
use std::time::Duration;

use tracing::{Instrument as _, Span};

use leasehold_core::{LocalTime, Loss};

use super::Guard;
use crate::engine::{End, EndedHold, ReleaseOutcome, Response, Transmit, release_dropped, with_deadline};
use crate::error::{Error, ErrorKind};
use crate::telemetry::spans;

impl Guard {
    /// Releases the lease, and waits for the store's confirmation.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// orders.lock().await?.release().await?;
    /// assert!(orders.try_lock().await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost` if the lease had ended before; `is_unavailable` if the store did not confirm the release. The client then
    /// retries it in the background until the lease has expired.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the client releases the lease in the background.
    pub async fn release(self) -> Result<(), Error> {
        self.release_until(None).await
    }

    /// As [`Self::release`], but retries for up to `limit`.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// guard.release_timeout(Duration::from_secs(5)).await?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost` if the lease had ended before; `is_timeout` when the limit has passed; `is_unavailable` if the store refused the
    /// release (`is_refused`), which is returned at once, or if the server of a bridged lock did not answer two releases. The client then
    /// retries in the background.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::release`].
    pub async fn release_timeout(self, limit: Duration) -> Result<(), Error> {
        let deadline = self.handle.now() + limit;
        self.release_until(Some(deadline)).await
    }

    async fn release_until(mut self, deadline: Option<LocalTime>) -> Result<(), Error> {
        let span = spans::release(&self.resource, &self.handle.url, self.token);
        let released = self.release_in(&span, deadline).await;
        let outcome = match &released {
            Ok(()) => "released",
            Err(error) if error.is_lost() => "lost",
            Err(_) => "unconfirmed",
        };
        span.record("outcome", outcome);
        released
    }

    async fn release_in(&mut self, span: &Span, deadline: Option<LocalTime>) -> Result<(), Error> {
        let leg = self.release_leg(deadline).await;
        let own = self.release_own(span, deadline).await;
        // A lock that was lost does not become an unknown one.
        if leg.as_ref().is_err_and(Error::is_lost) { leg } else { own.and(leg) }
    }

    async fn release_own(&mut self, span: &Span, deadline: Option<LocalTime>) -> Result<(), Error> {
        let (queue, now) = (self.local_queue.take(), self.handle.now());
        let (transmit, loss) = match self.handle.session.release_or_hand_off(queue, self.entry, now) {
            EndedHold::HandedOff => {
                self.hold.handed_off();
                self.record_end("handed off", Some(now));
                self.is_over = true;
                return Ok(());
            }
            EndedHold::Releasing { transmit, loss } => (transmit, loss),
        };
        self.record_end("released", Some(now));
        let lost = loss.map(|loss| self.lost_error(loss));
        let given = self.send_release(transmit, deadline).instrument(span.clone()).await?;
        self.is_over = true;
        match (lost, given) {
            (Some(lost), _) => Err(lost),
            (None, ReleaseOutcome::Released) => Ok(()),
            (None, ReleaseOutcome::NotHeld) => Err(self.lost_error(Loss::Gone)),
            (None, ReleaseOutcome::Unconfirmed) => {
                Err(self.handle.unavailable(&self.resource, "release not confirmed; the lease has expired"))
            }
        }
    }

    /// Sends the release, and waits for its outcome or the deadline. The driver sends the retries.
    async fn send_release(
        &self,
        transmit: Option<Transmit>,
        deadline: Option<LocalTime>,
    ) -> Result<ReleaseOutcome, Error> {
        let session = &self.handle.session;
        let mut request = self.send(transmit);
        let mut watch = session.watch(self.entry);
        let released = poll_fn(|context| {
            let Response { end, error } = request.poll_response(context).unwrap_or_default();
            if let Some(End::Release(released)) = end {
                return Poll::Ready(Ok(released));
            }
            if request.is_in_flight() {
                // A store answers within a time limit. Until then nothing else needs to wake this task.
                return Poll::Pending;
            }
            let failed = |error| Poll::Ready(Err(self.handle.store_error(&self.resource, &error)));
            match (session.poll_released(&mut watch, context), error) {
                (Poll::Ready(released), _) => Poll::Ready(Ok(released)),
                (Poll::Pending, Some(error)) if deadline.is_none() => failed(error),
                // What the store has said is not to be told as silence later.
                (Poll::Pending, _) => match session.release_error(self.entry) {
                    Some(error) if error.failure.is_refusal() => failed(error),
                    _ => Poll::Pending,
                },
            }
        });
        with_deadline(session, deadline, released).await.unwrap_or_else(|| Err(self.unconfirmed()))
    }

    /// The error of a release at its time limit.
    fn unconfirmed(&self) -> Error {
        let why = self.handle.session.release_error(self.entry);
        let why = why.map_or_else(String::new, |error| format!(" ({})", error.message));
        let what = format!("release not confirmed within the limit{why}; it is retried in the background");
        self.handle.error(ErrorKind::Timeout, &self.resource, what)
    }

    /// Hands the lease to the next task of its local queue. Returns whether that was possible; then the store is not called.
    fn try_hand_off(&mut self) -> bool {
        let Some(queue) = self.local_queue.take() else {
            self.record_end("released", None);
            return false;
        };
        let now = self.handle.now();
        let is_handed_off = self.handle.session.hand_off(queue, self.entry, now);
        if is_handed_off {
            self.hold.handed_off();
        }
        self.record_end(if is_handed_off { "handed off" } else { "released" }, Some(now));
        self.is_over |= is_handed_off;
        is_handed_off
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.handle.session.is_forked() {
            // They may be the last that refer to what the parent's threads use.
            forget((self.leg.take(), std::mem::replace(&mut self.span, Span::none())));
            return;
        }
        if self.is_over || self.try_hand_off() {
            return;
        }
        if let Some(leg) = self.leg.take() {
            let (handle, resource, entry) = (self.handle.clone(), self.resource.clone(), self.entry);
            let release = move || release_dropped(&handle.session, &*handle.store, &resource, entry);
            leg.abandon(Box::new(release));
            return;
        }
        // The caller of a request may have lost its server, and repeat the request.
        if self.handle.session.suspend_request(self.entry, self.handle.now()) {
            return;
        }
        release_dropped(&self.handle.session, &*self.handle.store, &self.resource, self.entry);
    }
}
