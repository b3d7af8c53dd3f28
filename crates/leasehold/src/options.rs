//! The options and the inspection methods that the kinds of lock share.
//!
//! They are macros because each kind is a type of its own, and its methods must appear in its own documentation.

use std::time::Duration;

/// The minimum ttl, 100 ms. With a shorter ttl, a failed renewal could not be retried in time.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let orders = client.mutex("orders:42").ttl(leasehold::MIN_TTL / 2);
/// assert!(orders.lock().await.unwrap_err().is_invalid());
/// # Ok(()) });
/// ```
pub const MIN_TTL: Duration = leasehold_core::MIN_TTL;
/// The maximum ttl, 30 days, and the maximum time for which a released lock can be retained.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let orders = client.mutex("orders:42").ttl(leasehold::MAX_TTL * 2);
/// assert!(orders.lock().await.unwrap_err().is_invalid());
/// # Ok(()) });
/// ```
pub const MAX_TTL: Duration = leasehold_core::MAX_TTL;

/// All options: those of a lease, and the minimum hold. `$new` is the call of the client that examples make the lock with.
macro_rules! settings {
    ($kind:ident, $new:literal) => {
        impl $kind {
            /// Sets the minimum hold: none by default, at most 30 days. After an earlier release, the store retains the lock
            /// until this long after the grant. Use it for work that must not run twice when hosts start it by clocks that
            /// differ.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # use std::time::Duration;
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".min_hold(Duration::from_secs(60));")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn min_hold(mut self, min_hold: std::time::Duration) -> Self {
                self.0.min_hold = min_hold;
                self
            }
        }

        $crate::options::identity_settings!($kind, $new);
        $crate::options::lease_settings!($kind, $new);
    };
}
pub(crate) use settings;

/// The ids of attempts and leases, for kinds whose leases are held by one caller.
macro_rules! identity_settings {
    ($kind:ident, $new:literal) => {
        impl $kind {
            /// Prepares the leases for [`Guard::detach`](crate::Guard::detach): the id of each is then all that its renewal and its release
            /// need, which are one command each ([`Client::renew_leases`](crate::Client::renew_leases)). Off by default. Tasks of this
            /// client do not share such a lease, inspection does not mark it as this client's own, and a writer does not become a reader.
            /// Over a quorum, renewals stay as dear as they are.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".detachable();")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn detachable(mut self) -> Self {
                self.0.set_ids($crate::locks::lock::AttemptIds::Random);
                self
            }

            /// Names the attempt: a caller who repeats it with the same id continues it, at any client of the store. It keeps its place in the
            /// queue, or gets the same lease with the time that is left. Such an attempt outlives its future and its guard: if one of
            /// them is dropped, or the time for waiting is over, the attempt stays in the queue, or holds the lease, for another 2.5 s; unless
            /// the request was repeated, it is then released. (A lease that a repeat was answered with is left alone: the caller may know of it
            /// by another answer.) Once the lease is released, or the request was not repeated in time, it has ended, and a further
            /// attempt with its id fails with `is_lost`. The lease is [detachable](Self::detachable).
            ///
            /// The id is a secret of the caller: at least 16 random bytes, new for each request. Kind and name of the lock are part of it. Its
            /// release leaves a row of the store for a minute, by which late repeats are recognised.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".request(b\"7f2c9d54a1e84b60\");")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn request(mut self, id: impl AsRef<[u8]>) -> Self {
                self.0.set_request(id.as_ref());
                self
            }

            /// Shows this program and this host as the holder, in place of this process: for a server that acquires locks on behalf of
            /// others.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".holder(\"billing\", \"10.0.0.7\");")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn holder(mut self, program: impl Into<String>, host: impl Into<String>) -> Self {
                self.0.set_holder(program.into(), host.into());
                self
            }
        }
    };
}
pub(crate) use identity_settings;

