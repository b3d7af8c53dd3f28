//! A PostgreSQL server behind a proxy.

use std::thread::sleep;

use leasehold_testkit::{Postgres, Proxy};

use super::injection::{Injection, disturb_network};
use crate::faults::Fault;

const KILL: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";

pub(super) struct Database {
    server: Postgres,
    proxy: Proxy,
}

impl Database {
    pub(super) fn start() -> Self {
        let server = Postgres::on_port();
        Self { proxy: Proxy::before_postgres(&server), server }
    }

    pub(super) fn url(&self) -> String {
        self.proxy.url()
    }

    pub(super) fn inject(&mut self, injection: &mut Injection<'_>) -> String {
        match injection.fault {
            Fault::ServerStop => {
                let time = injection.duration(20, 200);
                self.server.freeze();
                sleep(time);
                self.server.thaw();
                format!("for {} ms", time.as_millis())
            }
            Fault::ServerKill => {
                let time = injection.duration(0, 60);
                self.server.stop();
                sleep(time);
                self.server.start();
                format!("down for {} ms", time.as_millis())
            }
            Fault::ClientKill => {
                let times = injection.rng.between(1, 4);
                for _ in 0..times {
                    // A server that recovers from the fault before refuses.
                    let _ = self.server.try_run(KILL);
                    sleep(injection.duration(1, 10));
                }
                format!("{times} times")
            }
            _ => disturb_network(&self.proxy, injection),
        }
    }
}
