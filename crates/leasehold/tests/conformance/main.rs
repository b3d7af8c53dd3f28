//! What every store must do, seen through the public library. One suite, run by every store.

mod suite;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::Client;

/// A place for leases that lives as long as one test, and that several clients can share.
struct Store {
    url: String,
    /// Dropped before the folder that it is in.
    _server: Option<Server>,
    _folder: tempfile::TempDir,
}

impl Store {
    fn new(scheme: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (url, server) = match scheme {
            "memory" => (format!("memory:conformance-{}", COUNT.fetch_add(1, Ordering::Relaxed)), None),
            "sqlite" => (format!("sqlite:{}", folder.path().join("locks.db").display()), None),
            "redis" => {
                let (server, port) = Server::on_a_free_port(folder.path());
                (format!("redis://127.0.0.1:{port}"), Some(server))
            }
            "redis+unix" => {
                let socket = folder.path().join("socket");
                let server = Server::start(folder.path(), "0", &socket);
                (format!("redis+unix://{}", socket.display()), Some(server))
            }
            other => panic!("no test knows how to start a {other}: store"),
        };
        Self { url, _server: server, _folder: folder }
    }

    async fn client(&self) -> Client {
        Client::connect(&self.url).await.expect("the store opens")
    }
}

/// A server of one test's own, stopped with it.
struct Server(Child);

impl Server {
    /// Starts one and waits until it listens, in bounded time.
    fn start(folder: &Path, port: &str, socket: &Path) -> Self {
        let mut command = Command::new("redis-server");
        command.args(["--port", port, "--bind", "127.0.0.1", "--save", "", "--unixsocket"]).arg(socket);
        command.arg("--dir").arg(folder).stdout(Stdio::null());
        let mut server = Self(command.spawn().expect("redis-server is missing: scripts/test install"));
        let give_up = Instant::now() + Duration::from_secs(20);
        while !socket.exists() && server.0.try_wait().expect("it can be waited for").is_none() {
            assert!(Instant::now() < give_up, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(2));
        }
        server
    }

    fn on_a_free_port(folder: &Path) -> (Self, u16) {
        // Another program may take the port before the server does: then it ends, and another port is tried.
        for attempt in 0..10 {
            let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
            let port = free.local_addr().expect("it is bound").port();
            drop(free);
            let mut server =
                Self::start(folder, &port.to_string(), &folder.join(format!("socket-{attempt}")));
            if server.0.try_wait().expect("it can be waited for").is_none() {
                return (server, port);
            }
        }
        panic!("redis-server found no port");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

macro_rules! stores {
    ($($store:ident: $scheme:literal)*) => {
        /// The stores that run the suite.
        const STORES: &[&str] = &[$($scheme),*];
        $(suite::tests!($store, $scheme);)*
    };
}

stores! { memory: "memory" sqlite: "sqlite" redis: "redis" redis_unix: "redis+unix" }

#[test]
fn every_store_runs_this_suite() {
    assert_eq!(STORES, leasehold::SCHEMES);
}
