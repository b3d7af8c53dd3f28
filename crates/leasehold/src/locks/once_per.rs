//! Work that one of many candidates starts in each period.
//!
//! The store retains the mutex of that name for nine tenths of the period after the grant. The period is counted from the
//! start and not by the calendar, so only the store's clock matters. The last tenth is tolerance for hosts that start a
//! little early.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::Kind;

use crate::engine::Sleep;
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;
use crate::locks::lock::{Lock, MAX_TTL, WaitMode};
use crate::options::{identity_settings, lease_settings};

/// The minimum time for which a start is retained.
const MIN_RETENTION: Duration = Duration::from_millis(900);

/// How often a waiting candidate polls whether the work is done.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Work that one of many candidates starts in each period. Created by [`Client::once_per`](crate::Client::once_per).
///
/// Two starts are at least nine tenths of the period apart, from the moment at which the store grants them: where its answer comes late, the
/// work begins that much later. If all hosts call [`start`](Self::start) at noon, by clocks that
/// differ, one of them starts the work. If that host dies before it has finished, there are two modes:
///
/// - **At most once**, the default: the period is lost. No other host starts the work in this period.
/// - [**At least once**](Self::at_least_once): the other hosts wait for the end of the work. When the lease of a dead host
///   expires, the next host starts the work, so work may be done twice. If the first host was only stopped, both hosts may
///   work at the same time; their tokens distinguish them.
///
/// Releasing or dropping the guard means that the work is done. Work whose client is closed first is not done: at least once,
/// the next host starts it. The period is 1 s to 33 days.
///
/// ```
/// # leasehold::doc_test(async {
/// use std::time::Duration;
///
/// let client = leasehold::Client::connect("memory:").await?;
/// let lottery = client.once_per("lottery", Duration::from_secs(3_600));
///
/// if let Some(guard) = lottery.start().await? {
///     println!("drawing with token {}", guard.token());
///     guard.release().await?;
/// }
/// assert!(lottery.start().await?.is_none()); // not again in this hour
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct OncePer(Lock);

identity_settings!(OncePer, "once_per(\"lottery\", std::time::Duration::from_secs(3_600))");
lease_settings!(OncePer, "once_per(\"lottery\", std::time::Duration::from_secs(3_600))");

impl OncePer {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, period: Duration) -> Self {
        let mut lock = Lock::new(handle, Kind::Mutex, name, 1);
        lock.min_hold = period / 10 * 9;
        lock.terms.min_lifetime = lock.min_hold;
        Self(lock)
    }

    /// If the host that runs the work dies, another host starts the work again after the lease has expired. While the work
    /// runs, [`start`](Self::start) waits on the other hosts.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let backup = client.once_per("backup", Duration::from_secs(86_400)).at_least_once();
    /// if let Some(guard) = backup.start().await? {
    ///     guard.release().await?; // done; otherwise the next host starts when the lease has expired
    /// }
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn at_least_once(mut self) -> Self {
        self.0.terms.min_lifetime = Duration::ZERO;
        self.0.min_hold_ends_at_close = true;
        self
    }

    /// Starts the work of this period, or returns `None` if it was started already. With
    /// [`at_least_once`](Self::at_least_once), this waits until the current host has finished or died, and polls once a
    /// second.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let cleanup = client.once_per("cleanup", Duration::from_secs(3_600));
    /// let guard = cleanup.start().await?.expect("the first start of this hour");
    /// assert!(cleanup.start().await?.is_none());
    /// # drop(guard);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for an invalid name, period or option; `is_unavailable` if the store did not respond;
    /// `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the wait is cancelled and a granted start is released. It does not count as done.
    pub async fn start(&self) -> Result<Option<Guard>, Error> {
        self.check()?;
        if !self.0.terms.min_lifetime.is_zero() {
            return self.0.acquire(1, None, WaitMode::NoWait).await;
        }
        self.start_or_see_done(WaitMode::Forever).await
    }

    /// As [`Self::start`], but waits at most `limit` for the current host. Without [`at_least_once`](Self::at_least_once)
    /// `start` does not wait, and neither does this.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let backup = client.once_per("backup", Duration::from_secs(86_400)).at_least_once();
    /// let working = backup.start().await?;
    /// let error = backup.start_timeout(Duration::from_millis(5)).await.unwrap_err();
    /// assert!(error.is_timeout()); // neither started nor done
    /// # drop(working);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::start`]; `is_timeout` if the work is neither done nor free to start when the limit has passed.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::start`]. A start that the store grants at the moment of the limit is released, and does not count as done.
    pub async fn start_timeout(&self, limit: Duration) -> Result<Option<Guard>, Error> {
        self.check()?;
        if !self.0.terms.min_lifetime.is_zero() {
            return self.0.acquire(1, None, WaitMode::NoWait).await;
        }
        self.start_or_see_done(WaitMode::AtMost(limit)).await
    }

    async fn start_or_see_done(&self, wait: WaitMode) -> Result<Option<Guard>, Error> {
        let started = async {
            match self.0.acquire(1, None, wait).await? {
                Some(guard) => Ok(Some(guard)),
                // It may have been done since the last look.
                None if self.is_done().await? => Ok(None),
                None => {
                    let what = "the work was neither done nor free to start within the limit";
                    Err(self.0.handle.error(ErrorKind::Timeout, self.0.checked_resource()?, what))
                }
            }
        };
        let (mut started, mut done) = (pin!(started), pin!(self.until_done()));
        poll_fn(|context| match started.as_mut().poll(context) {
            Poll::Pending => done.as_mut().poll(context).map(|done| done.map(|()| None)),
            ready => ready,
        })
        .await
    }

    async fn until_done(&self) -> Result<(), Error> {
        loop {
            self.0.handle.check_open()?;
            // An error here is ignored: the attempt that runs beside this reports an unavailable store.
            if self.is_done().await.unwrap_or(false) {
                return Ok(());
            }
            Sleep::until(&self.0.handle.session, self.0.handle.now() + POLL_INTERVAL).await;
        }
    }

    async fn is_done(&self) -> Result<bool, Error> {
        Ok(self.0.look_up().await?.holders.iter().any(|holder| holder.retained))
    }

    fn check(&self) -> Result<(), Error> {
        let resource = self.0.checked_resource()?;
        if (MIN_RETENTION..=MAX_TTL).contains(&self.0.min_hold) {
            return Ok(());
        }
        let what = "a period is at least 1 s and at most 33 days";
        Err(self.0.handle.error(ErrorKind::Invalid, resource, what))
    }
}
