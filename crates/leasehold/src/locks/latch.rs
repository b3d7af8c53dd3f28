//! Waiting until something has happened a number of times.
//!
//! Each count is a kept lease, so it outlives whoever counted. Who waits looks: a queue hands over what becomes free, and
//! here nothing does.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Kind, Owner};

use crate::engine::Sleep;
use crate::error::{Error, ErrorKind};
use crate::handle::Handle;
use crate::inspect::{HolderInfo, LockInfo};
use crate::locks::lock::{Lock, WaitMode};
use crate::options::looking;

/// How long a count is remembered unless something else is said.
const KEEP: Duration = Duration::from_secs(24 * 3_600);

/// How often whoever waits looks; less often where more than a hundred counts would be shown each time.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_FOR_EACH: Duration = Duration::from_millis(1);

/// A number that is counted down to zero, and a way to wait for that. Created by [`Client::latch`](crate::Client::latch).
///
/// Counts outlive those who count. They are remembered for a day, or as long as [`keep`](Self::keep) says; after that the
/// latch begins anew, as it does with [`force_release`](Self::force_release). Everybody names the same number.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let imported = client.latch("imported", 2);
///
/// assert_eq!(imported.count_down().await?, 1);
/// assert_eq!(imported.count_down_as("worker-2").await?, 0);
/// assert_eq!(imported.count_down_as("worker-2").await?, 0); // counts once
/// imported.wait().await?; // it is open
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Latch(Lock);

looking!(Latch);

impl Latch {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, count: u32) -> Self {
        let mut lock = Lock::new(handle, Kind::Latch, name, count);
        lock.min_hold = KEEP;
        Self(lock)
    }

    /// How long a count is remembered: a day unless set, at most 30 days.
    #[must_use]
    pub fn keep(mut self, keep: Duration) -> Self {
        self.0.min_hold = keep;
        self
    }

    /// Counts down by one, and says how many are left. Once it is zero, further counts change nothing.
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name or a setting that can't be, or a number other than that with which the latch is in use;
    /// `is_unavailable` when the store could not be asked: whether it counted is unknown then, see
    /// [`Self::count_down_as`]; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped early, it may or may not have counted.
    pub async fn count_down(&self) -> Result<u32, Error> {
        self.count(&self.0).await
    }

    /// As [`Self::count_down`], but however often it is called with the same name, it counts once. So it may be repeated
    /// after an error, or by a process that was started anew.
    ///
    /// # Errors
    ///
    /// As [`Self::count_down`], and `is_invalid` for a name that can't be.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::count_down`].
    pub async fn count_down_as(&self, name: impl AsRef<str>) -> Result<u32, Error> {
        let mut lock = self.0.clone();
        lock.owner = Some(Owner::new(name.as_ref()));
        self.count(&lock).await
    }

    /// Only what is kept counts: a lease may still be taken back. Nor does the release of an owner count that has another
    /// lease beside it, of an attempt that was given up for instance; then it has to be done again.
    async fn count(&self, lock: &Lock) -> Result<u32, Error> {
        loop {
            let mut has_counted = false;
            // It can't be had where it is zero already.
            if let Some(guard) = lock.acquire(1, None, WaitMode::NoWait).await? {
                guard.release().await?;
                has_counted = lock.owner.is_none();
            }
            let view = self.view().await?;
            if let Some(owner) = &lock.owner {
                let is_theirs = |holder: &HolderInfo| holder.owner.as_deref() == Some(owner.as_str());
                has_counted = view.holders.iter().any(|holder| holder.retained && is_theirs(holder));
            }
            let left = self.left(&view);
            if has_counted || left == 0 {
                return Ok(left);
            }
            Sleep::until(&self.0.handle.session, self.0.handle.now() + LOOK).await;
        }
    }

    async fn view(&self) -> Result<LockInfo, Error> {
        let resource = self.0.check(1)?;
        let view = self.inspect().await?;
        if view.in_use > 0 && view.capacity != self.0.capacity {
            let what =
                format!("it is in use with a count of {}: everybody must name the same", view.capacity);
            return Err(self.0.handle.error(ErrorKind::Invalid, resource, what));
        }
        Ok(view)
    }

    fn left(&self, view: &LockInfo) -> u32 {
        let kept = view.holders.iter().filter(|holder| holder.retained).count();
        self.0.capacity.saturating_sub(u32::try_from(kept).unwrap_or(u32::MAX))
    }

    fn pause(&self) -> Duration {
        LOOK.max(LOOK_FOR_EACH * self.0.capacity)
    }

    /// How many are left.
    ///
    /// # Errors
    ///
    /// As [`Self::count_down`].
    pub async fn remaining(&self) -> Result<u32, Error> {
        Ok(self.left(&self.view().await?))
    }

    /// Waits until it is zero, for as long as it takes. It looks ten times a second, and less often
    /// for more than a hundred.
    ///
    /// # Errors
    ///
    /// As [`Self::count_down`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn wait(&self) -> Result<(), Error> {
        while !self.wait_timeout(Duration::MAX).await? {}
        Ok(())
    }

    /// Waits until it is zero for at most this long, and says whether it is.
    ///
    /// # Errors
    ///
    /// As [`Self::count_down`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn wait_timeout(&self, limit: Duration) -> Result<bool, Error> {
        let session = &self.0.handle.session;
        let deadline = session.now() + limit;
        loop {
            if session.is_closed() {
                return Err(self.0.handle.closed());
            }
            if self.remaining().await? == 0 {
                return Ok(true);
            }
            let now = session.now();
            if now >= deadline {
                return Ok(false);
            }
            Sleep::until(session, deadline.min(now + self.pause())).await;
        }
    }
}
