//! Real servers for the tests and the benchmarks, each started for one of them and ended with it.
//!
//! What can't be started panics: a test without its server has failed.

#![allow(clippy::missing_panics_doc, reason = "every function here panics where a server can't be had")]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server of one test's own, stopped with it.
pub struct Server(Child);

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

    /// One that listens on a free port, and which that is.
    pub fn on_a_free_port(folder: &Path) -> (Self, u16) {
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

impl Server {
    /// One that listens on this socket only.
    pub fn on_a_socket(folder: &Path, socket: &Path) -> Self {
        Self::start(folder, "0", socket)
    }

    /// Sends it a signal, by its short name.
    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([&format!("-{signal}"), &self.0.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
