//! The client's side: pure state machines for one attempt, one lease, one hand-off budget and one quorum round.

pub(crate) mod attempt;
pub(crate) mod handoff;
mod hints;
pub(crate) mod lease;
pub(crate) mod quorum;
pub(crate) mod secrets;
