//! Acquire, renew and release; the state of locks.

mod attempt;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use futures_util::FutureExt as _;
use leasehold::{Kind, LockInfo, Loss, MAX_TTL, MIN_TTL, Token};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::request::{JsonBody, Lock, Parameters, span};
use crate::app::App;
use crate::audit;
use crate::caller::Caller;
use crate::leases::{Ending, Held, Id, Lease, unconfirmed};
use crate::metrics::AcquireTimer;
use crate::presence::Presence;
use crate::problem::{Code, Problem};
use crate::sessions::OpenRequest;
use crate::time::millis;
use attempt::Attempt;

/// The ttl of a lease whose request names none.
const DEFAULT_TTL: Duration = Duration::from_secs(10);

/// How long an `acquire` with an owner is repeated after it found that a lease of that owner has ended.
const LOSS_LIMIT: Duration = Duration::from_secs(1);
const LOSS_PAUSE: Duration = Duration::from_millis(10);

/// The maximum age of a list, so that several callers share one poll of the store.
const LIST_AGE: Duration = Duration::from_millis(100);

/// Locks of one page of the list.
const MAX_PAGE: usize = 10_000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AcquireRequest {
    session: Option<String>,
    wait_ms: Option<u64>,
    ttl_ms: Option<u64>,
    label: Option<String>,
    mode: Option<attempt::RequestedMode>,
    permits: Option<u32>,
    capacity: Option<u32>,
    owner: Option<String>,
}

/// A lease that was granted, or is held.
#[derive(Debug, Serialize)]
pub(super) struct Grant {
    lease: String,
    kind: &'static str,
    name: String,
    token: u64,
    expires_in_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
}

impl Grant {
    pub(super) fn new(lease: &Lease, remaining: Duration) -> Self {
        Self {
            lease: lease.id.as_str().to_owned(),
            kind: lease.kind.as_str(),
            name: lease.name.clone(),
            token: lease.token.get(),
            expires_in_ms: millis(remaining),
            session: lease.session.as_ref().map(|id| id.as_str().to_owned()),
        }
    }
}

/// Acquires a lock. The attempt ends when the request is dropped, because its future is.
pub(super) async fn acquire(
    State(app): State<Arc<App>>,
    Extension(presence): Extension<Presence>,
    Extension(caller): Extension<Caller>,
    lock: Lock,
    JsonBody(request): JsonBody<AcquireRequest>,
) -> Result<Json<Grant>, Problem> {
    app.check_open()?;
    // A request that does not wait is answered although its client sends no more, as in a batch of requests.
    let _watched = request.wait_ms.is_some_and(|ms| ms > 0).then(|| presence.watch());
    let timer = AcquireTimer::start(lock.kind);
    let result = acquire_now(&app, &caller, &lock, request).await;
    timer.end(result.as_ref().map(drop).map_err(|problem| problem.code));
    result.map(Json)
}

async fn acquire_now(
    app: &Arc<App>,
    caller: &Caller,
    lock: &Lock,
    request: AcquireRequest,
) -> Result<Grant, Problem> {
    let wait = span("wait_ms", request.wait_ms.unwrap_or(0), Duration::ZERO, app.limits.max_wait)?;
    let ttl = request.ttl_ms.map_or(Ok(DEFAULT_TTL), |ms| span("ttl_ms", ms, MIN_TTL, MAX_TTL))?;
    let session = request.session.as_deref().map(|id| app.sessions.enter(&Id::from(id))).transpose()?;
    let label = request.label.or_else(|| session.as_ref().and_then(|open| open.0.label.clone()));
    let attempt = Attempt {
        kind: lock.kind,
        name: &lock.name,
        ttl,
        // A session renews its leases; a lease without one is renewed by its caller.
        renews: session.is_some(),
        label,
        mode: request.mode,
        permits: request.permits,
        capacity: request.capacity,
        owner: request.owner,
    };
    attempt.check()?;
    let permit = app.reserve(caller)?;
    let ended = session.as_ref().map(|open| open.0.ended.clone());
    let began = Instant::now();
    let held = loop {
        let left = wait.saturating_sub(began.elapsed());
        let attempting = acquire_unless_lost(app, lock, &attempt, left);
        let held = unless_ended(app, ended.as_ref(), attempting).await?;
        let held = held.ok_or_else(|| not_granted(lock, wait))?;
        if lasts(lock, &held, ttl).await? {
            break held;
        }
        if began.elapsed() >= wait {
            return Err(not_granted(lock, wait));
        }
    };
    if !wait.is_zero() {
        // The connection's task looks here whether the client is gone. If the request was granted at once, it has not looked yet.
        tokio::task::yield_now().await;
    }
    let id = session.as_ref().map(|open| open.0.id.clone());
    let lease = app.leases.insert(lock.key(), id, held, permit)?;
    if let Some(open) = &session {
        join(app, open, &lease)?;
    }
    Ok(Grant::new(&lease, lease.remaining()))
}

