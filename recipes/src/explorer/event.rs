//! One step of a schedule, as text for people.

use redis::Value;

/// One step of a schedule, as text for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The client. None: the event affects all of them.
    pub who: Option<usize>,
    /// The command, or what happened.
    pub action: String,
    /// The server's reply.
    pub reply: Option<String>,
    /// What the client concludes.
    pub notes: Vec<String>,
}

impl Event {
    /// An event that no reply follows.
    pub(super) fn of(who: Option<usize>, action: impl Into<String>) -> Self {
        Self { who, action: action.into(), reply: None, notes: Vec::new() }
    }
}

/// Rounds a remaining time up: a real server has always used a millisecond or two of it.
pub(super) fn in_whole_seconds(reply: Value) -> Value {
    match reply {
        Value::Int(ms) if ms > 0 && ms % 1_000 > 500 => Value::Int(ms - ms % 1_000 + 1_000),
        reply => reply,
    }
}
