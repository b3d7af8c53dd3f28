//! The customers: so many requests over so many connections, which stay open, as `ab -k` sends them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout_at;

/// How many connect at the same time: fewer than wait for a service in its system's queue.
const AT_ONCE: usize = 64;

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
    /// How long each request took, the shortest first, those that failed included.
    pub latencies: Vec<Duration>,
    /// Requests that were not answered with a sale.
    pub failed: usize,
    /// From the first request to the last answer.
    pub took: Duration,
    /// Which driver saw it.
    pub driver: &'static str,
}

impl Seen {
    /// Requests that ended with a sale.
    #[must_use]
    pub fn sold(&self) -> usize {
        self.latencies.len().saturating_sub(self.failed)
    }

    /// Sales in a second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "some thousands")]
        let sold = self.sold() as f64;
        sold / self.took.as_secs_f64().max(f64::EPSILON)
    }

    /// The time within which this part of the requests was over.
    #[must_use]
    pub fn quantile(&self, per_mille: usize) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        self.latencies.get(last * per_mille / 1_000).copied().unwrap_or_default()
    }
}

/// Sends the load to these ports in turn. All are connected before the first one asks.
pub async fn drive(ports: &[u16], load: Load, answered: &Arc<AtomicUsize>) -> Seen {
    let end = tokio::time::Instant::now() + load.limit;
    let customers = load.customers.min(load.requests);
    let connect = |number: usize| {
        let port = ports[number % ports.len()];
        async move { timeout_at(end, TcpStream::connect(("127.0.0.1", port))).await.ok()?.ok() }
    };
    let streams = stream::iter(0..customers).map(connect).buffered(AT_ONCE).filter_map(std::future::ready);
    let streams: Vec<_> = streams.collect().await;
    let start = Instant::now();
    let left = Arc::new(AtomicUsize::new(load.requests));
    let mut asking = JoinSet::new();
    for stream in streams {
        let customer = Customer { left: left.clone(), answered: answered.clone(), end };
        asking.spawn(customer.buy(stream));
    }
    let mut seen = Seen { driver: "built-in", ..Seen::default() };
    let mut sold = 0;
    while let Some(bought) = asking.join_next().await {
        let bought = bought.unwrap_or_default();
        sold += bought.sold;
        seen.latencies.extend(bought.latencies);
    }
    seen.took = start.elapsed();
    // What nobody was left to ask took as long as all of it.
    seen.latencies.resize(load.requests, seen.took);
    seen.failed = load.requests - sold;
    seen.latencies.sort_unstable();
    seen
}

struct Customer {
    left: Arc<AtomicUsize>,
    answered: Arc<AtomicUsize>,
    end: tokio::time::Instant,
}

#[derive(Default)]
struct Bought {
    sold: usize,
    latencies: Vec<Duration>,
}

impl Customer {
    /// Until there are no requests left, the time is over, or the connection breaks.
    async fn buy(self, stream: TcpStream) -> Bought {
        let mut bought = Bought::default();
        let _ = stream.set_nodelay(true);
        let mut stream = BufReader::new(stream);
        while self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            let start = Instant::now();
            let status = timeout_at(self.end, ask(&mut stream)).await;
            bought.latencies.push(start.elapsed());
            match status {
                Ok(Ok(200)) => bought.sold += 1,
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return bought,
            }
            self.answered.fetch_add(1, Ordering::Relaxed);
        }
        bought
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
