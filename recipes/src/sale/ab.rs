//! The published driver, `ab` from apache2-utils, where it is there.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use super::driver::{Load, Seen};
use crate::run::Outcome;

/// Whether it is there.
pub async fn is_there() -> bool {
    let version = Command::new("ab").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().await;
    version.is_ok_and(|status| status.success())
}

/// Sends the load to one port.
///
/// # Errors
///
/// It can't be started, or says something that is not understood.
pub async fn drive(port: u16, load: Load) -> Outcome<Seen> {
    let folder = tempfile::tempdir()?;
    let table = folder.path().join("latencies");
    let mut ab = Command::new("ab");
    ab.args(["-k", "-l", "-r", "-q", "-n", &load.requests.to_string(), "-c", &load.customers.to_string()]);
    ab.arg("-g").arg(&table).arg(format!("http://127.0.0.1:{port}/buy"));
    ab.stdin(Stdio::null()).kill_on_drop(true);
    let said = timeout(load.limit, ab.output()).await;
    let Ok(said) = said else {
        return Ok(Seen { failed: load.requests, took: load.limit, driver: "ab", ..Seen::default() });
    };
    let said = said?;
    if !said.status.success() {
        return Err(format!("ab failed: {}", String::from_utf8_lossy(&said.stderr)).into());
    }
    read(&String::from_utf8_lossy(&said.stdout), &std::fs::read_to_string(&table)?)
}

/// What it says, and its table: start, seconds, connecting, answering, all of it, waiting, in milliseconds.
fn read(said: &str, table: &str) -> Outcome<Seen> {
    let number = |label: &str| -> Option<f64> {
        let line = said.lines().find(|line| line.starts_with(label))?;
        line[label.len()..].split_whitespace().next()?.parse().ok()
    };
    let took = number("Time taken for tests:").ok_or("ab does not say how long it took")?;
    let failed = number("Failed requests:").unwrap_or(0.0) + number("Non-2xx responses:").unwrap_or(0.0);
    let times = table.lines().skip(1).filter_map(|line| line.split('\t').nth(4)?.trim().parse().ok());
    let mut latencies: Vec<_> = times.map(Duration::from_millis).collect();
    latencies.sort_unstable();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
    let failed = failed as usize;
    Ok(Seen { latencies, failed, took: Duration::from_secs_f64(took), driver: "ab" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ab_says_is_understood() {
        let said =
            "Time taken for tests:   0.500 seconds\nFailed requests:        1\nNon-2xx responses:      0\n";
        let table = "starttime\tseconds\tctime\tdtime\tttime\twait\nday\t1\t0\t7\t7\t7\nday\t1\t0\t3\t3\t3\nday\t1\t0\t90\t90\t90\n";
        let seen = read(said, table).unwrap();
        assert_eq!(seen.latencies, [3, 7, 90].map(Duration::from_millis));
        assert_eq!((seen.sold(), seen.failed, seen.took), (2, 1, Duration::from_millis(500)));
    }
}
