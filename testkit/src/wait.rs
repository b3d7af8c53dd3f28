//! Waiting for a condition, within bounds.

use std::thread;
use std::time::{Duration, Instant};

/// How long a server may take for anything. Generous, since a busy machine is no fault of a test, and since a Sentinel
/// that sees the machine stall may keep still for half a minute.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Waits until it is so. `what` completes the sentence "it did not happen that".
pub fn wait_until(what: &str, is_so: impl FnMut() -> bool) {
    wait_or_explain(what, is_so, String::new);
}

/// Waits until it is so, for tests that are async.
pub async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let give_up = Instant::now() + LIMIT;
    while !is_so().await {
        assert!(Instant::now() < give_up, "within {LIMIT:?} it did not become so");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The same, and says what there was instead.
pub(crate) fn wait_or_explain(what: &str, mut is_so: impl FnMut() -> bool, explain: impl FnOnce() -> String) {
    if wait_for(|| is_so().then_some(())).is_none() {
        panic!("within {LIMIT:?} it did not happen that {what}\n{}", explain());
    }
}

/// Waits until there is something, and gives up with `None`.
pub(crate) fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let give_up = Instant::now() + LIMIT;
    loop {
        let found = look();
        if found.is_some() || Instant::now() > give_up {
            return found;
        }
        thread::sleep(Duration::from_millis(3));
    }
}
