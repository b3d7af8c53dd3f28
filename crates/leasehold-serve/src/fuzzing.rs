//! Requests without a connection, for the fuzz target in `fuzz/`. It is no part of the public API.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use leasehold::Client;
use serde_json::Value;
use tower_service::Service as _;

use crate::api::{Transport, router};
use crate::app::App;
use crate::caller::Caller;
use crate::config::Limits;
use crate::description::DESCRIPTION;
use crate::presence::Presence;
use crate::tokens::Tokens;

/// A request that waits is dropped after this time, as if its client had closed the connection.
const LIMIT: Duration = Duration::from_millis(2);

/// The members that the bodies of requests have, by the description.
///
/// # Panics
///
/// If the description has none.
#[must_use]
pub fn members() -> Vec<String> {
    let description: Value = serde_json::from_str(DESCRIPTION).expect("JSON");
    let schemas = description["components"]["schemas"].as_object().expect("schemas");
    let requests = schemas.iter().filter(|(name, _)| name.ends_with("Request")).map(|(_, schema)| schema);
    let members = requests.flat_map(|request| request["properties"].as_object().expect("members").keys());
    let mut members: Vec<String> = members.cloned().collect();
    members.sort_unstable();
    members.dedup();
    members
}

/// A request over the Unix socket.
#[derive(Debug)]
pub struct AnyRequest<'a> {
    /// Its method; any word.
    pub method: &'a str,
    /// Its path and query.
    pub target: &'a str,
    /// Whether the body is declared as JSON.
    pub is_json: bool,
    /// Its body.
    pub body: &'a [u8],
}

/// Sends the requests one after the other to a new server with a store in memory. What is no HTTP request is left out.
///
/// # Panics
///
/// If the server answers with an error of its own, or with an error that does not describe itself.
pub async fn send(requests: impl Iterator<Item = AnyRequest<'_>>) {
    let client = Client::connect("memory:").await.expect("a store in memory");
    let app = Arc::new(App::new(client, Tokens::default(), Limits::default()));
    let mut router = router(app);
    for AnyRequest { method, target, is_json, body } in requests {
        let media = if is_json { "application/json" } else { "text/plain" };
        let request = Request::builder().method(method).uri(target).header(CONTENT_TYPE, media);
        // As in `connection.rs`.
        let request =
            request.extension(Transport::Unix(Caller::of_socket(0, None))).extension(Presence::default());
        let request = request.extension(crate::delivery::Delivery::default());
        let Ok(request) = request.body(Body::from(body.to_vec())) else { continue };
        let Ok(Ok(response)) = tokio::time::timeout(LIMIT, router.call(request)).await else { continue };
        let status = response.status();
        assert!(!status.is_server_error(), "{method} {target}: {status}");
        if status.is_client_error() {
            let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a whole answer");
            let problem: Value = serde_json::from_slice(&bytes).expect("JSON");
            assert_eq!(problem["status"], status.as_u16(), "{method} {target}: {problem}");
            assert!(
                problem["code"].is_string() && problem["detail"].is_string(),
                "{method} {target}: {problem}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_those_of_all_requests() {
        let members = members();
        for one in ["request_id", "names", "leases", "token"] {
            assert!(members.iter().any(|member| member == one), "{one}: {members:?}");
        }
    }

    #[tokio::test]
    async fn requests_are_answered_dropped_or_left_out() {
        let lock = "/v1/locks/mutex/a/acquire";
        let request = |target, body| AnyRequest { method: "POST", target, is_json: true, body };
        let requests = [
            request(lock, b"{}".as_slice()),
            request(lock, b"{\"wait_ms\":60000}"),
            request(lock, b"["),
            request("no path", b""),
        ];
        send(requests.into_iter()).await;
    }
}
