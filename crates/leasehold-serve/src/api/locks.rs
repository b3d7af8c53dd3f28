//! Acquire and release by force; the state of locks.

mod attempt;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use leasehold::{Client, Guard, Kind, LeaseId, LockInfo, MAX_TTL, MIN_TTL, MutexSet, Token};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::leases::Shown;
use super::request::{JsonBody, Lock, Parameters, span};
use crate::app::App;
use crate::audit;
use crate::caller::Caller;
use crate::delivery::{Delivery, give_back};
use crate::metrics::{AcquireTimer, Outcome};
use crate::presence::Presence;
use crate::problem::{Code, Problem};
use crate::rights::Right;
use crate::time::{expires_in_ms, millis};
use attempt::Attempt;

/// The ttl of a lease whose request names none: three times a failover of ten seconds.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// How soon a caller must repeat a request that goes on waiting. The server gives it half a second longer.
const REPEAT_WITHIN: Duration = Duration::from_secs(2);

/// The length of a request's id in bytes: at least so much that it can't be guessed.
const REQUEST_ID: std::ops::RangeInclusive<usize> = 16..=200;

/// The maximum age of a list, so that several callers share one poll of the store.
const LIST_AGE: Duration = Duration::from_millis(100);

/// Locks of one page of the list.
const MAX_PAGE: usize = 10_000;

/// Locks that are acquired together.
const MAX_NAMES: usize = 100;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AcquireRequest {
    /// Names the attempt, so that it can be repeated.
    request_id: Option<String>,
    wait_ms: Option<u64>,
    ttl_ms: Option<u64>,
    min_hold_ms: Option<u64>,
    once_per_ms: Option<u64>,
    label: Option<String>,
    mode: Option<attempt::RequestedMode>,
    permits: Option<u32>,
    capacity: Option<u32>,
    owner: Option<String>,
}

/// A lease that was granted.
#[derive(Debug, Serialize)]
struct Grant {
    lease: String,
    #[serde(flatten)]
    shown: Shown,
    expires_in_ms: u64,
}

impl Grant {
    fn new(id: &LeaseId, trusted_until: Instant, arrived: Instant) -> Self {
        let expires_in_ms = expires_in_ms(trusted_until, arrived);
        Self { lease: id.to_string(), shown: Shown::of(id), expires_in_ms }
    }
}

/// What has become of a request that acquires.
enum Acquired {
    /// The lease, and until when it may be trusted.
    Granted(LeaseId, Instant),
    /// It stays in the queue for the caller, who repeats it.
    Waiting,
}

/// Acquires a lock. Without an id of the caller's, the attempt ends when the request is dropped, because its future is.
pub(super) async fn acquire(
    State(app): State<Arc<App>>,
    Extension(presence): Extension<Presence>,
    Extension(delivery): Extension<Delivery>,
    Extension(caller): Extension<Caller>,
    lock: Lock,
    JsonBody(request): JsonBody<AcquireRequest>,
) -> Result<Response, Problem> {
    let arrived = Instant::now();
    app.check_open()?;
    // A request that does not wait is answered although its client sends no more, as in a batch of requests.
    let _watched = request.wait_ms.is_some_and(|ms| ms > 0).then(|| presence.watch());
    let timer = AcquireTimer::start(lock.kind);
    let result = acquire_now(&app, &caller, &lock, request).await;
    timer.end(match &result {
        Ok(Acquired::Granted(..)) => Outcome::Granted,
        Ok(Acquired::Waiting) => Outcome::Waiting,
        Err(problem) => Outcome::Refused(problem.code),
    });
    match result? {
        Acquired::Granted(id, trusted_until) => {
            let grant = Grant::new(&id, trusted_until, arrived);
            Ok(granted(&delivery, [id], &grant))
        }
        Acquired::Waiting => {
            let body = json!({ "status": "waiting", "repeat_within_ms": millis(REPEAT_WITHIN) });
            Ok((StatusCode::ACCEPTED, Json(body)).into_response())
        }
    }
}

