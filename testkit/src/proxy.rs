//! A proxy on a free port in front of a server: the network's part in a test.
//!
//! It delays, swallows, cuts and refuses. It passes bytes on as they are, and changes or reorders nothing. Only the
//! choice of messages to swallow looks into them, so that does nothing to TLS.

mod frames;
mod link;

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::port::Port;
use crate::server::Server;

use link::{Link, Way};

/// A proxy, ended with the test. At first it passes everything on at once.
pub struct Proxy {
    port: Port,
    url: String,
    /// None while connections are refused.
    acceptor: Mutex<Option<Acceptor>>,
    shared: Arc<Shared>,
}

/// What the proxy's threads know.
struct Shared {
    /// Where new connections lead.
    server: AtomicU16,
    requests: Arc<Way>,
    replies: Arc<Way>,
    links: Mutex<Vec<Link>>,
}

impl Proxy {
    /// Opens one in front of a server that has a port. The server may stop and start meanwhile.
    #[must_use]
    pub fn before(server: &Server) -> Self {
        let port = Port::claim();
        let shared = Shared {
            server: AtomicU16::new(server.port()),
            requests: Arc::default(),
            replies: Arc::default(),
            links: Mutex::default(),
        };
        let url = server.url_at(port.number());
        let proxy = Self { port, url, acceptor: Mutex::new(None), shared: Arc::new(shared) };
        proxy.refuse(false);
        proxy
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The server's address by way of this proxy, with the password.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Delays what clients say from now on. Delays add no limit to how much is on the way, up to some megabytes.
    pub fn delay_requests(&self, delay: Duration) {
        self.shared.requests.set_delay(delay);
    }

    /// Delays what the server says from now on.
    pub fn delay_replies(&self, delay: Duration) {
        self.shared.replies.set_delay(delay);
    }

    /// Whether what clients say is lost. Let it be followed by [`Proxy::cut`], since no client can go on from there.
    pub fn swallow_requests(&self, swallow: bool) {
        self.shared.requests.set_swallows(swallow);
    }

    /// Whether what the server says is lost. Let it be followed by [`Proxy::cut`], since no client can go on from there.
    pub fn swallow_replies(&self, swallow: bool) {
        self.shared.replies.set_swallows(swallow);
    }

    /// Loses the pushes and the pub/sub messages of the server that contain these bytes, and no other. None loses
    /// nothing.
    pub fn swallow_messages(&self, with: Option<&[u8]>) {
        self.shared.replies.set_unwanted(with);
    }

    /// How often something was swallowed so far: a message, or a piece of whatever size.
    #[must_use]
    pub fn swallowed(&self) -> usize {
        self.shared.requests.swallowed() + self.shared.replies.swallowed()
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        let mut links = lock(&self.shared.links);
        links.retain(|link| !link.is_over());
        links.len()
    }

    /// Closes all connections, to clients and to the server. What is on the way is lost.
    pub fn cut(&self) {
        // Dropped outside of the lock, since it waits for their threads.
        let links = std::mem::take(&mut *lock(&self.shared.links));
        drop(links);
    }

    /// New connections lead to another server from now on, as when a name or a virtual address moves. Those that are there
    /// stay where they are.
    pub fn lead_to(&self, server: &Server) {
        self.shared.server.store(server.port(), Ordering::SeqCst);
    }

    /// Whether new connections are refused, as by a host on which nobody listens.
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
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("the port is claimed");
        let is_over = Arc::new(AtomicBool::new(false));
        let (ends, shared) = (Arc::clone(&is_over), Arc::clone(shared));
        let thread = thread::spawn(move || {
            for client in listener.incoming() {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                // A client that is gone, or a server that is: then the client's connection is closed.
                let Ok(client) = client else { continue };
                let port = shared.server.load(Ordering::SeqCst);
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { continue };
                // Locked before anything passes, so that whoever has heard from the server can be cut off.
                let mut links = lock(&shared.links);
                links.retain(|link| !link.is_over());
                links.push(Link::start(&client, &server, &shared.requests, &shared.replies));
            }
        });
        Self { port, is_over, thread: Some(thread) }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // It looks at that when a client comes.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A test that failed elsewhere is no reason for another panic here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
