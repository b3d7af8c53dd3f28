//! The load driver of the articles: `ab` from apache2-utils.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use super::driver::{Load, LoadResult};
use crate::outcome::Outcome;

/// Whether `ab` is installed.
pub async fn is_installed() -> bool {
    let version = Command::new("ab").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().await;
    version.is_ok_and(|status| status.success())
}

/// Sends the load to one port.
///
/// # Errors
///
/// It does not start, or its output cannot be parsed.
pub async fn drive(port: u16, load: Load) -> Outcome<LoadResult> {
    let folder = tempfile::tempdir()?;
    let table = folder.path().join("latencies");
    let mut ab = Command::new("ab");
    ab.args(["-k", "-l", "-r", "-q", "-n", &load.requests.to_string(), "-c", &load.clients.to_string()]);
    ab.arg("-g").arg(&table).arg(format!("http://127.0.0.1:{port}/buy"));
    ab.stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(load.limit, ab.output()).await;
    let Ok(output) = output else {
        // A killed `ab` reports nothing.
        let latencies = vec![load.limit; load.requests];
        return Ok(LoadResult { latencies, failed: load.requests, took: load.limit, driver: "ab" });
    };
    let output = output?;
    if !output.status.success() {
        return Err(format!("ab failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    parse(&String::from_utf8_lossy(&output.stdout), &std::fs::read_to_string(&table)?)
}

/// Parses the report, and the table with start, seconds, connect, processing, total and wait in milliseconds.
fn parse(report: &str, table: &str) -> Outcome<LoadResult> {
    let number = |label: &str| -> Option<f64> {
        let line = report.lines().find(|line| line.starts_with(label))?;
        line[label.len()..].split_whitespace().next()?.parse().ok()
    };
    let took = number("Time taken for tests:").ok_or("the output of ab has no duration")?;
    let failed = number("Failed requests:").unwrap_or(0.0) + number("Non-2xx responses:").unwrap_or(0.0);
    let times = table.lines().skip(1).filter_map(|line| line.split('\t').nth(4)?.trim().parse().ok());
    let mut latencies: Vec<_> = times.map(Duration::from_millis).collect();
    latencies.sort_unstable();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
    let failed = failed as usize;
    Ok(LoadResult { latencies, failed, took: Duration::from_secs_f64(took), driver: "ab" })
}

#[cfg(test)]
mod tests {
    use std::io;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::task::JoinSet;

    use super::*;

    /// A service that sends this response to every request, or none, until the test ends.
    async fn service(response: Option<&'static str>) -> (u16, JoinSet<()>) {
        assert!(is_installed().await, "ab is missing: scripts/test install");
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut clients = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                clients.spawn(serve(stream, response));
            }
        });
        (port, serving)
    }

    /// Serves one connection.
    async fn serve(mut stream: TcpStream, response: Option<&'static str>) -> io::Result<()> {
        let mut received = Vec::new();
        loop {
            received.push(stream.read_u8().await?);
            if received.ends_with(b"\r\n\r\n") {
                let head = response.map(|status| format!("HTTP/1.1 {status}\r\nConnection: keep-alive\r\n"));
                let response = head.map(|head| head + "Content-Length: 0\r\n\r\n").unwrap_or_default();
                stream.write_all(response.as_bytes()).await?;
                received.clear();
            }
        }
    }

    const LOAD: Load = Load { requests: 40, clients: 8, limit: Duration::from_secs(60) };

    #[tokio::test]
    async fn each_response_counts_as_a_sale_or_as_a_failure() {
        let (port, _serving) = service(Some("200 OK")).await;
        let result = drive(port, LOAD).await.unwrap();
        assert_eq!((result.latencies.len(), result.sold(), result.failed), (40, 40, 0));
        let (port, _serving) = service(Some("503 Busy")).await;
        let result = drive(port, LOAD).await.unwrap();
        assert_eq!((result.latencies.len(), result.sold(), result.failed), (40, 0, 40));
    }

    #[tokio::test]
    async fn requests_without_a_response_count_with_the_duration_of_the_run() {
        let (port, _serving) = service(None).await;
        let load = Load { limit: Duration::from_millis(200), ..LOAD };
        let result = drive(port, load).await.unwrap();
        assert_eq!((result.sold(), result.failed, result.took), (0, 40, load.limit));
        assert_eq!([0, 500, 1_000].map(|part| result.quantile(part)), [load.limit; 3]);
    }

    #[test]
    fn the_report_of_ab_is_parsed() {
        let report =
            "Time taken for tests:   0.500 seconds\nFailed requests:        1\nNon-2xx responses:      0\n";
        let table = "starttime\tseconds\tctime\tdtime\tttime\twait\nday\t1\t0\t7\t7\t7\nday\t1\t0\t3\t3\t3\nday\t1\t0\t90\t90\t90\n";
        let result = parse(report, table).unwrap();
        assert_eq!(result.latencies, [3, 7, 90].map(Duration::from_millis));
        assert_eq!((result.sold(), result.failed, result.took), (2, 1, Duration::from_millis(500)));
    }
}
