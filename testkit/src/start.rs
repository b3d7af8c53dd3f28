//! Starts a server with its options.

use std::fs;

use crate::builder::{Builder, quoted};
use crate::port::Port;
use crate::server::{Ready, Server};

/// Maximum number of ports to try.
const ATTEMPTS: usize = 10;

impl Builder {
    /// Starts the server and waits until it responds.
    pub fn start(self) -> Server {
        self.start_on(Port::claim)
    }

    fn start_on(self, mut claim: impl FnMut() -> Port) -> Server {
        for _ in 0..ATTEMPTS {
            let mut server = self.prepare((!self.on_socket).then(&mut claim));
            match server.try_start(Ready::Answers) {
                Ok(()) => return server,
                // Another program has taken the port meanwhile.
                Err(log) if log.contains("Address already in use") => {}
                Err(log) => panic!("{:?} does not start:\n{log}", self.flavor),
            }
        }
        panic!("{:?} found no port in {ATTEMPTS} attempts", self.flavor);
    }

    /// Creates everything but the process.
    fn prepare(&self, port: Option<Port>) -> Server {
        let folder = tempfile::Builder::new().prefix("server-").tempdir().expect("a temporary folder");
        let number = port.as_ref().map_or(0, Port::number);
        let (plain, tls) = if self.has_tls { (0, number) } else { (number, 0) };
        let (socket, dir) = (quoted(&folder.path().join("socket")), quoted(folder.path()));
        let mut lines = format!("bind 127.0.0.1\nport {plain}\nunixsocket {socket}\ndir {dir}\n");
        if self.has_tls {
            lines += &format!("tls-port {tls}\ntls-replication yes\n");
        }
        if !self.is_sentinel {
            lines += "save \"\"\n";
        }
        if let Some(password) = &self.password {
            lines += &format!("requirepass {password}\n");
            // Sentinels authenticate each other with it; replicas authenticate with their master.
            let name = if self.is_sentinel { "sentinel sentinel-pass" } else { "masterauth" };
            lines += &format!("{name} {password}\n");
        }
        for (name, value) in &self.settings {
            lines += &format!("{name} {value}\n");
        }
        fs::write(folder.path().join("conf"), lines).expect("the folder can be written to");
        Server::stopped(self.clone(), port, folder)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn start_moves_to_another_port_if_another_program_takes_the_first_one() {
        let mut intruder = None;
        let server = Server::builder().start_on(|| {
            let port = Port::claim();
            intruder.get_or_insert_with(|| TcpListener::bind(("127.0.0.1", port.number())).unwrap());
            port
        });
        assert_ne!(server.port(), intruder.unwrap().local_addr().unwrap().port());
    }
}
