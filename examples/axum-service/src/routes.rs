//! The paths and the handlers.

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use leasehold::Guard;

use crate::failure::Failure;
use crate::order_lock::OrderLock;
use crate::orders::Order;
use crate::state::Service;

pub(crate) fn router(service: Service) -> Router {
    Router::new()
        .route("/orders/{id}", get(show))
        .route("/orders/{id}/ship", post(ship))
        .route("/metrics", get(metrics))
        .with_state(service)
}

async fn show(State(service): State<Service>, Path(id): Path<String>) -> Result<Json<Order>, Failure> {
    Ok(Json(service.orders.find(&id).await?))
}

async fn metrics(State(service): State<Service>) -> String {
    service.metrics.render()
}

/// Ships an order. A repeated request is answered with the same parcel.
///
/// The work runs in a task of its own: if the client closes its connection, axum drops the handler's future, and the carrier's call must
/// not be interrupted by that.
async fn ship(
    State(service): State<Service>,
    OrderLock { id, guard }: OrderLock,
) -> Result<Json<Order>, Failure> {
    let shipment = service.shipments.spawn(ship_order(service.clone(), id, guard));
    let order = shipment.await.expect("a shipment does not panic")?;
    Ok(Json(order))
}

async fn ship_order(service: Service, id: String, guard: Guard) -> Result<Order, Failure> {
    let work = async {
        let order = service.orders.find(&id).await?;
        if order.parcel.is_some() {
            return Ok(order);
        }
        let parcel = (service.carrier)(&id).await;
        service.orders.set_parcel(&id, parcel, guard.token()).await
    };
    // If the lease is lost, the work is dropped where it is. The next request calls the carrier with the same key.
    guard.run(work).await?
    // The guard is dropped here, which releases the lock in the background.
}
