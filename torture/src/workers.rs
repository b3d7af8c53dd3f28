//! The worker processes: peers that take the lock again and again.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use leasehold_bench::compare::process::Process;
use leasehold_bench_peer::clock::now_ns;
use leasehold_bench_peer::protocol::{Contend, Open, Order};
use rustix::process::{Pid, Signal, kill_process};

use crate::options::millis;
use crate::targets::Target;

/// What every worker is told.
#[derive(Clone, Debug)]
pub struct Work {
    /// The addresses of the store.
    pub urls: Vec<String>,
    /// The ttl of the leases.
    pub ttl: Duration,
    /// Clients in each process.
    pub clients: u32,
    /// The order, but for the number of the first task.
    pub contend: Contend,
}

/// A running worker process.
pub struct Worker {
    process: Process,
    first_task: u32,
    tasks: u32,
    /// Open file descriptors: some time after the start, and when they were noted last.
    descriptors: Option<(i64, i64)>,
}

impl Worker {
    /// Starts a process and connects it.
    ///
    /// # Errors
    ///
    /// Why it does not start or connect.
    pub fn start(target: &Target, work: &Work, first_task: u32) -> Result<Self, String> {
        let mut process = if target.is_own() {
            let own = std::env::current_exe().map_err(|error| error.to_string())?;
            let mut command = Command::new(own);
            command.args(["peer", target.program]);
            Process::spawn(command)?
        } else {
            Process::start(target.program)?
        };
        let open = Open { urls: work.urls.clone(), clients: work.clients, ttl_ms: millis(work.ttl) };
        process.ask(&Order::Open(open), Duration::ZERO)?;
        Ok(Self { process, first_task, tasks: work.contend.tasks, descriptors: None })
    }

    /// Tells it to work.
    ///
    /// # Errors
    ///
    /// It has ended.
    pub fn work(&mut self, work: &Work) -> Result<(), String> {
        let order = Contend { first_task: self.first_task, ..work.contend.clone() };
        self.process.tell(&Order::Contend(order))
    }

    /// The library with its version.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.process.hello.library
    }

    /// The numbers of its tasks.
    #[must_use]
    pub fn tasks(&self) -> Vec<u32> {
        (self.first_task..self.first_task + self.tasks).collect()
    }

    /// Stops it, or lets it continue.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.process.pid()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It fails only if the process has ended by itself, which its tasks' record shows.
            let _ = kill_process(pid, signal);
        }
    }

    /// Why it has stopped working, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.process.failure()
    }

    /// Kills it, like a crash of its machine.
    pub fn kill(mut self) {
        self.process.kill();
    }

    /// Waits for the end of its work.
    ///
    /// # Errors
    ///
    /// The error of the peer, or that it does not answer.
    pub fn finish(&mut self, within: Duration) -> Result<(), String> {
        self.process.answer(within).map(|_| ())
    }

    /// Disconnects.
    pub fn close(&mut self) {
        let _ = self.process.ask(&Order::Close, Duration::ZERO);
    }

    /// Holders and waiters in the store, if the library can list them.
    ///
    /// # Errors
    ///
    /// The store does not answer.
    pub fn left(&mut self) -> Result<Option<u32>, String> {
        Ok(self.process.ask(&Order::Left, Duration::ZERO)?.left)
    }

    /// Notes the number of open file descriptors.
    pub fn note_descriptors(&mut self) {
        let Some(now) = self.open_descriptors() else { return };
        self.descriptors = Some((self.descriptors.map_or(now, |(first, _)| first), now));
    }

    /// How many more they were when they were noted last than when they were noted first.
    #[must_use]
    pub fn descriptors_grown(&self) -> i64 {
        self.descriptors.map_or(0, |(first, last)| last - first)
    }

    fn open_descriptors(&self) -> Option<i64> {
        let folder = Path::new("/proc").join(self.process.pid().to_string()).join("fd");
        i64::try_from(std::fs::read_dir(folder).ok()?.count()).ok()
    }
}

/// Waits until the condition holds or the time is over. Returns whether it holds.
pub fn wait_until(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The time from now to a moment of the machine's clock.
#[must_use]
pub fn left_until(ns: u64) -> Duration {
    Duration::from_nanos(ns.saturating_sub(now_ns()))
}
