//! What happened in one step, as people are told it.

use redis::Value;

/// What happened, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Which client; none where it happens to all.
    pub who: Option<usize>,
    /// What it said, or what happened.
    pub said: String,
    /// What it was answered.
    pub reply: Option<String>,
    /// What it makes of that.
    pub notes: Vec<String>,
}

/// A real server has always lost a millisecond or two of a span.
pub(super) fn in_whole_seconds(reply: Value) -> Value {
    match reply {
        Value::Int(ms) if ms > 0 && ms % 1_000 > 500 => Value::Int(ms - ms % 1_000 + 1_000),
        reply => reply,
    }
}
