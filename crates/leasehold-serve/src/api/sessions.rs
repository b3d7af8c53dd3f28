//! Sessions: open, heartbeat, state, close.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use leasehold::MAX_LABEL_BYTES;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::locks::Grant;
use super::request::{JsonBody, SessionPath, span};
use crate::app::App;
use crate::leases::{Ending, Id};
use crate::problem::{Code, Problem};
use crate::sessions::{LostLease, Session};
use crate::time::millis;

const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(10);
/// Why a session has ended that its caller closed.
const CLOSED: &str = "it was closed";

const MIN_HEARTBEAT: Duration = Duration::from_millis(500);
const MAX_HEARTBEAT: Duration = Duration::from_secs(3600);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OpenRequest {
    heartbeat_ms: Option<u64>,
    label: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct SessionState {
    session: String,
    heartbeat_ms: u64,
    /// The time until the session ends without another heartbeat.
    expires_in_ms: u64,
    /// The server stops: release what is held.
    stopping: bool,
    leases: Vec<Grant>,
    /// Leases that were lost, in every answer until the caller must have heard one.
    lost: Vec<LostLease>,
}

impl SessionState {
    fn new(app: &App, session: &Session, lost: Vec<LostLease>) -> Self {
        let leases = session.leases();
        let leases = leases.iter().filter_map(|id| app.leases.by_id(id));
        Self {
            session: session.id.as_str().to_owned(),
            heartbeat_ms: millis(session.heartbeat),
            expires_in_ms: millis(session.remaining()),
            stopping: app.draining.is_cancelled(),
            leases: leases.map(|lease| Grant::new(&lease, lease.remaining())).collect(),
            lost,
        }
    }
}

pub(super) async fn open(
    State(app): State<Arc<App>>,
    JsonBody(request): JsonBody<OpenRequest>,
) -> Result<(StatusCode, Json<SessionState>), Problem> {
    app.check_open()?;
    let heartbeat = request
        .heartbeat_ms
        .map_or(Ok(DEFAULT_HEARTBEAT), |ms| span("heartbeat_ms", ms, MIN_HEARTBEAT, MAX_HEARTBEAT))?;
    if let Some(label) = &request.label
        && label.len() > MAX_LABEL_BYTES
    {
        let what = format!("a label has at most {MAX_LABEL_BYTES} bytes, this one has {}", label.len());
        return Err(Problem::new(Code::InvalidRequest, what));
    }
    let session = app.sessions.open(heartbeat, request.label)?;
    Ok((StatusCode::CREATED, Json(SessionState::new(&app, &session, Vec::new()))))
}

pub(super) async fn show(
    State(app): State<Arc<App>>,
    SessionPath(id): SessionPath,
) -> Result<Json<SessionState>, Problem> {
    let session = app.sessions.get(&Id::from(id.as_str()))?;
    Ok(Json(SessionState::new(&app, &session, Vec::new())))
}

pub(super) async fn heartbeat(
    State(app): State<Arc<App>>,
    SessionPath(id): SessionPath,
) -> Result<Json<SessionState>, Problem> {
    let session = app.sessions.beat(&Id::from(id.as_str()))?;
    app.end_lost_of(&session);
    let lost = session.report_losses(Instant::now(), 0);
    let lost = lost.into_iter().map(|(_, lost)| lost).collect();
    Ok(Json(SessionState::new(&app, &session, lost)))
}

/// Ends the session, and waits until the store has confirmed the release of its leases. A repeated request does the same.
pub(super) async fn close(
    State(app): State<Arc<App>>,
    SessionPath(id): SessionPath,
) -> Result<StatusCode, Problem> {
    let id = Id::from(id.as_str());
    let leases = match app.sessions.get(&id).and_then(|session| app.sessions.end(&session, CLOSED)) {
        Ok(leases) => {
            app.metrics.session_ended("closed");
            leases.iter().filter_map(|id| app.leases.by_id(id)).collect()
        }
        Err(_) if app.sessions.ended_by(&id, CLOSED) => app.leases.of_session(&id),
        Err(problem) => return Err(problem),
    };
    let releases = leases.iter().map(|lease| app.release(lease, Ending::Session(CLOSED.to_owned())));
    let released: Result<Vec<Ending>, Problem> =
        futures_util::future::join_all(releases).await.into_iter().collect();
    released.map(|_| StatusCode::NO_CONTENT)
}
