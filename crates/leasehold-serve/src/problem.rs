//! Errors as problem details (RFC 9457), each with what the caller can do about it.

use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use leasehold::{Error, ErrorKind};
use serde::Serialize;

/// The page that explains each problem; the code is the anchor.
const PAGE: &str = "https://github.com/leasehold/leasehold/blob/main/docs/http-api.md#";

const MEDIA: &str = "application/problem+json";

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    InvalidRequest,
    Unauthorized,
    MissingRight,
    NameNotAllowed,
    ForeignOrigin,
    UnknownPath,
    MethodNotAllowed,
    SlowBody,
    Busy,
    TimedOut,
    NotHeld,
    RequestEnded,
    BodyTooLarge,
    NotJson,
    Unsupported,
    HeadTooLarge,
    LimitReached,
    TooManyConnections,
    Stopping,
    StoreUnavailable,
}

impl Code {
    /// Every code, for the test that compares them with the documents.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 20] = [
        Self::InvalidRequest,
        Self::Unauthorized,
        Self::MissingRight,
        Self::NameNotAllowed,
        Self::ForeignOrigin,
        Self::UnknownPath,
        Self::MethodNotAllowed,
        Self::SlowBody,
        Self::Busy,
        Self::TimedOut,
        Self::NotHeld,
        Self::RequestEnded,
        Self::BodyTooLarge,
        Self::NotJson,
        Self::Unsupported,
        Self::LimitReached,
        Self::HeadTooLarge,
        Self::TooManyConnections,
        Self::Stopping,
        Self::StoreUnavailable,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid-request",
            Self::Unauthorized => "unauthorized",
            Self::MissingRight => "missing-right",
            Self::NameNotAllowed => "name-not-allowed",
            Self::ForeignOrigin => "foreign-origin",
            Self::UnknownPath => "unknown-path",
            Self::MethodNotAllowed => "method-not-allowed",
            Self::SlowBody => "slow-body",
            Self::Busy => "busy",
            Self::TimedOut => "timed-out",
            Self::NotHeld => "not-held",
            Self::RequestEnded => "request-ended",
            Self::BodyTooLarge => "body-too-large",
            Self::NotJson => "not-json",
            Self::Unsupported => "unsupported",
            Self::HeadTooLarge => "head-too-large",
            Self::LimitReached => "limit-reached",
            Self::TooManyConnections => "too-many-connections",
            Self::Stopping => "stopping",
            Self::StoreUnavailable => "store-unavailable",
        }
    }

    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::InvalidRequest => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::MissingRight | Self::NameNotAllowed | Self::ForeignOrigin => StatusCode::FORBIDDEN,
            Self::UnknownPath => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::SlowBody => StatusCode::REQUEST_TIMEOUT,
            Self::Busy | Self::TimedOut | Self::NotHeld => StatusCode::CONFLICT,
            Self::RequestEnded => StatusCode::GONE,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
            Self::LimitReached => StatusCode::TOO_MANY_REQUESTS,
            Self::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::TooManyConnections | Self::Stopping | Self::StoreUnavailable => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }

    /// Whether the same request may succeed in a moment.
    fn is_temporary(self) -> bool {
        matches!(self.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
    }

    /// Whether the same request may succeed at another server of the same store: this server refuses it for a reason of its own.
    fn is_of_this_server(self) -> bool {
        matches!(self, Self::LimitReached | Self::TooManyConnections | Self::Stopping)
    }

    fn title(self) -> &'static str {
        match self {
            Self::InvalidRequest => "the request is invalid",
            Self::Unauthorized => "the request has no valid token",
            Self::MissingRight => "the token lacks a right",
            Self::NameNotAllowed => "the token is not for this name",
            Self::ForeignOrigin => "the request comes from another site",
            Self::UnknownPath => "there is no such path",
            Self::MethodNotAllowed => "the path has no such method",
            Self::SlowBody => "the body did not arrive in time",
            Self::Busy => "the lock is held",
            Self::TimedOut => "the lock was not granted in time",
            Self::NotHeld => "the lock is not held like that",
            Self::RequestEnded => "the request has ended",
            Self::BodyTooLarge => "the body is too large",
            Self::NotJson => "the body is not declared as JSON",
            Self::Unsupported => "the lock or the store does not support this",
            Self::HeadTooLarge => "the request's head is too large",
            Self::LimitReached => "a limit of the server is reached",
            Self::TooManyConnections => "the server has no place for this connection",
            Self::Stopping => "the server is stopping",
            Self::StoreUnavailable => "the store did not answer",
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::InvalidRequest => "correct what the detail names; /v1/openapi.json describes every field",
            Self::Unauthorized => "send the header `Authorization: Bearer TOKEN` with a token of this server",
            Self::MissingRight => {
                "use a token whose line of the token file has the right that the detail names"
            }
            Self::NameNotAllowed => "use a token for this name; GET /v1/access lists the prefixes of yours",
            Self::ForeignOrigin => "call the server by its own address, and not from a page of another site",
            Self::UnknownPath | Self::MethodNotAllowed => {
                "/v1/openapi.json lists the paths and their methods"
            }
            Self::SlowBody => "send the body at once",
            Self::Busy => "wait in the queue with `wait_ms`, or try again later",
            Self::TimedOut => "wait longer with `wait_ms`, or look at the holders: GET the lock",
            Self::NotHeld => "GET the lock for its holders and their tokens",
            Self::RequestEnded => "acquire the lock by a new request with a new `request_id`",
            Self::BodyTooLarge => "send a shorter body",
            Self::NotJson => "send the header `Content-Type: application/json`",
            Self::Unsupported => "the detail names what is supported",
            Self::HeadTooLarge => "send fewer and shorter headers, and a shorter path",
            Self::LimitReached => "release leases or close connections, or try again later",
            Self::TooManyConnections => {
                "try again; requests with a token and those over the Unix socket have places of their own, which --max-connections sets"
            }
            Self::Stopping => "try again: another instance, or this one after its restart",
            Self::StoreUnavailable => "try again; check the store with `leasehold doctor`",
        }
    }
}

