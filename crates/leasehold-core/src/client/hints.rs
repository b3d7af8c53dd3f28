//! How often a push that proves nothing lets a client ask the store.

use core::time::Duration;

use crate::time::LocalTime;

/// Pushes cause at most one question per attempt or lease in this time, because any user of the server may send them.
const HINT_INTERVAL: Duration = Duration::from_secs(1);

/// Limits the questions that pushes cause.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HintLimit {
    /// A push has asked for a question that was not sent yet.
    is_pending: bool,
    /// The next one is sent then at the earliest.
    next_at: LocalTime,
}

impl HintLimit {
    /// When the question is due that a push asks for, at `at` or later.
    pub(super) fn due(&mut self, at: LocalTime) -> LocalTime {
        self.is_pending = true;
        at.max(self.next_at)
    }

    /// A question was sent, whatever its cause.
    pub(super) fn handle_sent(&mut self, now: LocalTime) {
        if core::mem::take(&mut self.is_pending) {
            self.next_at = now + HINT_INTERVAL;
        }
    }
}