/// Acquires the lock for at most this wait, and again if a lease of the same owner turns out to be lost.
async fn acquire_unless_lost(
    app: &App,
    lock: &Lock,
    attempt: &Attempt<'_>,
    wait: Duration,
) -> Result<Option<Held>, leasehold::Error> {
    let began = Instant::now();
    let mut repeats_until = None;
    loop {
        let asked_at = Instant::now();
        let held = attempt.run(&app.client, wait.saturating_sub(began.elapsed())).await;
        if !held.as_ref().is_err_and(leasehold::Error::is_lost) {
            return held;
        }
        let now = Instant::now();
        if now - asked_at > LOSS_LIMIT {
            // It has waited, so this is another loss.
            repeats_until = None;
        }
        if now > *repeats_until.get_or_insert(now + LOSS_LIMIT) {
            return held;
        }
        // A lease of this owner has ended that was not looked at since. It was another caller's, whose request may be using it, and
        // learns of the end at this moment.
        app.end_lost_at(lock.kind, &lock.name);
        tokio::time::sleep(LOSS_PAUSE).await;
    }
}

/// Whether the store confirms a lease that was granted after a wait: it has a few seconds, until its first renewal. A lease of which the
/// store knows nothing was never the caller's. If the store does not answer, the caller gets what is left.
async fn lasts(lock: &Lock, held: &Held, ttl: Duration) -> Result<bool, Problem> {
    if held.remaining() >= ttl / 2 {
        return Ok(true);
    }
    match held.renew().await {
        Err(error) if error.is_lost() => {}
        _ => return Ok(true),
    }
    if matches!(held.lost().now_or_never(), Some(Loss::Gone)) {
        return Ok(false);
    }
    let Lock { kind, name } = lock;
    let what = format!(
        "{kind} {name:?} was granted, and its lease ended before the answer: the store is too slow for this ttl"
    );
    Err(Problem::new(Code::StoreUnavailable, what))
}

/// Adds the lease to its session, which may have ended in the meantime.
fn join(app: &Arc<App>, open: &OpenRequest, lease: &Arc<Lease>) -> Result<(), Problem> {
    let joined = app.sessions.add_lease(&open.0, &lease.id);
    if joined.is_err() {
        app.drop_lease(lease, "it ended during the grant");
    }
    joined
}

