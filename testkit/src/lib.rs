//! Real servers for tests, benchmarks and recipes. Each is started for one of them and exits with it.
//!
//! Every failure to start panics, since a test without its server has failed. Every wait has a limit, and panics at it.
//!
//! The crate `redis-test` also starts servers. It is not used here: it cannot restart a server on the same port and files, needs
//! `openssl` and `redis-cli`, offers one program only, and injects no network faults.

#![allow(clippy::missing_panics_doc, reason = "every function here panics if a server does not start")]

mod builder;
mod certificates;
mod cluster;
mod extent;
mod pause_detector;
mod port;
mod postgres;
mod process;
mod program;
mod proxy;
mod ruled_proxy;
mod script_rules;
mod sentinels;
mod server;
mod start;
mod wait;

pub use builder::Builder;
pub use certificates::{Certificates, NoCertificate, Pair};
pub use cluster::Cluster;
pub use extent::extent;
pub use pause_detector::{
    PauseDetector, retry_if_paused, retry_if_slow, unless_paused, unless_paused_blocking,
};
pub use port::Port;
pub use postgres::{Filling, PgBouncer, Postgres, PostgresOptions, Session, SmallDisk};
pub use program::Flavor;
pub use proxy::Proxy;
pub use ruled_proxy::{RuledProxy, Rules, positions};
pub use script_rules::SCRIPT_RULES;
pub use sentinels::Sentinels;
pub use server::Server;
pub use wait::{LIMIT, until, until_some, wait_until};
