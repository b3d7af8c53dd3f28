//! Resource use of a run: commands, bytes and CPU of the servers, CPU of the peers.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use leasehold_testkit::Server;

use crate::server_cost::server_seconds;

/// Resource use so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Used {
    /// Commands, those within scripts included.
    pub(crate) calls: f64,
    /// Bytes on the servers' connections, in both directions.
    pub(crate) bytes: f64,
    /// CPU seconds of the servers' main threads.
    pub(crate) server: f64,
    /// CPU seconds of the peers' processes.
    pub(crate) peers: f64,
}

impl Used {
    /// By these servers, a store of another kind, and these processes.
    pub(crate) fn now(servers: &[Server], store: Option<u32>, pids: &[u32]) -> Self {
        let mut used = Self { peers: pids.iter().map(|pid| process_seconds(*pid)).sum(), ..Self::default() };
        used.server = store.map_or(0.0, family_seconds);
        for server in servers {
            let Ok(info) = server.query::<String>(&["INFO", "everything"]) else { continue };
            // INFO does not count its own reply; the next INFO does.
            used.bytes += f64::from(u32::try_from(info.len()).unwrap_or(u32::MAX));
            let fields = info.lines().filter_map(|line| line.trim_end().split_once(':'));
            for (name, value) in fields {
                if matches!(name, "total_net_input_bytes" | "total_net_output_bytes") {
                    used.bytes += value.parse().unwrap_or(0.0);
                } else if name.starts_with("cmdstat_") && name != "cmdstat_info" {
                    let calls = value.strip_prefix("calls=").and_then(|rest| rest.split(',').next());
                    used.calls += calls.and_then(|calls| calls.parse().ok()).unwrap_or(0.0);
                }
            }
            used.server += server_seconds(server.pid());
        }
        used
    }

    /// Resource use since an earlier moment.
    #[must_use]
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            calls: self.calls - before.calls,
            bytes: self.bytes - before.bytes,
            server: self.server - before.server,
            peers: self.peers - before.peers,
        }
    }
}

/// The fields of a process in `/proc`, from its state on: its name before them may have spaces.
fn fields(pid: u32) -> Vec<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().unwrap_or_default().split(' ').map(str::to_owned).collect()
}

/// The kernel counts in ticks of 10 ms.
fn seconds(fields: &[String]) -> f64 {
    fields.iter().filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() * 0.01
}

/// User and system time of a process.
fn process_seconds(pid: u32) -> f64 {
    fields(pid).get(11..13).map_or(0.0, seconds)
}

/// The same, with the processes that it has started, also those that have ended: PostgreSQL has one for each connection.
fn family_seconds(pid: u32) -> f64 {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parent = pid.to_string();
    let children = pids.filter(|other| fields(*other).get(1) == Some(&parent));
    process_seconds(pid) + ended_seconds(pid) + children.map(process_seconds).sum::<f64>()
}

/// CPU time of its child processes that have exited.
fn ended_seconds(pid: u32) -> f64 {
    fields(pid).get(13..15).map_or(0.0, seconds)
}

/// Counts the commands that clients send, without those within scripts. MONITOR slows the server down, so it runs during the warm-up
/// only.
pub(crate) struct Listener {
    stream: UnixStream,
    sent: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Starts to count.
    ///
    /// # Errors
    ///
    /// The connection fails.
    pub(crate) fn on(server: &Server) -> std::io::Result<Self> {
        let mut stream = UnixStream::connect(server.socket())?;
        stream.write_all(b"MONITOR\r\n")?;
        let sent = Arc::new(AtomicU64::new(0));
        let (reader, count) = (BufReader::new(stream.try_clone()?), Arc::clone(&sent));
        let thread = std::thread::spawn(move || {
            for line in reader.split(b'\n').map_while(Result::ok) {
                count.fetch_add(u64::from(is_sent(&line)), Ordering::Relaxed);
            }
        });
        Ok(Self { stream, sent, thread: Some(thread) })
    }

    /// Number of commands so far.
    #[must_use]
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// `+1700000000.123456 [0 127.0.0.1:4242] "PING"`: by a client, on a port. The benchmark's own questions come over the socket,
/// and those of scripts say `lua`.
fn is_sent(line: &[u8]) -> bool {
    let Some(from) =
        line.split(|byte| *byte == b'[').nth(1).and_then(|rest| rest.split(|byte| *byte == b']').next())
    else {
        return false;
    };
    from.starts_with(b"0 ") && !from.ends_with(b" lua") && !from[2..].starts_with(b"unix:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_scripts_and_of_the_benchmark_itself_are_not_counted() {
        assert!(is_sent(br#"+1339518083.107412 [0 127.0.0.1:60866] "keys" "[x]""#));
        assert!(!is_sent(br#"+1339518083.107412 [0 lua] "get" "a""#));
        assert!(!is_sent(br#"+1339518083.107412 [0 unix:/tmp/socket] "info""#));
        assert!(!is_sent(b"+OK"));
    }

    #[test]
    fn what_a_process_spent_that_has_ended_is_its_parent_s() {
        let busy = || {
            std::process::Command::new("sh")
                .args(["-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"])
                .status()
        };
        let before = ended_seconds(std::process::id());
        // One of them may be over before the clock's next tick.
        let spent = (0..100).any(|_| busy().unwrap().success() && ended_seconds(std::process::id()) > before);
        assert!(spent && ended_seconds(u32::MAX).abs() < f64::EPSILON);
    }
}
