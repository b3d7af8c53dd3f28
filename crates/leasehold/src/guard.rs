//! A held lease.

mod leg;
mod release;

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{Acquisition, LocalTime, Loss, Resource, Token};
use leasehold_store::Store;
use tracing::Span;

use crate::engine::{
    DetachedLease, EntryId, QueueId, QueuedGrant, RenewalError, Request, Transmit, with_deadline,
};
use crate::error::{Error, ErrorKind};
use crate::handle::Handle;
use crate::options::MAX_TTL;
use crate::telemetry::{Hold, spans};

/// A held lease. The client renews it while the guard lives. [`release`](Self::release) releases it, and so does dropping
/// the guard.
///
/// A guard can be dropped anywhere: outside a runtime, in a panic, on another thread. Dropping calls an embedded store
/// (`memory:`, `sqlite:`) directly; for other stores the client's thread sends the release. Only `release` reports whether
/// the store has confirmed it.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let guard = client.mutex("report").lock().await?;
/// let body = guard.run(async { "body" }).await?; // dropped when the lease is lost
/// println!("UPDATE … WHERE fence <= {}: {body}", guard.token());
/// guard.release().await?;
/// # Ok(()) });
/// ```
#[must_use = "the lock is released when the guard is dropped"]
pub struct Guard {
    handle: Arc<Handle>,
    entry: EntryId,
    resource: Arc<Resource>,
    token: Token,
    /// The local queue that owns the lease, if there is one.
    local_queue: Option<QueueId>,
    /// The lease was released, replaced or handed off.
    is_over: bool,
    /// Counts the hold.
    hold: Hold,
    /// Lasts as long as the hold.
    span: Span,
    /// The attempt waited before it reached the store.
    was_admitted: bool,
    /// It is being detached: the drop of a request's lease leaves the caller time to repeat the request.
    outlives_drop: bool,
    /// The lock of another library that the lease is bridged to.
    leg: Option<Arc<crate::bridge::Leg>>,
}

impl Guard {
    pub(crate) fn new(
        handle: Arc<Handle>,
        entry: EntryId,
        resource: Arc<Resource>,
        token: Token,
        local_queue: Option<QueueId>,
    ) -> Self {
        Self {
            handle,
            entry,
            resource,
            token,
            local_queue,
            is_over: false,
            hold: Hold::none(),
            span: Span::none(),
            was_admitted: false,
            outlives_drop: false,
            leg: None,
        }
    }

    /// The grant, if the attempt waited for it.
    pub(crate) fn queued_grant(&self) -> Option<QueuedGrant> {
        let queued = self.handle.session.queued_grant(self.entry, self.token);
        queued.or(self.was_admitted.then_some(QueuedGrant { granted_at: None }))
    }

    /// The attempt waited in an admission queue before it reached the store.
    pub(crate) fn set_admitted(&mut self) {
        self.was_admitted = true;
    }

    /// Begins the hold, after the attempt with this span.
    pub(crate) fn begin_hold(&mut self, hold: Hold, acquire: &Span) {
        self.hold = hold;
        self.span = spans::hold(&self.resource, &self.handle.url, self.token(), acquire);
    }

    /// Ends the hold, once.
    fn record_end(&mut self, outcome: &'static str, now: Option<LocalTime>) {
        let handle = &self.handle;
        self.hold.end(|| now.unwrap_or_else(|| handle.now()));
        std::mem::replace(&mut self.span, Span::none()).record("outcome", outcome);
    }

    #[cfg(feature = "_simulation")]
    pub(crate) fn session(&self) -> &Arc<crate::engine::Session> {
        &self.handle.session
    }

    pub(crate) fn entry_id(&self) -> EntryId {
        self.entry
    }

    pub(crate) fn resource(&self) -> &Resource {
        &self.resource
    }

    /// Lets the client forget the lease, which stays in the store. Returns its terms, and the attempt that the store knows.
    pub(crate) fn forget_lease(&mut self) -> Result<(DetachedLease, Acquisition), Loss> {
        let now = self.handle.now();
        let lease = self.handle.session.detach(self.entry, self.local_queue, now)?;
        self.record_end("detached", Some(now));
        self.is_over = true;
        let attempts = self.handle.store.voted_attempts();
        let stored = attempts.map_or(lease.acquisition, |attempts| attempts.detach(lease.acquisition));
        Ok((lease, stored))
    }

    /// From now on the drop of a request's lease leaves its caller time to repeat the request.
    pub(crate) fn outlive_drop(&mut self) {
        self.outlives_drop = true;
    }

