//! The built-in load driver: concurrent clients with keep-alive connections, like `ab -k`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout_at;

/// How many clients connect at the same time: fewer than the listen queue of a service holds.
const MAX_CONNECTING: usize = 64;

/// The load of one run.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Number of requests.
    pub requests: usize,
    /// Number of concurrent clients.
    pub clients: usize,
    /// Maximum duration of the run.
    pub limit: Duration,
}

/// The result of one run.
#[derive(Clone, Debug, Default)]
pub struct LoadResult {
    /// The latency of each request in ascending order, failed ones included.
    pub latencies: Vec<Duration>,
    /// Requests without a sale.
    pub failed: usize,
    /// Time from the first request to the last response.
    pub took: Duration,
    /// The load driver.
    pub driver: &'static str,
}

impl LoadResult {
    /// Number of sales.
    #[must_use]
    pub fn sold(&self) -> usize {
        self.latencies.len().saturating_sub(self.failed)
    }

    /// Sales per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "some thousands")]
        let sold = self.sold() as f64;
        sold / self.took.as_secs_f64().max(f64::EPSILON)
    }

    /// The latency that this part of the requests did not exceed.
    #[must_use]
    pub fn quantile(&self, per_mille: usize) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        self.latencies.get(last * per_mille / 1_000).copied().unwrap_or_default()
    }
}

/// Sends the load to these ports in turn. All clients connect before the first request.
pub async fn drive(ports: &[u16], load: Load, completed: &Arc<AtomicUsize>) -> LoadResult {
    let end = tokio::time::Instant::now() + load.limit;
    let clients = load.clients.min(load.requests);
    let connect = |number: usize| {
        let port = ports[number % ports.len()];
        async move { timeout_at(end, TcpStream::connect(("127.0.0.1", port))).await.ok()?.ok() }
    };
    let streams =
        stream::iter(0..clients).map(connect).buffered(MAX_CONNECTING).filter_map(std::future::ready);
    let streams: Vec<_> = streams.collect().await;
    let start = Instant::now();
    let left = Arc::new(AtomicUsize::new(load.requests));
    let mut running = JoinSet::new();
    for stream in streams {
        let client = LoadClient { left: left.clone(), completed: completed.clone(), end };
        running.spawn(client.buy(stream));
    }
    let mut result = LoadResult { driver: "built-in", ..LoadResult::default() };
    let mut sold = 0;
    while let Some(bought) = running.join_next().await {
        let bought = bought.unwrap_or_default();
        sold += bought.sold;
        result.latencies.extend(bought.latencies);
    }
    result.took = start.elapsed();
    // Requests that no client was left to send count with the duration of the run.
    result.latencies.resize(load.requests, result.took);
    result.failed = load.requests - sold;
    result.latencies.sort_unstable();
    result
}

struct LoadClient {
    left: Arc<AtomicUsize>,
    completed: Arc<AtomicUsize>,
    end: tokio::time::Instant,
}

#[derive(Default)]
struct Bought {
    sold: usize,
    latencies: Vec<Duration>,
}

impl LoadClient {
    /// Sends requests until none is left, the time is over, or the connection breaks.
    async fn buy(self, stream: TcpStream) -> Bought {
        let mut bought = Bought::default();
        let _ = stream.set_nodelay(true);
        let mut stream = BufReader::new(stream);
        while self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            let start = Instant::now();
            let status = timeout_at(self.end, request(&mut stream)).await;
            bought.latencies.push(start.elapsed());
            match status {
                Ok(Ok(200)) => bought.sold += 1,
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return bought,
            }
            self.completed.fetch_add(1, Ordering::Relaxed);
        }
        bought
    }
}

async fn request(stream: &mut BufReader<TcpStream>) -> io::Result<u16> {
    stream.write_all(b"GET /buy HTTP/1.1\r\nhost: flash-sale\r\n\r\n").await?;
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("not an HTTP response"))?;
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
