//! Every interleaving of a few clients' steps, on real servers.
//!
//! The search is breadth-first, so the first schedule that breaks a check is a shortest one. A state is what the servers
//! contain and which replies each client has received; each state is visited once. The search never sleeps, and every run
//! gives the same result.

mod event;
mod probe;
mod replay;
mod sandbox;
mod scenario;
mod search;
mod state;

pub use event::Event;
pub use sandbox::{CLOCK, Sandbox};
pub use scenario::{Check, Fault, HolderAction, MakeClient, NAMES, PROBE, Participant, Scenario, Subject};
pub use search::{Findings, Violation, explore};
pub use state::Choice;
