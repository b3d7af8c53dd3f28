//! Bounded waits for a condition.

use std::thread;
use std::time::{Duration, Instant};

/// Limit of every wait. It is generous since the machine may be busy, and since a Sentinel that detects a stall of the machine does
/// nothing for half a minute.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Waits until the condition holds. `what` names the condition in the panic's message.
pub fn wait_until(what: &str, is_so: impl FnMut() -> bool) {
    wait_or_explain(what, is_so, String::new);
}

/// Waits until the condition holds, in an async test.
pub async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so().await {
        assert!(Instant::now() < deadline, "the condition does not hold after {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until there is a value, in an async test.
pub async fn until_some<T>(mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let mut found = None;
    until(async || {
        found = look().await;
        found.is_some()
    })
    .await;
    found.expect("it was waited for")
}

/// Waits until the condition holds, and adds an explanation to the panic's message.
pub(crate) fn wait_or_explain(what: &str, mut is_so: impl FnMut() -> bool, explain: impl FnOnce() -> String) {
    if wait_for(|| is_so().then_some(())).is_none() {
        panic!("not reached within {LIMIT:?}: {what}\n{}", explain());
    }
}

/// Waits until `look` returns a value. None: the limit has passed.
pub(crate) fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let found = look();
        if found.is_some() || Instant::now() > deadline {
            return found;
        }
        thread::sleep(Duration::from_millis(3));
    }
}
