//! The one error type.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use leasehold_core::{Failure, NameError};
use leasehold_store::{Cause, OpenError, OpenErrorKind, StoreError};

/// An error. Its message names the lock, the store, what happened, and the fix.
///
/// Contention is not an error: `try_lock` and `lock_timeout` return `None`. [`kind`](Self::kind) and the predicates
/// distinguish what a program can do. Messages never contain a password. Cloning is cheap.
///
/// ```
/// # leasehold::doc_test(async {
/// use leasehold::ErrorKind;
///
/// let client = leasehold::Client::connect("memory:").await?;
/// let error = client.mutex("").lock().await.unwrap_err();
/// match error.kind() {
///     ErrorKind::Invalid => println!("a bug in this program: {error}"),
///     ErrorKind::Unavailable => println!("try again later: {error}"),
///     _ => println!("{error}"),
/// }
/// # assert!(error.is_invalid());
/// # Ok(()) });
/// ```
///
/// # The cause
///
/// If a driver or the system caused the error, [`source`](StdError::source) returns their error. It is a
/// [`redis::RedisError`] if a server refused the connection, closed it, or answered with an error. It is a `rusqlite::Error`
/// or a [`std::io::Error`] for a file, and a `tokio_postgres::Error` for a fence or a lock in your transaction.
///
/// `{}` prints the message of this crate without the text of the source. A report of the whole chain (`{:#}` of `anyhow`)
/// therefore has each text once. `{:#}` of this type prints the message and the text of the source on one line, unless the
/// message already explains the source.
///
/// ```
/// use std::error::Error as _;
///
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// # let token = client.mutex("report").lock().await?.token();
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("missing/report");
/// let error = leasehold::fence::FencedFile::new(path).write(token, b"new").unwrap_err();
/// let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>()).unwrap();
/// assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
/// assert!(!error.to_string().contains(&source.to_string()));
/// # Ok(()) });
/// ```
///
/// Errors of other crates do not become this one by `?`:
///
/// ```compile_fail,E0277
/// fn job() -> Result<(), leasehold::Error> {
///     std::fs::read("config")?;
///     Ok(())
/// }
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    /// The full message.
    message: String,
    /// The length of its part before the source's own text; all of it if that is not quoted.
    own: usize,
    source: Option<Cause>,
    /// What is known about the command that failed at the store.
    failure: Option<Failure>,
}