    /// Whether less than a tenth of the ttl has passed since the grant or the last renewal.
    pub(crate) fn is_fresh(&self) -> bool {
        self.handle.session.is_fresh(self.entry, self.handle.now())
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.handle.store
    }

    /// From now on the guard releases its attached lease.
    pub(crate) fn own(&self) {
        self.handle.session.own(self.entry, self.handle.now());
    }

    /// Another lease has replaced this one.
    pub(crate) fn mark_replaced(mut self) {
        let now = self.handle.now();
        self.record_end("replaced", Some(now));
        self.handle.session.mark_replaced(self.entry, now);
        self.is_over = true;
    }

    /// Replaces the lock's `min_hold`. If the lease is released sooner than this after the grant, the store retains the lock
    /// until then. With zero the release frees the lock at once, for example if there was no work to do. A lease with a
    /// minimum hold is not handed off between the tasks of its client.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let lottery = client.mutex("lottery").min_hold(Duration::from_secs(3_600));
    /// let guard = lottery.lock().await?;
    /// guard.set_min_hold(Duration::ZERO)?; // there was nothing to draw
    /// guard.release().await?;
    /// assert!(lottery.try_lock().await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for more than 30 days, for more than the `max_ttl` of a quorum, and for a bridged lock, because the other library's
    /// lock is released at once. Nothing is changed in that case.
    pub fn set_min_hold(&self, min_hold: Duration) -> Result<(), Error> {
        let longest = self.handle.capabilities.max_ttl.map_or(MAX_TTL, |longest| longest.min(MAX_TTL));
        if min_hold > longest {
            let what = format!("a minimum hold is at most {longest:?}, not {min_hold:?}");
            return Err(self.handle.error(ErrorKind::Invalid, &self.resource, what));
        }
        if self.leg.is_some() && !min_hold.is_zero() {
            return Err(self.handle.error(ErrorKind::Invalid, &self.resource, crate::bridge::NO_MIN_HOLD));
        }
        self.handle.session.set_min_hold(self.entry, min_hold, self.handle.now());
        Ok(())
    }

