//! The lock of the order that the path names, as an extractor.

use std::time::Duration;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use leasehold::Guard;

use crate::failure::Failure;
use crate::state::Service;

/// How long a request waits for an earlier one with the same order.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(2);

/// How long a crashed host blocks an order. The lease is renewed while the request runs.
pub(crate) const TTL: Duration = Duration::from_secs(10);

/// A handler with this argument runs for one request per order at a time. The lock is held until it is dropped.
///
/// A handler that also reads a body calls [`Service::lock_order`] after it has read it. Otherwise a client that sends its
/// body slowly would hold the lock.
pub(crate) struct OrderLock {
    pub(crate) id: String,
    pub(crate) guard: Guard,
}

impl Service {
    /// Waits for the requests with the same order that came before, for a limited time.
    pub(crate) async fn lock_order(&self, id: &str) -> Result<Guard, Failure> {
        let lock = self.locks.mutex(format!("order:{id}")).ttl(TTL).metrics_label("order");
        lock.lock_timeout(MAX_WAIT).await?.ok_or_else(|| Failure::InProgress(id.to_owned()))
    }
}

impl FromRequestParts<Service> for OrderLock {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, service: &Service) -> Result<Self, Failure> {
        let Path(id) = Path::<String>::from_request_parts(parts, service).await?;
        let guard = service.lock_order(&id).await?;
        Ok(Self { id, guard })
    }
}
