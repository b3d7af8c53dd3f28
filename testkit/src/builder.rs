//! What a server is to be, and its configuration file.

use std::fs;
use std::path::Path;

use crate::certificates::Pair;
use crate::port::Port;
use crate::program::Flavor;
use crate::server::{Ready, Server};

/// How often a start is tried on another port.
const ATTEMPTS: usize = 10;

/// What a server is to be, before it starts.
#[must_use = "it starts with start()"]
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

    /// Speaks nothing but TLS on its port and with other servers, with this certificate, and knows clients by this
    /// authority. It asks clients for no certificate, unless the setting `tls-auth-clients` says `yes`.
    pub fn tls(mut self, pair: &Pair, authority: &Path) -> Self {
        self.has_tls = true;
        self.setting("tls-cert-file", &quoted(&pair.certificate))
            .setting("tls-key-file", &quoted(&pair.key))
            .setting("tls-ca-cert-file", &quoted(authority))
            .setting("tls-auth-clients", "no")
    }

    /// Asks for this password, also from its replicas, and gives it to its master.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Is a Sentinel.
    pub(crate) fn sentinel(mut self) -> Self {
        self.is_sentinel = true;
        self
    }

    /// Adds a line to its configuration file, where the last one of a name counts. The value is written as in that
    /// file: `("save", "60 1")`.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts it and waits until it answers.
    pub fn start(self) -> Server {
        self.start_on(Port::claim)
    }

    fn start_on(self, mut claim: impl FnMut() -> Port) -> Server {
        for _ in 0..ATTEMPTS {
            let mut server = self.prepare((!self.on_socket).then(&mut claim));
            match server.try_start(Ready::Answers) {
                Ok(()) => return server,
                // Another program took the port meanwhile.
                Err(log) if log.contains("Address already in use") => {}
                Err(log) => panic!("{:?} does not start:\n{log}", self.flavor),
            }
        }
        panic!("{:?} found no port in {ATTEMPTS} attempts", self.flavor);
    }

    /// Everything but the process.
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
            // Sentinels ask each other for it; servers ask their replicas.
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

/// A path as a configuration file wants it, spaces and all.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_that_another_program_takes_before_the_server_does_is_given_up_for_another() {
        let mut intruder = None;
        let server = Server::builder().start_on(|| {
            let port = Port::claim();
            intruder.get_or_insert_with(|| TcpListener::bind(("127.0.0.1", port.number())).unwrap());
            port
        });
        assert_ne!(server.port(), intruder.unwrap().local_addr().unwrap().port());
    }
}
