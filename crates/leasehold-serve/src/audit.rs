//! What the operator is told of the leases that a caller takes from another one.

use leasehold::{Error, HolderInfo, Kind};

use crate::caller::Caller;
use crate::config::Notices;

/// Tells who has released which lock by force, and whose lease that was. If the store has not answered, it may have been.
pub(crate) fn forced_release(
    notices: &Notices,
    caller: &Caller,
    (kind, name): (Kind, &str),
    outcome: Result<&[HolderInfo], &Error>,
) {
    match outcome {
        Ok([]) => {}
        Ok(released) => {
            let tokens: Vec<String> = released.iter().map(|holder| holder.token.to_string()).collect();
            let (tokens, who) = (tokens.join(", "), if released.len() == 1 { "holder" } else { "holders" });
            tracing::warn!(%kind, lock = name, %caller, tokens, "a lock was released by force");
            notices
                .tell(&format!("{caller} has released {kind} {name:?} by force: {who} with token {tokens}"));
        }
        Err(error) if error.is_unavailable() => {
            tracing::warn!(%kind, lock = name, %caller, %error, "a forced release has no answer");
            notices.tell(&format!(
                "{caller} has asked to release {kind} {name:?} by force, and the store has not confirmed it"
            ));
        }
        // The store has released nothing.
        Err(_) => {}
    }
}
