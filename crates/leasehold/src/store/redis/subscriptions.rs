//! Subscriptions to the inboxes of a cluster's hash slots.

use leasehold_core::{Answer, ClientId, Effect, Failure, Reply};
use leasehold_redis_protocol::{Channels, inbox_of};

use super::connections::Connections;
use super::error::CallError;
use super::exec::CallOptions;
use super::{rights, wire};
use crate::store::StoreError;

/// Subscribes to a slot's inbox. Returns the error on failure.
pub(super) async fn subscribe(
    connections: &Connections,
    options: CallOptions<'_>,
    client: ClientId,
    slot: u16,
) -> Option<(u16, CallError)> {
    let channels = options.variant.channels();
    let mut command = redis::cmd(channels.subscribe_command());
    command.arg(inbox_of(client, Some(slot)));
    let mut driver_conn = connections.driver_conn();
    // A channel of a slot that is being imported is only served after ASKING, as its keys are.
    let reply = if options.is_asking && channels == Channels::Sharded {
        wire::pipeline(&mut driver_conn, vec![command], true).await.pop().unwrap_or(Ok(redis::Value::Nil))
    } else {
        driver_conn.send_packed_command(&command).await
    };
    match reply.and_then(redis::Value::extract_error) {
        Ok(_) => {
            connections.confirm_subscription(slot);
            None
        }
        Err(error) => {
            let rule = if channels == Channels::Sharded { "+ssubscribe" } else { "+subscribe" };
            Some((slot, CallError::from(&rights::of_command(error, rule, None))))
        }
    }
}

/// Adjusts the answer to a waiting attempt whose subscription failed. A redirect means that the slot is migrating: a grant
/// stays valid, but a queued attempt must go to a node where it can subscribe.
pub(super) fn require_subscription(answer: &mut Result<Answer, CallError>, error: &CallError) {
    let Ok(good) = answer else { return };
    if !matches!(error, CallError::Moved(_) | CallError::Ask(_) | CallError::TryAgain(_)) {
        let error = StoreError::from(error.clone());
        let failure = match error.failure {
            Failure::Permanent(_) => Failure::Permanent(Effect::Possible),
            _ => Failure::Unknown,
        };
        *answer = Err(CallError::Failed(StoreError { failure, ..error }));
    } else if matches!(good.reply, Reply::Queued(_)) {
        *answer = Err(CallError::NotSubscribed(Box::new(good.clone())));
    }
}
