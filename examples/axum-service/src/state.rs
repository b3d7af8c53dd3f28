//! What all requests share.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use leasehold::Client;
use metrics_exporter_prometheus::PrometheusHandle;

use crate::orders::Orders;

/// The carrier's API: it collects an order, and answers with the number of the parcel.
pub(crate) type Carrier = Arc<dyn Fn(&str) -> BoxFuture<'static, i64> + Send + Sync>;

/// The state of the service. Clones are the same service.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) locks: Client,
    pub(crate) orders: Orders,
    pub(crate) carrier: Carrier,
    pub(crate) metrics: PrometheusHandle,
}
