//! A proxy on a free port in front of a server, which injects network faults.
//!
//! It delays, holds, drops, disconnects and refuses. It never changes or reorders bytes. Only `drop_messages` parses them, so that method
//! has no effect on TLS.

mod frames;
mod link;

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::port::Port;
use crate::postgres::Postgres;
use crate::server::Server;
use crate::wait::wait_until;

use link::{Direction, Link, lock};

/// How long [`Proxy::hold_replies_from`] waits for an effect, and how often: longer than any client waits before it asks again, and not so
/// long that an attempt ends which gets no reply to three requests.
const ATTEMPT: Duration = Duration::from_millis(1_500);
const ATTEMPTS: usize = 20;

/// A proxy, which stops when it is dropped. Without further calls it forwards everything without delay.
pub struct Proxy {
    port: Port,
    url: String,
    /// None while connections are refused.
    acceptor: Mutex<Option<Acceptor>>,
    shared: Arc<Shared>,
}

/// The state shared by the proxy's threads.
struct Shared {
    /// The server's port for new connections.
    server: AtomicU16,
    requests: Arc<Direction>,
    replies: Arc<Direction>,
    links: Mutex<Vec<Link>>,
    opened: AtomicUsize,
    subscribers_hang: Arc<AtomicBool>,
}

impl Proxy {
    /// Starts a proxy in front of a server that has a port. The server may stop and restart meanwhile.
    #[must_use]
    pub fn before(server: &Server) -> Self {
        Self::start(server.port(), |port| server.url_at(port))
    }

    /// As [`Proxy::before`], in front of a PostgreSQL server.
    #[must_use]
    pub fn before_postgres(server: &Postgres) -> Self {
        Self::start(server.port(), |port| server.url_at(port))
    }

    /// As [`Proxy::before`], in front of a server of another kind on this port. `url_at` is the URL for clients, with the proxy's port.
    #[must_use]
    pub fn before_port(server: u16, url_at: impl FnOnce(u16) -> String) -> Self {
        Self::start(server, url_at)
    }

