//! The customers: so many requests over so many connections, which stay open, as `ab -k` sends them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout_at;

/// The published load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Requests in all.
    pub requests: usize,
    /// How many of them at a time.
    pub customers: usize,
    /// When the run is over, whatever has been answered by then.
    pub limit: Duration,
}

/// What the customers saw.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// How long each answered request took, the shortest first.
    pub latencies: Vec<Duration>,
    /// Requests that were not answered with a sale.
    pub failed: usize,
    /// From the first request to the last answer.
    pub took: Duration,
    /// Which driver saw it.
    pub driver: &'static str,
}

impl Seen {
    /// Requests answered in a second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "some thousands")]
        let answered = self.latencies.len() as f64;
        answered / self.took.as_secs_f64().max(f64::EPSILON)
    }

    /// The time within which this part of the requests was answered.
    #[must_use]
    pub fn quantile(&self, per_mille: usize) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        self.latencies.get(last * per_mille / 1_000).copied().unwrap_or_default()
    }
}

/// Sends the load to these ports in turn.
pub async fn drive(ports: &[u16], load: Load, answered: &Arc<AtomicUsize>) -> Seen {
    let start = Instant::now();
    let left = Arc::new(AtomicUsize::new(load.requests));
    let end = tokio::time::Instant::now() + load.limit;
    let mut customers = JoinSet::new();
    for number in 0..load.customers.min(load.requests) {
        let customer = Customer {
            port: ports[number % ports.len()],
            left: left.clone(),
            answered: answered.clone(),
            end,
        };
        customers.spawn(customer.buy());
    }
    let mut seen = Seen { driver: "built-in", ..Seen::default() };
    while let Some(bought) = customers.join_next().await {
        seen.latencies.extend(bought.unwrap_or_default());
    }
    seen.took = start.elapsed();
    seen.failed = load.requests - seen.latencies.len();
    seen.latencies.sort_unstable();
    seen
}

struct Customer {
    port: u16,
    left: Arc<AtomicUsize>,
    answered: Arc<AtomicUsize>,
    end: tokio::time::Instant,
}

impl Customer {
    /// Until there are no requests left, the time is over, or the connection breaks: how long each sale took.
    async fn buy(self) -> Vec<Duration> {
        let mut sales = Vec::new();
        let Ok(Ok(stream)) = timeout_at(self.end, TcpStream::connect(("127.0.0.1", self.port))).await else {
            return sales;
        };
        let _ = stream.set_nodelay(true);
        let mut stream = BufReader::new(stream);
        while self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            let start = Instant::now();
            let Ok(Ok(status)) = timeout_at(self.end, ask(&mut stream)).await else { return sales };
            if status == 200 {
                sales.push(start.elapsed());
            }
            self.answered.fetch_add(1, Ordering::Relaxed);
        }
        sales
    }
}

async fn ask(stream: &mut BufReader<TcpStream>) -> io::Result<u16> {
    stream.write_all(b"GET /buy HTTP/1.1\r\nhost: flash-sale\r\n\r\n").await?;
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("that is no answer"))?;
    let mut length = 0;
    loop {
        line.clear();
        stream.read_line(&mut line).await?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().map_err(io::Error::other)?;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok(status)
}
