//! Parts of requests, with problems instead of the framework's errors.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::LengthLimitError;
use leasehold::{Kind, MAX_NAME_BYTES};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::app::App;
use crate::caller::Caller;
use crate::problem::{Code, Problem};
use crate::rights::Right;

/// The name in a path whose query has the lock's name. Clients take the names `.` and `..` for folders, and remove them from paths
/// even if they are percent-encoded.
const NAME_IN_QUERY: &str = "_";

/// How many times the usual length a body with the ids of leases may have.
const LEASES_FACTOR: usize = 16;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NameQuery {
    name: Option<String>,
}

/// The lock that the path names. The caller may use its name.
pub(super) struct Lock {
    pub(super) kind: Kind,
    pub(super) name: String,
}

impl Lock {
    pub(super) fn key(&self) -> (Kind, &str) {
        (self.kind, &self.name)
    }

    /// Refuses a lock whose name the caller may not use. A request that names a lock has a caller.
    pub(super) fn check(&self, caller: Option<&Caller>) -> Result<(), Problem> {
        // The path decides which right the request needs, and every token may read.
        let unknown = || Problem::new(Code::Unauthorized, "the request has no caller");
        caller.ok_or_else(unknown)?.may(Right::Read, &self.name)
    }

    /// Parses the words of a path or a query.
    pub(super) fn new(kind: &str, name: String) -> Result<Self, Problem> {
        let invalid = |what: String| Problem::new(Code::InvalidRequest, what);
        let kind = Kind::ALL.iter().copied().find(|known| known.as_str() == kind).ok_or_else(|| {
            let known: Vec<_> = Kind::ALL.iter().map(|kind| kind.as_str()).collect();
            invalid(format!("{:?} is no kind of lock; there are {}", cut(kind), known.join(", ")))
        })?;
        if name.len() > MAX_NAME_BYTES {
            return Err(invalid(format!(
                "a lock's name has at most {MAX_NAME_BYTES} bytes, this one has {}",
                name.len()
            )));
        }
        if let Some(position) = name.find(char::is_control) {
            return Err(invalid(format!(
                "a lock's name has no control characters, this one has one at byte {position}"
            )));
        }
        Ok(Self { kind, name })
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Lock {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let invalid = |what: String| Problem::new(Code::InvalidRequest, what);
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((kind, name)) = path.map_err(|error| invalid(error.body_text()))?;
        let query = Query::<NameQuery>::from_request_parts(parts, state).await;
        let Query(query) = query.map_err(|error| invalid(error.body_text()))?;
        let name = match query.name {
            None => name,
            Some(of_query) if name == NAME_IN_QUERY => of_query,
            Some(_) => {
                let what = format!("with the parameter `name`, the name in the path is `{NAME_IN_QUERY}`");
                return Err(invalid(what));
            }
        };
        let lock = Self::new(&kind, name)?;
        lock.check(parts.extensions.get::<Caller>())?;
        Ok(lock)
    }
}

/// The parameters after `?`.
pub(super) struct Parameters<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let query = Query::<T>::from_request_parts(parts, state).await;
        query
            .map(|Query(value)| Self(value))
            .map_err(|error| Problem::new(Code::InvalidRequest, error.body_text()))
    }
}

/// A JSON body; without a body, that of `{}`.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let bytes = receive(body, LEASES_FACTOR * app.limits.body_bytes).await?;
        let bytes = if bytes.is_empty() { b"{}".to_vec() } else { json(&parts, bytes)? };
        // An array would be read as the values of the members.
        if bytes.trim_ascii_start().first() != Some(&b'{') {
            return Err(Problem::new(Code::InvalidRequest, "the body is no JSON object"));
        }
        let value = serde_json::from_slice(&bytes).map_err(|error| {
            Problem::new(Code::InvalidRequest, format!("the body: {}", without_text(&error)))
        })?;
        Ok(Self(value))
    }
}

/// What is wrong with a body, without a text in the place of another value: it may be the id of a lease.
fn without_text(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let (begin, end) = ("string \"", "\", expected ");
    match (text.find(begin), text.rfind(end)) {
        (Some(first), Some(last)) if first + begin.len() <= last => {
            format!("{}string{}", &text[..first], &text[last + 1..])
        }
        _ => text,
    }
}

/// Receives the whole body before the handler runs, also if the handler does not need one. An answer must not overtake the
/// body: the connection would be closed while the client still sends, and the client would get an error instead of the answer.
pub(super) async fn receive_body(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    if body.is_end_stream() {
        return Ok(next.run(Request::from_parts(parts, body)).await);
    }
    let factor = if parts.uri.path().starts_with("/v1/leases/") { LEASES_FACTOR } else { 1 };
    let received =
        tokio::time::timeout(app.limits.receive_timeout, receive(body, factor * app.limits.body_bytes));
    let bytes = received.await.map_err(|_| {
        let what = format!("the body did not end within {:?}", app.limits.receive_timeout);
        Problem::new(Code::SlowBody, what)
    })??;
    Ok(next.run(Request::from_parts(parts, Body::from(bytes))).await)
}

async fn receive(body: Body, limit: usize) -> Result<Vec<u8>, Problem> {
    let bytes = to_bytes(body, limit).await.map_err(|error| {
        if error.into_inner().is::<LengthLimitError>() {
            Problem::new(Code::BodyTooLarge, format!("a body has at most {limit} bytes"))
        } else {
            Problem::new(Code::InvalidRequest, "the body ended early")
        }
    })?;
    Ok(bytes.to_vec())
}

/// The body, if it is declared as JSON. A page of another site can send anything but this type without asking first.
fn json(parts: &Parts, bytes: Vec<u8>) -> Result<Vec<u8>, Problem> {
    let declared = parts.headers.get(CONTENT_TYPE).map(|value| value.to_str().unwrap_or_default());
    let media = declared.map(|value| value.split(';').next().unwrap_or_default().trim());
    if media.is_some_and(|media| media.eq_ignore_ascii_case("application/json")) {
        Ok(bytes)
    } else {
        Err(Problem::new(Code::NotJson, "a body has the type application/json"))
    }
}

/// A time in milliseconds that is in a range.
pub(super) fn span(field: &str, ms: u64, least: Duration, most: Duration) -> Result<Duration, Problem> {
    let span = Duration::from_millis(ms);
    if span < least || span > most {
        let what = format!("{field} is {} to {}, not {ms}", least.as_millis(), most.as_millis());
        return Err(Problem::new(Code::InvalidRequest, what));
    }
    Ok(span)
}

/// The beginning of a text from a client, for a message.
pub(super) fn cut(text: &str) -> String {
    text.chars().take(200).collect()
}
