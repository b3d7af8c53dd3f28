//! A `run` inside of another: whether it waits for a lock that its own ancestors hold, and so for itself.

use std::time::Duration;

use leasehold::{HolderInfo, Kind, LockInfo, Token};

use crate::exit::Stop;
use crate::inspect::printable;
use crate::lock::Lock;
use crate::process::is_ancestor;

/// The tokens of all enclosing runs, the outermost first. A name alone would not tell the store and the kind: a token is given
/// once.
const TOKENS: &str = "LEASEHOLD_TOKENS";

/// How often it is looked whether the attempt is in the queue.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The variable for the command that runs under this token.
pub(crate) fn variable(token: Token) -> (&'static str, String) {
    let tokens = enclosing().into_iter().chain([token.get()]);
    (TOKENS, tokens.map(|token| token.to_string()).collect::<Vec<_>>().join(" "))
}

fn enclosing() -> Vec<u64> {
    let tokens = std::env::var(TOKENS).unwrap_or_default();
    tokens.split(' ').filter_map(|token| token.parse().ok()).collect()
}

/// Ends, while the lock is waited for, once it is certain that an ancestor holds it: the ancestor waits for its command to end,
/// and the command for the lock.
pub(crate) async fn until_self_deadlock(lock: &Lock) -> Stop {
    let tokens = enclosing();
    let is_own = |holder: &HolderInfo| {
        // The variable may have been passed on to a process that the holder does not wait for, by `at` for instance.
        !holder.retained
            && tokens.contains(&holder.token.get())
            && holder.metadata.pid.is_some_and(is_ancestor)
    };
    while !tokens.is_empty() && lock.waits() {
        // A store that does not answer is reported by the attempt.
        if let Ok(view) = lock.inspect().await {
            if let Some(holder) = blocking(lock, &view, is_own) {
                return refusal(lock, holder);
            }
            if view.waiters.iter().any(|waiter| waiter.is_own) || !view.holders.iter().any(is_own) {
                break;
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    std::future::pending().await
}

/// The ancestor's lease that stands in the way of the attempt for as long as it lasts.
fn blocking<'a>(
    lock: &Lock,
    view: &'a LockInfo,
    is_own: impl Fn(&HolderInfo) -> bool,
) -> Option<&'a HolderInfo> {
    let own: Vec<&HolderInfo> = view.holders.iter().filter(|holder| is_own(holder)).collect();
    let is_blocked = match view.kind {
        // Others may give their permits back.
        Kind::Semaphore => own.iter().map(|holder| holder.weight).sum::<u32>() >= view.capacity,
        // Readers are granted beside each other, unless a writer waits between them.
        Kind::ReadWrite if lock.is_shared() => view.waiters.iter().any(|waiter| waiter.is_own),
        _ => true,
    };
    own.into_iter().find(|holder| is_blocked && !lock.is_of_owner(holder.owner.as_deref()))
}

fn refusal(lock: &Lock, holder: &HolderInfo) -> Stop {
    let (name, pid) = (printable(lock.name()), holder.metadata.pid.unwrap_or_default());
    Stop::usage(format!(
        "\"{name}\" is held by the leasehold that this command runs under (pid {pid}), so this one would wait for itself: \
         leave out one of the two, or use --owner ID in both"
    ))
}
