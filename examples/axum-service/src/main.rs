//! A web service in which one request per order runs at a time, on any number of hosts: see README.md.

mod failure;
mod order_lock;
mod orders;
mod routes;
mod state;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use leasehold::Client;
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::net::TcpListener;
use tokio::time::{interval, sleep};
use tokio_util::task::TaskTracker;

use orders::Orders;
use routes::router;
use state::Service;

/// How long requests in flight may take after SIGTERM.
const GRACE: Duration = Duration::from_secs(20);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let setting = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    // First, because a client looks its metrics up once, when it connects.
    let metrics = PrometheusBuilder::new().install_recorder()?;
    let locks = Client::connect(&setting("LEASEHOLD_STORE", "memory:")).await?;
    let orders = Orders::open(&setting("DATABASE", ":memory:"))?;
    let carrier_delay = Duration::from_millis(setting("CARRIER_MS", "200").parse()?);
    let service = Service {
        locks: locks.clone(),
        orders,
        // In your program, a call of the carrier's API, with the order's id as its idempotency key: it may be called again.
        carrier: Arc::new(move |_order: &str| {
            Box::pin(async move {
                sleep(carrier_delay).await;
                i64::from(std::process::id())
            })
        }),
        metrics: metrics.clone(),
        shipments: TaskTracker::new(),
    };
    let shipments = service.shipments.clone();
    tokio::spawn(async move {
        let mut ticks = interval(Duration::from_secs(5));
        loop {
            ticks.tick().await;
            metrics.run_upkeep();
        }
    });

    let listener = TcpListener::bind(setting("LISTEN", "127.0.0.1:3000")).await?;
    println!("listening on {}", listener.local_addr()?);
    let served = async {
        // After the signal it accepts no connection, and waits for the requests in flight.
        axum::serve(listener, router(service)).with_graceful_shutdown(terminated()).await?;
        shipments.close();
        shipments.wait().await;
        Ok::<_, Box<dyn Error>>(())
    };
    tokio::select! {
        served = served => served?,
        () = async { terminated().await; sleep(GRACE).await } => {
            // Their locks are not released, because the carrier may be at work: they expire.
            eprintln!("shipments took too long");
            std::process::exit(1);
        }
    }
    // Waits for the confirmation of all releases.
    locks.close().await?;
    Ok(())
}

/// Waits for SIGTERM, or for Ctrl-C.
async fn terminated() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
