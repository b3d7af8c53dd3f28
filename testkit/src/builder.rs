//! The options of a server, and its configuration file.

use std::fs;
use std::path::Path;

use crate::certificates::Pair;
use crate::port::Port;
use crate::program::Flavor;
use crate::server::{Ready, Server};

/// Maximum number of ports to try.
const ATTEMPTS: usize = 10;

/// The options of a server.
#[must_use = "the server starts with start()"]
#[derive(Clone, Debug, Default)]
pub struct Builder {
    pub(crate) flavor: Flavor,
    on_socket: bool,
    pub(crate) is_sentinel: bool,
    pub(crate) has_tls: bool,
    pub(crate) password: Option<String>,
    settings: Vec<(String, String)>,
}

impl Builder {
    /// Runs this program.
    pub fn flavor(mut self, flavor: Flavor) -> Self {
        self.flavor = flavor;
        self
    }

    /// Listens on a Unix socket only, on no port.
    pub fn on_socket(mut self) -> Self {
        self.on_socket = true;
        self
    }

    /// Uses only TLS on its port and towards other servers, with this certificate, and verifies clients by this authority. It
    /// requests no client certificate unless the setting `tls-auth-clients` is `yes`.
    pub fn tls(mut self, pair: &Pair, authority: &Path) -> Self {
        self.has_tls = true;
        self.setting("tls-cert-file", &quoted(&pair.certificate))
            .setting("tls-key-file", &quoted(&pair.key))
            .setting("tls-ca-cert-file", &quoted(authority))
            .setting("tls-auth-clients", "no")
    }

    /// Requires this password from clients and replicas, and sends it to its master.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Runs as a Sentinel.
    pub(crate) fn sentinel(mut self) -> Self {
        self.is_sentinel = true;
        self
    }

    /// Adds a line to its configuration file, in which the last line of a name counts. The value has the syntax of that file:
    /// `("save", "60 1")`.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

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

/// A path in the syntax of a configuration file, which may contain spaces.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
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
