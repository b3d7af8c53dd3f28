//! A balancer that passes TCP connections to the servers in turn.
//!
//! It checks no health by requests of its own. A server that refuses a connection is passed over, and one that has left a caller without an answer gets
//! no new connections for a while, as usual balancers do.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_bench_peer::clock::now_ns;
use tokio::io::copy;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::sleep;

/// For so long a server without an answer gets no new connections, in nanoseconds.
const AVOIDED: u64 = 1_000_000_000;

/// Interval of the looks at a request whose first line has not arrived.
const PIECE: Duration = Duration::from_millis(1);

/// The longest first line that is looked for.
const LINE: usize = 256;

/// The balancer, which ends when it is dropped, with all of its connections.
pub(super) struct Balancer {
    address: SocketAddr,
    shared: Arc<Shared>,
    runtime: Option<Runtime>,
}

struct Shared {
    servers: Vec<Backend>,
    /// Connections so far.
    accepted: AtomicUsize,
    /// Each change cuts all connections.
    cuts: watch::Sender<()>,
    losses: Mutex<Losses>,
    /// The server with the newest renewal.
    renewal: Mutex<Option<usize>>,
}

struct Backend {
    port: AtomicU16,
    avoided_until: AtomicU64,
}

/// Answers that are lost.
#[derive(Default)]
struct Losses {
    /// The end of the path of their requests.
    to: Option<&'static str>,
    lost: u64,
    is_next_lost: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Balancer {
    pub(super) fn start(ports: &[u16]) -> io::Result<Self> {
        let backend = |port: &u16| Backend { port: AtomicU16::new(*port), avoided_until: AtomicU64::new(0) };
        let shared = Arc::new(Shared {
            servers: ports.iter().map(backend).collect(),
            accepted: AtomicUsize::new(0),
            cuts: watch::Sender::new(()),
            losses: Mutex::default(),
            renewal: Mutex::default(),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        runtime.spawn(accept(listener, shared.clone()));
        Ok(Self { address, shared, runtime: Some(runtime) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// New connections for this server go to this port.
    pub(super) fn direct(&self, number: usize, port: u16) {
        self.shared.servers[number].port.store(port, Ordering::SeqCst);
    }

    /// Cuts all connections.
    pub(super) fn cut(&self) {
        self.shared.cuts.send_replace(());
    }

    /// From now on every other answer to requests whose path ends in this is lost. Returns how many were lost before.
    pub(super) fn lose_answers(&self, to: Option<&'static str>) -> u64 {
        std::mem::replace(&mut *lock(&self.shared.losses), Losses { to, ..Losses::default() }).lost
    }

    pub(super) fn forget_renewal(&self) {
        *lock(&self.shared.renewal) = None;
    }

    pub(super) fn last_renewal(&self) -> Option<usize> {
        *lock(&self.shared.renewal)
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((caller, _)) = listener.accept().await else { continue };
        let shared = shared.clone();
        tokio::spawn(async move {
            let mut cuts = shared.cuts.subscribe();
            tokio::select! {
                _ = cuts.changed() => {}
                // An error ends both connections, as the end of either does.
                _ = pass(caller, &shared) => {}
            }
        });
    }
}

async fn pass(mut caller: TcpStream, shared: &Shared) -> io::Result<()> {
    let path = path(&caller).await?;
    let Some((number, mut server)) = shared.connect().await else { return Ok(()) };
    if path.ends_with("/renew") {
        *lock(&shared.renewal) = Some(number);
    }
    let (mut from_caller, mut to_caller) = caller.split();
    let (mut from_server, mut to_server) = server.split();
    let mut requests = pin!(copy(&mut from_caller, &mut to_server));
    tokio::select! {
        _ = &mut requests => {
            // The caller has given up.
            shared.servers[number].avoided_until.store(now_ns() + AVOIDED, Ordering::SeqCst);
            return Ok(());
        }
        answered = from_server.readable() => answered?,
    }
    if shared.loses_answer(&path) {
        return Ok(());
    }
    tokio::select! {
        _ = requests => {}
        _ = copy(&mut from_server, &mut to_caller) => {}
    }
    Ok(())
}

/// The path of the request that is arriving, which stays unread.
async fn path(caller: &TcpStream) -> io::Result<String> {
    let mut line = [0; LINE];
    loop {
        let length = caller.peek(&mut line).await?;
        let has_line = length == LINE || line[..length].contains(&b'\n');
        if has_line || length == 0 {
            let text = String::from_utf8_lossy(&line[..length]);
            return Ok(text.split(' ').nth(1).unwrap_or_default().to_owned());
        }
        sleep(PIECE).await;
    }
}

impl Shared {
    /// A connection with the next server that accepts one.
    async fn connect(&self) -> Option<(usize, TcpStream)> {
        let first = self.accepted.fetch_add(1, Ordering::SeqCst);
        let mut order: Vec<usize> =
            (0..self.servers.len()).map(|at| (first + at) % self.servers.len()).collect();
        let now = now_ns();
        order.sort_by_key(|number| self.servers[*number].avoided_until.load(Ordering::SeqCst) > now);
        for number in order {
            let port = self.servers[number].port.load(Ordering::SeqCst);
            if let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
                return Some((number, server));
            }
        }
        None
    }

    fn loses_answer(&self, path: &str) -> bool {
        let mut losses = lock(&self.losses);
        if !losses.to.is_some_and(|end| path.ends_with(end)) {
            return false;
        }
        losses.is_next_lost = !losses.is_next_lost;
        losses.lost += u64::from(losses.is_next_lost);
        losses.is_next_lost
    }
}
