//! What is logged about an entry. An outage is logged at its first failure and at its end.

use leasehold_core::{Loss, REFUSAL_LIMIT, Resource};

#[derive(Debug)]
pub(super) enum LogEvent {
    /// With the error of its last renewal, if the lease has expired because of that.
    Lost(Loss, Option<String>),
    /// The store refuses a queued attempt for the first time since its last answer.
    AttemptRefused(String),
    /// It answered it after that.
    AttemptRecovered,
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
            Self::Lost(loss, error) => tracing::warn!(%resource, %loss, error, "lease lost"),
            Self::AttemptRefused(error) => {
                let limit = REFUSAL_LIMIT;
                tracing::warn!(%resource, error, ?limit, "the store refuses a waiting attempt, which is retried");
            }
            Self::AttemptRecovered => {
                tracing::info!(%resource, "the store accepts the waiting attempt again");
            }
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
