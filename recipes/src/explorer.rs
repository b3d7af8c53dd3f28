//! Every interleaving of a few clients' steps, on real servers.
//!
//! The search goes by length, so the first schedule that breaks a check is a shortest one. What the servers contain and what
//! each client was told make up a state; a state that was met before is not looked at again. Nothing here sleeps, and no two
//! runs differ.

mod event;
mod probe;
mod replay;
mod sandbox;
mod scenario;
mod search;
mod state;

pub use event::Event;
pub use sandbox::{CLOCK, Sandbox};
pub use scenario::{Check, Fault, MakeClient, NAMES, PROBE, Part, Scenario, Stay, Subject};
pub use search::{Findings, Violation, explore};
pub use state::Choice;
