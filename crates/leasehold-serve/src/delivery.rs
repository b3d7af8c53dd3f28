//! Grants whose answers are on their way to the caller.
//!
//! A caller that has closed its connection does not hear of its grant. The connection therefore knows the leases of answers that are not written yet,
//! and returns them when it ends.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use http_body_util::Full;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use leasehold::{Client, LeaseId};

/// Releases a lease of which its caller does not know, or leaves the caller time to repeat its request.
pub(crate) fn give_back(client: &Client, lease: &LeaseId) {
    if client.return_lease(lease) {
        return;
    }
    // The servers of a quorum have to be asked for it first.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        let (client, lease) = (client.clone(), lease.clone());
        runtime.spawn(async move { client.release_leases([&lease]).await });
    }
}

/// The leases of one connection's answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Delivery(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Their answers have not been taken by the connection.
    granted: Vec<LeaseId>,
    /// Their answers are in the connection's buffer.
    taken: Vec<LeaseId>,
}

impl Delivery {
    /// These leases are granted, and their answer is this body.
    pub(crate) fn answer(&self, leases: impl IntoIterator<Item = LeaseId>, body: Vec<u8>) -> Body {
        self.state().granted.extend(leases);
        Body::new(Answer { body: Full::from(body), delivery: self.clone() })
    }

    /// Everything in the connection's buffer was written.
    pub(crate) fn flushed(&self) {
        self.state().taken.clear();
    }

    /// Returns the leases whose answers were not written: the connection has ended.
    pub(crate) fn end(&self, client: &Client) {
        let State { granted, taken } = std::mem::take(&mut *self.state());
        for lease in granted.iter().chain(&taken) {
            give_back(client, lease);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The body of an answer with leases.
struct Answer {
    body: Full<Bytes>,
    delivery: Delivery,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        let mut state = self.delivery.state();
        let State { granted, taken } = &mut *state;
        // The answers of a connection are written one after the other.
        taken.append(granted);
        drop(state);
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn lease_is_returned_unless_its_answer_was_written() {
        let client = Client::connect("memory:").await.unwrap();
        let take =
            async |name: &str| client.mutex(name).detachable().lock().await.unwrap().detach().await.unwrap();
        for (is_taken, is_flushed) in [(false, false), (false, true), (true, false), (true, true)] {
            let (delivery, lease) = (Delivery::default(), take("a").await);
            let body = delivery.answer([lease.clone()], b"{}".to_vec());
            if is_taken {
                assert_eq!(body.collect().await.unwrap().to_bytes(), "{}");
            }
            if is_flushed {
                // Of an earlier answer, if this one was not taken.
                delivery.flushed();
            }
            delivery.end(&client);
            let is_written = is_taken && is_flushed;
            // A release is sent at once, and not before the next command.
            let wait = if is_written { Duration::ZERO } else { Duration::from_secs(60) };
            let guard = client.mutex("a").lock_timeout(wait).await.unwrap();
            assert_eq!(guard.is_none(), is_written, "taken: {is_taken}, flushed: {is_flushed}");
            client.release_leases([&lease]).await;
        }
    }
}
