//! The real engine of leasehold under simulated time, network and faults.
//!
//! One thread runs everything of a run: clients with their drivers, users' tasks, the network, the servers. All chance comes from
//! a seed, so a run can be repeated. `docs/simulation.md` says what is simulated and what is checked.

pub mod checks;
pub mod executor;
mod faults;
pub mod history;
pub mod network;
pub mod plan;
pub mod planted;
pub mod quorum;
pub mod rng;
pub mod run;
mod schedule;
pub mod server;
mod serving;
pub mod shrink;
mod stranger;
mod transport;
mod users;
pub mod world;
