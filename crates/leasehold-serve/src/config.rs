//! Where a server listens, and its limits.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::tokens::Tokens;

/// An address on which a server listens.
///
/// ```
/// use leasehold_serve::Listen;
///
/// assert_eq!("unix:/run/leasehold.sock".parse(), Ok(Listen::Unix("/run/leasehold.sock".into())));
/// assert_eq!("127.0.0.1:8430".parse(), Ok(Listen::Tcp("127.0.0.1:8430".to_owned())));
/// assert!("8430".parse::<Listen>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Listen {
    /// A Unix socket, mode 0600. Requests need no token.
    Unix(PathBuf),
    /// `HOST:PORT`. Requests need a token. Port 0 is any free port.
    Tcp(String),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix("unix:").or_else(|| text.starts_with('/').then_some(text));
        if let Some(path) = path {
            return if path.is_empty() {
                Err("the path of the socket is missing: unix:PATH".to_owned())
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        // What is typed here by mistake may be the address of a store, with its password.
        let is_host = |host: &str| !host.is_empty() && !host.contains(['/', '@']);
        let port = text.rsplit_once(':').filter(|(host, _)| is_host(host)).map(|(_, port)| port);
        match port.map(str::parse::<u16>) {
            Some(Ok(_)) => Ok(Self::Tcp(text.to_owned())),
            _ => {
                Err("it is no address to listen at: write unix:PATH or HOST:PORT, for example 127.0.0.1:8430"
                    .to_owned())
            }
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

/// A certificate with its key, both PEM files.
///
/// ```
/// # let mut config = leasehold_serve::Config::new([]);
/// config.tls = Some(leasehold_serve::Tls { certificate: "server.pem".into(), key: "server.key".into() });
/// ```
#[derive(Clone, Debug)]
pub struct Tls {
    /// The certificate, followed by those of its authorities.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// What one server accepts before it refuses.
///
/// ```
/// let mut limits = leasehold_serve::Limits::default();
/// limits.connections = 100;
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Open connections of each address, each with at most one request: those of the Unix socket, and those over TCP that have
    /// shown a token, of which at most half with a token that only reads. Further ones are answered with 503 and closed.
    pub connections: usize,
    /// Open connections of each TCP address that have shown no token, half of them before their request and half during it. A
    /// further one takes the place of the oldest.
    pub strangers: usize,
    /// Requests that acquire a lock or wait for it.
    pub waits: usize,
    /// The part of `connections`, `leases` and `watchers` that the callers over TCP with tokens of one name can use, in percent, if
    /// there are tokens of other names.
    pub token_share_percent: u8,
    /// Connections that receive events. Those with a token that only reads get half of them.
    pub watchers: usize,
    /// Bytes of a request's body; 16 times as many for the ids of leases.
    pub body_bytes: usize,
    /// The time in which a request's header, and a request's body, must arrive.
    pub receive_timeout: Duration,
    /// The time in which a connection over TCP must have sent the header of its first request, after its TLS handshake.
    pub stranger_timeout: Duration,
    /// The time in which a client must take in a part of an answer.
    pub send_timeout: Duration,
    /// The longest `wait_ms`: a caller repeats its request, so that no proxy ends it.
    pub max_wait: Duration,
    /// Connections over TCP at a time that are told why they are closed.
    pub(crate) closing: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            strangers: 1024,
            waits: 100_000,
            token_share_percent: 50,
            watchers: 64,
            body_bytes: 16 * 1024,
            receive_timeout: Duration::from_secs(20),
            stranger_timeout: Duration::from_secs(5),
            send_timeout: Duration::from_secs(20),
            max_wait: Duration::from_secs(50),
            closing: 64,
        }
    }
}

impl Limits {
    /// Lowers the limits of connections so that those of these addresses need at most so many file descriptors, and returns whether
    /// anything was lowered. Without it, strangers could take the descriptors of those that have a token. At least four connections
    /// of each kind are left.
    ///
    /// ```
    /// # let listen = [leasehold_serve::Listen::Tcp("127.0.0.1:0".to_owned())];
    /// let mut limits = leasehold_serve::Limits::default();
    /// assert!(limits.fit(136, &listen));
    /// assert!(limits.connections + limits.strangers < 136);
    /// assert!(!limits.fit(136, &listen));
    /// ```
    pub fn fit(&mut self, descriptors: usize, listen: &[Listen]) -> bool {
        let needed = self.descriptors(listen);
        if needed <= descriptors {
            return false;
        }
        let lowered = |limit: usize| {
            let share = limit as u128 * descriptors as u128 / needed as u128;
            usize::try_from(share).unwrap_or(limit).max(4).min(limit)
        };
        for limit in [&mut self.connections, &mut self.strangers, &mut self.closing] {
            *limit = lowered(*limit);
        }
        // What is beside the strangers does not shrink below a few.
        while self.descriptors(listen) > descriptors && self.connections > 4 {
            self.connections -= 1;
        }
        true
    }

    /// How many file descriptors the connections of these addresses need.
    ///
    /// ```
    /// # let listen = [leasehold_serve::Listen::Unix("/run/locks.sock".into())];
    /// let limits = leasehold_serve::Limits::default();
    /// assert_eq!(limits.descriptors(&listen), limits.connections);
    /// ```
    #[must_use]
    pub fn descriptors(&self, listen: &[Listen]) -> usize {
        let tcp = listen.iter().filter(|listen| matches!(listen, Listen::Tcp(_))).count();
        listen.len().saturating_mul(self.connections).saturating_add(tcp * self.room_for_strangers())
    }

    /// The part of a limit that the callers with tokens of one name can use; at least 1.
    pub(crate) fn token_share(&self, limit: usize) -> usize {
        let percent = usize::from(self.token_share_percent.min(100));
        (limit / 100 * percent + (limit % 100 * percent).div_ceil(100)).max(1)
    }

    /// The open connections of a TCP address that have shown no token: with those whose place was taken, and which may still be told so.
    pub(crate) fn room_for_strangers(&self) -> usize {
        self.strangers.saturating_add(2 + 2 * self.closing)
    }
}

/// What is told to the operator of a running server, for example that a new certificate can't be used. By default nothing is.
///
/// ```
/// # let mut config = leasehold_serve::Config::new([]);
/// config.notices = leasehold_serve::Notices::new(|text| eprintln!("{text}"));
/// ```
#[derive(Clone)]
pub struct Notices(Arc<dyn Fn(&str) + Send + Sync>);

impl Notices {
    /// Calls the function with each message. It must not block.
    ///
    /// ```
    /// let _ = leasehold_serve::Notices::new(|text| eprintln!("{text}"));
    /// ```
    #[must_use]
    pub fn new(tell: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    pub(crate) fn tell(&self, text: &str) {
        (self.0)(text);
    }
}

impl Default for Notices {
    fn default() -> Self {
        Self::new(|_| {})
    }
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notices")
    }
}

/// The settings of a server.
///
/// ```
/// let mut config = leasehold_serve::Config::new(["127.0.0.1:0".parse().unwrap()]);
/// config.tokens.add_write("0123456789abcdef0123456789abcdef").unwrap();
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// The addresses, at least one.
    pub listen: Vec<Listen>,
    /// The tokens for connections over TCP.
    pub tokens: Tokens,
    /// Encrypts connections over TCP.
    pub tls: Option<Tls>,
    /// The limits.
    pub limits: Limits,
    /// How long a stopping server goes on answering what does not wait, while callers go on to other servers. None by default.
    pub drain: Duration,
    /// Where messages for the operator go.
    pub notices: Notices,
}

impl Config {
    /// The settings of a server that listens there, with the default limits and without tokens.
    ///
    /// ```
    /// let config = leasehold_serve::Config::new(["unix:/run/leasehold.sock".parse().unwrap()]);
    /// assert!(config.tokens.is_empty() && config.tls.is_none());
    /// ```
    #[must_use]
    pub fn new(listen: impl IntoIterator<Item = Listen>) -> Self {
        Self {
            listen: listen.into_iter().collect(),
            tokens: Tokens::default(),
            tls: None,
            limits: Limits::default(),
            drain: Duration::ZERO,
            notices: Notices::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_a_token_is_its_part_of_the_limit_and_one_at_least() {
        for (percent, limit, share) in [
            (50, 4096, 2048),
            (50, 3, 2),
            (50, 1, 1),
            (1, 10, 1),
            (0, 10, 1),
            (100, 7, 7),
            (255, 7, 7),
            (100, usize::MAX, usize::MAX),
        ] {
            let limits = Limits { token_share_percent: percent, ..Limits::default() };
            assert_eq!(limits.token_share(limit), share, "{percent} % of {limit}");
        }
    }
}
