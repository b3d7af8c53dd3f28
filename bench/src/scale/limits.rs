//! Whether this machine can hold a scenario: memory, open files and ports, checked before it begins.

use std::fs;

use leasehold_testkit::Server;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setpriority_process, setrlimit};

/// Bytes for a lease at the server and in its client, and for a connection at both ends: upper bounds.
const PER_LEASE: u64 = 4_000;
const PER_CONNECTION: u64 = 80_000;
/// Bytes of a process, and of a server, without leases and connections.
const PER_PROCESS: u64 = 30_000_000;
/// The share of the available memory that a scenario may need.
const SHARE_PERCENT: u64 = 70;
/// Files of a process besides its connections.
const FILES: u64 = 100;

/// The priority of servers, as `nice` counts it.
const PRIORITY: i32 = -10;

/// Gives servers the processor before their clients, as if they had a machine of their own: with hundreds of busy clients on two cores a
/// server would have a hundredth of them. A system that does not allow that leaves them as they are.
pub(super) fn prefer(servers: &[Server]) {
    for server in servers {
        let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw);
        let _ = setpriority_process(pid, PRIORITY);
    }
}

/// What a scenario needs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    pub(super) leases: u64,
    /// Connections to all servers.
    pub(super) connections: u64,
    /// Most connections of one process, which may be a server.
    pub(super) most: u64,
    /// Processes, with the servers.
    pub(super) processes: u64,
}

/// What the machine has.
#[derive(Clone, Copy, Debug)]
struct Limits {
    memory: u64,
    files: u64,
    ports: u64,
}

impl Need {
    /// Raises the limit of open files as far as it may be raised, for the processes that will be started, and checks the need against the limits.
    ///
    /// # Errors
    ///
    /// What does not suffice, and what helps.
    pub(super) fn check(self) -> Result<(), String> {
        self.fits(Limits { memory: available_memory(), files: raise_files(), ports: ports() })
    }

    fn fits(self, limits: Limits) -> Result<(), String> {
        let files = self.most + FILES;
        if files > limits.files {
            return Err(format!(
                "a process needs {files} open files, and the limit is {}: raise it with `ulimit -n`, or lower --size",
                limits.files
            ));
        }
        if self.most > limits.ports {
            return Err(format!(
                "{} connections to one server need as many ports, and net.ipv4.ip_local_port_range has {}: lower --size",
                self.most, limits.ports
            ));
        }
        let needed =
            self.leases * PER_LEASE + self.connections * PER_CONNECTION + self.processes * PER_PROCESS;
        if needed > limits.memory / 100 * SHARE_PERCENT {
            return Err(format!(
                "about {} MB of memory are needed, and {} MB are available, of which a scenario may use {SHARE_PERCENT} %: lower --size",
                needed / 1_000_000,
                limits.memory / 1_000_000
            ));
        }
        Ok(())
    }
}

/// In bytes.
fn available_memory() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1_024
}

fn raise_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // An error leaves the limit as it is, which is then read.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Ports for outgoing connections to one address.
fn ports() -> u64 {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut ends = range.split_whitespace().filter_map(|end| end.parse::<u64>().ok());
    ends.next().zip(ends.next()).map_or(0, |(first, last)| last.saturating_sub(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory: 10_000_000_000, files: 20_000, ports: 28_000 };

    #[test]
    fn what_does_not_fit_is_refused_with_what_helps() {
        let fits = |need: Need| need.fits(LIMITS).err().unwrap_or_default();
        assert_eq!(fits(Need { leases: 1_000_000, most: 19_900, processes: 9, ..Need::default() }), "");
        assert!(
            fits(Need { most: 20_000, ..Need::default() })
                .contains("needs 20100 open files, and the limit is 20000")
        );
        let wide = Limits { files: 100_000, ..LIMITS };
        assert!(
            Need { most: 30_000, ..Need::default() }
                .fits(wide)
                .unwrap_err()
                .contains("ip_local_port_range has 28000")
        );
        assert!(fits(Need { leases: 2_000_000, ..Need::default() }).contains("about 8000 MB"));
        assert!(fits(Need { connections: 100_000, ..Need::default() }).contains("--size"));
    }

    #[test]
    fn the_limits_of_this_machine_are_read() {
        assert!(available_memory() > 1_000_000 && raise_files() > 100 && ports() > 100);
    }
}
