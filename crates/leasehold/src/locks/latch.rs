//! A latch: clients count down, and waiters continue when the count is zero.
//!
//! To count down, a client acquires a lease and releases it at once, with a minimum hold. The store therefore retains the lease,
//! also if the process ends. Waiters poll, because a wait queue only grants capacity that becomes free, and a latch frees none.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Kind, Owner};

use crate::engine::Sleep;
use crate::error::{Error, ErrorKind};
use crate::handle::Handle;
use crate::inspect::{HolderInfo, LockInfo};
use crate::locks::lock::{Lock, Replication, WaitMode};
use crate::options::inspection;

/// How long the store retains a count by default.
const RETENTION: Duration = Duration::from_secs(24 * 3_600);

/// A shorter retention could end before the counts of other clients.
const MIN_RETENTION: Duration = Duration::from_secs(1);

/// The interval between two polls of a waiter. It grows with the count, because each poll returns every count.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const POLL_INTERVAL_PER_COUNT: Duration = Duration::from_millis(1);

/// A counter that clients count down. It opens at zero. Created by [`Client::latch`](crate::Client::latch).
///
/// A count outlives its process. The store retains each count for a day by default (see [`retention`](Self::retention)).
/// When the counts have expired, or after [`force_release`](Self::force_release), the latch starts again at its full count.
/// All clients must pass the same count.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let imported = client.latch("imported", 2);
///
/// assert_eq!(imported.count_down().await?, 1);
/// assert_eq!(imported.count_down_as("worker-2").await?, 0);
/// assert_eq!(imported.count_down_as("worker-2").await?, 0); // counts once
/// imported.wait().await?; // open
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Latch(Lock);

inspection!(Latch, "latch(\"imported\", 2)");

impl Latch {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, count: u32) -> Self {
        let mut lock = Lock::new(handle, Kind::Latch, name, count);
        lock.min_hold = RETENTION;
        Self(lock)
    }

    /// Sets how long the store retains a count: 1 day by default, at least 1 s, at most 30 days.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let imported = client.latch("imported", 3).retention(Duration::from_secs(3_600));
    /// assert_eq!(imported.count_down().await?, 2);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.0.min_hold = retention;
        self
    }

    /// Counts down by one, and returns the remaining count. At zero, further calls change nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let imported = client.latch("imported", 2);
    /// assert_eq!(imported.count_down().await?, 1);
    /// assert_eq!(imported.count_down().await?, 0);
    /// assert_eq!(imported.count_down().await?, 0);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_invalid` for an invalid name or option, or a count that differs from the one in use; `is_unavailable` if the
    /// store did not respond; `is_closed`. After `is_unavailable` it is unknown whether the call has counted.
    /// [`Self::count_down_as`] can be repeated safely.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the call may or may not have counted.
    pub async fn count_down(&self) -> Result<u32, Error> {
        self.count(&self.0).await
    }

    /// Counts down by one, once for each name. A call may therefore be repeated after an error, or by a process that was
    /// restarted.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let imported = client.latch("imported", 2);
    /// assert_eq!(imported.count_down_as("worker-1").await?, 1);
    /// assert_eq!(imported.count_down_as("worker-1").await?, 1); // repeated
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::count_down`], and `is_invalid` for an invalid name.
    ///
    /// # Cancel safety
    ///
    /// As [`Self::count_down`]; calling it again with the same name is safe.
    pub async fn count_down_as(&self, name: impl AsRef<str>) -> Result<u32, Error> {
        let mut lock = self.0.clone();
        lock.owner = Some(Owner::new(name.as_ref()));
        self.count(&lock).await
    }

    /// Only a retained lease counts, because a live one may still be revoked. The release of an owner that has another live lease,
    /// for example of a cancelled attempt, retains nothing; then the loop counts again once that lease has ended.
    async fn count(&self, lock: &Lock) -> Result<u32, Error> {
        if lock.min_hold < MIN_RETENTION {
            let what = "a count is retained for at least 1 s";
            return Err(lock.handle.error(ErrorKind::Invalid, lock.checked_resource()?, what));
        }
        let (mut replication, mut has_counted) = (Replication::of(lock), false);
        loop {
            // At zero there is no capacity, so nothing is granted. A call without a name counts once.
            if !has_counted && let Some(guard) = lock.acquire(1, None, WaitMode::NoWait).await? {
                guard.release().await?;
                has_counted = lock.owner.is_none();
            }
            let view = self.view().await?;
            if let Some(owner) = &lock.owner {
                let is_own = |holder: &HolderInfo| holder.owner.as_deref() == Some(owner.as_str());
                // A client that died while it counted may have left a row that is not retained.
                has_counted = view.holders.iter().any(|holder| is_own(holder) && holder.retained);
            }
            let remaining = self.remaining_in(&view);
            if has_counted || remaining == 0 {
                if replication.confirms().await? {
                    return Ok(remaining);
                }
                continue;
            }
            replication.reset();
            Sleep::until(&self.0.handle.session, self.0.handle.now() + POLL_INTERVAL).await;
        }
    }

    async fn view(&self) -> Result<LockInfo, Error> {
        let resource = self.0.check(1)?;
        let view = self.0.look_up().await?;
        if view.in_use > 0 && view.capacity != self.0.capacity {
            let what =
                format!("it is in use with a count of {}: all clients must pass the same", view.capacity);
            return Err(self.0.handle.error(ErrorKind::Invalid, resource, what));
        }
        Ok(view)
    }

    fn remaining_in(&self, view: &LockInfo) -> u32 {
        let retained = view.holders.iter().filter(|holder| holder.retained).count();
        self.0.capacity.saturating_sub(u32::try_from(retained).unwrap_or(u32::MAX))
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL.max(POLL_INTERVAL_PER_COUNT * self.0.capacity)
    }

    /// The remaining count.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// assert_eq!(client.latch("imported", 2).remaining().await?, 2);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::count_down`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn remaining(&self) -> Result<u32, Error> {
        Ok(self.remaining_in(&self.view().await?))
    }

    /// Waits without a limit until the count is zero. It polls every 100 ms, or every 1 ms × count for counts above 100.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let imported = client.latch("imported", 1);
    /// imported.count_down().await?;
    /// imported.wait().await?;
    /// # Ok(()) });
    /// ```
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

    /// Waits at most `limit` until the count is zero, and returns whether it is.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let imported = client.latch("imported", 1);
    /// assert!(!imported.wait_timeout(Duration::from_millis(5)).await?);
    /// # Ok(()) });
    /// ```
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
        let mut replication = Replication::of(&self.0);
        loop {
            if session.is_closed() {
                return Err(self.0.handle.closed());
            }
            if self.remaining().await? == 0 {
                if replication.confirms().await? {
                    return Ok(true);
                }
                continue;
            }
            replication.reset();
            let now = session.now();
            if now >= deadline {
                return Ok(false);
            }
            Sleep::until(session, deadline.min(now + self.poll_interval())).await;
        }
    }
}
