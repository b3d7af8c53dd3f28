//! Subscriptions to the inboxes of a cluster's hash slots.

use leasehold_core::{Answer, ClientId, Effect, Failure, Reply};
use leasehold_redis_protocol::{Channels, inbox_of};
use leasehold_store::StoreError;

use super::error::CallError;
use super::pushes::Subscription;
use super::{rights, wire};

/// What became of a subscription.
pub(super) enum Outcome {
    /// Confirmed: pushes arrive from now on.
    New,
    /// There is no connection for pushes now. Waiters ask once there is one.
    Absent,
    Failed(CallError),
}

/// Subscribes to a slot's inbox.
pub(super) async fn subscribe(
    subscription: &Subscription,
    channels: Channels,
    is_asking: bool,
    client: ClientId,
    slot: u16,
) -> Outcome {
    let connection = subscription.connection().filter(|_| !subscription.is_lost());
    let Some(mut connection) = connection else { return Outcome::Absent };
    let mut command = redis::cmd(channels.subscribe_command());
    command.arg(inbox_of(client, Some(slot)));
    // A channel of a slot that is being imported is only served after ASKING, as its keys are.
    let reply = if is_asking && channels == Channels::Sharded {
        wire::pipeline(&mut connection, vec![command], true).await.pop().unwrap_or(Ok(redis::Value::Nil))
    } else {
        connection.send_packed_command(&command).await
    };
    let reply = reply.and_then(redis::Value::extract_error);
    if subscription.is_lost() {
        return Outcome::Absent;
    }
    match reply {
        Ok(_) => {
            subscription.confirm_slot(slot);
            Outcome::New
        }
        Err(error) if error.code().is_none() => {
            // It may have been lost a moment ago, or hang.
            subscription.lose();
            Outcome::Absent
        }
        Err(error) => {
            let rule = if channels == Channels::Sharded { "+ssubscribe" } else { "+subscribe" };
            Outcome::Failed(CallError::from(&rights::of_command(error, rule, None)))
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
        *answer = Err(CallError::Failed(error.known_as(failure)));
    } else if matches!(good.reply, Reply::Queued(_)) {
        *answer = Err(CallError::NotSubscribed(Box::new(good.clone())));
    }
}