/// An answer that is an error.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) code: Code,
    pub(crate) detail: String,
    /// Whether another server of the same store may be asked.
    try_another: bool,
}

#[derive(Serialize)]
struct Body<'a> {
    r#type: String,
    code: &'a str,
    title: &'a str,
    status: u16,
    detail: &'a str,
    remedy: &'a str,
    try_another: bool,
}

impl Problem {
    pub(crate) fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), try_another: code.is_of_this_server() }
    }

    /// A whole answer, for a connection on which no request was received. It is the last one.
    pub(crate) fn to_answer(&self) -> String {
        let (status, body) = (self.code.status(), self.to_json());
        let reason = status.canonical_reason().unwrap_or_default();
        let retry = if self.code.is_temporary() { "Retry-After: 1\r\n" } else { "" };
        format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {MEDIA}\r\n{retry}Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
            status.as_u16(),
            body.len()
        )
    }

    fn to_json(&self) -> String {
        let Self { code, detail, try_another } = self;
        let body = Body {
            r#type: format!("{PAGE}{}", code.as_str()),
            code: code.as_str(),
            title: code.title(),
            status: code.status().as_u16(),
            detail,
            remedy: code.remedy(),
            try_another: *try_another,
        };
        // It has only texts and a number.
        serde_json::to_string(&body).unwrap_or_default()
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::of(&error)
    }
}

impl Problem {
    /// What this error of the library is for a caller.
    pub(crate) fn of(error: &Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Invalid => Code::InvalidRequest,
            ErrorKind::Unsupported => Code::Unsupported,
            ErrorKind::Lost | ErrorKind::Stale | ErrorKind::Ahead => Code::RequestEnded,
            ErrorKind::NotOwner => Code::NotHeld,
            ErrorKind::QueueFull => Code::LimitReached,
            ErrorKind::Closed => Code::Stopping,
            _ => Code::StoreUnavailable,
        };
        // The limit of waiters is the store's, which all servers have.
        let is_of_store = error.kind() == ErrorKind::QueueFull;
        let problem = Self::new(code, format!("{error:#}"));
        Self { try_another: problem.try_another && !is_of_store, ..problem }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let code = self.code;
        let mut response = (code.status(), self.to_json()).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA));
        if code == Code::Unauthorized {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"leasehold\""));
        }
        if code.is_temporary() {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_for_the_moment_says_when_and_where_to_try_again() {
        let elsewhere = [Code::LimitReached, Code::TooManyConnections, Code::Stopping];
        for code in Code::ALL {
            let problem = Problem::new(code, "because");
            let (text, status) = (problem.to_answer(), code.status().as_u16());
            let response = problem.into_response();
            let is_for_the_moment = [429, 503].contains(&status);
            assert_eq!(response.headers().contains_key(RETRY_AFTER), is_for_the_moment, "{code:?}");
            assert_eq!(text.contains("\r\nRetry-After: 1\r\n"), is_for_the_moment, "{text}");
            let expected = format!("\"try_another\":{}", elsewhere.contains(&code));
            assert!(text.ends_with(&format!("{expected}}}")), "{text}");
            assert!(is_for_the_moment || !elsewhere.contains(&code));
        }
    }

    #[tokio::test]
    async fn full_queue_of_the_store_is_full_at_every_server() {
        let store = leasehold::testing::TestStore::new();
        let (holder, client) = (store.client().unwrap(), store.client().unwrap());
        let _held = holder.mutex("a").lock().await.unwrap();
        let full = client.mutex("a").max_waiters(0).lock_timeout(std::time::Duration::from_secs(60)).await;
        let problem = Problem::from(full.unwrap_err());
        assert_eq!((problem.code, problem.try_another), (Code::LimitReached, false));
    }
}
