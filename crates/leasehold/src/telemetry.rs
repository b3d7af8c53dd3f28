//! Metrics of a client, its locks and its leases: the only place that knows their names (`docs/metrics.md`).
//!
//! Call sites are one line each. Without the feature `metrics` every type here is empty and every call does nothing. The
//! engine and the locks decide nothing by what is counted here.

#[cfg(feature = "metrics")]
mod metered;
#[cfg(feature = "metrics")]
mod names;
#[cfg_attr(feature = "metrics", path = "telemetry/on.rs")]
#[cfg_attr(not(feature = "metrics"), path = "telemetry/off.rs")]
mod switch;

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
