//! The target `leasehold-serve`: three servers on one store behind a balancer, and callers that know nothing but the balancer's address.
//!
//! Each server is a process of this program that runs the library of `leasehold serve`. The callers are written as `docs/http-api.md` tells the
//! author of a client. The balancer passes bytes, and looks at the path of a request only in order to lose answers and to aim a fault.

mod balancer;
mod caller;
mod server;

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use leasehold_bench::compare::process::Process;
use rustix::process::{Pid, Signal, kill_process};

use crate::faults::Fault;
use crate::stores::{Done, Injection};
use crate::workers::wait_until;

use balancer::Balancer;
pub use caller::{Repeats, run as run_caller};
pub use server::run as run_server;

/// The bearer token of all callers: the servers listen on the loopback address.
const TOKEN: &str = "torture-0123456789abcdef0123456789abcdef";

/// Servers of a fleet.
const SERVERS: usize = 3;

/// How long a stopped server's last answers may take.
const STOPPING: Duration = Duration::from_secs(10);

/// How long a fault waits for a renewal to aim at.
const RENEWAL: Duration = Duration::from_secs(1);

/// The servers of one run, and the balancer before them. All of it ends when this value is dropped.
pub struct Fleet {
    store: String,
    balancer: Balancer,
    servers: Vec<Process>,
}

impl Fleet {
    /// Starts the servers and the balancer.
    ///
    /// # Errors
    ///
    /// Why something does not start.
    pub fn start(store: &str) -> Result<Self, String> {
        let (mut servers, mut ports) = (Vec::new(), Vec::new());
        for _ in 0..SERVERS {
            let (server, port) = start(store)?;
            servers.push(server);
            ports.push(port);
        }
        let balancer = Balancer::start(&ports).map_err(|error| error.to_string())?;
        Ok(Self { store: store.to_owned(), balancer, servers })
    }

    /// The address for callers.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.balancer.address())
    }

    /// Injects a fault of the servers or of the connections with them, and returns when all servers answer again.
    pub(crate) fn inject(&mut self, injection: &mut Injection<'_>) -> Done {
        let number = injection.rng.index(self.servers.len());
        match injection.fault {
            Fault::ServeKill => {
                self.servers[number].kill();
                let down = injection.duration(0, 60);
                sleep(down);
                self.restart(number)?;
                Ok(format!("server {number}, down for {} ms", down.as_millis()))
            }
            Fault::ServeTerm => {
                signal(&self.servers[number], Signal::TERM);
                self.servers[number].answer(STOPPING).map_err(|why| format!("server {number}: {why}"))?;
                self.restart(number)?;
                Ok(format!("server {number}"))
            }
            Fault::ServeStop => {
                let aimed = (injection.rng.index(2) == 0).then(|| self.with_renewal()).flatten();
                let number = aimed.unwrap_or(number);
                let time = injection.duration(20, 250);
                signal(&self.servers[number], Signal::STOP);
                sleep(time);
                signal(&self.servers[number], Signal::CONT);
                let has = if aimed.is_some() { " with a renewal" } else { "" };
                Ok(format!("server {number}{has} for {} ms", time.as_millis()))
            }
            Fault::ServeCut => {
                let times = injection.rng.between(1, 8);
                for _ in 0..times {
                    self.balancer.cut();
                    sleep(injection.duration(0, 4));
                }
                Ok(format!("{times} times"))
            }
            Fault::AcquireUnanswered => self.lose_answers("/acquire", injection),
            Fault::ReleaseUnanswered => self.lose_answers("/release", injection),
            other => unreachable!("{other:?} is no fault of a fleet"),
        }
    }

    fn restart(&mut self, number: usize) -> Result<(), String> {
        let (server, port) = start(&self.store)?;
        self.servers[number] = server;
        self.balancer.direct(number, port);
        Ok(())
    }

    /// The server that receives the next renewal, right after it was passed on.
    fn with_renewal(&self) -> Option<usize> {
        self.balancer.forget_renewal();
        let mut found = None;
        wait_until(RENEWAL, || {
            found = self.balancer.last_renewal();
            found.is_some()
        });
        found
    }

    fn lose_answers(&self, to: &'static str, injection: &mut Injection<'_>) -> Done {
        let time = injection.duration(20, 80);
        self.balancer.lose_answers(Some(to));
        sleep(time);
        match self.balancer.lose_answers(None) {
            0 => Err("there was no such answer".to_owned()),
            lost => Ok(format!("{lost} answers in {} ms", time.as_millis())),
        }
    }
}

/// Starts a server, and returns its port.
fn start(store: &str) -> Result<(Process, u16), String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(own);
    command.args(["server", store]);
    let server = Process::spawn(command).map_err(|why| format!("a server of leasehold serve: {why}"))?;
    let port = server.hello.runtime.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let port = port.ok_or_else(|| format!("a server listens on {}", server.hello.runtime))?;
    Ok((server, port))
}

fn signal(server: &Process, signal: Signal) {
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // It fails only if the server has ended by itself, which its callers and its next start show.
        let _ = kill_process(pid, signal);
    }
}
