//! The kinds of lock, each by its name.

use std::time::Duration;

use super::Client;
use crate::locks::barrier::Barrier;
use crate::locks::election::Election;
use crate::locks::latch::Latch;
use crate::locks::mutex::Mutex;
use crate::locks::once_per::OncePer;
use crate::locks::reentrant::ReentrantMutex;
use crate::locks::rw::RwLock;
use crate::locks::semaphore::Semaphore;

impl Client {
    /// A lock with one holder at a time. Nothing is sent. An invalid name (empty, longer than 512 bytes, or with control
    /// characters) is reported when the lock is used.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("orders:42").lock().await?;
    /// # Ok(()) });
    /// ```
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex::new(self.handle.clone(), name.as_ref())
    }

    /// The mutex of that name for a named owner. The owner may hold it more than once, in several tasks or processes.
    /// Sends nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.reentrant_mutex("account:7", "request-93ab").lock().await?;
    /// # Ok(()) });
    /// ```
    pub fn reentrant_mutex(&self, name: impl AsRef<str>, owner: impl AsRef<str>) -> ReentrantMutex {
        ReentrantMutex::new(self.handle.clone(), name.as_ref(), owner.as_ref())
    }

    /// A semaphore with this many permits, at least 1. Sends nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.semaphore("uploads", 3).acquire(1).await?;
    /// # Ok(()) });
    /// ```
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore::new(self.handle.clone(), name.as_ref(), permits)
    }

    /// A lock with many readers or one writer. Sends nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.rw_lock("prices").read().await?;
    /// # Ok(()) });
    /// ```
    pub fn rw_lock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock::new(self.handle.clone(), name.as_ref())
    }

    /// An election with one leader at a time. Sends nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let leadership = client.election("scheduler").campaign().await?;
    /// # Ok(()) });
    /// ```
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(self.handle.clone(), name.as_ref())
    }

    /// A latch that opens after this many counts. Sends nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// assert_eq!(client.latch("imported", 3).count_down().await?, 2);
    /// # Ok(()) });
    /// ```
    pub fn latch(&self, name: impl AsRef<str>, count: u32) -> Latch {
        Latch::new(self.handle.clone(), name.as_ref(), count)
    }

    /// Work that one of many candidates starts in each period, under the mutex of that name. The period is 1 s to 33 days.
    /// Sends nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let day = Duration::from_secs(86_400);
    /// assert!(client.once_per("report", day).start().await?.is_some());
    /// # Ok(()) });
    /// ```
    pub fn once_per(&self, name: impl AsRef<str>, period: Duration) -> OncePer {
        OncePer::new(self.handle.clone(), name.as_ref(), period)
    }

    /// A barrier at which this many parties wait for each other, 1 to 65,534. Sends nothing.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// client.barrier("loaded", 1).wait().await?;
    /// # Ok(()) });
    /// ```
    pub fn barrier(&self, name: impl AsRef<str>, parties: u32) -> Barrier {
        Barrier::new(self.handle.clone(), name.as_ref(), parties)
    }
}
