//! What all requests share.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use leasehold::Client;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio_util::task::TaskTracker;

use crate::orders::Orders;

/// The carrier's API: it collects an order, and answers with the number of the parcel. The order's id is the idempotency key: another
/// call with the same id gets the same parcel.
pub(crate) type Carrier = Arc<dyn Fn(&str) -> BoxFuture<'static, i64> + Send + Sync>;

/// The state of the service. Clones are the same service.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) locks: Client,
    pub(crate) orders: Orders,
    pub(crate) carrier: Carrier,
    pub(crate) metrics: PrometheusHandle,
    /// The shipments that run, also those whose client has gone.
    pub(crate) shipments: TaskTracker,
}
