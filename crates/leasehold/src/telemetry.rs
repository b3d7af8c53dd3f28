//! Metrics of a client, its locks and its leases: the only place that knows their names (`docs/metrics.md`).
//!
//! Call sites are one line each. Without the feature `metrics` every type here is empty and every call does nothing. The
//! engine and the locks decide nothing by what is counted here.

#[cfg(feature = "metrics")]
mod metered;
#[cfg(feature = "metrics")]
mod names;
pub(crate) mod spans;
#[cfg_attr(feature = "metrics", path = "telemetry/on.rs")]
#[cfg_attr(not(feature = "metrics"), path = "telemetry/off.rs")]
mod switch;

use leasehold_core::Reply;
use leasehold_store::CallResult;
pub(crate) use switch::{ClientTelemetry, Hold, LockTelemetry};

/// How an attempt ended: the values of the label `outcome` of `leasehold_acquisitions_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptOutcome {
    /// Granted without a wait for another holder.
    Immediate,
    /// Granted after a wait in a queue.
    Waited,
    /// Not granted to an attempt that does not wait.
    Busy,
    /// Not granted until the caller's limit.
    TimedOut,
    /// The store did not answer, or its answer was lost.
    Unavailable,
    /// Another error.
    Failed,
    /// The future was dropped.
    Cancelled,
}

impl AttemptOutcome {
    /// Its name in metrics and spans.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Immediate => "immediate",
            Self::Waited => "waited",
            Self::Busy => "busy",
            Self::TimedOut => "timeout",
            Self::Unavailable => "unavailable",
            Self::Failed => "error",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A renewal's outcome: the values of the label `outcome` of `leasehold_renewals_total`, and of the field in the events.
pub(crate) fn renewal_outcome(answered: &CallResult) -> &'static str {
    match answered.as_ref().map(|answer| &answer.reply) {
        Ok(Reply::Renewed { .. }) => "ok",
        Ok(Reply::NotHeld) => "lost",
        _ => "failed",
    }
}
