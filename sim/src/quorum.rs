//! Redlock, simulated: the library's engine and its quorum store over three or five nodes.
//!
//! Each node is the core's model with a clock, data and a restart guard of its own, and each client has a connection to each of
//! them. What is checked are guards, because no single node knows who holds the lock.

mod books;
mod checks;
mod event;
mod faults;
mod host;
mod network;
mod node;
pub mod plan;
pub mod planted;
pub mod rate;
pub mod run;
mod users;
mod world;
