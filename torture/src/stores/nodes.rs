//! Independent servers: one, or a quorum. Each is behind a proxy.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use leasehold_testkit::{Builder, Proxy, Server};

use super::injection::{Done, Injection, command, disturb_network, kill_clients, kill_repeatedly};
use super::stranger;
use crate::faults::{CLOCK_STEP, Fault};

/// libfaketime reads its file again after a second.
const CLOCK_CACHE: Duration = Duration::from_millis(1_100);

/// The files of an append-only server: of Redis 7 and Valkey, and of Redis 6.2.
const FILES: [&str; 3] = ["appendonlydir", "appendonly.aof", "dump.rdb"];

pub(super) struct Nodes {
    nodes: Vec<Node>,
    /// The file with the offset of the clock.
    clock: Option<PathBuf>,
    offset_ms: i64,
}

struct Node {
    server: Server,
    proxy: Proxy,
}

impl Nodes {
    pub(super) fn start(builder: &Builder, count: usize, clock: Option<PathBuf>) -> Self {
        let node = || {
            let server = builder.clone().start();
            Node { proxy: Proxy::before(&server), server }
        };
        Self { nodes: (0..count).map(|_| node()).collect(), clock, offset_ms: 0 }
    }

    /// The addresses of the proxies.
    pub(super) fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.proxy.url()).collect()
    }

    pub(super) fn keys(&self) -> u64 {
        self.nodes.iter().map(|node| node.server.query::<u64>(&["DBSIZE"]).unwrap_or(0)).sum()
    }

    pub(super) fn inject(&mut self, injection: &mut Injection<'_>) -> Done {
        let number = injection.rng.index(self.nodes.len());
        let what = match injection.fault {
            Fault::ClockForward => self.step_clock(1, injection),
            Fault::ClockBack => self.step_clock(-1, injection),
            _ => self.nodes[number].inject(injection)?,
        };
        Ok(if self.nodes.len() > 1 { format!("node {number}: {what}") } else { what })
    }

    fn step_clock(&mut self, sign: i64, injection: &mut Injection<'_>) -> String {
        let limit = u64::try_from(CLOCK_STEP.as_millis()).unwrap_or(u64::MAX);
        let step = sign * i64::try_from(injection.rng.between(limit / 6, limit)).unwrap_or(0);
        self.offset_ms += step;
        if let Some(clock) = &self.clock {
            let seconds = f64::from(i32::try_from(self.offset_ms).unwrap_or(0)) / 1_000.0;
            // Renamed, so that the server never reads half of it.
            let new = clock.with_extension("new");
            let written = std::fs::write(&new, format!("{seconds:+.3}\n"));
            written.and_then(|()| std::fs::rename(&new, clock)).expect("the folder can be written to");
        }
        sleep(CLOCK_CACHE);
        format!("by {step} ms")
    }
}

impl Node {
    fn inject(&mut self, injection: &mut Injection<'_>) -> Done {
        match injection.fault {
            Fault::ServerStop => {
                let time = injection.duration(20, 200);
                self.server.signal("STOP");
                sleep(time);
                self.server.signal("CONT");
                Ok(format!("for {} ms", time.as_millis()))
            }
            Fault::ServerKill => self.restart(injection.duration(0, 60), false),
            Fault::ServerEmpty => self.restart(injection.duration(0, 60), true),
            Fault::ClientKill => kill_repeatedly(injection, || kill_clients(&self.server)),
            Fault::ScriptFlush => command(&self.server, &["SCRIPT", "FLUSH"]).map(|()| String::new()),
            Fault::Stranger => stranger::publish([&self.server], &stranger::PLAIN, injection),
            Fault::FlushAll => command(&self.server, &["FLUSHALL"]).map(|()| String::new()),
            _ => Ok(disturb_network(&self.proxy, injection)),
        }
    }

    fn restart(&mut self, time: Duration, is_emptied: bool) -> Done {
        self.server.stop();
        for file in FILES.iter().filter(|_| is_emptied) {
            let path = self.server.folder().join(file);
            let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        }
        let has_files = FILES.iter().any(|file| self.server.folder().join(file).exists());
        sleep(time);
        self.server.start();
        if is_emptied && has_files {
            return Err("a file of the server could not be removed".to_owned());
        }
        Ok(format!("down for {} ms", time.as_millis()))
    }
}
