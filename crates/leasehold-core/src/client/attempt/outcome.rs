//! How an attempt waits, and how it ends.

use core::time::Duration;

use crate::command::{Grant, Refusal};
use crate::secret::SecretKey;
use crate::time::LocalTime;

/// Deadline and polling of a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitPolicy {
    /// Time of the timeout; `NEVER` waits without a limit.
    pub deadline: LocalTime,
    /// Max time between two re-checks of the head of the queue without a push; the store may request an earlier re-check.
    /// The other waiters re-check when the store requests it, and at least three times within the lifetime of their queue
    /// entry.
    pub repoll_interval: Duration,
    /// Whether a pushed grant counts only after a re-check has confirmed it (needed to wait for replicas).
    pub confirms_pushes: bool,
    /// The client's key, from which the secrets of the attempt's `Acquire`s are derived.
    pub secret_key: SecretKey,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The lease is held.
    Granted {
        /// What was granted.
        grant: Grant,
        /// Local time from which the grant is counted.
        since: LocalTime,
        /// Local time until which the grant may be trusted.
        trusted_until: LocalTime,
    },
    /// Another client holds the lock.
    NotGranted,
    /// The deadline passed before the store granted it. The answer to the pending `Release` shows whether the store was
    /// reachable at all.
    TimedOut,
    /// The queue is full.
    QueueFull,
    /// The parameters contradict the resource's current use.
    Refused(Refusal),
    /// The attempt was released by its caller, or by a `Release` that arrived before the `Acquire`.
    Cancelled,
    /// The store could not be reached. If the outcome is unknown, a release is pending.
    Failed,
}

/// What is known about a command that failed: whether it had an effect, and whether a repetition can succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It never reached the store.
    NotSent,
    /// It never reached the store, because other clients blocked the store. A waiter retries.
    Busy,
    /// It may have taken effect.
    Unknown,
    /// It took effect, but on fewer replicas than requested.
    NotDurable,
    /// It never reached the store, and no later command will reach it, because the store's data is lost.
    Gone,
    /// The task or the process that was to send it was paused meanwhile. It may have taken effect, and this says nothing about the
    /// store.
    Paused,
    /// The store refused it with an error that may pass without a change of this client: the store loads its data, is a
    /// replica until a failover ends, its disk or memory is full, or the password is being changed. A waiter that is
    /// queued retries for [`REFUSAL_LIMIT`].
    Transient(Effect),
    /// The store refused it with an error that stays until someone changes rights, tables or data: no waiter retries.
    Permanent(Effect),
}

/// What a refused command may have changed in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: it was refused as a whole.
    None,
    /// A part of it, or all.
    Possible,
}

/// How long a queued attempt goes on while the store refuses its commands with errors that may pass, counted from the first
/// refusal since the last answer. It covers a failover, a large data set that is loaded, and a person who frees a disk.
pub const REFUSAL_LIMIT: Duration = Duration::from_secs(300);

impl Failure {
    /// Whether the command may have taken effect, wholly or in part.
    #[must_use]
    pub const fn may_have_effect(self) -> bool {
        match self {
            Self::Unknown | Self::NotDurable | Self::Paused => true,
            Self::Transient(effect) | Self::Permanent(effect) => matches!(effect, Effect::Possible),
            Self::NotSent | Self::Busy | Self::Gone => false,
        }
    }

    /// Whether the store answered, with an error. Otherwise it did not answer, or was not asked.
    #[must_use]
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::NotDurable | Self::Gone | Self::Transient(_) | Self::Permanent(_))
    }

    /// The failure of a command that was not sent, because what it needs first, such as a connection, has failed in this way.
    #[must_use]
    pub const fn before_sending(self) -> Self {
        match self {
            Self::Unknown | Self::NotDurable | Self::Paused => Self::NotSent,
            Self::Transient(_) => Self::Transient(Effect::None),
            Self::Permanent(_) => Self::Permanent(Effect::None),
            Self::NotSent | Self::Busy | Self::Gone => self,
        }
    }
}
