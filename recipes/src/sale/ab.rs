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
        // What it had seen by then is lost with it.
        let latencies = vec![load.limit; load.requests];
        return Ok(Seen { latencies, failed: load.requests, took: load.limit, driver: "ab" });
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
    use std::io;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::task::JoinSet;

    use super::*;

    /// A service that gives everybody this answer, or none, until the test is over.
    async fn service(answer: Option<&'static str>) -> (u16, JoinSet<()>) {
        assert!(is_there().await, "ab is missing: scripts/test install");
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut customers = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                customers.spawn(serve(stream, answer));
            }
        });
        (port, serving)
    }

    /// Until the connection is over.
    async fn serve(mut stream: TcpStream, answer: Option<&'static str>) -> io::Result<()> {
        let mut heard = Vec::new();
        loop {
            heard.push(stream.read_u8().await?);
            if heard.ends_with(b"\r\n\r\n") {
                let head = answer.map(|status| format!("HTTP/1.1 {status}\r\nConnection: keep-alive\r\n"));
                let answer = head.map(|head| head + "Content-Length: 0\r\n\r\n").unwrap_or_default();
                stream.write_all(answer.as_bytes()).await?;
                heard.clear();
            }
        }
    }

    const LOAD: Load = Load { requests: 40, customers: 8, limit: Duration::from_secs(60) };

    #[tokio::test]
    async fn everybody_who_is_answered_is_counted_as_sold_to_or_as_failed() {
        let (port, _serving) = service(Some("200 OK")).await;
        let seen = drive(port, LOAD).await.unwrap();
        assert_eq!((seen.latencies.len(), seen.sold(), seen.failed), (40, 40, 0));
        let (port, _serving) = service(Some("503 Busy")).await;
        let seen = drive(port, LOAD).await.unwrap();
        assert_eq!((seen.latencies.len(), seen.sold(), seen.failed), (40, 0, 40));
    }

    #[tokio::test]
    async fn who_is_not_answered_before_the_run_is_over_has_waited_for_all_of_it() {
        let (port, _serving) = service(None).await;
        let load = Load { limit: Duration::from_millis(200), ..LOAD };
        let seen = drive(port, load).await.unwrap();
        assert_eq!((seen.sold(), seen.failed, seen.took), (0, 40, load.limit));
        assert_eq!([0, 500, 1_000].map(|part| seen.quantile(part)), [load.limit; 3]);
    }

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
