//! A `run` inside another one: detects that it waits for a lock that its own ancestor holds, which is a deadlock.

use std::time::Duration;

use leasehold::{HolderInfo, Kind, LockInfo, Token};

use crate::exit::Stop;
use crate::lock::Lock;
use crate::process::is_ancestor;
use crate::text::printable;

/// The tokens of all enclosing runs, the outermost first. A token identifies a grant; a name would leave the store and the kind
/// open.
const TOKENS: &str = "LEASEHOLD_TOKENS";

/// The interval at which the lock is polled until the attempt is in its queue.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The variable for the command that runs under these tokens.
pub(crate) fn variable(tokens: &[Token]) -> (&'static str, String) {
    let tokens = enclosing().into_iter().chain(tokens.iter().map(|token| token.get()));
    (TOKENS, tokens.map(|token| token.to_string()).collect::<Vec<_>>().join(" "))
}

fn enclosing() -> Vec<u64> {
    let tokens = std::env::var(TOKENS).unwrap_or_default();
    tokens.split(' ').filter_map(|token| token.parse().ok()).collect()
}

/// Resolves when the attempt certainly waits for a lock of an ancestor: the ancestor waits for the end of its command, and the
/// command waits for the lock. Otherwise it stays pending.
pub(crate) async fn until_self_deadlock(lock: &Lock) -> Stop {
    let tokens = enclosing();
    let is_own = |holder: &HolderInfo| {
        // A process that the holder does not wait for may have inherited the variable, for example a job of `at`.
        !holder.retained
            && tokens.contains(&holder.token.get())
            && holder.metadata.pid.is_some_and(is_ancestor)
    };
    while !tokens.is_empty() && lock.waits() {
        // The attempt reports an unavailable store.
        if let Ok(views) = lock.inspect_all().await {
            // Of several locks one is enough, whichever of them the attempt waits for now: it needs all of them.
            for view in &views {
                if let Some(holder) = blocking(lock, view, is_own) {
                    return refusal(view, holder);
                }
            }
            let is_queued = views.iter().any(|view| view.waiters.iter().any(|waiter| waiter.is_own));
            if is_queued || !views.iter().any(|view| view.holders.iter().any(is_own)) {
                break;
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    std::future::pending().await
}

/// The ancestor's lease that blocks the attempt until the ancestor releases it.
fn blocking<'a>(
    lock: &Lock,
    view: &'a LockInfo,
    is_own: impl Fn(&HolderInfo) -> bool,
) -> Option<&'a HolderInfo> {
    let own: Vec<&HolderInfo> = view.holders.iter().filter(|holder| is_own(holder)).collect();
    let is_blocked = match view.kind {
        // Other holders may release their permits.
        Kind::Semaphore => own.iter().map(|holder| holder.weight).sum::<u32>() >= view.capacity,
        // Readers share the lock, unless a writer waits between them.
        Kind::ReadWrite if lock.is_shared() => view.waiters.iter().any(|waiter| waiter.is_own),
        _ => true,
    };
    own.into_iter().find(|holder| is_blocked && !lock.is_of_owner(holder.owner.as_deref()))
}

fn refusal(view: &LockInfo, holder: &HolderInfo) -> Stop {
    let (name, pid) = (printable(&view.name), holder.metadata.pid.unwrap_or_default());
    Stop::usage(format!(
        "\"{name}\" is held by the leasehold that this command runs under (pid {pid}), so this one would wait for itself: \
         leave out one of the two, or use --owner ID in both"
    ))
}
