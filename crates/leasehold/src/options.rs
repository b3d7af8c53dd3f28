//! The options and the inspection methods that the kinds of lock share.
//!
//! They are macros because each kind is a type of its own, and its methods must appear in its own documentation.

use std::time::Duration;

/// The minimum ttl. Below it a failed renewal could not be retried in time.
pub const MIN_TTL: Duration = Duration::from_millis(100);
/// The maximum ttl, and the maximum time for which a released lock can be retained.
pub const MAX_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

/// All options: those of a lease, and the minimum hold.
macro_rules! settings {
    ($kind:ident) => {
        impl $kind {
            /// Retains the lock until this long after the grant, even if it is released earlier. For work that must not run
            /// twice although the clocks that start it differ.
            #[must_use]
            pub fn min_hold(mut self, min_hold: std::time::Duration) -> Self {
                self.0.min_hold = min_hold;
                self
            }
        }

        $crate::options::lease_settings!($kind);
    };
}
pub(crate) use settings;

/// The options of a lease, for kinds that set the minimum hold themselves.
macro_rules! lease_settings {
    ($kind:ident) => {
        impl $kind {
            /// How long the lease runs without renewal: 100 ms to 30 days, 10 s by default. A crashed holder blocks others
            /// for at most this long.
            #[must_use]
            pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
                self.0.terms.ttl = ttl;
                self
            }

            /// Whether the lease is renewed at a third of its ttl while the guard lives; true by default. Without renewal, a
            /// loss in the store (a server that was emptied, for example) is detected at a call of `renew`, or when the lease
            /// ends.
            #[must_use]
            pub fn auto_renew(mut self, renews: bool) -> Self {
                self.0.terms.renews = renews;
                self
            }

            /// Ends the lease this long after the grant, even if renewals succeed: for work that may hang.
            #[must_use]
            pub fn max_hold(mut self, hold: std::time::Duration) -> Self {
                self.0.terms.max_hold = Some(hold);
                self
            }

            /// The maximum length of the lock's wait queue, 100,000 by default. When it is full, waiting fails with
            /// `is_queue_full`.
            #[must_use]
            pub fn max_waiters(mut self, max_waiters: u32) -> Self {
                self.0.max_waiters = max_waiters;
                self
            }
        }

        $crate::options::looking!($kind);
    };
}
pub(crate) use lease_settings;

/// The label, and inspection.
macro_rules! looking {
    ($kind:ident) => {
        impl $kind {
            /// Waits until this many replicas have each grant and each renewal, so that a failover to one of them keeps the
            /// lease. It costs a round trip to the replicas. If they do not confirm a grant within 0.5 s, the lease is released
            /// and the attempt fails; a renewal is retried until the lease has expired. Redis only.
            #[must_use]
            pub fn replicas(mut self, replicas: u32) -> Self {
                self.0.terms.replicas = replicas;
                self
            }

            /// Text that inspection shows beside host, process and program. At most 1 KiB.
            #[must_use]
            pub fn label(mut self, label: impl Into<String>) -> Self {
                self.0.set_label(label.into());
                self
            }

            /// The holders and waiters of the lock.
            ///
            /// # Errors
            ///
            /// `is_invalid` for the name; `is_unavailable`.
            pub async fn inspect(&self) -> Result<$crate::LockInfo, $crate::Error> {
                self.0.inspect().await
            }

            /// Releases the lock by force, and grants it to the next waiters. The holders are notified of the loss. Until they
            /// stop, old and new holders work at the same time, and only their tokens distinguish them.
            ///
            /// # Errors
            ///
            /// As [`Self::inspect`].
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
pub(crate) use looking;
