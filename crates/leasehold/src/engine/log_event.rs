//! What is logged about an entry. An outage is logged at its first failure and at its end.

use leasehold_core::{Loss, Resource};

#[derive(Debug)]
pub(super) enum LogEvent {
    Lost(Loss),
    /// The first failure since the last success.
    RenewalFailed(String),
    /// The first success after that.
    RenewalRecovered,
    /// The first failure.
    ReleaseFailed(String),
    /// After that.
    ReleaseRecovered,
    ReleaseUnconfirmed,
}

impl LogEvent {
    pub(super) fn log(self, resource: &Resource) {
        match self {
            Self::Lost(loss) => tracing::warn!(%resource, %loss, "lease lost"),
            Self::RenewalFailed(error) => tracing::warn!(%resource, error, "lease not renewed"),
            Self::RenewalRecovered => tracing::info!(%resource, "lease renewed again"),
            Self::ReleaseFailed(error) => tracing::warn!(%resource, error, "lease not released yet"),
            Self::ReleaseRecovered => tracing::info!(%resource, "lease released after retries"),
            Self::ReleaseUnconfirmed => {
                tracing::warn!(%resource, "release not confirmed; the lease has expired");
            }
        }
    }
}
