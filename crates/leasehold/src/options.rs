//! What every kind of lock offers besides taking it: its settings, and looking at it.
//!
//! Macros, since the kinds are types of their own and these are methods of each, documented where they are used.

/// The settings of a lock, the same for every kind.
macro_rules! settings {
    ($kind:ident) => {
        impl $kind {
            /// Keeps what was taken until this long after the grant, also when it is released before. For work that
            /// must not run twice although the clocks that start it differ.
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

/// Those that a kind has which keeps by itself what was taken.
macro_rules! lease_settings {
    ($kind:ident) => {
        impl $kind {
            /// How long the lease runs without renewal: 10 s unless set, 100 ms to 30 days. It is what a holder that
            /// dies costs those behind it.
            #[must_use]
            pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
                self.0.terms.ttl = ttl;
                self
            }

            /// Whether the lease is renewed, at a third of its ttl, for as long as the guard lives. It is unless set.
            /// Without renewal, a loss that only the store knows of (a server that was emptied) is noticed when the lease
            /// is renewed by hand, or at its end.
            #[must_use]
            pub fn auto_renew(mut self, renews: bool) -> Self {
                self.0.terms.renews = renews;
                self
            }

            /// Ends the lease this long after the grant, however well renewals go: for work that may hang.
            #[must_use]
            pub fn max_hold(mut self, hold: std::time::Duration) -> Self {
                self.0.terms.max_hold = Some(hold);
                self
            }

            /// How many may wait for this lock; beyond that, waiting fails with `is_queue_full`. 100,000 unless set.
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

/// What is shown to whoever looks, and looking.
macro_rules! looking {
    ($kind:ident) => {
        impl $kind {
            /// Counts a lease, and each of its renewals, only when this many of the server's replicas have it too: then a
            /// failover to one of them does not forget it. It costs the way to the replicas and back. If they do not
            /// answer within half a second the lease is given back, with an error that says so; a renewal that they do
            /// not get is tried again until the lease has run out. Redis only.
            #[must_use]
            pub fn replicas(mut self, replicas: u32) -> Self {
                self.0.terms.replicas = replicas;
                self
            }

            /// Text that is shown to everybody who looks at the lock, besides host, process and program. Up to 1 KiB.
            #[must_use]
            pub fn label(mut self, label: impl Into<String>) -> Self {
                self.0.set_label(label.into());
                self
            }

            /// Who holds the lock and who waits for it.
            ///
            /// # Errors
            ///
            /// `is_invalid` for the name; `is_unavailable`.
            pub async fn inspect(&self) -> Result<$crate::LockInfo, $crate::Error> {
                self.0.inspect().await
            }

            /// Takes the lock away from whoever holds it, and gives it to those next in the queue. The holders learn
            /// that they have lost; until then old and new ones work, and only their tokens tell them apart.
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
