//! The machine.

use std::time::{SystemTime, UNIX_EPOCH};

use leasehold_testkit::Server;

use super::results::Machine;

/// Describes the machine, and starts a server for its version.
pub(crate) fn look() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let server = Server::on_socket();
    let info: String = server.query(&["INFO", "server"]).unwrap_or_default();
    let version = info.lines().find_map(|line| line.trim_end().strip_prefix("redis_version:"));
    Machine {
        processor: model.map_or_else(|| "unknown".to_owned(), |(_, model)| model.trim().to_owned()),
        cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        kernel: format!("Linux {}", read("/proc/sys/kernel/osrelease").trim()),
        server: format!("Redis {}", version.unwrap_or("of unknown version")),
        at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    }
}