    /// The lock's name.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// assert_eq!(client.mutex("orders:42").lock().await?.name(), "orders:42");
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        self.resource.name.as_str()
    }

    /// The fencing token: higher than that of every earlier holder of this lock. Acquisitions of one owner share it, and a downgrade
    /// keeps it. Pass it to the protected resource, which must
    /// refuse tokens lower than the highest it has seen.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// let first = orders.lock().await?.token();
    /// let second = orders.lock().await?.token();
    /// assert!(second > first);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn token(&self) -> Token {
        if let Some(token) = self.leg.as_ref().and_then(|leg| leg.token()) {
            return token;
        }
        self.token
    }

    /// The token by which the store knows the lease: that of [`HolderInfo`](crate::HolderInfo), and for
    /// [`Client::force_release_token`](crate::Client::force_release_token). It is lower than [`Self::token`] if another task of this
    /// client handed the lease on (see [`Mutex`](crate::Mutex)), or with a bridge to Redisson's fenced lock whose counter is ahead.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// let guard = orders.lock().await?;
    /// assert_eq!(orders.inspect().await?.holders[0].token, guard.lease_token());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn lease_token(&self) -> Token {
        self.handle.session.lease_token(self.entry).unwrap_or(self.token)
    }

    /// The time for which the lease may be trusted if no further renewal succeeds. It is measured by the local clock, which
    /// includes suspend. Zero when the lease is lost.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").ttl(Duration::from_secs(10)).lock().await?;
    /// assert!(guard.remaining() > Duration::ZERO && guard.remaining() < Duration::from_secs(10));
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.handle.session.remaining(self.entry, self.handle.now()).unwrap_or(Duration::ZERO)
    }

    /// Whether the lease may be trusted now. If the process is stopped right after this call, the answer may be outdated
    /// when the process continues. The fencing token protects against that.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// let guard = orders.lock().await?;
    /// assert!(guard.is_held());
    /// orders.force_release().await?;
    /// guard.lost().await; // the holder is notified
    /// assert!(!guard.is_held());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Waits until the lease is lost. If the store does not respond, this returns after [`Self::remaining`]. Of a lease that has
    /// expired, [`Self::renewal_error`] says why it could not be renewed.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// let guard = orders.lock().await?;
    /// orders.force_release().await?;
    /// println!("lost: {}", guard.lost().await);
    /// # Ok(()) });
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn lost(&self) -> Loss {
        let session = &self.handle.session;
        let mut watch = session.watch(self.entry);
        poll_fn(|context| session.poll_lost(&mut watch, context)).await
    }

    /// Why the last renewal failed; `None` if it succeeded, and before the first one. The store's message does not name the lock, and
    /// never contains a password. Renewals go on, so a lease may be saved; after [`Loss::Expired`](crate::Loss::Expired) it is the reason of
    /// the loss. Of a bridged lock, the lock of the other library counts too, and [`Loss::Bridge`](crate::Loss::Bridge).
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// if let Some(error) = guard.renewal_error() {
    ///     eprintln!("{} is not renewed: {error:#}", guard.name());
    /// }
    /// # assert!(guard.renewal_error().is_none());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn renewal_error(&self) -> Option<Error> {
        self.handle.session.renewal_error(self.entry).map(|error| Error::of_store(&error))
    }

    /// Waits until [`Self::remaining`] is at most `left`, or until the lease is lost. `remaining` falls that low if renewals
    /// fail or are off.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42").ttl(Duration::from_millis(100)).auto_renew(false);
    /// let guard = orders.lock().await?;
    /// guard.wait_until_expiring(Duration::from_millis(90)).await;
    /// assert!(guard.remaining() <= Duration::from_millis(90)); // time to stop the work
    /// # Ok(()) });
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn wait_until_expiring(&self, left: Duration) {
        let mut lost = pin!(self.lost());
        loop {
            let remaining = self.remaining();
            if remaining <= left {
                return;
            }
            // A renewal only moves this later, so checking again then is soon enough.
            let until = self.handle.now() + (remaining - left);
            if with_deadline(&self.handle.session, Some(until), lost.as_mut()).await.is_some() {
                return;
            }
        }
    }

    /// Renews the lease now to its full ttl, and waits for the store's confirmation. With `auto_renew(false)`, only this
    /// call extends the lease, with two exceptions: a lease that was granted after a wait starts with 3 s, and the client claims
    /// its full ttl within a second; and an upgrade that waits in vain renews the lease that it returns. With automatic renewal,
    /// this call ensures a full ttl before a long step.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").auto_renew(false).lock().await?;
    /// for step in 0..3 {
    ///     guard.renew().await?; // 10 s for each step
    ///     println!("step {step}");
    /// }
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost`; `is_unavailable` if the store did not confirm the renewal. The client then retries it in the background,
    /// even with `auto_renew(false)`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped early, the renewal may or may not have taken effect, and the client retries it in the
    /// background.
    pub async fn renew(&self) -> Result<(), Error> {
        let session = &self.handle.session;
        let mut request = self.send(session.begin_renewal(self.entry, self.handle.now()));
        let mut watch = session.watch(self.entry);
        let renewed = poll_fn(|context| {
            request.poll_response(context);
            session.poll_renewed(&mut watch, context)
        });
        match renewed.await {
            Ok(()) => self.renew_leg().await,
            Err(RenewalError::Lost(loss)) => Err(self.lost_error(loss)),
            Err(RenewalError::Failed(error)) => Err(self.handle.store_error(&self.resource, &error)),
        }
    }

    /// Runs `work` while the lease is held. Drops `work` when the lease is lost.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// let guard = orders.lock().await?;
    /// assert_eq!(guard.run(async { 42 }).await?, 42);
    ///
    /// orders.force_release().await?;
    /// let work = std::future::pending::<()>();
    /// assert!(guard.run(work).await.unwrap_err().is_lost());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost`. If the lease was lost before the work finished, the value of the work is dropped too, because the
    /// work may have run without the lock.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as `work`. The guard is only borrowed.
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

    fn send(&self, transmit: Option<Transmit>) -> Request<'_> {
        Request::send(&self.handle.session, &*self.handle.store, &self.resource, transmit)
    }

    pub(crate) fn loss(&self) -> Option<Loss> {
        self.handle.session.remaining(self.entry, self.handle.now()).err()
    }

    /// The error of the lost lease. If it has expired, its last renewal's error is the reason.
    pub(crate) fn lost_error(&self, loss: Loss) -> Error {
        let reason = self.handle.session.loss_reason(self.entry, loss);
        self.handle.lost(&self.resource, loss, reason.as_ref())
    }

    pub(crate) fn unavailable(&self, what: &str) -> Error {
        self.handle.unavailable(&self.resource, what)
    }

    /// Waits at most `limit` until the lease is lost.
    #[cfg(feature = "blocking")]
    pub(crate) async fn lost_within(&self, limit: Duration) -> Option<Loss> {
        let until = self.handle.now() + limit;
        with_deadline(&self.handle.session, Some(until), self.lost()).await
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guard({} on {}, token {})", self.resource, self.handle.url, self.token())
    }
}
