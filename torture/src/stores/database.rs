//! A PostgreSQL server behind a proxy.

use std::thread::sleep;

use leasehold_testkit::{Postgres, Proxy};

use super::injection::{Done, Injection, disturb_network, kill_repeatedly};
use super::notifier;
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

    pub(super) fn inject(&mut self, injection: &mut Injection<'_>) -> Done {
        match injection.fault {
            Fault::ServerStop => {
                let time = injection.duration(20, 200);
                self.server.freeze();
                sleep(time);
                self.server.thaw();
                Ok(format!("for {} ms", time.as_millis()))
            }
            Fault::ServerKill => {
                let time = injection.duration(0, 60);
                self.server.stop();
                sleep(time);
                self.server.start();
                Ok(format!("down for {} ms", time.as_millis()))
            }
            // A server that recovers from the fault before refuses.
            Fault::ClientKill => kill_repeatedly(injection, || self.server.try_run(KILL).map(|_| ())),
            Fault::Stranger => notifier::notify(&self.server, injection),
            _ => Ok(disturb_network(&self.proxy, injection)),
        }
    }
}
