//! The one error type.

use std::error::Error as StdError;
use std::fmt;

use leasehold_core::NameError;

/// An error: what happened, to which lock, on which store.
///
/// Contention is not an error: `try_lock` and `lock_timeout` return `None`. The predicates tell what a program can do.
/// Messages never contain a password.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// use leasehold::Client;
///
/// let invalid = client.mutex("").lock().await.unwrap_err();
/// assert!(invalid.is_invalid());
/// println!("{invalid}"); // names the lock, the store and the fix
///
/// let unavailable = Client::connect("redis://127.0.0.1:1").await.unwrap_err();
/// assert!(unavailable.is_unavailable());
/// # Ok(()) });
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    Invalid,
    Unsupported,
    Unavailable,
    Lost,
    Timeout,
    QueueFull,
    NotOwner,
    Stale,
    Closed,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), source: None }))
    }

    pub(crate) fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Box::new(source));
        self
    }

    /// An argument is invalid: a name, a ttl, an address, or a number of permits that differs from the one in use. Nothing was
    /// changed.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let error = client.semaphore("uploads", 3).acquire(4).await.unwrap_err();
    /// assert!(error.is_invalid());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        self.0.kind == ErrorKind::Invalid
    }

    /// This store does not support the operation.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let error = client.mutex("orders:42").replicas(1).lock().await.unwrap_err();
    /// assert!(error.is_unsupported()); // `memory:` has no replicas
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        self.0.kind == ErrorKind::Unsupported
    }

    /// The store was unreachable or did not respond, so the state of the lock is unknown. If it granted a lease, the client is
    /// releasing it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// let error = leasehold::Client::connect("redis://127.0.0.1:1").await.unwrap_err();
    /// assert!(error.is_unavailable());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.0.kind == ErrorKind::Unavailable
    }

    /// The lease ended before its holder released it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// let guard = orders.lock().await?;
    /// orders.force_release().await?;
    /// assert!(guard.release().await.unwrap_err().is_lost());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.kind == ErrorKind::Lost
    }

    /// A time limit that the caller set has passed: that of `close_timeout`, `release_timeout` or `write_timeout`. A `lock_timeout`
    /// returns `None` instead.
    ///
    /// ```no_run
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("redis://127.0.0.1").await?;
    /// if let Err(error) = client.close_timeout(Duration::from_secs(2)).await {
    ///     assert!(error.is_timeout() || error.is_unavailable());
    /// }
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.0.kind == ErrorKind::Timeout
    }

    /// The lock's wait queue is full.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42").max_waiters(0);
    /// let guard = orders.lock().await?;
    /// assert!(orders.lock().await.unwrap_err().is_queue_full());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_queue_full(&self) -> bool {
        self.0.kind == ErrorKind::QueueFull
    }

    /// The named owner does not hold the lock, so it can't release it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let account = client.reentrant_mutex("account:7", "request-93ab");
    /// assert!(account.release_all().await.unwrap_err().is_not_owner());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_not_owner(&self) -> bool {
        self.0.kind == ErrorKind::NotOwner
    }

    /// The resource has seen a higher token, so the holder of this one has lost its lease.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let (fence, device) = (leasehold::fence::Fence::new(), client.mutex("device"));
    /// let first = device.lock().await?.token();
    /// fence.admit(device.lock().await?.token())?;
    /// assert!(fence.admit(first).unwrap_err().is_stale());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.0.kind == ErrorKind::Stale
    }

    /// The client was closed.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let orders = client.mutex("orders:42");
    /// client.close().await?;
    /// assert!(orders.lock().await.unwrap_err().is_closed());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.kind == ErrorKind::Closed
    }
}

impl From<NameError> for Error {
    fn from(error: NameError) -> Self {
        Self::new(ErrorKind::Invalid, error.to_string()).with_source(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}, {:?})", self.0.kind, self.0.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

/// An error about what this build leaves out.
pub(crate) fn needs_feature(what: &str, feature: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("{what} needs the feature \"{feature}\" of leasehold"))
}

/// An error about what the caller has passed.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}