    fn start(server: u16, url_at: impl FnOnce(u16) -> String) -> Self {
        let port = Port::claim();
        let shared = Shared {
            server: AtomicU16::new(server),
            requests: Arc::default(),
            replies: Arc::default(),
            links: Mutex::default(),
            opened: AtomicUsize::default(),
            subscribers_hang: Arc::default(),
        };
        let url = url_at(port.number());
        let proxy = Self { port, url, acceptor: Mutex::new(None), shared: Arc::new(shared) };
        proxy.refuse(false);
        proxy
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The server's URL through this proxy, with the password.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Delays all requests from now on. A delay does not limit the bytes in flight, up to some megabytes.
    pub fn delay_requests(&self, delay: Duration) {
        self.shared.requests.set_delay(delay);
    }

    /// Delays all replies from now on.
    pub fn delay_replies(&self, delay: Duration) {
        self.shared.replies.set_delay(delay);
    }

    /// Whether to hold the requests from now on, until [`Proxy::release_held`]. A held request blocks the later ones of its connection
    /// only, so that a request over another connection overtakes it.
    pub fn hold_requests(&self, hold: bool) {
        self.shared.requests.set_holds(hold);
    }

    /// Whether to hold the replies from now on, until [`Proxy::release_held`]. A held reply blocks the later ones of its connection
    /// only, so that a reply over another connection overtakes it.
    pub fn hold_replies(&self, hold: bool) {
        self.shared.replies.set_holds(hold);
    }

    /// Holds the replies and changes something on the server, until a later request of the client shows an effect. A request that was on
    /// its way already has its reply held too, and its connection may then send no other: the change is undone, and both begin again.
    ///
    /// # Panics
    ///
    /// If there is no effect after some attempts.
    pub async fn hold_replies_from(&self, change: impl Fn(), undo: impl Fn(), has_effect: impl Fn() -> bool) {
        for _ in 0..ATTEMPTS {
            self.hold_replies(true);
            change();
            let until = Instant::now() + ATTEMPT;
            while Instant::now() < until {
                if has_effect() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            undo();
            self.hold_replies(false);
            self.release_held();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("no request had an effect while the replies were held");
    }

    /// Number of held requests and replies.
    #[must_use]
    pub fn held(&self) -> usize {
        self.shared.requests.held() + self.shared.replies.held()
    }

    /// Forwards the held requests and replies.
    pub fn release_held(&self) {
        self.shared.requests.release_held();
        self.shared.replies.release_held();
    }

    /// Whether to drop all requests. Call [`Proxy::cut`] afterwards, since the byte stream has a gap.
    pub fn drop_requests(&self, drops: bool) {
        self.shared.requests.set_drops(drops);
    }

    /// Whether to drop all replies. Call [`Proxy::cut`] afterwards, since the byte stream has a gap.
    pub fn drop_replies(&self, drops: bool) {
        self.shared.replies.set_drops(drops);
    }

    /// Drops the pushes and pub/sub messages of the server that contain these bytes. None drops nothing.
    pub fn drop_messages(&self, with: Option<&[u8]>) {
        self.shared.replies.set_unwanted(with);
    }

    /// Whether connections over which the client has subscribed hang: they stay open, and what the server sends over them is dropped.
    pub fn hang_subscribers(&self, hang: bool) {
        self.shared.subscribers_hang.store(hang, Ordering::SeqCst);
    }

    /// Number of messages and pieces dropped so far.
    #[must_use]
    pub fn dropped(&self) -> usize {
        self.shared.requests.dropped() + self.shared.replies.dropped()
    }

    /// Number of open connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        let mut links = lock(&self.shared.links);
        links.retain(|link| !link.is_over());
        links.len()
    }

    /// Number of connections that were opened so far.
    #[must_use]
    pub fn opened(&self) -> usize {
        self.shared.opened.load(Ordering::SeqCst)
    }

    /// Closes all connections to clients and to the server. Bytes in flight are lost.
    pub fn cut(&self) {
        // The drop waits for their threads, so it happens outside of the mutex.
        let links = std::mem::take(&mut *lock(&self.shared.links));
        drop(links);
    }

    /// Directs new connections to the server at another port, like a DNS name or a virtual address that moves. Open connections stay.
    pub fn redirect_to(&self, port: u16) {
        self.shared.server.store(port, Ordering::SeqCst);
    }

    /// Whether to refuse new connections.
    pub fn refuse(&self, refuse: bool) {
        let mut acceptor = lock(&self.acceptor);
        if refuse {
            *acceptor = None;
        } else if acceptor.is_none() {
            *acceptor = Some(Acceptor::start(self.port.number(), &self.shared));
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.refuse(true);
        self.cut();
    }
}

/// The thread that listens, until this is dropped.
struct Acceptor {
    port: u16,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    fn start(port: u16, shared: &Arc<Shared>) -> Self {
        // A process that is being started has copies of the sockets that tried the port, until it runs its own program.
        let mut bound = None;
        wait_until("the claimed port is free", || {
            bound = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok();
            bound.is_some()
        });
        let listener = bound.expect("it is bound");
        let is_over = Arc::new(AtomicBool::new(false));
        let (ends, shared) = (Arc::clone(&is_over), Arc::clone(shared));
        let thread = thread::spawn(move || {
            for client in listener.incoming() {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                // If the server is gone, the client's connection is closed.
                let Ok(client) = client else { continue };
                let port = shared.server.load(Ordering::SeqCst);
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { continue };
                // Locked before any byte passes, so that `cut` closes every connection that has received a reply.
                shared.opened.fetch_add(1, Ordering::SeqCst);
                let mut links = lock(&shared.links);
                links.retain(|link| !link.is_over());
                links.push(Link::start(
                    &client,
                    &server,
                    &shared.requests,
                    &shared.replies,
                    &shared.subscribers_hang,
                ));
            }
        });
        Self { port, is_over, thread: Some(thread) }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // A connection wakes the thread, which then checks the flag.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // A process that is being started has a copy of the listener, whose backlog accepts connections, until it runs its own program.
        wait_until("no process listens at the port", || {
            TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)).is_ok()
        });
    }
}