/// An answer with leases, which are returned if it can't be written.
fn granted(
    delivery: &Delivery,
    leases: impl IntoIterator<Item = LeaseId>,
    body: &impl Serialize,
) -> Response {
    // Texts and numbers always serialize.
    let body = delivery.answer(leases, serde_json::to_vec(body).unwrap_or_default());
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

async fn acquire_now(
    app: &Arc<App>,
    caller: &Caller,
    lock: &Lock,
    request: AcquireRequest,
) -> Result<Acquired, Problem> {
    let wait = span("wait_ms", request.wait_ms.unwrap_or(0), Duration::ZERO, app.limits.max_wait)?;
    let ttl = request.ttl_ms.map_or(Ok(DEFAULT_TTL), |ms| span("ttl_ms", ms, MIN_TTL, MAX_TTL))?;
    let min_hold =
        request.min_hold_ms.map(|ms| span("min_hold_ms", ms, Duration::ZERO, MAX_TTL)).transpose()?;
    let period = request.once_per_ms.map(Duration::from_millis);
    let request_id = request.request_id.as_deref().map(|id| attempt_name(caller, id)).transpose()?;
    let attempt = Attempt {
        kind: lock.kind,
        name: &lock.name,
        request_id,
        holder: (caller.name(), caller.peer()),
        ttl,
        min_hold,
        period,
        label: request.label,
        mode: request.mode,
        permits: request.permits,
        capacity: request.capacity,
        owner: request.owner.map(|owner| owner_of(caller, &owner)).transpose()?,
    };
    attempt.check()?;
    let _permit = app.reserve(caller)?;
    let Some(id) = attempt.request_id.clone() else {
        // A period does not wait: its work has begun elsewhere.
        let waited = if attempt.period.is_some() { Duration::ZERO } else { wait };
        return run(app, lock, &attempt, wait).await?.ok_or_else(|| not_granted(lock, waited));
    };
    let Some(open) = app.requests.open(lock.kind, &lock.name, id).await else { return Ok(Acquired::Waiting) };
    tokio::select! {
        biased;
        // The caller has asked again, and no longer reads this answer.
        () = open.superseded() => Ok(Acquired::Waiting),
        acquired = run(app, lock, &attempt, wait) => match acquired? {
            Some(acquired) => Ok(acquired),
            None if wait.is_zero() || attempt.period.is_some() => Err(not_granted(lock, Duration::ZERO)),
            None => Ok(Acquired::Waiting),
        },
    }
}

/// The owner as the store knows it. No name of a token has a space, so that no other caller's owner is the same.
fn owner_of(caller: &Caller, owner: &str) -> Result<String, Problem> {
    if owner.is_empty() {
        return Err(Problem::new(Code::InvalidRequest, "owner is empty: leave it out, or name the owner"));
    }
    Ok(format!("{owner} ({})", caller.name()))
}

/// The id under which the store knows the attempt of a caller's request: no other caller's is the same.
fn attempt_name(caller: &Caller, request_id: &str) -> Result<Vec<u8>, Problem> {
    if !REQUEST_ID.contains(&request_id.len()) {
        let (least, most) = (REQUEST_ID.start(), REQUEST_ID.end());
        let what = format!(
            "request_id has {least} to {most} bytes, of which at least {least} are random, this one has {}",
            request_id.len()
        );
        return Err(Problem::new(Code::InvalidRequest, what));
    }
    Ok([caller.name().as_bytes(), b"\0", request_id.as_bytes()].concat())
}

/// Acquires the lock for at most this wait. None if it was not granted.
async fn run(
    app: &App,
    lock: &Lock,
    attempt: &Attempt<'_>,
    wait: Duration,
) -> Result<Option<Acquired>, Problem> {
    let began = Instant::now();
    loop {
        let left = wait.saturating_sub(began.elapsed());
        let Some(guard) = unless_stopping(app, attempt.run(&app.client, left)).await? else {
            return Ok(None);
        };
        // A lease that was granted after a wait gets its whole ttl now.
        let mut detached = Detached::new(&app.client);
        match detached.add(guard).await {
            Ok(()) => {
                look_for_client(wait).await;
                return Ok(detached
                    .take()
                    .pop()
                    .map(|(id, trusted_until)| Acquired::Granted(id, trusted_until)));
            }
            // A lease of which the store knows nothing was never the caller's.
            Err(error) if error.is_lost() && began.elapsed() < wait => {}
            Err(error) => return Err(not_detached(&error, &format!("{} {:?}", lock.kind, lock.name))),
        }
    }
}

/// A lease that was granted could not be renewed.
fn not_detached(error: &leasehold::Error, lock: &str) -> Problem {
    if !error.is_lost() {
        return Problem::of(error);
    }
    let what = format!(
        "{lock} was granted, and its lease ended before the answer: the store is too slow for this ttl"
    );
    Problem::new(Code::StoreUnavailable, what)
}

/// The connection's task looks here whether the client of a request that waits is gone: if the request was granted at once, it has not looked
/// yet.
async fn look_for_client(wait: Duration) {
    if !wait.is_zero() {
        tokio::task::yield_now().await;
    }
}

/// Runs an attempt until the server stops.
async fn unless_stopping<T>(
    app: &App,
    attempt: impl Future<Output = Result<T, leasehold::Error>>,
) -> Result<T, Problem> {
    tokio::select! {
        biased;
        () = app.draining.cancelled() => Err(App::stopping_problem()),
        result = attempt => result.map_err(|error| match error.is_lost() {
            true => Problem::new(Code::RequestEnded, format!("{error:#}")),
            false => error.into(),
        }),
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
pub(super) struct AcquireAllRequest {
    names: Vec<String>,
    wait_ms: Option<u64>,
    ttl_ms: Option<u64>,
    label: Option<String>,
}

/// Acquires several mutexes, all or none.
pub(super) async fn acquire_all(
    State(app): State<Arc<App>>,
    Extension(presence): Extension<Presence>,
    Extension(delivery): Extension<Delivery>,
    Extension(caller): Extension<Caller>,
    JsonBody(request): JsonBody<AcquireAllRequest>,
) -> Result<Response, Problem> {
    let arrived = Instant::now();
    app.check_open()?;
    let AcquireAllRequest { names, wait_ms, ttl_ms, label } = request;
    let wait = span("wait_ms", wait_ms.unwrap_or(0), Duration::ZERO, app.limits.max_wait)?;
    let ttl = ttl_ms.map_or(Ok(DEFAULT_TTL), |ms| span("ttl_ms", ms, MIN_TTL, MAX_TTL))?;
    if names.is_empty() || names.len() > MAX_NAMES {
        let what = format!("names has 1 to {MAX_NAMES} names, not {}", names.len());
        return Err(Problem::new(Code::InvalidRequest, what));
    }
    for name in &names {
        Lock::new(Kind::Mutex.as_str(), name.clone())?;
        caller.may(Right::Write, name)?;
    }
    let _watched = (!wait.is_zero()).then(|| presence.watch());
    let _permit = app.reserve(&caller)?;
    let mutexes = names.iter().map(|name| {
        let mutex = app.client.mutex(name).ttl(ttl).detachable().holder(caller.name(), caller.peer());
        match &label {
            Some(label) => mutex.label(label.as_str()),
            None => mutex,
        }
    });
    let set = MutexSet::new(mutexes);
    let attempt = async { if wait.is_zero() { set.try_lock().await } else { set.lock_timeout(wait).await } };
    let Some(held) = unless_stopping(&app, attempt).await? else {
        let code = if wait.is_zero() { Code::Busy } else { Code::TimedOut };
        return Err(Problem::new(code, "not all of these locks were granted, and none is held"));
    };
    look_for_client(wait).await;
    let mut detached = Detached::new(&app.client);
    for guard in held.into_guards() {
        // If one fails, the guards that are left release their leases.
        let lock = format!("mutex {:?}", guard.name());
        detached.add(guard).await.map_err(|error| not_detached(&error, &lock))?;
    }
    let grants = detached.take();
    let shown: Vec<Grant> =
        grants.iter().map(|(id, trusted_until)| Grant::new(id, *trusted_until, arrived)).collect();
    Ok(granted(&delivery, grants.into_iter().map(|(id, _)| id), &json!({ "leases": shown })))
}

/// Leases that no guard releases any more, and for which there is no answer yet. They are returned when this is dropped.
struct Detached<'a> {
    client: &'a Client,
    /// Each with the time until which it may be trusted.
    grants: Vec<(LeaseId, Instant)>,
}

impl<'a> Detached<'a> {
    fn new(client: &'a Client) -> Self {
        Self { client, grants: Vec::new() }
    }

    async fn add(&mut self, guard: Guard) -> Result<(), leasehold::Error> {
        let (id, valid_for) = guard.detach_valid_for().await?;
        self.grants.push((id, Instant::now() + valid_for));
        Ok(())
    }

    /// The leases, for an answer.
    fn take(mut self) -> Vec<(LeaseId, Instant)> {
        std::mem::take(&mut self.grants)
    }
}

impl Drop for Detached<'_> {
    fn drop(&mut self) {
        self.grants.iter().for_each(|(id, _)| give_back(self.client, id));
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
    use super::*;

    #[tokio::test]
    async fn leases_for_which_there_is_no_answer_are_returned() {
        let client = Client::connect("memory:").await.unwrap();
        for is_answered in [false, true] {
            let mut detached = Detached::new(&client);
            let mut free = Vec::new();
            for name in ["a", "b"] {
                let guard = client.mutex(name).detachable().lock().await.unwrap();
                detached.add(guard).await.unwrap();
            }
            // Of several leases, the first is not trusted for longer because the answer is late.
            let added_by = Instant::now();
            assert!(
                detached.grants.iter().all(|(_, trusted_until)| *trusted_until <= added_by + DEFAULT_TTL)
            );
            match is_answered {
                true => assert_eq!(detached.take().len(), 2),
                false => drop(detached),
            }
            let wait = if is_answered { Duration::ZERO } else { Duration::from_secs(60) };
            for name in ["a", "b"] {
                free.push(client.mutex(name).lock_timeout(wait).await.unwrap());
            }
            assert!(free.iter().all(|guard| guard.is_none() == is_answered));
        }
    }
}
