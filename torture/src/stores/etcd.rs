//! An etcd server behind a proxy.

use std::thread::sleep;

use leasehold_bench::compare::store::{Kind, Store};
use leasehold_testkit::Proxy;
use rustix::process::{Pid, Signal, kill_process};

use super::injection::{Done, Injection, disturb_network};
use crate::faults::Fault;

pub(super) struct Etcd {
    server: Store,
    proxy: Proxy,
}

impl Etcd {
    pub(super) fn start() -> Result<Self, String> {
        let server = Store::start(Kind::Etcd)?;
        let proxy = Proxy::before_port(server.port(), |port| format!("etcd://127.0.0.1:{port}"));
        Ok(Self { server, proxy })
    }

    pub(super) fn url(&self) -> String {
        self.proxy.url()
    }

    pub(super) fn inject(&mut self, injection: &mut Injection<'_>) -> Done {
        match injection.fault {
            Fault::ServerStop => {
                let time = injection.duration(20, 200);
                self.signal(Signal::STOP);
                sleep(time);
                self.signal(Signal::CONT);
                Ok(format!("for {} ms", time.as_millis()))
            }
            Fault::ServerKill => {
                let time = injection.duration(0, 60);
                self.server.kill();
                sleep(time);
                self.server.restart().expect("etcd starts with its files");
                Ok(format!("down for {} ms", time.as_millis()))
            }
            _ => Ok(disturb_network(&self.proxy, injection)),
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.server.pid()).ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(pid, signal).expect("it is our child");
    }
}
