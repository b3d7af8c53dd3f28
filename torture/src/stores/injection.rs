//! What an injection needs to know, and what several kinds of servers share.

use std::time::Duration;

use leasehold_testkit::Server;
use redis::RedisResult;

use crate::faults::Fault;
use crate::rng::Rng;

/// What an injection needs to know.
pub(crate) struct Injection<'a> {
    pub(crate) fault: Fault,
    pub(crate) ttl: Duration,
    pub(crate) rng: &'a mut Rng,
}

impl Injection<'_> {
    /// A random time between these parts of the ttl, in percent.
    pub(crate) fn duration(&mut self, low: u64, high: u64) -> Duration {
        let ttl = u64::try_from(self.ttl.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(ttl * self.rng.between(low, high) / 100)
    }
}

/// Closes all connections of clients, also those that receive pushes.
pub(super) fn kill_clients(server: &Server) {
    for kind in ["normal", "pubsub"] {
        let _: RedisResult<i64> = server.query(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]);
    }
}
