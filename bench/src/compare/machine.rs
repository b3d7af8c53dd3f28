//! The machine.

use std::time::{SystemTime, UNIX_EPOCH};

use super::results::Machine;
use crate::program::Program;

/// Describes the machine, and starts each of the servers for its version.
pub(crate) fn look(programs: &[Program]) -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let versions: Vec<String> = programs.iter().map(|program| program.version()).collect();
    Machine {
        processor: model.map_or_else(|| "unknown".to_owned(), |(_, model)| model.trim().to_owned()),
        cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        kernel: format!("Linux {}", read("/proc/sys/kernel/osrelease").trim()),
        server: versions.join(" and "),
        at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    }
}
