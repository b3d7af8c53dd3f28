//! The store's time and the process's time, which must never be mixed, and the margin between them.
//!
//! The core reads no clock: the caller passes the time in.

use core::fmt;
use core::ops::Add;
use core::time::Duration;

/// The shortest ttl: with a shorter one, a failed renewal could not be repeated in time.
pub const MIN_TTL: Duration = Duration::from_millis(100);

/// The longest ttl.
pub const MAX_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

macro_rules! microseconds {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(u64);

        impl $name {
            /// The origin of this clock.
            pub const ZERO: Self = Self(0);
            /// A time that is never reached.
            pub const NEVER: Self = Self(u64::MAX);

            /// The time this many microseconds after the origin.
            #[must_use]
            pub const fn from_micros(micros: u64) -> Self {
                Self(micros)
            }

            /// Microseconds since the origin.
            #[must_use]
            pub const fn as_micros(self) -> u64 {
                self.0
            }

            /// Time since `earlier`; zero if `earlier` is later.
            #[must_use]
            pub const fn since(self, earlier: Self) -> Duration {
                Duration::from_micros(self.0.saturating_sub(earlier.0))
            }

            /// This time minus `span`, but not before the origin.
            #[must_use]
            pub fn saturating_sub(self, span: Duration) -> Self {
                Self(self.0.saturating_sub(whole_micros(span)))
            }
        }

        impl Add<Duration> for $name {
            type Output = Self;
            /// Saturates at [`Self::NEVER`].
            fn add(self, span: Duration) -> Self {
                Self(self.0.saturating_add(whole_micros(span)))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}µs", self.0)
            }
        }
    };
}

microseconds! {
    /// A time of the *store's* clock. Every expiry is such a time, and only the store compares them.
    StoreTime
}

microseconds! {
    /// A time of *this process's* clock, which never steps back and includes suspend. It only limits how long the client
    /// trusts a lease.
    LocalTime
}

fn whole_micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// Safety margin for `span`, because the clocks of client and store run at different speeds and timers fire late: 1 % and
/// 2 ms.
#[must_use]
pub fn drift_margin(span: Duration) -> Duration {
    span / 100 + Duration::from_millis(2)
}