/// The kind of an [`Error`], by what a program can do about it. Each kind has a predicate, such as [`Error::is_lost`].
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let error = client.semaphore("uploads", 2).acquire(3).await.unwrap_err();
/// assert_eq!(error.kind(), leasehold::ErrorKind::Invalid);
/// # Ok(()) });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum ErrorKind {
    /// [`Error::is_invalid`]
    Invalid,
    /// [`Error::is_unsupported`]
    Unsupported,
    /// [`Error::is_unavailable`]
    Unavailable,
    /// [`Error::is_lost`]
    Lost,
    /// [`Error::is_timeout`]
    Timeout,
    /// [`Error::is_queue_full`]
    QueueFull,
    /// [`Error::is_not_owner`]
    NotOwner,
    /// [`Error::is_stale`]
    Stale,
    /// [`Error::is_ahead`]
    Ahead,
    /// [`Error::is_closed`]
    Closed,
    /// [`Error::is_forked`]
    Forked,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self(Arc::new(Inner { kind, own: message.len(), message, source: None, failure: None }))
    }

    pub(crate) fn with_source(self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.with_cause(Arc::new(source))
    }

    /// A message that ends with the text of the cause quotes it.
    fn with_cause(mut self, cause: Cause) -> Self {
        let inner = Arc::make_mut(&mut self.0);
        if let Some(own) = inner.message.strip_suffix(&cause.to_string()) {
            inner.own = own.trim_end_matches([':', ' ']).len();
        }
        inner.source = Some(cause);
        self
    }

    /// A command failed without a reply. `subject`: the lock and the store, or the store.
    pub(crate) fn from_store(subject: impl fmt::Display, error: &StoreError) -> Self {
        Self::unavailable(format!("{subject}: {}", error.message), error)
    }

    /// As `from_store`, in the store's words alone.
    pub(crate) fn of_store(error: &StoreError) -> Self {
        Self::unavailable(error.message.clone(), error)
    }

    fn unavailable(message: String, error: &StoreError) -> Self {
        let mut this = Self::new(ErrorKind::Unavailable, message);
        if let Some(inner) = Arc::get_mut(&mut this.0) {
            inner.failure = Some(error.failure);
        }
        match &error.cause {
            None => this,
            Some(cause) => this.with_cause(cause.clone()),
        }
    }

    /// The kind of the error.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// let error = leasehold::Client::connect("elsewhere:").await.unwrap_err();
    /// assert_eq!(error.kind(), leasehold::ErrorKind::Invalid);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// An argument is invalid: a name, a ttl, an address, or a number of permits that differs from the one in use. Nothing was
    /// changed, except that [`Guard::detach`](crate::Guard::detach) has released the lease.
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

    /// The store was unreachable or did not respond, so the state of the lock is unknown. After an attempt, the client is
    /// releasing the lease that the store may have granted. After [`Guard::renew`](crate::Guard::renew) the lease goes on, and the client retries the
    /// renewal.
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

    /// The store refused the command with an error of its own, such as a missing right, a full disk or a wrong password. It is one of
    /// the errors for which [`is_unavailable`](Self::is_unavailable) is true; the others are those of a store that did not answer.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// if let Err(error) = client.mutex("orders:42").lock().await {
    ///     let who = if error.is_refused() { "the administrator of the store" } else { "the network" };
    ///     eprintln!("ask {who}: {error}");
    /// }
    /// # let silent = leasehold::Client::connect("redis://127.0.0.1:1").await.unwrap_err();
    /// # assert!(silent.is_unavailable() && !silent.is_refused());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.0.failure.is_some_and(Failure::is_refusal)
    }

    /// What is known about the command that failed at the store.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.0.failure
    }

    /// The store was busy with other clients for too long, or takes no writes at present, for example during a failover. Nothing was
    /// changed, and a repetition may soon succeed. It is one of the errors for which [`is_unavailable`](Self::is_unavailable) is true.
    ///
    /// ```no_run
    /// # leasehold::doc_test(async {
    /// use leasehold::Client;
    ///
    /// let client = loop {
    ///     match Client::connect("redis://127.0.0.1").await {
    ///         Err(error) if error.is_busy() => {}
    ///         connected => break connected?,
    ///     }
    /// };
    /// # drop(client);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.0.failure == Some(Failure::Busy)
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

    /// A time limit of the caller has passed: that of `close_timeout`, `release_timeout`, [`OncePer::start_timeout`](crate::OncePer::start_timeout),
    /// `FencedFile::write` and `write_timeout`, [`connect_timeout`](crate::ClientBuilder::connect_timeout), or PostgreSQL's `lock_timeout` in a fence
    /// or a lock of a transaction. At its limit, `lock_timeout` returns `None` instead.
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

    /// The resource has seen a higher token. The holder of this token has therefore lost its lease.
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

    /// The token is a day or more ahead of this machine's clock, so the resource would refuse all later holders after it. It was
    /// forged, or a clock is or was wrong: tokens never fall, also when a store's clock is set back. `admit_ahead` and its like in
    /// [`fence`](crate::fence) take such a token.
    ///
    /// ```
    /// # use leasehold::Token;
    /// let fence = leasehold::fence::Fence::new();
    /// let token = Token::new((1 << 53) - 1).unwrap();
    /// assert!(fence.admit(token).unwrap_err().is_ahead());
    /// ```
    #[must_use]
    pub fn is_ahead(&self) -> bool {
        self.0.kind == ErrorKind::Ahead
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

    /// The client, its locks or its leases are those of a parent process: this one was forked from it without `exec`, and has none of its
    /// threads and connections. The lease still is the parent's. Connect again in this process.
    ///
    /// A file of `sqlite:` that a parent has open can't be opened here at all, because SQLite's locks on files do not pass a fork.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// match client.mutex("orders:42").lock().await {
    ///     Err(error) if error.is_forked() => eprintln!("connect after the fork: {error}"),
    ///     other => drop(other?),
    /// }
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_forked(&self) -> bool {
        self.0.kind == ErrorKind::Forked
    }
}

impl From<NameError> for Error {
    fn from(error: NameError) -> Self {
        Self::new(ErrorKind::Invalid, error.to_string())
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        let kind = match error.kind {
            OpenErrorKind::Invalid => ErrorKind::Invalid,
            OpenErrorKind::Unsupported => ErrorKind::Unsupported,
            OpenErrorKind::Unavailable => ErrorKind::Unavailable,
            OpenErrorKind::Forked => ErrorKind::Forked,
        };
        let mut this = Self::new(kind, error.message);
        if let Some(inner) = Arc::get_mut(&mut this.0) {
            inner.failure = error.failure;
        }
        match error.cause {
            None => this,
            Some(cause) => this.with_cause(cause),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { message, own, .. } = &*self.0;
        f.write_str(if f.alternate() { message } else { &message[..*own] })
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

/// An error about what the caller has passed.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_source_is_printed_once_in_a_chain_and_in_the_alternate_form() {
        let system = || std::io::Error::other("odd");
        let quoting = Error::new(ErrorKind::Unavailable, "the disk failed: odd").with_source(system());
        assert_eq!(quoting.to_string(), "the disk failed");
        assert_eq!(format!("{quoting:#}"), "the disk failed: odd");
        let explaining = Error::new(ErrorKind::Unavailable, "the disk is full").with_source(system());
        assert_eq!(explaining.to_string(), format!("{explaining:#}"));
        assert_eq!(explaining.clone().source().unwrap().to_string(), "odd");
    }
}
