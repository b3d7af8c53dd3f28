//! What is no lock: the dashboard, the description, metrics, and the state of the server.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};

use crate::app::App;
use crate::caller::Caller;
use crate::description::DESCRIPTION;
use crate::problem::{Code, Problem};
use crate::random::random_hex;
use crate::rights::Right;
use crate::time::millis;

const DASHBOARD: &str = include_str!("../dashboard.html");

/// The maximum age of the metrics, so that two servers of Prometheus share one poll.
const METRICS_AGE: Duration = Duration::from_secs(1);

/// The time for a poll of the metrics, since Prometheus waits for 10 s by default. A store that hangs takes longer.
const METRICS_LIMIT: Duration = Duration::from_secs(4);

pub(super) async fn description() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], DESCRIPTION)
}

/// The page, which has no data. Only its own script runs, and it loads nothing from elsewhere.
pub(super) async fn dashboard() -> Result<Response, Problem> {
    let nonce = random_hex().map_err(|what| Problem::new(Code::StoreUnavailable, what))?;
    let policy = format!(
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (CONTENT_SECURITY_POLICY, policy),
        (CACHE_CONTROL, "no-store".to_owned()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (REFERRER_POLICY, "no-referrer".to_owned()),
    ];
    Ok((headers, DASHBOARD.replace("{{nonce}}", nonce.as_str())).into_response())
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let snapshot = app.observer.snapshot_within(METRICS_LIMIT, METRICS_AGE).await;
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render(&snapshot))
}

/// Whether the server grants locks: for probes of load balancers and containers.
pub(super) async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, Problem> {
    app.check_open()?;
    match app.observer.health().await {
        Ok(()) => Ok(Json(json!({ "status": "ok" }))),
        // The message names the store, and this path needs no token.
        Err(_) => Err(Problem::new(Code::StoreUnavailable, "the store did not answer")),
    }
}

/// Who the caller is, what it may do, and at which server and store.
pub(super) async fn access(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<Value> {
    let profile = caller.profile();
    let rights = Right::ALL.into_iter().filter(|right| profile.rights.has(*right)).map(Right::as_str);
    let rights: Vec<&str> = rights.collect();
    Json(json!({
        "name": caller.name(),
        "rights": rights,
        "prefixes": profile.prefixes(),
        "store": app.client.address(),
        "server": {
            "version": env!("CARGO_PKG_VERSION"),
            "host": rustix::system::uname().nodename().to_string_lossy(),
            "listen": app.listen,
            "uptime_ms": millis(app.started.elapsed()),
        },
    }))
}
