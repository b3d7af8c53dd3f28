//! Real servers for the tests, the benchmarks and the recipes, each started for one of them and ended with it.
//!
//! What can't be started panics: a test without its server has failed. Every wait is bounded and panics too.
//!
//! The crate `redis-test` also starts servers. It is not used here, since it can't start one again on the same port
//! and files, calls `openssl` and `redis-cli`, and has neither a choice of programs nor faults on the way.

#![allow(clippy::missing_panics_doc, reason = "every function here panics where a server can't be had")]

mod builder;
mod certificates;
mod cluster;
mod pauses;
mod port;
mod process;
mod program;
mod proxy;
mod sentinels;
mod server;
mod wait;

pub use builder::Builder;
pub use certificates::{Certificates, Pair};
pub use cluster::Cluster;
pub use pauses::{Pauses, undisturbed};
pub use port::Port;
pub use program::Flavor;
pub use proxy::Proxy;
pub use sentinels::Sentinels;
pub use server::Server;
pub use wait::{LIMIT, until, wait_until};
