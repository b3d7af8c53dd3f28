//! A store that answers every command at once, without any rules: what remains is the client's own cost.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use leasehold_core::{
    Answer, ClientId, Command, Failure, Grant, Reply, Resource, SecretKey, StoreTime, Token, TokenRange,
};
use leasehold_store::clock::Clock;
use leasehold_store::{
    Batch, BoxFuture, Call, CallResult, Capabilities, EMBEDDED_POLL_INTERVALS, Store, StoreError,
};

use crate::client::Client;
use crate::engine::Session;
use crate::handle::{ClientOptions, Handle};
use crate::telemetry::ClientTelemetry;

/// A client of a store that grants every attempt at the second poll, as if its answer came over a connection. It has no driver, so
/// it renews nothing.
#[must_use]
pub fn instant_client() -> Client {
    let telemetry = ClientTelemetry::new("instant:");
    let session =
        Arc::new(Session::new(ClientId::new(1), SecretKey::new(1), Clock::System, telemetry.clone()));
    let store: Arc<dyn Store> = Arc::new(InstantStore(Arc::new(AtomicU64::new(1))));
    let handle = Handle::new(session, store, "instant:".to_owned(), ClientOptions::default(), telemetry);
    Client { handle: Arc::new(handle) }
}

/// The next token is its whole state.
struct InstantStore(Arc<AtomicU64>);

fn answer(next: &AtomicU64, command: &Command) -> CallResult {
    let reply = match command {
        Command::Acquire(acquire) => {
            let first = next.fetch_add(u64::from(acquire.reserve) + 1, Ordering::Relaxed);
            let last = first + u64::from(acquire.reserve);
            match (Token::new(first), Token::new(last)) {
                (Some(first), Some(last)) => Reply::Granted(Grant {
                    tokens: TokenRange { first, last },
                    valid_for: acquire.ttl,
                    is_plain: false,
                }),
                _ => return Err(unsupported()),
            }
        }
        Command::Release(_) => Reply::Released,
        _ => return Err(unsupported()),
    };
    Ok(Answer { at: StoreTime::ZERO, reply })
}

fn unsupported() -> StoreError {
    StoreError::new(Failure::NotSent, "this store only grants and releases")
}

impl Store for InstantStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(EMBEDDED_POLL_INTERVALS)
    }

    fn call(&self, call: Call, _: u32) -> BoxFuture<CallResult> {
        let (next, mut is_sent) = (self.0.clone(), false);
        Box::pin(poll_fn(move |context| {
            if std::mem::replace(&mut is_sent, true) {
                return Poll::Ready(answer(&next, &call.command));
            }
            context.waker().wake_by_ref();
            Poll::Pending
        }))
    }

    fn call_batch(&self, batch: Batch, _: u32) -> BoxFuture<Vec<CallResult>> {
        let answers = batch.iter().map(|Call { command, .. }| answer(&self.0, command)).collect();
        Box::pin(std::future::ready(answers))
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
}