/// Runs an attempt until the server or the session ends.
async fn unless_ended<T>(
    app: &App,
    session: Option<&CancellationToken>,
    attempt: impl Future<Output = Result<T, leasehold::Error>>,
) -> Result<T, Problem> {
    let session_ended = async {
        match session {
            Some(ended) => ended.cancelled().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = app.draining.cancelled() => Err(App::stopping_problem()),
        () = session_ended => Err(Problem::new(Code::SessionEnded, "the session ended during the wait")),
        result = attempt => Ok(result?),
    }
}

fn not_granted(lock: &Lock, wait: Duration) -> Problem {
    let Lock { kind, name } = lock;
    if wait.is_zero() {
        Problem::new(Code::Busy, format!("{kind} {name:?} is held, and the request does not wait"))
    } else {
        Problem::new(Code::TimedOut, format!("{kind} {name:?} was not granted within {wait:?}"))
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LeaseRequest {
    lease: String,
}

pub(super) async fn renew(
    State(app): State<Arc<App>>,
    lock: Lock,
    JsonBody(request): JsonBody<LeaseRequest>,
) -> Result<Json<Grant>, Problem> {
    let lease = app.leases.get(lock.key(), &Id::from(request.lease.as_str()))?;
    let remaining = app.leases.renew(&lease).await?;
    Ok(Json(Grant::new(&lease, remaining)))
}

/// Releases a lease. A repeated release succeeds too, because the answer of the first one may have been lost.
pub(super) async fn release(
    State(app): State<Arc<App>>,
    lock: Lock,
    JsonBody(request): JsonBody<LeaseRequest>,
) -> Result<StatusCode, Problem> {
    let id = Id::from(request.lease.as_str());
    let lease = match app.leases.get(lock.key(), &id) {
        Ok(lease) => lease,
        // Asked after the look for the lease: another request may just have ended it.
        Err(problem) => {
            return match app.leases.ending(lock.key(), &id) {
                Some(Ending::Released) => Ok(StatusCode::NO_CONTENT),
                Some(refused @ Ending::Refused(_)) => Err(unconfirmed(lock.key(), refused)),
                _ => Err(problem),
            };
        }
    };
    match app.release(&lease, Ending::Released).await? {
        Ending::Released => Ok(StatusCode::NO_CONTENT),
        ending => Err(Problem::new(Code::LeaseEnded, format!("{} {:?}: {ending}", lock.kind, lock.name))),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ForceRequest {
    /// The holder that the caller means.
    token: Option<u64>,
}

/// Releases a lock by force. With a token, only if its holder is still the one with this token.
pub(super) async fn force_release(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    lock: Lock,
    JsonBody(request): JsonBody<ForceRequest>,
) -> Result<Json<Value>, Problem> {
    let Lock { kind, name } = &lock;
    if let Some(token) = request.token {
        let released = match Token::new(token) {
            Some(token) => app.client.force_release_token(*kind, name, token).await,
            None => Ok(None),
        };
        audit::forced_release(&app.notices, &caller, lock.key(), released.as_ref().map(Option::as_slice));
        // Its name and kind are valid, so this is about the holder.
        let released = released.map_err(|error| match error.is_invalid() {
            true => {
                let what = format!("{kind} {name:?}: the holder with the token {token} has released it, and it stays taken for a while");
                Problem::new(Code::NotHeld, what)
            }
            false => error.into(),
        })?;
        let Some(released) = released else {
            let what = format!("{kind} {name:?} has no holder with the token {token}");
            return Err(Problem::new(Code::NotHeld, what));
        };
        return Ok(Json(json!({ "released": [released] })));
    }
    let released = app.client.force_release(*kind, name).await;
    audit::forced_release(&app.notices, &caller, lock.key(), released.as_ref().map(Vec::as_slice));
    let released = released?;
    if released.is_empty() {
        return Err(Problem::new(Code::NotHeld, format!("{kind} {name:?} is not held")));
    }
    Ok(Json(json!({ "released": released })))
}

pub(super) async fn show(State(app): State<Arc<App>>, lock: Lock) -> Result<Json<LockInfo>, Problem> {
    Ok(Json(app.client.inspect(lock.kind, &lock.name).await?))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListParameters {
    kind: Option<String>,
    /// Part of the name.
    search: Option<String>,
    limit: Option<usize>,
    /// `kind/name` of the last lock of the page before.
    after: Option<String>,
}

/// The locks in use, ordered by kind and name, in pages.
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Parameters(parameters): Parameters<ListParameters>,
) -> Result<Response, Problem> {
    let ListParameters { kind, search, limit, after } = parameters;
    if let Some(kind) = &kind {
        Lock::new(kind, String::new())?;
    }
    let limit = limit.unwrap_or(1000);
    if limit == 0 || limit > MAX_PAGE {
        return Err(Problem::new(Code::InvalidRequest, format!("limit is 1 to {MAX_PAGE}, not {limit}")));
    }
    let snapshot = app.observer.snapshot(LIST_AGE).await;
    if let Some(error) = &snapshot.error {
        return Err(Problem::new(Code::StoreUnavailable, error.clone()));
    }
    let place = |kind: Kind, name: &str| format!("{kind}/{name}");
    let is_wanted = |lock: &&LockInfo| {
        caller.sees(&lock.name)
            && kind.as_ref().is_none_or(|kind| lock.kind.as_str() == kind)
            && search.as_ref().is_none_or(|part| lock.name.contains(part.as_str()))
            && after.as_ref().is_none_or(|after| place(lock.kind, &lock.name) > *after)
    };
    let mut locks: Vec<&LockInfo> = snapshot.locks.iter().filter(is_wanted).collect();
    locks.sort_by_cached_key(|lock| place(lock.kind, &lock.name));
    let is_more = locks.len() > limit;
    locks.truncate(limit);
    let last = locks.last().filter(|_| is_more);
    let next = last.map(|lock| place(lock.kind, &lock.name));
    Ok(Json(json!({ "locks": locks, "next": next })).into_response())
}

#[cfg(test)]
mod tests {
    use leasehold::Client;

    use super::*;
    use crate::config::Limits;
    use crate::leases::Held;
    use crate::tokens::Tokens;

    /// The session ends after the grant, and before the lease is in it.
    #[tokio::test]
    async fn lease_that_is_granted_while_its_session_ends_is_released() {
        let client = Client::connect("memory:").await.unwrap();
        let app = Arc::new(App::new(client.clone(), Tokens::default(), Limits::default()));
        let session = app.sessions.open(Duration::from_secs(60), None).unwrap();
        let open = app.sessions.enter(&session.id).unwrap();
        let guard = client.mutex("a").auto_renew(true).lock().await.unwrap();
        let permit = app.reserve(&Caller::of_socket(0, None)).unwrap();
        let held = Held::Guard(guard);
        let lease = app.leases.insert((Kind::Mutex, "a"), Some(session.id.clone()), held, permit).unwrap();
        assert!(app.sessions.end(&session, "it was closed").unwrap().is_empty());
        let refused = join(&app, &open, &lease).unwrap_err();
        assert_eq!((refused.code, refused.detail.as_str()), (Code::SessionEnded, "it was closed"));
        let ended = tokio::time::timeout(Duration::from_secs(60), lease.ended()).await;
        assert_eq!(ended.unwrap(), Ending::Session("it ended during the grant".to_owned()));
        assert!(client.inspect(Kind::Mutex, "a").await.unwrap().holders.is_empty());
        assert_eq!(app.leases.len(), 0);
    }
}
