//! Two kinds of time that must never be mixed, and the margin between them.
//!
//! Neither is read here: whoever drives the core passes them in.

use core::fmt;
use core::ops::Add;
use core::time::Duration;

use crate::token::Token;

macro_rules! microseconds {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(u64);

        impl $name {
            /// The origin of this clock.
            pub const ZERO: Self = Self(0);
            /// A point that is never reached.
            pub const NEVER: Self = Self(u64::MAX);

            /// A point that many microseconds after the origin.
            #[must_use]
            pub const fn from_micros(micros: u64) -> Self {
                Self(micros)
            }

            /// Microseconds since the origin.
            #[must_use]
            pub const fn as_micros(self) -> u64 {
                self.0
            }

            /// The time from `earlier` to here; zero when `earlier` is later.
            #[must_use]
            pub const fn since(self, earlier: Self) -> Duration {
                Duration::from_micros(self.0.saturating_sub(earlier.0))
            }

            /// This point moved back by `span`, no further than the origin.
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
    /// A point on the *store's* clock. Every expiry is one, and only the store compares them.
    StoreTime
}

microseconds! {
    /// A point on *this process's* clock, which never steps back and also runs while the machine
    /// sleeps. It bounds how long the client trusts a lease, and decides nothing else.
    LocalTime
}

fn whole_micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// What the store's clocks say at the moment of one command.
///
/// On Redis both are the server's `TIME`. The embedded stores run their leases on the boot clock,
/// which no administrator can step, and their tokens on the wall clock, which outlives a reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// The clock of expiries.
    pub time: StoreTime,
    /// The clock of tokens: microseconds since 1970.
    pub wall: StoreTime,
    /// Where several stores vote: what the others may have given. No token below it is given, and a renewal raises the
    /// lease's own and the last one to it.
    pub floor: Option<Token>,
}

impl Now {
    /// A store that has one clock for both.
    #[must_use]
    pub const fn same(time: StoreTime) -> Self {
        Self { time, wall: time, floor: None }
    }
}

/// How much of `span` a client gives away because its clock and the store's run at different
/// speeds and because timers fire late: 1 % and 2 ms.
#[must_use]
pub fn drift_margin(span: Duration) -> Duration {
    span / 100 + Duration::from_millis(2)
}
