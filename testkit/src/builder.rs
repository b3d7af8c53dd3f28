//! The options of a server, and its configuration file.

use std::path::Path;

use crate::certificates::Pair;
use crate::program::Flavor;

/// The options of a server.
#[must_use = "the server starts with start()"]
#[derive(Clone, Debug, Default)]
pub struct Builder {
    pub(crate) flavor: Flavor,
    pub(crate) on_socket: bool,
    pub(crate) is_sentinel: bool,
    pub(crate) has_tls: bool,
    pub(crate) password: Option<String>,
    pub(crate) settings: Vec<(String, String)>,
    pub(crate) environment: Vec<(String, String)>,
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

    /// Adds a variable to the environment of its process.
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs as a Sentinel.
    pub fn sentinel(mut self) -> Self {
        self.is_sentinel = true;
        self
    }

    /// Adds a line to its configuration file, in which the last line of a name counts. The value has the syntax of that file:
    /// `("save", "60 1")`.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// A path in the syntax of a configuration file, which may contain spaces.
pub(crate) fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
}