/// The options of a lease, for kinds that set the minimum hold themselves.
macro_rules! lease_settings {
    ($kind:ident, $new:literal) => {
        impl $kind {
            /// Sets the lifetime of the lease without renewal: 100 ms to 30 days, 10 s by default. A crashed holder blocks
            /// others for at most this long.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # use std::time::Duration;
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".ttl(Duration::from_secs(30));")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
                self.0.terms.ttl = ttl;
                self
            }

            /// Sets whether the client renews the lease at a third of its ttl while the guard lives; true by default.
            /// Without renewal, a loss in the store (for example, a server was emptied) may be detected only at a call of
            /// `renew`, or when the lease expires.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".auto_renew(false);")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn auto_renew(mut self, renews: bool) -> Self {
                self.0.terms.renews = renews;
                self
            }

            /// Ends the lease this long after the grant, even if renewals succeed; no limit by default. Use it for work that
            /// may hang.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # use std::time::Duration;
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".max_hold(Duration::from_secs(600));")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn max_hold(mut self, hold: std::time::Duration) -> Self {
                self.0.terms.max_hold = Some(hold);
                self
            }

            /// Sets the maximum length of the lock's wait queue, 100,000 by default. If the queue is full, waiting
            /// fails with `is_queue_full`.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".max_waiters(100);")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn max_waiters(mut self, max_waiters: u32) -> Self {
                self.0.max_waiters = max_waiters;
                self
            }
        }

        $crate::options::inspection!($kind, $new);
    };
}
pub(crate) use lease_settings;

/// The label, and inspection.
macro_rules! inspection {
    ($kind:ident, $new:literal) => {
        impl $kind {
            /// Makes each grant and each renewal wait until this many replicas have it; 0 by default, Redis only. A failover
            /// to one of these replicas keeps the lease. It costs a round trip to the replicas. If they do not confirm a
            /// grant within 0.5 s, the lease is released and the attempt fails. If they do not confirm a renewal, the client
            /// retries it until the lease has expired. So it does with a release that keeps the lock busy for its minimum hold.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".replicas(1);")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn replicas(mut self, replicas: u32) -> Self {
                self.0.terms.replicas = replicas;
                self
            }

            /// Sets the text that inspection shows in addition to host, process and program: none by default,
            /// at most 1 KiB.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".label(\"nightly export\");")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn label(mut self, label: impl Into<String>) -> Self {
                self.0.set_label(label.into());
                self
            }

            /// Publishes the id of the current trace with the other metadata, so that inspection shows which trace holds the
            /// lock. Tasks with different ids do not share a lease: each of them has its own place in the store's queue.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".trace_id(\"4bf92f3577b34da6a3ce929d0e0e4736\");")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn trace_id(mut self, trace_id: impl Into<String>) -> Self {
                self.0.set_trace_id(trace_id.into());
                self
            }

            /// Sets the label of this lock's [metrics](crate::guide::metrics): the kind by default. Use one label for all locks
            /// with the same purpose, never a lock's name, because each label is a time series of its own. After 100
            /// different labels, a client counts locks with further labels as `other`. Without the feature `metrics`, this
            /// has no effect.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let lock = client.", $new, ".metrics_label(\"checkout\");")]
            /// # Ok(()) });
            /// ```
            #[must_use]
            pub fn metrics_label(mut self, label: impl AsRef<str>) -> Self {
                self.0.set_metrics_label(label.as_ref());
                self
            }

            /// The holders and waiters of the lock.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let info = client.", $new, ".inspect().await?;")]
            /// assert!(info.holders.is_empty());
            /// # Ok(()) });
            /// ```
            ///
            /// # Errors
            ///
            /// `is_invalid` for the name; `is_unavailable`; `is_closed`.
            ///
            /// # Cancel safety
            ///
            /// Cancel safe: it only reads.
            pub async fn inspect(&self) -> Result<$crate::LockInfo, $crate::Error> {
                self.0.inspect().await
            }

            /// Releases the lock by force, and grants it to the next waiters. Returns the former holders, which are notified
            /// of the loss. Until they stop, former and new holders work at the same time, and only their tokens distinguish
            /// them.
            ///
            /// ```
            /// # leasehold::doc_test(async {
            /// # let client = leasehold::Client::connect("memory:").await?;
            #[doc = concat!("let former = client.", $new, ".force_release().await?;")]
            /// assert!(former.is_empty()); // it was free
            /// # Ok(()) });
            /// ```
            ///
            /// # Errors
            ///
            /// As [`Self::inspect`]; `is_invalid` if another program's value is in the lock's key.
            ///
            /// # Cancel safety
            ///
            /// If the future is dropped, the lock may or may not have been released.
            pub async fn force_release(&self) -> Result<Vec<$crate::HolderInfo>, $crate::Error> {
                self.0.force_release().await
            }
        }

        impl std::fmt::Debug for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.debug(stringify!($kind), f)
            }
        }
    };
}
pub(crate) use inspection;
