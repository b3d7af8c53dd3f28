//! What servers and processes say of themselves: counters, memory, and the rate of commands while it is sampled.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use leasehold_testkit::Server;

use crate::compare::Used;

/// How often a sampler asks.
const STEP: Duration = Duration::from_millis(100);
/// The time over which a rate is taken.
const WINDOW: f64 = 1.0;

/// The fields of INFO, those of several servers added up.
#[derive(Clone, Debug, Default)]
pub(super) struct Info(BTreeMap<String, f64>);

impl Info {
    pub(super) fn of(servers: &[Server]) -> Result<Self, String> {
        let mut sum = Self::default();
        for server in servers {
            let text: String = server.query(&["INFO", "everything"]).map_err(|error| error.to_string())?;
            sum.add(&text);
        }
        Ok(sum)
    }

    /// `used_memory:1000`, and `cmdstat_get:calls=7,usec=8,…`, of which the calls are kept.
    fn add(&mut self, text: &str) {
        for (name, value) in text.lines().filter_map(|line| line.trim_end().split_once(':')) {
            let value =
                value.strip_prefix("calls=").map_or(value, |rest| rest.split(',').next().unwrap_or(""));
            if let Ok(value) = value.parse::<f64>() {
                *self.0.entry(name.to_owned()).or_default() += value;
            }
        }
    }

    pub(super) fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(0.0)
    }

    /// Calls of these commands.
    pub(super) fn calls(&self, commands: &[&str]) -> f64 {
        commands.iter().map(|command| self.get(&format!("cmdstat_{command}"))).sum()
    }
}

/// Resident memory of processes, in bytes.
pub(super) fn resident(pids: &[u32]) -> f64 {
    let one = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    pids.iter().filter_map(one).sum::<f64>() * 1_024.0
}

/// CPU seconds that all programs of the machine have spent.
pub(super) fn machine_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<f64> = stat
        .lines()
        .next()
        .map(|line| line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect())
        .unwrap_or_default();
    // user, nice, system, idle, iowait, irq, softirq; the kernel counts in ticks of 10 ms.
    [0, 1, 2, 5, 6].iter().filter_map(|at: &usize| ticks.get(*at)).sum::<f64>() * 0.01
}

/// What a measurement spends, and what other programs spend meanwhile.
pub(super) struct Watch {
    began: Instant,
    used: Used,
    machine: f64,
}

impl Watch {
    pub(super) fn start(servers: &[Server], store: Option<u32>, pids: &[u32]) -> Self {
        Self { began: Instant::now(), used: Used::now(servers, store, pids), machine: machine_seconds() }
    }

    /// What was spent since, the seconds, and the cores that other programs have used.
    pub(super) fn end(self, servers: &[Server], store: Option<u32>, pids: &[u32]) -> (Used, f64, f64) {
        let spent = Used::now(servers, store, pids).since(self.used);
        let seconds = self.began.elapsed().as_secs_f64();
        let others = machine_seconds() - self.machine - spent.server - spent.peers;
        (spent, seconds, (others / seconds).max(0.0))
    }
}

/// Samples how many commands a server has run.
pub(super) struct Sampler {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Vec<(f64, f64)>>,
}

impl Sampler {
    pub(super) fn start(server: &Server) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let (is_over, mut connection, began) = (Arc::clone(&ends), server.admin(), Instant::now());
        let thread = thread::spawn(move || {
            let mut samples = Vec::new();
            while !is_over.load(Ordering::SeqCst) {
                let mut info = Info::default();
                if let Ok(text) = redis::cmd("INFO").arg("stats").query::<String>(&mut connection) {
                    info.add(&text);
                    samples.push((began.elapsed().as_secs_f64(), info.get("total_commands_processed")));
                }
                thread::sleep(STEP);
            }
            samples
        });
        Self { ends, thread }
    }

    /// The most commands per second, those within scripts included.
    pub(super) fn peak(self) -> f64 {
        self.ends.store(true, Ordering::SeqCst);
        peak(&self.thread.join().unwrap_or_default())
    }
}

/// Over a second, or over all samples if they are fewer.
fn peak(samples: &[(f64, f64)]) -> f64 {
    let rate = |(from, before): (f64, f64), (to, after): (f64, f64)| (after - before) / (to - from);
    let within_window = samples.iter().enumerate().filter_map(|(index, from)| {
        let to = samples[index..].iter().find(|to| to.0 >= from.0 + WINDOW)?;
        Some(rate(*from, *to))
    });
    let most = within_window.reduce(f64::max);
    most.or_else(|| Some(rate(*samples.first()?, *samples.last()?)))
        .filter(|rate| rate.is_finite())
        .unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_several_servers_are_added_up() {
        let mut info = Info::default();
        for memory in [5, 7] {
            info.add(&format!(
                "# Memory\r\nused_memory:{memory}\r\ncmdstat_get:calls=2,usec=9\r\nredis_mode:cluster\r\n"
            ));
        }
        assert_eq!(
            [info.get("used_memory"), info.calls(&["get", "set"]), info.get("redis_mode")],
            [12.0, 4.0, 0.0]
        );
    }

    #[test]
    fn work_of_other_programs_is_seen() {
        let watch = Watch::start(&[], None, &[]);
        let busy = || {
            std::process::Command::new("sh")
                .args(["-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"])
                .status()
        };
        assert!(busy().unwrap().success());
        let (_, seconds, others) = watch.end(&[], None, &[]);
        assert!(seconds > 0.0 && others > 0.1, "{seconds} {others}");
    }

    #[test]
    fn peak_is_that_of_the_busiest_second() {
        let samples = [(0.0, 0.0), (0.5, 10.0), (1.0, 20.0), (1.5, 1_020.0), (2.0, 1_030.0), (3.0, 1_040.0)];
        assert!((peak(&samples) - 1_010.0).abs() < 1e-9);
        assert!((peak(&samples[..2]) - 20.0).abs() < 1e-9);
        assert!(peak(&samples[..1]).abs() < 1e-9);
    }
}
