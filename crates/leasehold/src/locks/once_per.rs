//! Work that one of many starts in each period.
//!
//! It is the mutex of that name, kept for nine tenths of the period. Counting from the start, and not by the calendar,
//! nobody's clock matters but the store's; the last tenth is for starts that come a little early or late.

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
use crate::options::lease_settings;

/// The shortest time for which a start is kept.
const MIN_KEEP: Duration = Duration::from_millis(900);

/// How often whoever waits looks whether the work is done.
const LOOK: Duration = Duration::from_secs(1);

/// Work that one of many starts in each period. Created by [`Client::once_per`](crate::Client::once_per).
///
/// Two starts are never closer to each other than nine tenths of the period: all hosts may ask at noon, by clocks that
/// differ, and one of them is told to start. If it dies half way there are two ways to go on, and neither can have it both
/// ways:
///
/// - **At most once**, which is the default: the period is lost. Nobody else starts, however little was done.
/// - [**At least once**](Self::at_least_once): others wait for the end of the work, and when the lease of a host that died
///   runs out, the next one starts. What was half done is done again, maybe while a host that was only stopped goes on:
///   the token tells them apart.
///
/// Releasing or dropping the guard means that the work is done. A period of more than 30 days can't be kept.
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

lease_settings!(OncePer);

impl OncePer {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, period: Duration) -> Self {
        let mut lock = Lock::new(handle, Kind::Mutex, name, 1);
        lock.min_hold = period / 10 * 9;
        lock.terms.min_lifetime = lock.min_hold;
        Self(lock)
    }

    /// If a host dies half way, its lease ends after the ttl, and another host starts.
    #[must_use]
    pub fn at_least_once(mut self) -> Self {
        self.0.terms.min_lifetime = Duration::ZERO;
        self
    }

    /// Starts the work of this period: `None` when that has been done. Where it is at least once, it waits for the end of
    /// whoever does it now, which is looked for once a second.
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name, a period or a setting that can't be; `is_unavailable` when the store could not be asked;
    /// `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point it gives back whatever it has or may have come to have: a place in the queue, or a start,
    /// which is then done.
    pub async fn start(&self) -> Result<Option<Guard>, Error> {
        self.check()?;
        if !self.0.terms.min_lifetime.is_zero() {
            return self.0.acquire(1, None, WaitMode::NoWait).await;
        }
        let mut started = pin!(self.0.acquire(1, None, WaitMode::Forever));
        let mut done = pin!(self.until_done());
        poll_fn(|context| match started.as_mut().poll(context) {
            Poll::Pending => done.as_mut().poll(context).map(|done| done.map(|()| None)),
            ready => ready,
        })
        .await
    }

    async fn until_done(&self) -> Result<(), Error> {
        loop {
            // A store that does not answer may do so the next time; the attempt has the last word about that.
            if self.inspect().await.is_ok_and(|view| view.holders.iter().any(|holder| holder.retained)) {
                return Ok(());
            }
            Sleep::until(&self.0.handle.session, self.0.handle.now() + LOOK).await;
        }
    }

    fn check(&self) -> Result<(), Error> {
        let resource = self.0.checked_resource()?;
        if (MIN_KEEP..=MAX_TTL).contains(&self.0.min_hold) {
            return Ok(());
        }
        let what = "a period is at least 1 s and at most 33 days";
        Err(self.0.handle.error(ErrorKind::Invalid, resource, what))
    }
}
